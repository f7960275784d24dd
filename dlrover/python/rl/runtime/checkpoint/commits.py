# SPDX-License-Identifier: Apache-2.0
"""A trainer's commits, in the node's memory or in a shared folder; every few of them are copied to the job's directory.

::

    COMMIT --> members write their states, or the calls of the step --> trainer.state --> manifest: committed
                  '- every few steps, in threads: states beside the calls, and copies of states
    a later COMMIT --> all states written? commits follow from them from now on
                       all copies complete? the trainer's file --> manifest: durable
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, DiskWait, retry_io
from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.layout import digest_of_results
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.cadence import Cadence
from dlrover.python.rl.runtime.checkpoint.copying import Copying
from dlrover.python.rl.runtime.checkpoint.member_state import (
    CommitAnswer,
    CommitRequest,
    PersistRequest,
    RestoreRequest,
    incarnation_of,
    is_calls,
)
from dlrover.python.rl.runtime.checkpoint.neighbours import (
    Held,
    Nodes,
    adopt_newest,
    copies_for_neighbours,
    copy_for_neighbour,
    lost_files,
    transfers_to,
    where_kept,
)
from dlrover.python.rl.runtime.checkpoint.roots import Roots, is_on_one_node, roots_of
from dlrover.python.rl.runtime.checkpoint.run_files import RunFiles, files_of
from dlrover.python.rl.runtime.checkpoint.runs import (
    SETTINGS,
    TRAINER,
    can_repeat,
    newest_commit,
)
from dlrover.python.rl.runtime.checkpoint.snapshots import Snapshots
from dlrover.python.rl.runtime.checkpoint.storage.generations import Generation, Store, find_newest
from dlrover.python.rl.runtime.checkpoint.storage.manifest import NODES, Manifest, Piece, folder_name
from dlrover.python.rl.runtime.checkpoint.storage.state_file import Header, StateFile
from dlrover.python.rl.trainer.port import LastCommit, Transfer

_LOG = get_logger(__name__)

T = TypeVar("T")

_NO_WAIT = DiskWait(0, 0, 0)


def checkpoints_of(job: JobSpec, run: str, epoch: int, node: str = "") -> "StoreCheckpoints":
    """The commits of a job's run, for its trainer of ``epoch`` on ``node``. Raises StaleEpoch after a later trainer."""
    roots = roots_of(job, run, epoch, node)
    resumed = newest_commit(job.job_dir, job.archive) if job.checkpoint.resume == "latest" else None
    before = None
    if resumed is not None and resumed[0].run != run:
        before = resumed[0]
        _LOG.info("continuing run %s", before.run)
    every = job.checkpoint.commit_every
    return StoreCheckpoints(
        roots,
        job.checkpoint.every,
        job.checkpoint.keep,
        before,
        files=files_of(job),
        settings=digest_of_results(job),
        cadence=Cadence(every if isinstance(every, int) else None),
        spread=roots.commits is None and not is_on_one_node(job),
    )


