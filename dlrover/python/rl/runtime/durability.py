"""Where a trainer's commits go: into the node's memory, or where all nodes see them; every few of them are copied, to
stay.

::

    COMMIT --> members write their files --> trainer.state --> manifest: committed
                  '- every few steps, in threads: copies among the job's checkpoints
    a later COMMIT --> all copies there? --> the trainer's file --> manifest: there for good
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoints import CheckpointStore, newest_of_any_run
from dlrover.python.rl.runtime.manifest import Manifest
from dlrover.python.rl.runtime.member_state import (
    CommitAnswer,
    CommitRequest,
    PersistRequest,
    RestoreRequest,
    Roots,
    incarnation_of,
)
from dlrover.python.rl.runtime.room import PATIENT, Patience, with_room
from dlrover.python.rl.runtime.state_file import Header, StateFile, check_size, copy_file
from dlrover.python.rl.trainer.recovery import LastCommit, MemberId

_LOG = get_logger(__name__)

_TRAINER = "trainer"
_FOLDER, _COMMITS = "checkpoints", "commits"


def roots_of(job: JobSpec, run: str, epoch: int, node: str = "") -> Roots:
    """Where the commits of a job's run are, for its trainer of ``epoch`` on ``node``.

    They are in the memory of the node where the whole job is on one node, so that nothing is left to go on when that is
    lost, or where the job asks for it.
    """
    commit_to, folder = job.checkpoint.commit_to, job.job_dir.absolute()
    if commit_to == "auto":
        one_node = job.trainer.node_number == 1 and job.scheduling_strategy != "SIMPLE"
        commit_to = "memory" if one_node else "job_dir"
    shared = commit_to == "job_dir"
    commits = folder / _COMMITS / run if shared else None
    return Roots(job.name, run, epoch, folder / _FOLDER / run, commits, node, shared)


def forget_commits(job_dir: Path, run: str | None = None) -> None:
    """Remove the commits of a run, or of all runs, from the job's directory; the copies among its checkpoints stay."""
    folder = job_dir.absolute() / _COMMITS
    runs = [run] if run is not None else [path.name for path in folder.iterdir()] if folder.is_dir() else []
    for name in runs:
        CheckpointStore(folder / name, name, durable=True).remove()


def checkpoints_of(job: JobSpec, run: str, epoch: int, node: str = "") -> "StoreCheckpoints":
    """The commits of a job's run, for its trainer of ``epoch`` on ``node``.

    Raises:
        StaleEpoch: a later trainer has taken over.
    """
    roots = roots_of(job, run, epoch, node)
    folder = roots.durable.parent
    resumed = newest_of_any_run(folder) if job.checkpoint.resume == "latest" else None
    before = None
    if resumed is not None and resumed[0] != run:
        before = CheckpointStore(folder / resumed[0], resumed[0], durable=True)
        _LOG.info("going on from step %d of run %s", resumed[1].step, resumed[0])
    return StoreCheckpoints(roots, job.checkpoint.every, job.checkpoint.keep, before)


