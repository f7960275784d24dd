# SPDX-License-Identifier: Apache-2.0
"""Files that only their owner can read, such as tokens, and files that are as readable as their folder."""

import os
import stat
from pathlib import Path

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.no_links import open_file


def check_private(path: Path) -> os.stat_result:
    """Raises CallError if others can read ``path``, OSError if it is not there."""
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode) or state.st_mode & 0o077 or state.st_uid != os.geteuid():
        raise CallError(f"{path} must be a file that only you can read: chmod 600 {path}")
    return state


def read_token(path: Path) -> str:
    """A token for a client. Raises CallError if its file is missing, empty, or open to others."""
    try:
        check_private(path)
        with open_file(path) as file:
            token = file.read().decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CallError(f"no token can be read from {path}: {error}") from error
    if not token:
        raise CallError(f"{path} is empty")
    return token


def create_private(path: Path, text: str) -> None:
    """Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def share_file(path: Path) -> None:
    """Let those read a file who may list its folder, which a program may have written for its owner alone."""
    path.chmod(0o600 | path.parent.stat().st_mode & 0o044)
