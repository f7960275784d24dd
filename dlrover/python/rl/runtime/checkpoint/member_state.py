# SPDX-License-Identifier: Apache-2.0
"""A member's part of commits: its state file, in a folder in the node's memory, the copy to the job's directory, and
restoring."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, DiskWait, retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId, is_url
from dlrover.python.rl.runtime.checkpoint.manifest import Manifest, folder_name
from dlrover.python.rl.runtime.checkpoint.object_store import ObjectStore, read_from
from dlrover.python.rl.runtime.checkpoint.state_file import Header, StateFile, read_state
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Roots:
    """The folders of a run's generations, for its trainer of ``epoch`` on ``node`` (``""`` in one process): ``durable``
    in the job's directory for copies, and ``commits`` for each step (None: in the memory of each node). ``shared``: the
    commits are on a disk that every node sees, and must outlive them."""

    job: str
    run: str
    epoch: int
    durable: Path | str
    commits: Path | None = None
    node: str = ""
    shared: bool = False

    def commit_root(self) -> Path:
        return self.commits or memory_root(self.job, self.run, self.durable)

    def commit_store(self, node: str) -> CheckpointStore:
        return CheckpointStore(self.commit_root(), self.run, durable=self.shared, node=self.owner(node))

    def owner(self, node: str) -> str:
        """The ``StateFile.node`` of files that ``node`` writes there."""
        return "" if self.shared else node

    def durable_store(self, keep: int = 2) -> CheckpointStore | ObjectStore:
        return open_copies(self.durable, self.run, keep)


def open_copies(place: Path | str, run: str, keep: int = 2) -> CheckpointStore | ObjectStore:
    """The copies of a run in a folder, or at a URL."""
    if isinstance(place, str):
        return ObjectStore(place, run, keep)
    return CheckpointStore(place, run, durable=True, keep=keep)


@dataclass(frozen=True)
class CommitRequest:
    """Write the state after ``step``; ``persist``: begin to copy it to the job's directory; ``copying``: the step whose
    copy is under way."""

    step: int
    roots: Roots
    persist: bool = False
    copying: int | None = None


@dataclass(frozen=True)
class CommitAnswer:
    """The state's file, and the copy of ``CommitRequest.copying``: finished, or still running."""

    file: StateFile
    copied: StateFile | None = None
    running: bool = False


@dataclass(frozen=True)
class PersistRequest:
    """Finish the copy of generation ``step``."""

    step: int
    folder: str
    files: Mapping[str, StateFile]
    roots: Roots


@dataclass(frozen=True)
class RestoreRequest:
    """Go back to ``step``, from the nearest of ``sources`` (folder and files); a relative folder is in the member's own
    commit root."""

    step: int
    sources: tuple[tuple[str, Mapping[str, StateFile]], ...]
    roots: Roots


@dataclass
class _Copy:
    step: int
    thread: threading.Thread
    file: StateFile | None = None


def incarnation_of(file: StateFile) -> int:
    return int(file.name.split(".")[-2])