@dataclass
class StoreCheckpoints:
    """The commits of one run; implements :class:`~dlrover.python.rl.trainer.port.Checkpoints`. ``before`` is the store
    of an earlier run that this one continues from, None for a fresh start."""

    roots: Roots
    every: int = 10
    keep: int = 2
    before: Store | None = None
    disk_wait: DiskWait = DEFAULT_DISK_WAIT
    files: RunFiles | None = None
    """Uploaded before each copy is published, which then has the files of its step."""

    settings: str = ""
    """Digest of the settings on which results depend; with others, calls of an earlier run are not repeated."""

    cadence: Cadence = field(default_factory=lambda: Cadence(every=1))
    spread: bool = False
    """The commits are in the memories of several nodes, each one's also in the next one's."""

    committed_bytes: int = 0
    """In the files of all commits so far, without their copies."""

    _latest: Manifest | None = None
    _at: Manifest | None = None  # the last commit, if it is in the folder of the next one
    _asked: CommitRequest | None = None
    _kept: list[Manifest] = field(default_factory=list, repr=False)
    _last: LastCommit | None = None
    _transferring_since_s: float = 0.0
    _there: set[str] = field(default_factory=set, repr=False)  # the nodes that have members
    _newest: Generation | None = field(default=None, repr=False)
    _offered: list[Generation] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._commits = self.roots.commit_store(self.roots.node)
        self._durable = self.roots.durable_store(self.keep)
        self._patiently(partial(self._commits.claim, self.roots.epoch))
        self.copying = Copying(self._commits, self._durable, self.roots.epoch, self.files, self._extra)
        self.copying.claim(self.disk_wait, needed=not self._manifests(self._commits, remember=False))
        self.snapshots = Snapshots()

    @property
    def run(self) -> str:
        return self.roots.run

    def _patiently(self, act: Callable[[], T]) -> T:
        return retry_io(act, self._commits.root, self.disk_wait)

    def newest(self) -> int | None:
        self.copying.publish_complete()
        self.snapshots.at = None
        self._newest = newest = self._find_newest()
        self._offered = [newest] if newest is not None else []
        self._at = newest.manifest if newest is not None and newest.store is self._commits else None
        if self._at is not None:
            self.cadence.go_on(_calls_since_states(self._at))
        if newest is not None:
            step = newest.manifest.step
            if newest.store is self._durable:
                text = "no commit later than step %d is left: continuing from its copy in %s"
                _LOG.warning(text, step, self._durable.root)
            return step
        damaged = [name for store in (self._commits, self._durable) for name in store.damaged()]
        if damaged or self._last is not None:
            names = ", ".join(damaged) or "all are gone"
            raise CheckpointMissing(f"no commit of run {self.roots.run} is left: {names}")
        return None

    def _find_newest(self) -> Generation | None:
        kept = self._manifests(self._commits)
        self._kept = kept[: self._commits.keep]
        newest = find_newest(self._commits, kept, self.disk_wait, self._is_there)
        wait = self.disk_wait if newest is None else _NO_WAIT
        try:
            newest = find_newest(self._durable, self._manifests(self._durable, wait), wait, self._is_there, newest)
        except OSError as error:
            if newest is None:
                raise
            _LOG.warning("going back to step %d; later copies were not sought: %s", newest.manifest.step, error)
        if newest is None and self.before is not None:
            earlier = self._manifests(self.before, remember=False)
            newest = find_newest(self.before, earlier, self.disk_wait, self._can_repeat)
            if newest is None and not all(map(self._can_repeat, earlier)):
                what = "it has calls without the states before them, which other settings cannot repeat"
                raise CheckpointMissing(f"run {self.before.run} cannot be continued: {what}")
        return newest

    def _manifests(self, store: Store, wait: DiskWait | None = None, remember: bool = True) -> list[Manifest]:
        manifests = retry_io(store.manifests, store.root, wait or self.disk_wait)
        for manifest in manifests if remember else ():
            self._remember_writers(manifest, self._last.step if self._last is not None else 0)
        return manifests

    def _can_repeat(self, manifest: Manifest) -> bool:
        return can_repeat(manifest, self.settings)

    def last_known(self) -> LastCommit | None:
        return self._last

    def _remember_writers(self, manifest: Manifest, step: int = 0) -> None:
        """Remember the incarnations that wrote ``manifest``, and its step, or ``step`` if that is later."""
        writers = dict(self._last.incarnations) if self._last is not None else {}
        for name, file in manifest.files.items():
            if name != TRAINER:
                role, _, rank = name.rpartition("-")
                member = ProcessId(role, int(rank))
                writers[member] = max(incarnation_of(file), writers.get(member, 0))
        self._last = LastCommit(max(manifest.step, step), writers)

    def load(self, step: int) -> Mapping[str, Any]:
        if self._newest is None or self._newest.manifest.step != step:
            raise CheckpointMissing(f"step {step} is not the newest commit")
        state: Mapping[str, Any] = self._newest.read(TRAINER, self.disk_wait)
        return state

    def discard(self, step: int, why: str) -> None:
        self.copying.publish_complete()
        for generation in self._offered:
            if generation.manifest.step == step:
                generation.store.quarantine(generation.manifest, why)
        self._newest, self._offered, self._at = None, [], None
        if self.copying.step == step:
            self.copying.end()

    def restore_request(self, step: int) -> RestoreRequest:
        self._offered = self._find(step)
        sources = tuple(generation.pieces(self._commits) for generation in self._offered)
        return RestoreRequest(step, sources, self.roots, records=self.cadence.every != 1)

    def _find(self, step: int) -> list[Generation]:
        """In all places that can be read; raises OSError if it may be in one that cannot, and is in no other."""
        found: list[Generation] = []
        for store in (self._commits, self._durable, self.before):
            if store is None:
                continue
            try:
                manifests = self._manifests(store, _NO_WAIT if found else None, remember=False)
            except OSError as error:
                if not found:
                    raise
                _LOG.warning("the copies in %s are left out: %s", store.root, error)
                continue
            found += [
                Generation(store, manifest)
                for manifest in manifests
                if manifest.step == step and (store is not self.before or self._can_repeat(manifest))
            ]
        return found

    def commit_request(self, step: int, last: bool) -> CommitRequest:
        self.copying.publish_complete()
        due = step > 0 and (last or step % self.every == 0)
        persist = due and self.copying.at is None and self.copying.claim(_NO_WAIT, needed=False)
        calls = self.cadence.every != 1 and self._at is not None and self._at.step == step - 1
        snapshot = calls and (persist or (self.snapshots.at is None and self.cadence.is_due()))
        self._asked = CommitRequest(
            step,
            self.roots,
            persist,
            self.copying.step,
            calls,
            snapshot,
            self.snapshots.at.step if self.snapshots.at is not None else None,
            first_kept=min((manifest.since for manifest in self._kept), default=step - 1),
            first_needed=self._first_needed(step),
            records=self.cadence.every != 1,
        )
        return self._asked

    def commit_request_for_states(self, answers: Mapping[ProcessId, CommitAnswer]) -> CommitRequest | None:
        if self._asked is None or all(answer.file is not None for answer in answers.values()):
            return None
        self._asked = replace(self._asked, calls=False, snapshot=False)
        return self._asked

    def _first_needed(self, step: int) -> int:
        """The first step whose files the commit before ``step`` needs."""
        return self._at.since if self._at is not None else step - 1

    def copies(self, answers: Mapping[ProcessId, CommitAnswer], nodes: Nodes) -> list[Transfer]:
        self._transferring_since_s = time.monotonic()
        self.snapshots.note(answers)
        if not self.spread or self._asked is None:
            return []
        folder = folder_name(self._asked.step, self.roots.epoch)
        pieces = {
            member: (*self._earlier(member.file_name, answer.file), Piece(folder, answer.file))
            for member, answer in answers.items()
            if answer.file is not None
        }
        asked = self._asked
        return copies_for_neighbours(self.roots, pieces, nodes, self._at, asked.first_kept, asked.copying)

    def _earlier(self, name: str, file: StateFile) -> tuple[Piece, ...]:
        return self.snapshots.earlier(name, self._at) if is_calls(file) and self._at is not None else ()

    def commit(
        self,
        step: int,
        answers: Mapping[ProcessId, CommitAnswer],
        state: Mapping[str, Any],
        copied: Mapping[Transfer, str],
    ) -> None:
        asked = self._asked
        if asked is None or asked.step != step:
            raise ValueError(f"step {step} was not asked for")
        files = {member.file_name: answer.file for member, answer in answers.items() if answer.file is not None}
        earlier = {name: pieces for name, file in files.items() if (pieces := self._earlier(name, file))}
        extra = {**self._extra, NODES: where_kept(files, copied, self._at)} if self.spread else self._extra
        if (states := self.snapshots.commit_of_states(extra)) is not None:
            self._patiently(partial(self._commits.revise, states, self.roots.epoch))
            self._kept = [states if kept.folder == states.folder else kept for kept in self._kept]
        self._commits.written = step if asked.snapshot else None
        write = partial(self._write, step, files, earlier, dict(state), extra)
        free_space = partial(self._commits.free_space, self._first_needed(step))
        self._latest = self._at = retry_io(write, self._commits.root, self.disk_wait, free_space)
        self._kept = [self._at, *self._kept][: self._commits.keep]
        slowest_s = max((answer.seconds for answer in answers.values()), default=0.0)
        transfer_s = time.monotonic() - self._transferring_since_s if copied else 0.0
        slowest_s += transfer_s
        self.cadence.note(files.values(), slowest_s, whole=not earlier)
        self.committed_bytes += sum(file.nbytes for file in self._at.files.values())
        self._remember_writers(self._at)
        self._end_snapshots(transfer_s)
        self.copying.note(answers)
        if asked.snapshot:
            self.snapshots.at = self._at
            self.cadence.go_on(0)
        if asked.persist:
            self.copying.begin(self._at)

    def _end_snapshots(self, transfer_s: float) -> None:
        """The commit follows from those that members have written meanwhile, if they have."""
        states = {name: piece.file for name, piece in self.snapshots.states.items()}
        if self.snapshots.at is not None and states:
            self.cadence.note_states(states.values(), self.snapshots.seconds + transfer_s)
            self.committed_bytes += sum(file.nbytes for file in states.values())
            if self.copying.step == self.snapshots.at.step:
                self.copying.note_states(states)
            self.snapshots.at = None
        elif self.snapshots.given_up is not None and self._at is not None:
            if not self.snapshots.still_written:
                self._commits.sweep(self.snapshots.given_up)
            self.snapshots.given_up = None
            self.cadence.go_on(_calls_since_states(self._at))

    def _write(
        self,
        step: int,
        files: Mapping[str, StateFile],
        earlier: Mapping[str, tuple[Piece, ...]],
        state: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> Manifest:
        header: Header = {"role": TRAINER, "step": step}
        own = self._commits.write(step, self.roots.epoch, f"{TRAINER}.state", header, state)
        own = replace(own, node=self.roots.owner(self.roots.node))
        return self._commits.commit(step, self.roots.epoch, {**files, TRAINER: own}, earlier, extra)

    def trainers_copy(self, nodes: Nodes) -> list[Transfer]:
        if not self.spread or self._at is None:
            return []
        return self._patiently(partial(copy_for_neighbour, self.roots, self._commits, self._at, nodes))

    def transfers_to(self, step: int, members: Collection[ProcessId], nodes: Nodes) -> list[Transfer]:
        generations = self._find(step) if self.spread else []
        manifest = next((each.manifest for each in generations if each.store is self._commits), None)
        return transfers_to(self.roots, manifest, members, nodes) if manifest is not None else []

    def held_request(self) -> Roots:
        return self.roots

    def found(self, held: Mapping[str, Sequence[Held]]) -> None:
        self._patiently(partial(adopt_newest, self._commits, held.values()))
        self._there = set(held)

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether the nodes that have its files are."""
        lost = lost_files(manifest, self._there) if self.spread else []
        if lost:
            _LOG.warning("step %d is lost with the nodes that had %s", manifest.step, ", ".join(lost))
        return not lost

    @property
    def _extra(self) -> dict[str, Any]:
        return {SETTINGS: self.settings}

    def persist_request(self) -> PersistRequest | None:
        self.copying.claim(self.disk_wait)
        newest = find_newest(self._commits, self._manifests(self._commits, remember=False), self.disk_wait)
        if newest is None:
            return None
        manifest = self._patiently(partial(self.copying.next_at_the_end, newest.manifest))
        if manifest is None:
            return None
        self._latest = manifest
        pieces = Generation(self._commits, manifest).pieces(self._commits)
        return PersistRequest(manifest.step, pieces, self.roots, finish=not self.copying.failed)

    def persisted(self, answers: Mapping[ProcessId, tuple[StateFile, ...]]) -> None:
        if self._latest is not None:
            self.copying.publish(self._latest, answers)


def _calls_since_states(manifest: Manifest) -> int:
    return max(map(len, manifest.earlier.values()), default=0)
