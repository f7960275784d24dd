# SPDX-License-Identifier: Apache-2.0
"""A worker's part of commits: its files in a folder in the node's memory, the copy to the job's directory, restoring.

::

    COMMIT of step 4      state_dict() --> a thread writes it ------> WRITTEN: the file
                                           '- a call that may change the state waits
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, DiskWait, retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, OtherLayout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId, is_url
from dlrover.python.rl.common.spans import phase
from dlrover.python.rl.data.state_tree import Buffer, StateTree, dump_in_place
from dlrover.python.rl.runtime.checkpoint.object_store import read_from
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.state_file import StateFile, read_state
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore, Piece, folder_name

_LOG = get_logger(__name__)

AT_ONCE_BYTES = 1 << 20  # smaller states are written within the call


@dataclass(frozen=True)
class CommitRequest:
    """A request to write the state after ``step``, with ``persist`` also to the job's directory. Steps before
    ``first_kept``, or if space is short ``first_needed``, are removed, but not the one that is ``copying`` there."""

    step: int
    roots: Roots
    persist: bool = False
    copying: int | None = None
    first_kept: int = 0
    first_needed: int = 0


@dataclass(frozen=True)
class WrittenRequest:
    """A request for the file of the last commit, once it is written if ``waits``, and for the copy of ``copying``."""

    waits: bool = False
    copying: int | None = None


@dataclass(frozen=True)
class CommitAnswer:
    """The file of the commit, None while it is being written, and the ``seconds`` that it has cost the worker. The
    finished ``copy`` of the requested step; if it is None and not ``is_copying``, it has failed."""

    file: StateFile | None
    seconds: float = 0.0
    copy: StateFile | None = None
    is_copying: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """A request to restore ``step`` from the nearest of ``sources``, which map each process to its file, or to copy it
    from the first to the job's directory. A relative folder is in the worker's own commit root."""

    step: int
    sources: tuple[Mapping[str, Piece], ...]
    roots: Roots


class _Background:
    """A file of ``step`` that a thread writes; ``seconds`` count calls' waits for it, and its share of the cores."""

    def __init__(self, step: int, write: Callable[[], StateFile | None]) -> None:
        self.step, self._write = step, write
        self.file: StateFile | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self.thread = threading.Thread(target=self._run, name=f"dlrover-copy-{step}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        began_s = time.thread_time()
        try:
            self.file = self._write()
        except Exception as error:  # noqa: BLE001 -- raised where the file is requested
            self.error = error
        finally:
            del self._write  # it holds the state
        self.seconds += (time.thread_time() - began_s) / (os.cpu_count() or 1)

    def finish(self) -> None:
        began_s = time.monotonic()
        self.thread.join()  # waits: for a file on this machine, which ends or fails
        self.seconds += time.monotonic() - began_s


class MemberState:
    """Writes and reads the state of one of ``members`` in its process of ``incarnation`` on ``node``."""

    def __init__(
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
        self._incarnation, self.node = incarnation, node
        self._rank, self._header = rank, dict[str, str | int](role=str(role), rank=rank)
        self._writing: _Background | None = None
        self._copy: _Background | None = None

    def wait_until_written(self) -> None:
        """Return once the values of the workload's ``state_dict`` may change."""
        if self._writing is not None and self._writing.thread.is_alive():
            with phase("write commit"):
                self._writing.finish()

    def commit(self, workload: Any, request: CommitRequest) -> CommitAnswer:
        """Begin to write the workload's ``state_dict``. Raises DataError for unsavable values, StaleEpoch, OSError."""
        self.wait_until_written()
        began_s, roots = time.monotonic(), request.roots
        store = roots.commit_store(self.node)
        if request.copying is not None:
            store.pinned.add(request.copying)
        if self._copy is not None and self._copy.thread.is_alive():
            store.pinned.add(self._copy.step)
        if not roots.shared and self.node != roots.node:
            store.drop_older(request.first_kept)
        with phase("collect state"):
            state = dump_in_place(workload.state_dict())  # only once: ranks may meet in it
        copy, self._writing = self._copy, _Background(request.step, partial(self._write, store, request, state))
        if sum(map(len, state.buffers)) <= AT_ONCE_BYTES:
            with phase("write commit"):
                self._writing.thread.join()  # waits: as finish does
        if request.persist:
            self._copy = _Background(request.step, partial(_copy_written, store, request, self._writing))
        self._writing.seconds += time.monotonic() - began_s
        return self._answer(request.copying, copy)

    def written(self, request: WrittenRequest) -> CommitAnswer:
        """Report on the last commit. Raises the error of its writing."""
        if request.waits:
            self.wait_until_written()
        return self._answer(request.copying, self._copy)

    def _answer(self, copying: int | None, copy: _Background | None) -> CommitAnswer:
        writing = self._writing
        if writing is None:
            return CommitAnswer(None)  # this process is new
        is_running = writing.thread.is_alive()  # first: a thread that has ended by now has its file
        if not is_running and writing.error is not None:
            raise writing.error
        file = None if is_running else writing.file
        if copy is None or copy.step != copying:
            return CommitAnswer(file, writing.seconds)
        is_copying = copy.thread.is_alive()
        if not is_copying and copy.error is not None:
            _LOG.warning("%s of step %d was not copied to the job's directory: %s", self.key, copy.step, copy.error)
        return CommitAnswer(file, writing.seconds, copy.file, is_copying)

    def _write(self, store: CheckpointStore, request: CommitRequest, state: StateTree[Buffer]) -> StateFile:
        header, name = {**self._header, "step": request.step}, f"{self.key}.{self._incarnation}.state"
        write = partial(store.write, request.step, request.roots.epoch, name, header, state)
        file = retry_io(write, store.root, self._disk_wait, partial(store.free_space, request.first_needed))
        return replace(file, node=request.roots.owner(self.node))

    def restore(self, workload: Any, request: GenerationRequest) -> None:
        """Load the state from the first intact source. Raises CheckpointCorrupt or CheckpointMissing without one."""
        self.wait_until_written()
        failure: CheckpointCorrupt | CheckpointMissing = CheckpointMissing(f"step {request.step} has no {self.key}")
        for source in request.sources:
            named = ((*name.rpartition("-")[::2], piece) for name, piece in source.items())
            pieces = dict(sorted((int(rank), piece) for role, rank, piece in named if role == self._header["role"]))
            try:
                if len(pieces) == self._members and self._rank in pieces:
                    return self._restore_own(workload, request, pieces)
                if pieces and workload.takes_other_members(workload.config):
                    return self._restore_other(workload, request, pieces)
            except (CheckpointCorrupt, CheckpointMissing) as error:
                failure = error
        raise failure

    def _restore_own(self, workload: Any, request: GenerationRequest, pieces: Mapping[int, Piece]) -> None:
        state = self._read(request, pieces[self._rank], self._rank)
        try:
            workload.load_state_dict(state)
        except OtherLayout:
            if not workload.takes_other_members(workload.config):
                raise
            self._restore_other(workload, request, pieces)

    def _restore_other(self, workload: Any, request: GenerationRequest, pieces: Mapping[int, Piece]) -> None:
        """Restore from the states of workers that have divided them differently."""
        workload.load_states(self._read(request, piece, rank) for rank, piece in pieces.items())

    def _read(self, request: GenerationRequest, piece: Piece, rank: int) -> Any:
        """Return the tree in the file of ``rank``. Raises CheckpointCorrupt."""
        root, header = request.roots.commit_root(), {**self._header, "rank": rank, "step": request.step}
        folder, file = piece
        if is_url(folder):
            read = partial(read_from, f"{folder}/{file.name}", file, header)
        else:
            read = partial(read_state, root / folder / file.name, file, header)
        try:
            return retry_io(read, root / folder, self._disk_wait)
        except OSError as error:
            raise CheckpointCorrupt(f"{folder}/{file.name}", f"it cannot be read: {error}") from error

    def persist(self, request: GenerationRequest) -> StateFile:
        """Finish or make the copy of a generation. Raises CheckpointCorrupt, CheckpointMissing, OSError."""
        copy, (folder, file) = self._copy, request.sources[0][self.key]
        if copy is not None and copy.step == request.step:
            copy.finish()
            if copy.file is not None:
                return copy.file
        source = request.roots.commit_root() / folder
        return request.roots.durable_store().put(source, request.step, request.roots.epoch, file)


def _copy_written(store: CheckpointStore, request: CommitRequest, writing: _Background) -> StateFile | None:
    step, roots = request.step, request.roots
    writing.thread.join()  # waits: as finish does
    source = store.root / folder_name(step, roots.epoch)
    return writing.file and roots.durable_store().put(source, step, roots.epoch, writing.file)
