"""A member's side of commits: its state into a file of the generation, the copy to the job's directory, and back."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.runtime.checkpoints import CheckpointStore
from dlrover.python.rl.runtime.node_memory import memory_root
from dlrover.python.rl.runtime.room import PATIENT, Patience, with_room
from dlrover.python.rl.runtime.state_file import StateFile, copy_file, read_state

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Roots:
    """Where the generations of a run are.

    Attributes:
        job: the job's name.
        run: which run of it.
        epoch: of the trainer that asks.
        durable: the folder of the copies, in the job's directory, which every node sees.
        commits: the folder of each step's commit; None: in the memory of each node.
        node: id of the trainer's node, ``""`` in one process.
        shared: whether ``commits`` is on a disk that every node sees, and is to outlive them.
    """

    job: str
    run: str
    epoch: int
    durable: Path
    commits: Path | None = None
    node: str = ""
    shared: bool = False

    def commit_root(self) -> Path:
        """The folder of each step's commit, as this node has it."""
        return self.commits or memory_root(self.job, self.run)

    def commit_store(self, node: str) -> CheckpointStore:
        """Each step's generation, as node ``node``, which is this one, has it."""
        return CheckpointStore(self.commit_root(), self.run, durable=self.shared, node=self.owner(node))

    def owner(self, node: str) -> str:
        """The ``StateFile.node`` of what ``node`` writes there."""
        return "" if self.shared else node

    def durable_store(self, keep: int = 2) -> CheckpointStore:
        """The generations in the job's directory."""
        return CheckpointStore(self.durable, self.run, durable=True, keep=keep)


@dataclass(frozen=True)
class CommitRequest:
    """Write the state after ``step``.

    Attributes:
        persist: whether to begin copying it to the job's directory.
        copying: the step whose copy is under way, None for none.
    """

    step: int
    roots: Roots
    persist: bool = False
    copying: int | None = None


@dataclass(frozen=True)
class CommitAnswer:
    """What was written.

    Attributes:
        file: the state's file.
        copied: the finished copy of the step asked about, None when it is not there.
        running: whether that copy is still being made.
    """

    file: StateFile
    copied: StateFile | None = None
    running: bool = False


@dataclass(frozen=True)
class PersistRequest:
    """Finish the copy of generation ``step``, whose folder is ``folder`` and whose files are ``files``."""

    step: int
    folder: str
    files: Mapping[str, StateFile]
    roots: Roots


@dataclass(frozen=True)
class RestoreRequest:
    """Go back to ``step``.

    Attributes:
        sources: folder and files of each place that has it, the nearest first. A folder is absolute, or in the memory
            of the member's node, or wherever its commits are.
    """

    step: int
    sources: tuple[tuple[str, Mapping[str, StateFile]], ...]
    roots: Roots


@dataclass
class _Copy:
    """A copy that is being made in a thread."""

    step: int
    thread: threading.Thread | None = None
    done: StateFile | None = None

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


def incarnation_of(file: StateFile) -> int:
    """Which process of the member has written ``file``."""
    return int(file.name.split(".")[-2])


class MemberState:
    """Writes and reads the state of one member.

    Args:
        role: its role.
        rank: its rank.
        incarnation: which of its processes this is.
        node: id of this node.
        patience: how long to wait for room.
    """

    def __init__(self, role: str, rank: int, incarnation: int, node: str, patience: Patience = PATIENT) -> None:
        self._patience = patience
        self.key = f"{role}-{rank}"
        self._incarnation, self._node = incarnation, node
        self._header: dict[str, str | int] = {"role": str(role), "rank": rank}
        self._copy: _Copy | None = None

    def commit(self, workload: Any, request: CommitRequest) -> CommitAnswer:
        """Write what the workload's ``state_dict`` gives.

        Raises:
            DataError: it holds what cannot be saved.
            StaleEpoch: a later trainer has taken over.
            OSError: it cannot be written; where there is no room, none has come.
        """
        roots, copy = request.roots, self._copy
        store = roots.commit_store(self._node)
        if request.copying is not None:
            store.pinned.add(request.copying)
        if copy is not None and copy.running:
            store.pinned.add(copy.step)
        header = {**self._header, "step": request.step}
        state = workload.state_dict()  # once: ranks may meet in it

        def write() -> StateFile:
            return store.write(request.step, roots.epoch, f"{self.key}.{self._incarnation}.state", header, state)

        file = with_room(write, partial(store.make_room, request.step - 1), self._patience)
        if not roots.shared and self._node != roots.node:
            store.drop_older(request.step - 2)
        if request.persist:
            self._begin_copy(request.step, store.folder(request.step, roots.epoch), file, roots)
        file = replace(file, node=roots.owner(self._node))
        if copy is None or copy.step != request.copying:
            return CommitAnswer(file)
        return CommitAnswer(file, copy.done, copy.running)

    def restore(self, workload: Any, request: RestoreRequest) -> None:
        """Load what was written, from the first place that has it intact.

        Raises:
            CheckpointCorrupt, CheckpointMissing: no place has.
        """
        root = request.roots.commit_root()
        header = {**self._header, "step": request.step}
        failure: CheckpointCorrupt | CheckpointMissing = CheckpointMissing(f"step {request.step} has no {self.key}")
        for folder, files in request.sources:
            file = files.get(self.key)
            if file is None:
                continue
            try:
                state = read_state(root / folder / file.name, file, header)
            except (CheckpointCorrupt, CheckpointMissing) as error:
                failure = error
                continue
            except OSError as error:
                failure = CheckpointCorrupt(str(root / folder / file.name), f"it cannot be read: {error}")
                continue
            workload.load_state_dict(state)
            return
        raise failure

    def persist(self, request: PersistRequest) -> StateFile:
        """Finish the copy of a generation; makes it when nobody has begun.

        Raises:
            CheckpointCorrupt, CheckpointMissing: there is nothing intact to copy.
            OSError: it cannot be written.
        """
        copy = self._copy
        if copy is not None and copy.step == request.step and copy.thread is not None:
            copy.thread.join()  # waits: for a copy on this machine, which ends or fails
            if copy.done is not None:
                return copy.done
        root = request.roots.commit_root()
        target = request.roots.durable_store().folder(request.step, request.roots.epoch)
        return copy_file(root / request.folder, target, request.files[self.key], durable=True)

    def _begin_copy(self, step: int, source: Path, file: StateFile, roots: Roots) -> None:
        copy = _Copy(step)

        def run() -> None:
            try:
                target = roots.durable_store().folder(step, roots.epoch)
                copy.done = copy_file(source, target, file, durable=True)
            except Exception as error:  # noqa: BLE001 -- whatever keeps it from the disk, the run goes on without
                _LOG.warning("%s of step %d was not copied to %s: %s", self.key, step, roots.durable, error)

        copy.thread = threading.Thread(target=run, name=f"dlrover-copy-{step}", daemon=True)
        copy.thread.start()
        self._copy = copy
