"""The folder in a node's memory where a run keeps its commits."""

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_MEMORY_VARIABLE = "DLROVER_RL_MEMORY"
_LEAST_SHARED_MEMORY = 1 << 28  # containers often come with 64 MB, which is no place for a model


def memory_root(job: str, run: str) -> Path:
    """The folder of a run's memory-backed generations on this node, created, for this user only.

    It is in the folder that the environment variable ``DLROVER_RL_MEMORY`` names, else in ``/dev/shm``, or in the
    temporary folder where that is missing or too small to hold a model.
    """
    shared = _memory_folder()
    root = shared / f"{job}-{run}"
    for _ in range(100):
        with suppress(FileExistsError):
            shared.mkdir(parents=True)
            shared.chmod(0o1777)  # other users have their own jobs in it
        with suppress(FileNotFoundError):  # the last job that was in it has just removed it
            root.mkdir(mode=0o700, exist_ok=True)
            break
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to another user", str(root))
    return root


def forget_memory(job: str, run: str | None = None) -> None:
    """Remove what a run of a job, or all of its runs, have left in this node's memory."""
    shared = _memory_folder()
    for root in shared.glob(f"{job}-*") if shared.is_dir() else ():
        of_job, _, of_run = root.name.rpartition("-")
        if of_job == job and run in (None, of_run):
            shutil.rmtree(root, ignore_errors=True)
    with suppress(OSError):
        shared.rmdir()  # only when it was the last one there


def _memory_folder() -> Path:
    if named := os.environ.get(_MEMORY_VARIABLE):
        return Path(named) / "dlrover-rl"
    memory = _SHARED_MEMORY if _is_usable(_SHARED_MEMORY) else Path(tempfile.gettempdir())
    return memory / "dlrover-rl"


def _is_usable(folder: Path) -> bool:
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    disk = os.statvfs(folder)
    return disk.f_blocks * disk.f_frsize >= _LEAST_SHARED_MEMORY