class MemberState:
    """Writes and reads the state of one member, in its process of ``incarnation`` on ``node``."""

    def __init__(
        self, role: str, rank: int, incarnation: int, node: str, disk_wait: DiskWait = DEFAULT_DISK_WAIT
    ) -> None:
        self._disk_wait = disk_wait
        self.key = ProcessId(role, rank).file_name
        self._incarnation, self._node = incarnation, node
        self._header: dict[str, str | int] = {"role": str(role), "rank": rank}
        self._copy: _Copy | None = None

    def commit(self, workload: Any, request: CommitRequest) -> CommitAnswer:
        """Write the workload's ``state_dict``. Raises DataError for values that cannot be saved, StaleEpoch,
        OSError."""
        roots, copy = request.roots, self._copy
        store = roots.commit_store(self._node)
        if request.copying is not None:
            store.pinned.add(request.copying)
        if copy is not None and copy.thread.is_alive():
            store.pinned.add(copy.step)
        header = {**self._header, "step": request.step}
        state = workload.state_dict()  # only once: ranks may meet in it

        def write() -> StateFile:
            return store.write(request.step, roots.epoch, f"{self.key}.{self._incarnation}.state", header, state)

        file = retry_io(write, store.root, self._disk_wait, partial(store.free_space, request.step - 1))
        if not roots.shared and self._node != roots.node:
            store.drop_older(request.step - 2)
        if request.persist:
            self._begin_copy(request.step, store.root / folder_name(request.step, roots.epoch), file, roots)
        file = replace(file, node=roots.owner(self._node))
        if copy is None or copy.step != request.copying:
            return CommitAnswer(file)
        return CommitAnswer(file, copy.file, copy.thread.is_alive())

    def restore(self, workload: Any, request: RestoreRequest) -> None:
        """Load the state from the first intact source; raises CheckpointCorrupt or CheckpointMissing if there is
        none."""
        root = request.roots.commit_root()
        header = {**self._header, "step": request.step}
        failure: CheckpointCorrupt | CheckpointMissing = CheckpointMissing(f"step {request.step} has no {self.key}")
        sources = ((folder, files[self.key]) for folder, files in request.sources if self.key in files)
        for folder, file in sources:
            try:
                state = retry_io(partial(_read, root, folder, file, header), root / folder, self._disk_wait)
            except (CheckpointCorrupt, CheckpointMissing) as error:
                failure = error
            except OSError as error:
                failure = CheckpointCorrupt(f"{folder}/{file.name}", f"it cannot be read: {error}")
            else:
                workload.load_state_dict(state)
                return
        raise failure

    def persist(self, request: PersistRequest) -> StateFile:
        """Finish the copy of a generation, or make it; raises CheckpointCorrupt, CheckpointMissing, OSError."""
        copy = self._copy
        if copy is not None and copy.step == request.step:
            copy.thread.join()  # waits: for a copy on this machine, which ends or fails
            if copy.file is not None:
                return copy.file
        source, copies = request.roots.commit_root() / request.folder, request.roots.durable_store()
        return copies.put(source, request.step, request.roots.epoch, request.files[self.key])

    def _begin_copy(self, step: int, source: Path, file: StateFile, roots: Roots) -> None:
        def run() -> None:
            try:
                copy.file = roots.durable_store().put(source, step, roots.epoch, file)
            except Exception as error:  # noqa: BLE001 -- the run continues without the copy
                _LOG.warning("%s of step %d was not copied to %s: %s", self.key, step, roots.durable, error)

        self._copy = copy = _Copy(step, threading.Thread(target=run, name=f"dlrover-copy-{step}", daemon=True))
        copy.thread.start()


def _read(root: Path, folder: str, file: StateFile, header: Header) -> Any:
    if is_url(folder):
        return read_from(f"{folder}/{file.name}", file, header)
    return read_state(root / folder / file.name, file, header)


# -- the folder in a node's memory ------------------------------------------------------------------------------------

_HELD, _SAVED_TO = "held", "saved-to"
_PAUSE_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")
_MEMORY_VARIABLE = "DLROVER_RL_MEMORY"
_LEAST_SHARED_MEMORY = 1 << 28  # containers often come with 64 MB, which is no place for a model


def memory_path(job: str, run: str) -> Path:
    """The path of :func:`memory_root`: in the folder of the environment variable ``DLROVER_RL_MEMORY``, else in
    ``/dev/shm``, or in the temporary folder if that is missing or too small to hold a model."""
    return _memory_folder() / f"{job}-{run}"


def memory_root(job: str, run: str, durable: Path | str | None = None) -> Path:
    """Create the folder of a run's memory-backed generations on this node, for this user only, and lock it until this
    process ends. ``durable`` is where its newest generation is saved when it is removed. Raises PermissionError if
    somebody else has made it, or a folder above it, or has put a link there."""
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
        raise PermissionError(
            errno.EPERM, "is not a folder that only you can use: commits do not go there", str(folder)
        )


