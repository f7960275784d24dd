# SPDX-License-Identifier: Apache-2.0
"""The folder in a node's memory that has a run's commits."""

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import is_url
from dlrover.python.rl.runtime.checkpoint.object_store import Store, newest_step, open_copies
from dlrover.python.rl.runtime.checkpoint.store import NODES, CheckpointStore, Manifest, decode, encode, folder_name

_LOG = get_logger(__name__)

_HELD, _SAVED_TO = "held", "saved-to"
_PAUSE_S = 0.05
_ALL = 1 << 30  # copies: how many a run keeps is unknown here, and its next commit removes superfluous ones
_SHARED_MEMORY = Path("/dev/shm")
_MEMORY_VARIABLE = "DLROVER_RL_MEMORY"
_LEAST_SHARED_MEMORY = 1 << 28  # containers often have 64 MB, too little for a model


def memory_path(job: str, run: str) -> Path:
    """Return the path of :func:`memory_root`: in the folder of the environment variable ``DLROVER_RL_MEMORY``, else in
    ``/dev/shm``, or if that is missing or too small for a model in the temporary folder."""
    return _memory_folder() / f"{job}-{run}"


def memory_name() -> str:
    """Return the name of this node's memory, which all processes share that see it, but not separate containers."""
    folder = _memory_folder()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    device = next(path.stat().st_dev for path in (folder, *folder.parents) if path.exists())
    return sha256(f"{boot} {device} {folder}".encode()).hexdigest()[:32]


def memory_root(job: str, run: str, durable: Path | str | None = None) -> Path:
    """Create the folder of a run's generations in this node's memory, for this user only, and lock it until this
    process ends; its removal saves the newest to ``durable``. Raises PermissionError for a link or foreign folder."""
    root = memory_path(job, run)
    own = root.parent
    for _ in range(100):
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(own)
        with suppress(FileNotFoundError):  # the last job that was in it has just removed it
            root.mkdir(mode=0o700, exist_ok=True)
            break
    _check_own(root)
    _warn_of_disk(own)
    if durable is not None:
        with suppress(FileExistsError, FileNotFoundError):  # made by another process; or the run has ended
            (root / _SAVED_TO).symlink_to(durable)
    _hold(root)
    return root


