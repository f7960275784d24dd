# SPDX-License-Identifier: Apache-2.0
"""A member's part of commits: its files in a folder in the node's memory, the copy to the job's directory, restoring.

::

    COMMIT of step 4      state_dict() --> a thread writes it ------> WRITTEN: the file
                                           '- a call that may change the state waits
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, DiskWait, retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, OtherLayout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId, is_url
from dlrover.python.rl.data.state_tree import InPieces, StateTree, dump_in_place
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.storage.manifest import Piece, folder_name
from dlrover.python.rl.runtime.checkpoint.storage.object_store import read_from
from dlrover.python.rl.runtime.checkpoint.storage.state_file import Header, StateFile, read_state
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore

_LOG = get_logger(__name__)

AT_ONCE_BYTES = 1 << 20
"""Smaller states are written within the call."""


@dataclass(frozen=True)
class CommitRequest:
    """Write the state after ``step``; with ``persist`` also copy it to the job's directory. Files of steps before
    ``first_kept`` are removed, where there is no room also those before ``first_needed``, but none of the step that is
    ``copying`` to the job's directory."""

    step: int
    roots: Roots
    persist: bool = False
    copying: int | None = None
    first_kept: int = 0
    first_needed: int = 0


@dataclass(frozen=True)
class WrittenRequest:
    """Report the file of the last commit, after it is written if ``waits``, and the copy of the step ``copying``."""

    waits: bool = False
    copying: int | None = None


@dataclass(frozen=True)
class Progress:
    """The state of a copy: ``file`` once it is finished; ``running``: not yet. Neither: it failed."""

    file: StateFile | None = None
    running: bool = False


@dataclass(frozen=True)
class CommitAnswer:
    """The file of the commit, None while it is written; ``seconds`` are those that it has taken from the member."""

    file: StateFile | None
    seconds: float = 0.0
    copy: Progress = Progress()


@dataclass(frozen=True)
class PersistRequest:
    """Copy generation ``step``, which has these files, or finish the copy that is under way."""

    step: int
    pieces: Mapping[str, Piece]
    roots: Roots


@dataclass(frozen=True)
class RestoreRequest:
    """Go back to ``step``, from the nearest of ``sources``, the file of each process; a relative folder is in the
    member's own commit root."""

    step: int
    sources: tuple[Mapping[str, Piece], ...]
    roots: Roots


@dataclass
class _Background:
    """A file of ``step`` that a thread writes; ``seconds`` are those that calls of the member have waited for it, and
    its share of this process's cores."""

    step: int
    write: InitVar[Callable[[], StateFile | None]]  # not kept: it holds the state
    file: StateFile | None = None
    error: Exception | None = None
    seconds: float = 0.0

    def __post_init__(self, write: Callable[[], StateFile | None]) -> None:
        run = partial(self._run, write)
        self.thread = threading.Thread(target=run, name=f"dlrover-copy-{self.step}", daemon=True)
        self.thread.start()

    def _run(self, write: Callable[[], StateFile | None]) -> None:
        began_s = time.thread_time()
        try:
            self.file = write()
        except Exception as error:  # noqa: BLE001 -- raised where the file is asked for
            self.error = error
        self.seconds += (time.thread_time() - began_s) / (os.cpu_count() or 1)

    @property
    def is_running(self) -> bool:
        return self.thread.is_alive()

    def finish(self) -> None:
        began_s = time.monotonic()
        self.thread.join()  # waits: for a file on this machine, which ends or fails
        self.seconds += time.monotonic() - began_s


def incarnation_of(file: StateFile) -> int:
    return int(file.name.split(".")[-2])


