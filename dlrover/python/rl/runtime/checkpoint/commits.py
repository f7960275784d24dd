# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the commits of a run and their copies, whose states follow from each other.
"""A trainer's commits, in the nodes' memory or a shared folder; every few of them are copied to the job's directory.

::

    COMMIT --> the trainer writes its state, workers begin to write theirs
    WRITTEN -> all have written? manifest: committed
    a later COMMIT or WRITTEN --> all copies complete? the trainer's file --> manifest: durable
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, DiskWait, is_transient, retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.code import describe_changes, digest_code
from dlrover.python.rl.runtime.checkpoint.member_state import (
    CommitAnswer,
    CommitRequest,
    GenerationRequest,
    WrittenRequest,
)
from dlrover.python.rl.runtime.checkpoint.neighbours import (
    Held,
    Nodes,
    adopt_newest,
    copies_for_neighbours,
    copy_for_neighbour,
    lost_files,
    nodes_by_process,
    transfers_to,
)
from dlrover.python.rl.runtime.checkpoint.object_store import ObjectStore, Store
from dlrover.python.rl.runtime.checkpoint.runs import (
    CODE,
    TRAINER,
    Roots,
    RunFiles,
    files_of,
    is_on_one_node,
    newest_commit,
    prune_earlier_runs,
    roots_of,
)
from dlrover.python.rl.runtime.checkpoint.state_file import Header, StateFile
from dlrover.python.rl.runtime.checkpoint.store import NODES, CheckpointStore, Manifest, Piece, folder_name
from dlrover.python.rl.trainer.port import LastCommit, Transfer

_LOG = get_logger(__name__)

_SHARE = 0.01
_MOST_STEPS, _MOST_S = 8, 10.0


@dataclass
class Stride:
    """The rule for the steps to commit: each ``every``-th. None: each step, or if repeated steps have the same bits
    (``deterministic``), so few steps apart that commits take at most 1 % of the time, but at most 8 steps and 10 s."""

    every: int | None = None
    deterministic: bool = False
    now_s: Callable[[], float] = time.monotonic
    _last: int = 0
    _commit_s: float = 0.0
    _step_s: float = math.inf
    _at: tuple[int, float] | None = field(default=None, repr=False)
    _waited_s: float = 0.0  # by the trainer, for the commit under way
    _waits_since_s: float | None = None

    @property
    def steps(self) -> int:
        if self.every is not None or not self.deterministic or not 0 < self._step_s < math.inf:
            return self.every or 1
        most = min(_MOST_STEPS, int(_MOST_S / self._step_s))
        return max(min(math.ceil(self._commit_s / (_SHARE * self._step_s)), most), 1)

    def start_after(self, step: int) -> None:
        """Count the steps from ``step``, whose commit has begun."""
        self._last, self._waited_s, self._waits_since_s = step, 0.0, None

    def is_due(self, step: int) -> bool:
        """Return True if a commit of ``step``, which has just ended, is due."""
        now_s = self.now_s()
        if self._at is not None and step == self._at[0] + 1:
            step_s = now_s - self._at[1]
            self._step_s = step_s if self._step_s == math.inf else 0.8 * self._step_s + 0.2 * step_s
        self._at = step, now_s
        return step - self._last >= self.steps

    def time_wait(self, waits: bool) -> None:
        """Record that the trainer ``waits`` for the current commit from now on, or no longer."""
        now_s = self.now_s()
        if self._waits_since_s is not None:
            self._waited_s += now_s - self._waits_since_s
        self._waits_since_s = now_s if waits else None

    def note_commit(self, members_s: float) -> None:
        """Record the cost of the current commit: ``members_s`` of the workers' calls, and the trainer's wait."""
        self.time_wait(False)
        self._commit_s = self._waited_s + members_s


@dataclass(frozen=True)
class Generation:
    store: Store
    manifest: Manifest

    def read(self, name: str, wait: DiskWait) -> Any:
        """Return the tree in a file. Raises CheckpointMissing, CheckpointCorrupt, OSError for an unreadable store."""
        try:
            return retry_io(partial(self.store.read, self.manifest, name), self.store.root, wait)
        except OSError as error:
            if isinstance(self.store, ObjectStore) or not is_transient(error):
                raise  # probably out of reach rather than damaged
            place = f"{self.store.root}/{self.manifest.folder}/{name}"
            raise CheckpointCorrupt(place, f"it cannot be read: {error}") from error

    def is_intact(self, wait: DiskWait) -> bool:
        """Return True if every file is intact, else quarantine the generation. Raises OSError if unreadable."""
        try:
            return retry_io(partial(self.store.valid, self.manifest), self.store.root, wait)
        except OSError as error:
            is_damaged = isinstance(self.store, CheckpointStore) and is_transient(error)
            if is_damaged and self.store.quarantine(self.manifest.folder, f"it cannot be read: {error}"):
                return False
            raise

    def pieces(self, own: Store) -> dict[str, Piece]:
        """Return the file of each process; its folder is relative in ``own``."""
        folder = self.manifest.folder if self.store is own else f"{self.store.root}/{self.manifest.folder}"
        return {name: Piece(folder, file) for name, file in self.manifest.files.items()}


def find_newest(
    store: Store,
    manifests: Sequence[Manifest],
    wait: DiskWait,
    usable: Callable[[Manifest], bool] = lambda manifest: True,
    beyond: Generation | None = None,
) -> Generation | None:
    """Return the first intact and ``usable`` generation, or ``beyond`` if its step is not earlier."""
    for manifest in manifests:
        if beyond is not None and manifest.step <= beyond.manifest.step:
            break
        generation = Generation(store, manifest)
        if usable(manifest) and generation.is_intact(wait):
            return generation
    return beyond


T = TypeVar("T")

_NO_WAIT = DiskWait(0, 0, 0)


@dataclass
class Copying:
    """Publishes the workers' copies of a commit as a generation of ``durable`` once all of them are complete."""

    commits: CheckpointStore
    durable: Store
    epoch: int
    files: RunFiles | None
    extra: Mapping[str, Any]
    at: Manifest | None = None  # the commit that is being copied
    _has_claimed: bool = False

    def claim(self, wait: DiskWait, needed: bool = True) -> bool:
        """Claim ``durable``, or return False if it is unreachable; raises StaleEpoch, OSError if ``needed``."""
        if self._has_claimed:
            return True
        try:
            retry_io(partial(self.durable.claim, self.epoch), self.durable.root, wait)
        except OSError as error:
            if needed or not is_transient(error):
                raise
            _LOG.warning("%s cannot be reached, and gets no copies for now: %s", self.durable.root, error)
            return False
        self._has_claimed = True
        return True

    @property
    def step(self) -> int | None:
        return self.at.step if self.at is not None else None

    def note(self, answers: Mapping[ProcessId, CommitAnswer]) -> None:
        """Publish the copy once every worker has finished its part; abandon it if one has failed."""
        if self.at is None:
            return
        copies = {member.file_name: answer.copy for member, answer in answers.items() if answer.copy is not None}
        if len(copies) == len(answers):
            self.publish(self.at, copies)
        elif all(answer.copy is not None or answer.is_copying for answer in answers.values()):
            return
        self.end()

    def publish_complete(self) -> None:
        """Publish the copy if all its verified files exist, even if workers have died since."""
        if self.at is None:
            return
        copies = {name: replace(file, node="") for name, file in self.at.files.items() if name != TRAINER}
        try:
            for copy in copies.values():
                self.durable.check(self.at.folder, copy)
        except (CheckpointCorrupt, CheckpointMissing, OSError):
            return
        self.publish(self.at, copies)
        self.end()

    def end(self) -> None:
        if self.at is not None:
            self.commits.pinned.discard(self.at.step)
        self.at = None

    def publish(self, manifest: Manifest, copies: Mapping[str, StateFile]) -> None:
        try:
            source = self.commits.root / manifest.folder
            trainers = self.durable.put(source, manifest.step, self.epoch, manifest.files[TRAINER])
            if self.files is not None:
                self.files.upload()
            self.durable.commit(manifest.step, self.epoch, {**copies, TRAINER: trainers}, self.extra)
            prune_earlier_runs(self.durable)
        except (CheckpointCorrupt, CheckpointMissing, OSError) as error:
            _LOG.warning("step %d was not copied to %s: %s", manifest.step, self.durable.root, error)