@cache
def _warn_of_disk(folder: Path) -> None:
    if _MEMORY_VARIABLE not in os.environ and not folder.is_relative_to(_SHARED_MEMORY):
        _LOG.warning(
            "%s is missing or smaller than %d MB: every step's commit is written to %s, which may be a disk",
            _SHARED_MEMORY,
            _LEAST_SHARED_MEMORY >> 20,
            folder,
        )


def forget_memory(job: str, run: str | None = None, patience_s: float = 0.0) -> None:
    """Remove the files of a run from this node's memory; without ``run``, those of all runs without living processes: a
    job of the same name may run in another directory or cluster. Killed processes get ``patience_s`` seconds to end.
    A commit that goes beyond the copies in the run's folder is saved there first."""
    deadline_s = time.monotonic() + patience_s
    roots = [root for root in _memory_folder().glob(f"{job}-*") if root.name.rpartition("-")[0] == job]
    for root in roots:
        while run in (None, root.name.rpartition("-")[2]) and _is_held(root) and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
        if root.name.rpartition("-")[2] == run or (run is None and not _is_held(root)):
            try:
                _save(root)
            except OSError as error:
                _LOG.error("the last step of run %s stays in %s: %s", root.name.rpartition("-")[2], root, error)
            else:
                shutil.rmtree(root, ignore_errors=True)
    with suppress(OSError):
        _memory_folder().rmdir()  # only when it was the last one there


def _save(root: Path) -> None:
    """Copy the newest generation of an ended run to the disk, if all of it was on this node and no later copy exists.
    Raises OSError."""
    run, target = root.name.rpartition("-")[2], root / _SAVED_TO
    if not target.is_symlink():
        return
    place = os.readlink(target)
    if not is_url(place) and not Path(place).parent.parent.is_dir():
        return
    memory, copies = (
        CheckpointStore(root, run, durable=False),
        open_copies(place if is_url(place) else Path(place), run),
    )
    newest = max((copy.step for copy in copies.manifests() if copies.valid(copy)), default=0)
    for manifest in memory.manifests():
        if manifest.step > newest and _save_generation(memory, manifest, copies):
            _LOG.warning("step %d of run %s was only in memory: saved to %s", manifest.step, run, copies.root)
            return


def _save_generation(memory: CheckpointStore, manifest: Manifest, copies: CheckpointStore | ObjectStore) -> bool:
    # A later trainer may have claimed the copies and ended before its first commit.
    epoch = max(manifest.epoch, copies.epoch)
    try:
        copies.claim(epoch)
        source = memory.root / manifest.folder
        files = {name: copies.put(source, manifest.step, epoch, file) for name, file in manifest.files.items()}
        copies.commit(manifest.step, epoch, files)
    except (CheckpointCorrupt, CheckpointMissing, StaleEpoch):
        return False
    return True


_locks: dict[Path, int] = {}
"""Folder to the descriptor of its lock file, which this process holds until it ends."""


def _hold(root: Path) -> None:
    path = root / _HELD
    if root in _locks and path.exists():
        return
    if root in _locks:
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
    if folder := os.environ.get(_MEMORY_VARIABLE):
        return Path(folder) / _own_name()
    memory = _SHARED_MEMORY if _is_usable(_SHARED_MEMORY) else Path(tempfile.gettempdir())
    return memory / _own_name()


def _own_name() -> str:
    """A folder of another user could be renamed under the files in it."""
    return f"dlrover-rl-{os.geteuid()}"


def _is_usable(folder: Path) -> bool:
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    disk = os.statvfs(folder)
    return disk.f_blocks * disk.f_frsize >= _LEAST_SHARED_MEMORY
