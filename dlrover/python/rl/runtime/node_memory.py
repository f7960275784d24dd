"""The folder in a node's memory where a run keeps its commits."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_HELD = "held"
_PAUSE_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")
_MEMORY_VARIABLE = "DLROVER_RL_MEMORY"
_LEAST_SHARED_MEMORY = 1 << 28  # containers often come with 64 MB, which is no place for a model


def memory_path(job: str, run: str) -> Path:
    """Where :func:`memory_root` is.

    It is in the folder that the environment variable ``DLROVER_RL_MEMORY`` names, else in ``/dev/shm``, or in the
    temporary folder where that is missing or too small to hold a model.
    """
    return _memory_folder() / f"{job}-{run}"


def memory_root(job: str, run: str) -> Path:
    """The folder of a run's memory-backed generations on this node, created, for this user only, and held by this
    process from now on."""
    root = memory_path(job, run)
    shared = root.parent
    for _ in range(100):
        with suppress(FileExistsError):
            shared.mkdir(parents=True)
            shared.chmod(0o1777)  # other users have their own jobs in it
        with suppress(FileNotFoundError):  # the last job that was in it has just removed it
            root.mkdir(mode=0o700, exist_ok=True)
            break
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to another user", str(root))
    _hold(root)
    return root


def forget_memory(job: str, run: str | None = None, patience_s: float = 0.0) -> None:
    """Remove what a run of a job has left in this node's memory; or what all of its runs have whose processes are gone:
    one of the same name may be running in another directory, or on another cluster. Those that were just killed get
    ``patience_s`` seconds to be gone."""
    deadline_s = time.monotonic() + patience_s
    for root in _roots(job):
        while run is None and _is_held(root) and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
        if root.name.rpartition("-")[2] == run or (run is None and not _is_held(root)):
            shutil.rmtree(root, ignore_errors=True)
    with suppress(OSError):
        _memory_folder().rmdir()  # only when it was the last one there


def _roots(job: str) -> list[Path]:
    """The folders of all runs of a job."""
    return [root for root in _memory_folder().glob(f"{job}-*") if root.name.rpartition("-")[0] == job]


_locks: dict[Path, int] = {}
"""What this process holds until it ends: folder to the descriptor of the file that is locked."""


def _hold(root: Path) -> None:
    path = root / _HELD
    if root in _locks and path.exists():
        return
    if root in _locks:
        os.close(_locks.pop(root))
    with suppress(FileNotFoundError):  # the run has ended
        _locks[root] = os.open(path, os.O_CREAT | os.O_RDONLY, 0o600)
        fcntl.flock(_locks[root], fcntl.LOCK_SH)  # waits: while another process looks whether anybody holds it


def _is_held(root: Path) -> bool:
    try:
        with (root / _HELD).open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


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