def checkpoints_of(job: JobSpec, run: str, epoch: int, node: str = "") -> "StoreCheckpoints":
    """Open the commits of a run for its trainer of ``epoch`` on ``node``. Raises StaleEpoch after a later trainer."""
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
        code=digest_code(job),
        stride=Stride(every if isinstance(every, int) else None),
        spread=roots.commits is None and not is_on_one_node(job),
    )


@dataclass
class StoreCheckpoints:
    """The commits of one run; implements :class:`~dlrover.python.rl.trainer.port.Checkpoints`."""

    roots: Roots
    every: int = 10
    keep: int = 2
    before: Store | None = None  # of an earlier run that this one continues
    disk_wait: DiskWait = DEFAULT_DISK_WAIT
    files: RunFiles | None = None  # uploaded before each copy is published, whose step they then have
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # digests of the code that computes the steps
    stride: Stride = field(default_factory=Stride)
    spread: bool = False  # the commits are in several nodes' memories, each also in the next node's
    committed_bytes: int = 0  # of all commits so far, without their copies
    last_known: LastCommit | None = None
    _persisting: Manifest | None = None  # the last commit that was to be copied at the end of the run: once
    _at: Manifest | None = None  # the last commit, if it is in the folder of the next one
    _request: CommitRequest | None = None
    _trainer_file: StateFile | None = None  # of the commit that was requested
    _recent: list[Manifest] = field(default_factory=list, repr=False)  # the commits that stay
    _nodes: set[str] = field(default_factory=set, repr=False)  # the nodes that have workers
    _newest: Generation | None = field(default=None, repr=False)
    _offered: list[Generation] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.run = self.roots.run
        self._commits = self.roots.commit_store(self.roots.node)
        self._durable = self.roots.durable_store(self.keep)
        self._retry(partial(self._commits.claim, self.roots.epoch))
        self.copying = Copying(self._commits, self._durable, self.roots.epoch, self.files, {CODE: self.code})
        self.copying.claim(self.disk_wait, needed=not self._manifests(self._commits, remember=False))

    def _retry(self, act: Callable[[], T]) -> T:
        return retry_io(act, self._commits.root, self.disk_wait)

    def newest(self) -> int | None:
        self.copying.publish_complete()
        self._newest = newest = self._find_newest()
        self._offered = [newest] if newest is not None else []
        self._at = newest.manifest if newest is not None and newest.store is self._commits else None
        self.stride.start_after(newest.manifest.step if newest is not None else 0)
        if newest is not None:
            step = newest.manifest.step
            if changes := describe_changes(newest.manifest.extra.get(CODE, {}), self.code):
                _LOG.warning("the steps after %d are computed with changed code: %s", step, changes)
            if newest.store is self._durable:
                text = "no commit after step %d is left: continuing from the copy of that step in %s"
                _LOG.warning(text, step, self._durable.root)
            return step
        damaged = [name for store in (self._commits, self._durable) for name in store.damaged()]
        if damaged or self.last_known is not None:
            names = ", ".join(damaged) or "all are gone"
            raise CheckpointMissing(f"no commit of run {self.run} is left: {names}")
        return None

    def _find_newest(self) -> Generation | None:
        manifests = self._manifests(self._commits)
        self._recent = manifests[: self._commits.keep]
        newest = find_newest(self._commits, manifests, self.disk_wait, self._is_reachable)
        wait = self.disk_wait if newest is None else _NO_WAIT
        try:
            newest = find_newest(self._durable, self._manifests(self._durable, wait), wait, self._is_reachable, newest)
        except OSError as error:
            if newest is None:
                raise
            _LOG.warning("going back to step %d without looking for a later copy: %s", newest.manifest.step, error)
        if newest is None and self.before is not None:
            newest = find_newest(self.before, self._manifests(self.before, remember=False), self.disk_wait)
        return newest

    def _manifests(self, store: Store, wait: DiskWait | None = None, remember: bool = True) -> list[Manifest]:
        manifests = retry_io(store.manifests, store.root, wait or self.disk_wait)
        for manifest in manifests if remember else ():
            self._remember_writers(manifest, self.last_known.step if self.last_known is not None else 0)
        return manifests

    def _remember_writers(self, manifest: Manifest, step: int = 0) -> None:
        """Remember the incarnations that wrote ``manifest``, and the later of its step and ``step``."""
        writers = dict(self.last_known.incarnations) if self.last_known is not None else {}
        for name, file in manifest.files.items():
            if name != TRAINER:
                role, _, rank = name.rpartition("-")
                member = ProcessId(role, int(rank))
                writers[member] = max(int(file.name.split(".")[-2]), writers.get(member, 0))
        self.last_known = LastCommit(max(manifest.step, step), writers)

    def load(self, step: int) -> Mapping[str, Any]:
        if self._newest is None or self._newest.manifest.step != step:
            raise CheckpointMissing(f"step {step} is not the newest commit")
        state: Mapping[str, Any] = self._newest.read(TRAINER, self.disk_wait)
        return state

    def discard(self, step: int, why: str) -> None:
        self.copying.publish_complete()
        for generation in self._offered:
            if generation.manifest.step == step:
                generation.store.quarantine(generation.manifest.folder, why)
        self._newest, self._offered, self._at = None, [], None
        if self.copying.step == step:
            self.copying.end()

    def restore_request(self, step: int) -> GenerationRequest:
        self._offered = self._find(step)
        sources = tuple(generation.pieces(self._commits) for generation in self._offered)
        return GenerationRequest(step, sources, self.roots)

    def _find(self, step: int) -> list[Generation]:
        """Find a step in all readable places; raises OSError if it can only be in an unreadable one."""
        generations: list[Generation] = []
        for store in (self._commits, self._durable, self.before):
            if store is None:
                continue
            try:
                manifests = self._manifests(store, _NO_WAIT if generations else None, remember=False)
            except OSError as error:
                if not generations:
                    raise
                _LOG.warning("the copies in %s are left out: %s", store.root, error)
                continue
            generations += [Generation(store, manifest) for manifest in manifests if manifest.step == step]
        return generations

    @property
    def adapts(self) -> bool:
        return self.stride.every is None

    def set_deterministic(self, deterministic: bool) -> None:
        self.stride.deterministic = deterministic

    def is_due(self, step: int, last: bool) -> bool:
        return self.stride.is_due(step) or last or step % self.every == 0

    def commit_request(self, step: int, last: bool) -> CommitRequest:
        self.copying.publish_complete()
        due = step > 0 and (last or step % self.every == 0)
        self._trainer_file = None
        self.stride.start_after(step)
        self.stride.time_wait(True)
        self._request = CommitRequest(
            step,
            self.roots,
            due and self.copying.at is None and self.copying.claim(_NO_WAIT, needed=False),
            self.copying.step,
            first_kept=min((manifest.step for manifest in self._recent), default=step - 1),
            first_needed=self._at.step if self._at is not None else step - 1,
        )
        return self._request

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        if self._request is None or self._request.step != step:
            raise ValueError(f"step {step} was not asked for")
        header: Header = {"role": TRAINER, "step": step}
        write = partial(self._commits.write, step, self.roots.epoch, f"{TRAINER}.state", header, dict(state))
        free_space = partial(self._commits.free_space, self._request.first_needed)
        file = retry_io(write, self._commits.root, self.disk_wait, free_space)
        self._trainer_file = replace(file, node=self.roots.owner(self.roots.node))

    def written_request(self, waits: bool) -> WrittenRequest:
        self.stride.time_wait(True)
        return WrittenRequest(waits, self.copying.step)

    def copies(self, answers: Mapping[ProcessId, CommitAnswer], nodes: Nodes) -> list[Transfer] | None:
        files = {member: answer.file for member, answer in answers.items() if answer.file is not None}
        if len(files) < len(answers):
            self.stride.time_wait(False)
            return None
        if not self.spread or self._request is None:
            return []
        folder, request = folder_name(self._request.step, self.roots.epoch), self._request
        pieces = {member: Piece(folder, file) for member, file in files.items()}
        return copies_for_neighbours(self.roots, pieces, nodes, request.first_kept, request.copying)

    def commit(self, step: int, answers: Mapping[ProcessId, CommitAnswer], copied: Mapping[Transfer, str]) -> None:
        request, trainer_file = self._request, self._trainer_file
        if request is None or trainer_file is None or request.step != step:
            raise ValueError(f"the state of step {step} was not saved")
        files = {member.file_name: answer.file for member, answer in answers.items() if answer.file is not None}
        extra = dict(self.copying.extra)
        if self.spread:
            extra[NODES] = nodes_by_process(files, copied, self._at)
        publish = partial(self._commits.commit, step, self.roots.epoch, {**files, TRAINER: trainer_file}, extra)
        free_space = partial(self._commits.free_space, request.first_needed)
        self._at = retry_io(publish, self._commits.root, self.disk_wait, free_space)
        self._recent = [self._at, *self._recent][: self._commits.keep]
        self.stride.note_commit(max((answer.seconds for answer in answers.values()), default=0.0))
        self.committed_bytes += sum(file.nbytes for file in self._at.files.values())
        self._remember_writers(self._at)
        self.copying.note(answers)
        if request.persist:
            self.copying.at = self._at
            self._commits.pinned.add(step)

    def trainers_copy(self, nodes: Nodes) -> list[Transfer]:
        if not self.spread or self._at is None:
            return []
        return self._retry(partial(copy_for_neighbour, self.roots, self._commits, self._at, nodes))

    def transfers_to(self, step: int, members: Collection[ProcessId], nodes: Nodes) -> list[Transfer]:
        generations = self._find(step) if self.spread else []
        manifest = next((each.manifest for each in generations if each.store is self._commits), None)
        return transfers_to(self.roots, manifest, members, nodes) if manifest is not None else []

    def found(self, generations: Mapping[str, Sequence[Held]]) -> None:
        self._retry(partial(adopt_newest, self._commits, generations.values()))
        self._nodes = set(generations)

    def _is_reachable(self, manifest: Manifest) -> bool:
        lost = lost_files(manifest, self._nodes) if self.spread else []
        if lost:
            _LOG.warning("step %d is lost with the nodes that had %s", manifest.step, ", ".join(lost))
        return not lost

    def persist_request(self) -> GenerationRequest | None:
        self.copying.claim(self.disk_wait)
        newest = find_newest(self._commits, self._manifests(self._commits, remember=False), self.disk_wait)
        if newest is None:
            return None
        step = newest.manifest.step
        copied = max((each.step for each in self._manifests(self._durable, remember=False)), default=-1)
        if step <= max(self._persisting.step if self._persisting is not None else -1, copied):
            return None
        self._persisting = newest.manifest
        return GenerationRequest(step, (newest.pieces(self._commits),), self.roots)

    def persisted(self, answers: Mapping[ProcessId, StateFile]) -> None:
        if self._persisting is not None:
            self.copying.publish(self._persisting, {member.file_name: copy for member, copy in answers.items()})
