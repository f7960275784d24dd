# SPDX-License-Identifier: Apache-2.0
"""Folders that hostile code writes in, and their removal."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make an empty folder, and remove it with all that is in it by then; what cannot be removed stays, and is
    logged."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        try:
            remove_tree(folder)
        except OSError as error:
            _LOG.warning("a program's folder could not be removed: %s", error)


def remove_tree(folder: Path) -> None:
    """Remove a folder in which no process writes any more.

    Unlike ``shutil.rmtree`` it takes folders of any depth, which no path can name: each is moved to the top first."""
    if folder.is_symlink():
        folder.unlink()
        return
    moved = f".removed-{secrets.token_hex(8)}"
    count, waiting = 0, [str(folder)]
    os.chmod(folder, 0o700)
    while waiting:
        current = waiting.pop()
        with os.scandir(current) as entries:
            found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_folder in found:
            if is_folder:
                os.chmod(path, 0o700)  # else it cannot be moved
                count += 1
                waiting.append(target := os.path.join(folder, f"{moved}-{count}"))
                os.rename(path, target)
            else:
                os.unlink(path)
        if current != str(folder):
            os.rmdir(current)
    os.rmdir(folder)
