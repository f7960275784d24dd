# SPDX-License-Identifier: Apache-2.0
"""A member's part of commits: its files in a folder in the node's memory, the copy to the job's directory, restoring.

::

    COMMIT of step 4, with a snapshot    COMMIT of step 5        COMMIT of step 6
    calls of 4 --> answer                calls of 5 --> answer   calls of 6 --> answer
    state after 4 --> a thread writes it ------> "the state of 4 is written": commits follow from it
                      '- a call that may change it waits
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, DiskWait, retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, DataError, OtherLayout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId, is_url
from dlrover.python.rl.data.state_tree import dump_in_place
from dlrover.python.rl.runtime.checkpoint.calls import RecordedCall, load_calls
from dlrover.python.rl.runtime.checkpoint.roots import Roots
from dlrover.python.rl.runtime.checkpoint.storage.copies import copy_pieces
from dlrover.python.rl.runtime.checkpoint.storage.manifest import Piece, folder_name
from dlrover.python.rl.runtime.checkpoint.storage.object_store import read_from
from dlrover.python.rl.runtime.checkpoint.storage.state_file import Header, StateFile, read_state
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore

_LOG = get_logger(__name__)

CALLS = ".calls"
"""Suffix of files of calls; those of states have ``.state``."""


@dataclass(frozen=True)
class CommitRequest:
    """Write the state after ``step``, or with ``calls`` those of the step, and with ``snapshot`` also the state, in the
    background; ``persist``: copy the state to the job's directory, in the background; ``snapshotting`` and ``copying``:
    the steps whose snapshot and copy are under way; ``first_kept``: the first step whose files stay, or
    ``first_needed`` where there is no room; ``records``: later commits may ask for calls."""

    step: int
    roots: Roots
    persist: bool = False
    copying: int | None = None
    calls: bool = False
    snapshot: bool = False
    snapshotting: int | None = None
    first_kept: int = 0
    first_needed: int = 0
    records: bool = True


@dataclass(frozen=True)
class Progress:
    """Of a file that is written in the background: ``file`` once it is finished, and how many seconds it took from the
    member's calls; ``running``: not yet. Neither: it failed."""

    file: StateFile | None = None
    running: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class CommitAnswer:
    """The file, None where the calls are not enough, and how long it took."""

    file: StateFile | None
    seconds: float = 0.0
    snapshot: Progress = Progress()
    copy: Progress = Progress()


@dataclass(frozen=True)
class PersistRequest:
    """Copy generation ``step``, which has these files of each process; ``finish`` the copy of the state that is under
    way instead, if it succeeds."""

    step: int
    pieces: Mapping[str, tuple[Piece, ...]]
    roots: Roots
    finish: bool = True


@dataclass(frozen=True)
class RestoreRequest:
    """Go back to ``step``, from the nearest of ``sources``, the files of each process; a relative folder is in the
    member's own commit root. ``records``: see :class:`CommitRequest`."""

    step: int
    sources: tuple[Mapping[str, tuple[Piece, ...]], ...]
    roots: Roots
    records: bool = True


@dataclass
class _Background:
    """A file of ``step`` that a thread writes; ``seconds`` are those that calls of the member have waited for it, and
    its share of this process's cores."""

    step: int
    write: InitVar[Callable[[], StateFile | None]]  # not kept: it holds the state
    what: str
    file: StateFile | None = None
    seconds: float = 0.0

    def __post_init__(self, write: Callable[[], StateFile | None]) -> None:
        run = partial(self._run, write)
        self.thread = threading.Thread(target=run, name=f"dlrover-copy-{self.step}", daemon=True)
        self.thread.start()

    def _run(self, write: Callable[[], StateFile | None]) -> None:
        began_s = time.thread_time()
        try:
            self.file = write()
        except Exception as error:  # noqa: BLE001 -- the run continues without the file
            _LOG.warning("%s: %s", self.what, error)
        self.seconds += (time.thread_time() - began_s) / (os.cpu_count() or 1)

    def finish(self) -> None:
        began_s = time.monotonic()
        self.thread.join()  # waits: for a file on this machine, which ends or fails
        self.seconds += time.monotonic() - began_s

    def progress(self, step: int | None) -> Progress:
        if self.step != step:
            return Progress()
        running = self.thread.is_alive()  # first: what has ended by now has its file
        return Progress(self.file, running, self.seconds)


