# SPDX-License-Identifier: Apache-2.0
"""Files that only their owner can read, such as tokens, and files that are as readable as their folder."""

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from dlrover.python.rl.common.errors import CallError

_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO does not block


def open_below(folder: int, parts: Sequence[str], flags: int = 0) -> int:
    """Open ``parts`` below an open folder for reading; raises OSError if a part is a link or missing."""
    with ExitStack() as opened:
        for part in parts[:-1]:
            folder = os.open(part, _STEP, dir_fd=folder)
            opened.callback(os.close, folder)
        return os.open(parts[-1], _READ | flags, dir_fd=folder)


def open_folder(folder: Path) -> int:
    """Open an absolute folder for :func:`open_below`. Raises NotADirectoryError if a part of its path is a link."""
    top = os.open("/", _STEP)
    try:
        return open_below(top, (*folder.parts[1:], "."), os.O_DIRECTORY)
    finally:
        os.close(top)


def open_file(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises OSError if it is a link; its folder may be one."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | _READ))


def with_real_parent(path: Path) -> Path:
    """Return ``path`` with the links in its parent resolved; its last part may remain a link."""
    return path.parent.resolve() / path.name


def check_private(path: Path) -> os.stat_result:
    """Return the state of a file. Raises CallError if others can read it, OSError if it is missing."""
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode) or state.st_mode & 0o077 or state.st_uid != os.geteuid():
        raise CallError(f"{path} must be a file that only you can read: chmod 600 {path}")
    return state


def read_token(path: Path) -> str:
    """Read a client's token. Raises CallError if its file is missing, empty, or readable by others."""
    try:
        check_private(path)
        with open_file(path) as file:
            token = file.read().decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CallError(f"cannot read a token from {path}: {error}") from error
    if not token:
        raise CallError(f"{path} is empty")
    return token


def create_private(path: Path, text: str) -> None:
    """Write a new file; raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def share_file(path: Path) -> None:
    """Let all who may list the folder of a file read it; a library may have written it for its owner alone."""
    path.chmod(0o600 | path.parent.stat().st_mode & 0o044)