class MemberState:
    """Writes and reads the state of one of ``members``, in its process of ``incarnation`` on ``node``."""

    def __init__(  # noqa: PLR0913 -- who it is
        self,
        role: str,
        rank: int,
        incarnation: int,
        node: str,
        members: int = 1,
        disk_wait: DiskWait = DEFAULT_DISK_WAIT,
    ) -> None:
        self._disk_wait, self._members = disk_wait, members
        self.key = ProcessId(role, rank).file_name
        self._incarnation, self._node = incarnation, node
        self._rank, self._header = rank, dict[str, str | int](role=str(role), rank=rank)
        self._writing: _Background | None = None
        self._copy: _Background | None = None

    def wait_until_written(self) -> None:
        """What the workload's ``state_dict`` has returned may change from now on."""
        if self._writing is not None and self._writing.is_running:
            self._writing.finish()

    def commit(self, workload: Any, request: CommitRequest) -> CommitAnswer:
        """Begin to write the workload's ``state_dict``. Raises DataError for values that cannot be saved, StaleEpoch,
        OSError."""
        self.wait_until_written()
        began_s, store = time.monotonic(), request.roots.commit_store(self._node)
        self._clean_up(store, request)
        state = dump_in_place(workload.state_dict())  # only once: ranks may meet in it
        copy, self._writing = self._copy, _Background(request.step, partial(self._write, store, request, state))
        if sum(map(len, state.buffers)) <= AT_ONCE_BYTES:
            self._writing.thread.join()  # waits: as finish does
        if request.persist:
            self._begin_copy(store, request, self._writing)
        self._writing.seconds += time.monotonic() - began_s
        return self._answer(request.copying, copy)

    def written(self, request: WrittenRequest) -> CommitAnswer:
        """Raises what writing has raised."""
        if request.waits:
            self.wait_until_written()
        return self._answer(request.copying, self._copy)

    def _answer(self, copying: int | None, copy: _Background | None) -> CommitAnswer:
        writing = self._writing
        if writing is None:
            return CommitAnswer(None)  # this process is new
        is_running = writing.is_running  # first: what has ended by now has its file
        if not is_running and writing.error is not None:
            raise writing.error
        file = None if is_running else writing.file
        return CommitAnswer(file, writing.seconds, self._progress_of(copy, copying))

    def _progress_of(self, copy: _Background | None, step: int | None) -> Progress:
        if copy is None or copy.step != step:
            return Progress()
        is_running = copy.is_running
        if not is_running and copy.error is not None:
            _LOG.warning("%s of step %d was not copied to the job's directory: %s", self.key, copy.step, copy.error)
        return Progress(copy.file, is_running)

    def _clean_up(self, store: CheckpointStore, request: CommitRequest) -> None:
        if request.copying is not None:
            store.pinned.add(request.copying)
        if self._copy is not None and self._copy.is_running:
            store.pinned.add(self._copy.step)
        if not request.roots.shared and self._node != request.roots.node:
            store.drop_older(request.first_kept)

    def _begin_copy(self, store: CheckpointStore, request: CommitRequest, writing: _Background) -> None:
        step, roots = request.step, request.roots
        source = store.root / folder_name(step, roots.epoch)

        def copy() -> StateFile | None:
            writing.thread.join()  # waits: as finish does
            return writing.file and roots.durable_store().put(source, step, roots.epoch, writing.file)

        self._copy = _Background(step, copy)

    def _write(
        self, store: CheckpointStore, request: CommitRequest, state: StateTree[memoryview | InPieces]
    ) -> StateFile:
        header, epoch = {**self._header, "step": request.step}, request.roots.epoch

        def write() -> StateFile:
            return store.write(request.step, epoch, f"{self.key}.{self._incarnation}.state", header, state)

        file = retry_io(write, store.root, self._disk_wait, partial(store.free_space, request.first_needed))
        return replace(file, node=request.roots.owner(self._node))

    def restore(self, workload: Any, request: RestoreRequest) -> None:
        """Load the state from the first intact source. Raises CheckpointCorrupt or CheckpointMissing if there is
        none."""
        self.wait_until_written()
        failure: CheckpointCorrupt | CheckpointMissing = CheckpointMissing(f"step {request.step} has no {self.key}")
        for source in request.sources:
            pieces = self._pieces_by_rank(source)
            try:
                if len(pieces) == self._members and self._rank in pieces:
                    return self._restore_own(workload, request, pieces)
                if pieces and workload.takes_other_members(workload.config):
                    return self._restore_other(workload, request, pieces)
            except (CheckpointCorrupt, CheckpointMissing) as error:
                failure = error
        raise failure

    def _pieces_by_rank(self, source: Mapping[str, Piece]) -> dict[int, Piece]:
        """Those of the members of the role, in rank order."""
        named = ((*name.rpartition("-")[::2], piece) for name, piece in source.items())
        return dict(sorted((int(rank), piece) for role, rank, piece in named if role == self._header["role"]))

    def _restore_own(self, workload: Any, request: RestoreRequest, pieces: Mapping[int, Piece]) -> None:
        state = self._read(request, pieces[self._rank], self._rank)
        try:
            workload.load_state_dict(state)
        except OtherLayout:
            if not workload.takes_other_members(workload.config):
                raise
            self._restore_other(workload, request, pieces)

    def _restore_other(self, workload: Any, request: RestoreRequest, pieces: Mapping[int, Piece]) -> None:
        """From the states of members that have divided what they have otherwise."""
        workload.load_states(self._read_all(request, pieces))

    def _read_all(self, request: RestoreRequest, pieces: Mapping[int, Piece]) -> Iterator[Any]:
        return (self._read(request, piece, rank) for rank, piece in pieces.items())

    def _read(self, request: RestoreRequest, piece: Piece, rank: int) -> Any:
        """The tree in the file of ``rank``. Raises CheckpointCorrupt."""
        root, header = request.roots.commit_root(), {**self._header, "rank": rank, "step": request.step}
        try:
            return retry_io(partial(_read, root, piece, header), root / piece.folder, self._disk_wait)
        except OSError as error:
            raise CheckpointCorrupt(f"{piece.folder}/{piece.file.name}", f"it cannot be read: {error}") from error

    def persist(self, request: PersistRequest) -> StateFile:
        """Finish the copy of a generation, or make it; raises CheckpointCorrupt, CheckpointMissing, OSError."""
        copy, (folder, file) = self._copy, request.pieces[self.key]
        if copy is not None and copy.step == request.step:
            copy.finish()
            if copy.file is not None:
                return copy.file
        source = request.roots.commit_root() / folder
        return request.roots.durable_store().put(source, request.step, request.roots.epoch, file)


def _read(root: Path, piece: Piece, header: Header) -> Any:
    folder, file = piece
    if is_url(folder):
        return read_from(f"{folder}/{file.name}", file, header)
    return read_state(root / folder / file.name, file, header)