def is_calls(file: StateFile) -> bool:
    return file.name.endswith(CALLS)


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
        self._snapshot: _Background | None = None
        self._copy: _Background | None = None
        self._since: int | None = None  # the first of the commits in this node's folder that calls can go on from

    def wait_until_written(self) -> None:
        """What the workload's ``state_dict`` has returned may change from now on."""
        if self._snapshot is not None and self._snapshot.thread.is_alive():
            self._snapshot.finish()

    def commit(self, workload: Any, request: CommitRequest, calls: list[Any] | None = None) -> CommitAnswer:
        """Write the workload's ``state_dict``, or the ``calls`` of the step. Raises DataError for values that cannot be
        saved, StaleEpoch, OSError."""
        began_s, store = time.monotonic(), request.roots.commit_store(self._node)
        if request.snapshot or not request.calls:
            self.wait_until_written()
        self._clean_up(store, request)
        snapshot, copy = self._snapshot, self._copy
        file = (
            self._write_calls(store, request, calls) if request.calls else self._write_state(store, workload, request)
        )
        if file is None:
            if request.snapshot:
                workload.state_dict()  # ranks that have all their calls may meet in it
            return CommitAnswer(None)
        if request.snapshot:
            self._begin_snapshot(store, workload, request)
        if request.persist:
            self._begin_copy(store, request, file)
        return CommitAnswer(
            file,
            time.monotonic() - began_s,
            snapshot.progress(request.snapshotting) if snapshot is not None else Progress(),
            copy.progress(request.copying) if copy is not None else Progress(),
        )

    def _clean_up(self, store: CheckpointStore, request: CommitRequest) -> None:
        if request.copying is not None:
            store.pinned.add(request.copying)
        if self._copy is not None and self._copy.thread.is_alive():
            store.pinned.add(self._copy.step)
        if not request.roots.shared and self._node != request.roots.node:
            store.drop_older(request.first_kept)

    def _write_state(self, store: CheckpointStore, workload: Any, request: CommitRequest) -> StateFile:
        file = self._write(store, request, self._state_name, workload.state_dict())  # only once: ranks may meet in it
        self._since = request.step if self._since is None else self._since
        return file

    @property
    def _state_name(self) -> str:
        return f"{self.key}.{self._incarnation}.state"

    def _begin_snapshot(self, store: CheckpointStore, workload: Any, request: CommitRequest) -> None:
        began_s = time.monotonic()
        state = dump_in_place(workload.state_dict())
        write = partial(self._write, store, request, self._state_name, state)
        self._snapshot = _Background(
            request.step, write, f"{self.key}: the state of step {request.step} is not written"
        )
        self._snapshot.seconds += time.monotonic() - began_s
        workload.note_writing(self.wait_until_written)

    def _begin_copy(self, store: CheckpointStore, request: CommitRequest, file: StateFile) -> None:
        step, roots, snapshot = request.step, request.roots, self._snapshot if request.snapshot else None
        source = store.root / folder_name(step, roots.epoch)

        def copy() -> StateFile | None:
            if snapshot is not None:
                snapshot.thread.join()  # waits: as finish does
            state = file if snapshot is None else snapshot.file
            return roots.durable_store().put(source, step, roots.epoch, state) if state is not None else None

        self._copy = _Background(step, copy, f"{self.key} of step {step} was not copied to {roots.durable}")

    def _write_calls(self, store: CheckpointStore, request: CommitRequest, calls: Any) -> StateFile | None:
        """None if there are none, an argument cannot be saved, or the commit before is not in this folder."""
        if calls is None or self._since is None or self._since >= request.step:
            return None
        name = f"{self.key}.{request.step}.{self._incarnation}{CALLS}"
        try:
            return self._write(store, request, name, {"calls": calls})
        except DataError:
            return None

    def _write(self, store: CheckpointStore, request: CommitRequest, name: str, tree: Any) -> StateFile:
        header, epoch = {**self._header, "step": request.step}, request.roots.epoch

        def write() -> StateFile:
            return store.write(request.step, epoch, name, header, tree)

        file = retry_io(write, store.root, self._disk_wait, partial(store.free_space, request.first_needed))
        return replace(file, node=request.roots.owner(self._node))

    def restore(self, workload: Any, request: RestoreRequest) -> list[RecordedCall]:
        """Load the state from the first intact source; returns the calls after which it is that of the request. Raises
        CheckpointCorrupt or CheckpointMissing if there is none, DataError if this code cannot repeat the calls."""
        self.wait_until_written()
        failure: CheckpointCorrupt | CheckpointMissing = CheckpointMissing(f"step {request.step} has no {self.key}")
        for source in request.sources:
            pieces = self._pieces_by_rank(source)
            try:
                if len(pieces) == self._members and self._rank in pieces:
                    return self._restore_own(workload, request, pieces)
                if pieces and workload.takes_other_members(workload.config):
                    self._restore_other(workload, request, pieces)
                    return []
            except (CheckpointCorrupt, CheckpointMissing) as error:
                failure = error
        raise failure

    def _pieces_by_rank(self, source: Mapping[str, tuple[Piece, ...]]) -> dict[int, tuple[Piece, ...]]:
        """Those of the members of the role, in rank order."""
        named = ((*name.rpartition("-")[::2], pieces) for name, pieces in source.items())
        return dict(sorted((int(rank), pieces) for role, rank, pieces in named if role == self._header["role"]))

    def _restore_own(
        self, workload: Any, request: RestoreRequest, pieces: Mapping[int, tuple[Piece, ...]]
    ) -> list[RecordedCall]:
        own = pieces[self._rank]
        state, *trees = self._read(request, own, self._rank)
        calls = [call for tree in trees for call in load_calls(tree)]
        self._since = request.step if "/" not in own[-1].folder else None
        try:
            workload.load_state_dict(state)
        except OtherLayout:
            if not workload.takes_other_members(workload.config):
                raise
            self._restore_other(workload, request, pieces)
        return calls

    def _restore_other(self, workload: Any, request: RestoreRequest, pieces: Mapping[int, tuple[Piece, ...]]) -> None:
        """From the states of members that have divided what they have otherwise. The calls after a state are for as
        many members as made them."""
        if later := [own for own in pieces.values() if len(own) > 1]:
            folder = later[0][-1].folder
            raise CheckpointMissing(f"{folder} has calls after the state, which other members cannot repeat")
        self._since = None
        workload.load_states(state for rank, own in pieces.items() for state in self._read(request, own, rank))

    def _read(self, request: RestoreRequest, pieces: Sequence[Piece], rank: int) -> Iterator[Any]:
        """The trees in the files of ``rank``, of which the last one is the step's. Raises CheckpointCorrupt."""
        root, header = request.roots.commit_root(), {**self._header, "rank": rank}
        for folder, file in pieces:
            expected = header if file is not pieces[-1].file else {**header, "step": request.step}
            try:
                tree = retry_io(partial(_read, root, folder, file, expected), root / folder, self._disk_wait)
            except OSError as error:
                raise CheckpointCorrupt(f"{folder}/{file.name}", f"it cannot be read: {error}") from error
            yield tree

    def persist(self, request: PersistRequest) -> tuple[StateFile, ...]:
        """Finish the copy of a generation, or make it; raises CheckpointCorrupt, CheckpointMissing, OSError."""
        copy, pieces = self._copy, request.pieces[self.key]
        if copy is not None and copy.step == request.step and request.finish:
            copy.finish()
            if copy.file is not None:
                return (copy.file,)
        root, copies = request.roots.commit_root(), request.roots.durable_store()
        return copy_pieces(root, copies, request.step, request.roots.epoch, pieces)


def _read(root: Path, folder: str, file: StateFile, header: Header) -> Any:
    if is_url(folder):
        return read_from(f"{folder}/{file.name}", file, header)
    return read_state(root / folder / file.name, file, header)