def resumed_layout(job: JobSpec) -> tuple[str, dict[str, int]] | None:
    """The copy that ``job`` would go on from, and how many members of each role are in it; None for a fresh start."""
    folder = job.job_dir.absolute() / _FOLDER
    found = newest_of_any_run(folder) if job.checkpoint.resume == "latest" else None
    if found is None:
        return None
    run, manifest = found
    members = Counter(name.rpartition("-")[0] for name in manifest.files if name != _TRAINER)
    return str(folder / run / manifest.folder), dict(members)


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
        patience: how long to wait for room.

    Raises:
        StaleEpoch: a later trainer has taken over.
    """

    roots: Roots
    every: int = 10
    keep: int = 2
    before: CheckpointStore | None = None
    patience: Patience = PATIENT
    _latest: Manifest | None = None
    _last: LastCommit | None = None
    _copying: Manifest | None = None
    _copy_asked: bool = False
    _found: _Found | None = field(default=None, repr=False)
    _offered: list[_Found] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._commits = self.roots.commit_store(self.roots.node)
        self._durable = self.roots.durable_store(self.keep)
        for store in (self._commits, self._durable):
            with_room(partial(store.claim, self.roots.epoch), lambda pinned: False, self.patience)

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest(self) -> int | None:
        self._publish_whole()
        for store in (self._commits, self._durable):
            for manifest in store.manifests():
                self._take_note(manifest, self._last.step if self._last is not None else 0)
        self._found = self._newest_in(self._commits, self._durable) or self._newest_in(self.before)
        self._offered = [self._found] if self._found is not None else []
        if self._found is not None:
            if self._found.store is self._durable:
                _LOG.warning(
                    "no commit is left of a later step than %d: going on from its copy in %s",
                    self._found.manifest.step,
                    self._durable.root,
                )
            return self._found.manifest.step
        damaged = [folder.name for store in (self._commits, self._durable) for folder in store.root.glob("*.bad*")]
        if damaged or self._last is not None:
            raise CheckpointMissing(
                f"no commit of run {self.roots.run} is left: {', '.join(damaged) or 'all are gone'}"
            )
        return None

    def last_known(self) -> LastCommit | None:
        return self._last

    def _take_note(self, manifest: Manifest, step: int = 0) -> None:
        """Remember who has written ``manifest``, which is, or is not, of a later step than ``step``."""
        wrote = dict(self._last.incarnations) if self._last is not None else {}
        for name, file in manifest.files.items():
            if name != _TRAINER:
                role, _, rank = name.rpartition("-")
                wrote[role, int(rank)] = max(incarnation_of(file), wrote.get((role, int(rank)), 0))
        self._last = LastCommit(max(manifest.step, step), wrote)

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
        self._publish_whole()
        for found in self._offered:
            if found.manifest.step == step:
                found.store.quarantine(found.manifest, why)
        self._found, self._offered = None, []
        if self._copying is not None and self._copying.step == step:
            self._end_copy()

    def restore_request(self, step: int) -> RestoreRequest:
        self._offered = [
            _Found(store, manifest)
            for store in (self._commits, self._durable, self.before)
            if store is not None
            for manifest in store.manifests()
            if manifest.step == step
        ]
        sources = ((self._folder_of(found), found.manifest.files) for found in self._offered)
        return RestoreRequest(step, tuple(sources), self.roots)

    def _folder_of(self, found: _Found) -> str:
        folder = found.manifest.folder
        return folder if found.store is self._commits else str(found.store.root / folder)

    # -- writing ------------------------------------------------------------------------------------------------------

    def commit_request(self, step: int, last: bool) -> CommitRequest:
        self._publish_whole()
        due = step > 0 and (last or step % self.every == 0)
        self._copy_asked = due and self._copying is None
        return CommitRequest(step, self.roots, self._copy_asked, self._copying.step if self._copying else None)

    def commit(self, step: int, answers: Mapping[MemberId, CommitAnswer], state: Mapping[str, Any]) -> None:
        if self._copy_asked:
            self._commits.pinned.add(step)
        files = {_key(member): answer.file for member, answer in answers.items()}
        write = partial(self._write, step, files, dict(state))
        self._latest = with_room(write, partial(self._commits.make_room, step - 1), self.patience)
        self._take_note(self._latest)
        self._see_copies(answers)
        if self._copy_asked:
            self._copying = self._latest

    def _write(self, step: int, files: Mapping[str, StateFile], state: Mapping[str, Any]) -> Manifest:
        """The trainer's file, and the manifest that makes a generation of it and of the members' files."""
        header: Header = {"role": _TRAINER, "step": step}
        own = self._commits.write(step, self.roots.epoch, f"{_TRAINER}.state", header, state)
        own = replace(own, node=self.roots.owner(self.roots.node))
        return self._commits.commit(step, self.roots.epoch, {**files, _TRAINER: own})

    def _see_copies(self, answers: Mapping[MemberId, CommitAnswer]) -> None:
        """Publish the copy that was being made once all members have theirs; give it up when one will never have."""
        if self._copying is None:
            return
        copies = {_key(member): answer.copied for member, answer in answers.items() if answer.copied is not None}
        if len(copies) == len(answers):
            self._publish(self._copying, copies)
        elif all(answer.copied is not None or answer.running for answer in answers.values()):
            return
        self._end_copy()

    def _publish_whole(self) -> None:
        """Publish the copy that is being made if all of it is there, whoever may have died since: a file of it gets its
        name when every byte has been compared."""
        if self._copying is None:
            return
        copies = {name: replace(file, node="") for name, file in self._copying.files.items() if name != _TRAINER}
        try:
            for copy in copies.values():
                check_size(self._durable.root / self._copying.folder, copy)
        except (CheckpointCorrupt, CheckpointMissing, OSError):
            return
        self._publish(self._copying, copies)
        self._end_copy()

    def _end_copy(self) -> None:
        if self._copying is not None:
            self._commits.pinned.discard(self._copying.step)
        self._copying = None

    def persist_request(self) -> PersistRequest | None:
        found = self._newest_in(self._commits)
        if found is None or any(manifest.step >= found.manifest.step for manifest in self._durable.manifests()):
            return None
        self._latest = found.manifest
        return PersistRequest(found.manifest.step, found.manifest.folder, found.manifest.files, self.roots)

    def persisted(self, answers: Mapping[MemberId, StateFile]) -> None:
        if self._latest is not None:
            self._publish(self._latest, {_key(member): copy for member, copy in answers.items()})

    def _publish(self, manifest: Manifest, copies: Mapping[str, StateFile]) -> None:
        """Make a copied generation one of the job's directory."""
        try:
            target = self._durable.folder(manifest.step, self.roots.epoch)
            own = copy_file(self._commits.root / manifest.folder, target, manifest.files[_TRAINER], durable=True)
            self._durable.commit(manifest.step, self.roots.epoch, {**copies, _TRAINER: own})
        except (CheckpointCorrupt, CheckpointMissing, OSError) as error:
            _LOG.warning("step %d was not copied to %s: %s", manifest.step, self._durable.root, error)


def _key(member: MemberId) -> str:
    return f"{member[0]}-{member[1]}"