def _check_own(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        message = "is not a folder that only you can use: commits do not go there"
        raise PermissionError(errno.EPERM, message, str(folder))


@cache
def _warn_of_disk(folder: Path) -> None:
    if _MEMORY_VARIABLE not in os.environ and not folder.is_relative_to(_SHARED_MEMORY):
        text = "%s is missing or smaller than %d MB: every step's commit is written to %s, which may be a disk"
        _LOG.warning(text, _SHARED_MEMORY, _LEAST_SHARED_MEMORY >> 20, folder)


def forget_memory(job: str, run: str | None = None, patience_s: float = 0.0, if_free: bool = False) -> None:
    """Remove a run's files from this node's memory, with ``if_free`` or without ``run`` (then of all runs of the job)
    only unused ones, after up to ``patience_s`` for killed processes. Saves a commit beyond the run's copies first."""
    deadline_s = time.monotonic() + patience_s
    for root in list(_memory_folder().glob(f"{job}-*")):
        name, _, its_run = root.name.rpartition("-")
        if name != job or run not in (None, its_run):
            continue
        while _is_held(root) and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
        if (run is not None and not if_free) or not _is_held(root):
            try:
                _save(root)
            except OSError as error:
                _LOG.error("the last step of run %s stays in %s: %s", its_run, root, error)
            else:
                shutil.rmtree(root, ignore_errors=True)
    with suppress(OSError):
        _memory_folder().rmdir()  # fails unless it is empty


@dataclass(frozen=True)
class RunMemory:
    """A run's folder in this node's memory, ``is_held`` by its processes; ``saved_to`` are its copies, if known."""

    job: str
    run: str
    root: Path
    is_held: bool
    saved_to: str

    def states(self) -> list[os.stat_result]:
        """Return the state of each file and folder in it that still exists."""
        states = []
        for path in (self.root, *self.root.rglob("*")):
            with suppress(OSError):
                states.append(path.lstat())
        return states


def list_memory() -> list[RunMemory]:
    memories = []
    for root in sorted(_memory_folder().glob("*-*")):
        if root.is_dir() and not root.is_symlink():
            (job, _, run), saved_to = root.name.rpartition("-"), ""
            with suppress(OSError):
                saved_to = os.readlink(root / _SAVED_TO)
            memories.append(RunMemory(job, run, root, _is_held(root), saved_to))
    return memories


def _copies_of(root: Path) -> Store | None:
    """Return the store for the copies of the run in ``root``; None if the folder above it is missing."""
    target = root / _SAVED_TO
    if not target.is_symlink():
        return None
    place, run = os.readlink(target), root.name.rpartition("-")[2]
    if is_url(place):
        return open_copies(place, run, keep=_ALL)
    return open_copies(Path(place), run, keep=_ALL) if Path(place).parent.parent.is_dir() else None


def _save(root: Path) -> None:
    """Save an ended run's newest generation to disk if it is whole here and no later copy exists. Raises OSError."""
    copies = _copies_of(root)
    if copies is None:
        return
    newest = newest_step(copies)
    for manifest in CheckpointStore(root, copies.run, durable=False).manifests():
        if manifest.step > newest and _save_generation(root, manifest, copies):
            return


def known_in_memory(job: str, run: str) -> list[bytes]:
    """Return the manifests of the generations that this node knows, if they have a place to be saved to."""
    root = memory_path(job, run)
    return list(map(encode, CheckpointStore(root, run, durable=False).manifests())) if _copies_of(root) else []


def save_from_memory(job: str, run: str, content: bytes) -> bool | None:
    """Copy this node's files of a generation, whose manifest is ``content``. Returns True if it is complete now or a
    later copy exists; None after an error, which is logged."""
    root, manifest = memory_path(job, run), decode(content)
    try:
        copies = _copies_of(root)
        if copies is None:
            return False
        return newest_step(copies) >= manifest.step or _save_generation(root, manifest, copies)
    except OSError as error:
        _LOG.error("step %d of run %s cannot be saved from the memory of this node: %s", manifest.step, run, error)
        return None


def _save_generation(memory: Path, manifest: Manifest, copies: Store) -> bool:
    """Copy the files of a generation in ``memory``, and commit the copy if that completes it: other nodes may save
    other files. Returns False if it is incomplete or damaged. Raises OSError."""
    # A later trainer may have claimed the copies and ended before its first commit.
    epoch, folder = max(manifest.epoch, copies.epoch), memory / manifest.folder
    try:
        copies.claim(epoch)
        for file in manifest.files.values():
            if (folder / file.name).is_file():
                copies.put(folder, manifest.step, epoch, file)
        files = {name: replace(file, node="") for name, file in manifest.files.items()}
        for file in files.values():
            copies.check(folder_name(manifest.step, epoch), file)
        extra = {name: value for name, value in manifest.extra.items() if name != NODES}
        copies.commit(manifest.step, epoch, files, extra)
    except (CheckpointCorrupt, CheckpointMissing, StaleEpoch, FileNotFoundError):
        return False
    _LOG.warning("step %d of run %s was only in memory: saved to %s", manifest.step, copies.run, copies.root)
    return True


_locks: dict[Path, int] = {}  # the descriptor of each folder's lock file, which this process holds until it ends


def _hold(root: Path) -> None:
    path = root / _HELD
    if root in _locks:
        if path.exists():
            return
        os.close(_locks.pop(root))
    with suppress(FileNotFoundError):  # the run has ended
        _locks[root] = os.open(path, os.O_CREAT | os.O_RDONLY, 0o600)
        fcntl.flock(_locks[root], fcntl.LOCK_SH)  # waits: while another process checks the lock


def _is_held(root: Path) -> bool:
    try:
        with (root / _HELD).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _memory_folder() -> Path:
    place = os.environ.get(_MEMORY_VARIABLE)
    if not place:
        is_usable = os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
        disk = os.statvfs(_SHARED_MEMORY) if is_usable else None
        is_large = disk is not None and disk.f_blocks * disk.f_frsize >= _LEAST_SHARED_MEMORY
        place = str(_SHARED_MEMORY) if is_large else tempfile.gettempdir()
    return Path(place) / f"dlrover-rl-{os.geteuid()}"  # a folder of another user could be renamed under its files
