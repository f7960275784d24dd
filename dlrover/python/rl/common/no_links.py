# SPDX-License-Identifier: Apache-2.0
"""Opening files and folders that a job could have exchanged for links: no link is followed."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO does not block


def open_below(folder: int, parts: Sequence[str], flags: int = 0) -> int:
    """Open ``parts`` below an open folder to read it; a part that is a link is an OSError, as one that is missing."""
    with ExitStack() as opened:
        for part in parts[:-1]:
            folder = os.open(part, _STEP, dir_fd=folder)
            opened.callback(os.close, folder)
        return os.open(parts[-1], _READ | flags, dir_fd=folder)


def open_folder(folder: Path) -> int:
    """Open an absolute folder to read below it. Raises NotADirectoryError if a part of its path is a link."""
    top = os.open("/", _STEP)
    try:
        return open_below(top, (*folder.parts[1:], "."), os.O_DIRECTORY)
    finally:
        os.close(top)


def open_file(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises OSError if it is a link; its folder may be reached through one."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | _READ))


def with_real_parent(path: Path) -> Path:
    """Return ``path`` below its parent without links, such as a user's own one to a scratch disk; its last part stays
    what it is, also a link."""
    return path.parent.resolve() / path.name
