"""Where a trainer's commits go: into the nodes' memory, and every few of them in the background to the job's directory.

::

    COMMIT --> members write their files --> trainer.state --> manifest: committed in memory
                  '- every few steps, in threads: copies to the job's directory
    a later COMMIT --> all copies there? --> the trainer's file --> manifest: there for good
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoints import CheckpointStore, newest_of_any_run
from dlrover.python.rl.runtime.manifest import Manifest
from dlrover.python.rl.runtime.member_state import CommitAnswer, CommitRequest, PersistRequest, RestoreRequest, Roots
from dlrover.python.rl.runtime.state_file import StateFile, copy_file, write_state
from dlrover.python.rl.trainer.recovery import MemberId

_LOG = get_logger(__name__)

_TRAINER = "trainer"
_FOLDER = "checkpoints"


def checkpoints_of(job: JobSpec, run: str, epoch: int, node: str = "") -> "StoreCheckpoints":
    """The commits of a job's run, for its trainer of ``epoch`` on ``node``.

    Raises:
        StaleEpoch: a later trainer has taken over.
    """
    folder = job.job_dir.absolute() / _FOLDER
    roots = Roots(job.name, run, epoch, durable=folder / run, node=node)
    resumed = newest_of_any_run(folder) if job.checkpoint.resume == "latest" else None
    before = None
    if resumed is not None and resumed[0] != run:
        before = CheckpointStore(folder / resumed[0], resumed[0], durable=True)
        _LOG.info("going on from step %d of run %s", resumed[1].step, resumed[0])
    return StoreCheckpoints(roots, job.checkpoint.every, job.checkpoint.keep, before)


@dataclass(frozen=True)
class _Found:
    """A generation, and the store that has it."""

    store: CheckpointStore
    manifest: Manifest


@dataclass
class StoreCheckpoints:
    """The commits of one run; implements :class:`~dlrover.python.rl.trainer.recovery.Checkpoints`.

    Args:
        roots: where they are.
        every: steps between copies to the job's directory.
        keep: copies to keep there.
        before: the generations of an earlier run that this one goes on from, None for a fresh start.

    Raises:
        StaleEpoch: a later trainer has taken over.
    """

    roots: Roots
    every: int = 10
    keep: int = 2
    before: CheckpointStore | None = None
    _latest: Manifest | None = None
    _copying: Manifest | None = None
    _copy_asked: bool = False
    _found: _Found | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._memory = self.roots.memory_store(self.roots.node)
        self._durable = self.roots.durable_store(self.keep)
        for store in (self._memory, self._durable):
            store.claim(self.roots.epoch)

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest(self) -> int | None:
        self._found = self._newest_in(self._memory, self._durable) or self._newest_in(self.before)
        if self._found is not None:
            return self._found.manifest.step
        damaged = [folder.name for store in (self._memory, self._durable) for folder in store.root.glob("*.bad*")]
        if damaged or self._latest is not None:
            raise CheckpointMissing(
                f"no commit of run {self.roots.run} is left: {', '.join(damaged) or 'all are gone'}"
            )
        return None

    def _newest_in(self, *stores: CheckpointStore | None) -> _Found | None:
        """The generation of the latest step; the first store's where several have it, since it is quicker."""
        best: _Found | None = None
        for store in stores:
            for manifest in store.manifests() if store is not None else ():
                if best is not None and manifest.step <= best.manifest.step:
                    break
                if store is not None and store.valid(manifest):
                    best = _Found(store, manifest)
                    break
        return best

    def load(self, step: int) -> Mapping[str, Any]:
        if self._found is None or self._found.manifest.step != step:
            raise CheckpointMissing(f"step {step} is not the newest commit")
        state: Mapping[str, Any] = self._found.store.read(self._found.manifest, _TRAINER)
        return state

    def discard(self, step: int, why: str) -> None:
        self._found = None
        for store in (self._memory, self._durable, self.before):
            if store is not None:
                store.quarantine(step, why)
        if self._copying is not None and self._copying.step == step:
            self._end_copy()

    def restore_request(self, step: int) -> RestoreRequest:
        sources = [
            (manifest.folder if store is self._memory else str(store.root / manifest.folder), manifest.files)
            for store in (self._memory, self._durable, self.before)
            if store is not None
            for manifest in store.manifests()
            if manifest.step == step
        ]
        return RestoreRequest(step, tuple(sources), self.roots)

    # -- writing ------------------------------------------------------------------------------------------------------

    def commit_request(self, step: int, last: bool) -> CommitRequest:
        due = step > 0 and (last or step % self.every == 0)
        self._copy_asked = due and self._copying is None
        return CommitRequest(step, self.roots, self._copy_asked, self._copying.step if self._copying else None)

    def commit(self, step: int, answers: Mapping[MemberId, CommitAnswer], state: Mapping[str, Any]) -> None:
        folder = self._memory.folder(step, self.roots.epoch)
        header: dict[str, str | int] = {"role": _TRAINER, "step": step}
        own = write_state(folder / f"{_TRAINER}.state", header, dict(state), durable=False)
        files = {_key(member): answer.file for member, answer in answers.items()}
        files[_TRAINER] = replace(own, node=self.roots.node)
        if self._copy_asked:
            self._memory.pinned.add(step)
        self._latest = self._memory.commit(step, self.roots.epoch, files)
        self._see_copies(answers)
        if self._copy_asked:
            self._copying = self._latest

    def _see_copies(self, answers: Mapping[MemberId, CommitAnswer]) -> None:
        """Publish the copy that was being made once all members have theirs; give it up when one will never have."""
        if self._copying is None:
            return
        copies = {member: answer.copied for member, answer in answers.items() if answer.copied is not None}
        if len(copies) == len(answers):
            self._publish(self._copying, copies)
        elif all(answer.copied is not None or answer.running for answer in answers.values()):
            return
        self._end_copy()

    def _end_copy(self) -> None:
        if self._copying is not None:
            self._memory.pinned.discard(self._copying.step)
        self._copying = None

    def persist_request(self) -> PersistRequest | None:
        found = self._newest_in(self._memory)
        if found is None or any(manifest.step >= found.manifest.step for manifest in self._durable.manifests()):
            return None
        self._latest = found.manifest
        return PersistRequest(found.manifest.step, found.manifest.folder, found.manifest.files, self.roots)

    def persisted(self, answers: Mapping[MemberId, StateFile]) -> None:
        if self._latest is not None:
            self._publish(self._latest, answers)

    def _publish(self, manifest: Manifest, copies: Mapping[MemberId, StateFile]) -> None:
        """Make a copied generation one of the job's directory."""
        try:
            target = self._durable.folder(manifest.step, self.roots.epoch)
            own = copy_file(self._memory.root / manifest.folder, target, manifest.files[_TRAINER], durable=True)
            files = {_key(member): copy for member, copy in copies.items()}
            self._durable.commit(manifest.step, self.roots.epoch, {**files, _TRAINER: own})
        except (CheckpointCorrupt, CheckpointMissing, OSError) as error:
            _LOG.warning("step %d was not copied to %s: %s", manifest.step, self._durable.root, error)


def _key(member: MemberId) -> str:
    return f"{member[0]}-{member[1]}"
