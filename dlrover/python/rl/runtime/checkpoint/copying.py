# SPDX-License-Identifier: Apache-2.0
"""The copies of a run's commits in its job's directory, of one commit at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dlrover.python.rl.common.disk_space import DiskWait, is_transient, retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.runtime.checkpoint.member_state import CommitAnswer
from dlrover.python.rl.runtime.checkpoint.run_files import RunFiles
from dlrover.python.rl.runtime.checkpoint.runs import TRAINER, prune_earlier_runs
from dlrover.python.rl.runtime.checkpoint.storage.manifest import Manifest
from dlrover.python.rl.runtime.checkpoint.storage.object_store import ObjectStore
from dlrover.python.rl.runtime.checkpoint.storage.state_file import StateFile
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore

_LOG = get_logger(__name__)


@dataclass
class Copying:
    """Members copy their states; once every one has, this publishes the copies as a generation of ``durable``."""

    commits: CheckpointStore
    durable: CheckpointStore | ObjectStore
    epoch: int
    files: RunFiles | None
    extra: Mapping[str, Any]
    at: Manifest | None = None
    """The commit whose copy is under way."""

    _tried: int = -1  # the last step that was to be copied at the end of the run
    _has_claimed: bool = False

    def claim(self, wait: DiskWait, needed: bool = True) -> bool:
        """Claim ``durable`` for this epoch, before which no copy may begin. Returns False if it cannot be reached;
        raises StaleEpoch, and, where it is ``needed``, the OSError."""
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

    def begin(self, manifest: Manifest) -> None:
        self.at = manifest
        self.commits.pinned.add(manifest.step)

    def note(self, answers: Mapping[ProcessId, CommitAnswer]) -> None:
        """Publish the copy under way once every member has finished its part; abandon it if one has failed."""
        if self.at is None:
            return
        found = {member.file_name: answer.copy for member, answer in answers.items()}
        copies = {name: each.file for name, each in found.items() if each.file is not None}
        if len(copies) == len(found):
            self._publish(self.at, copies)
        elif all(each.file is not None or each.running for each in found.values()):
            return
        self.end()

    def publish_complete(self) -> None:
        """Publish the copy under way if all its files exist, even if members have died since: a file gets its name only
        after its checksum was verified."""
        if self.at is None:
            return
        copies = {name: replace(file, node="") for name, file in self.at.files.items() if name != TRAINER}
        try:
            for copy in copies.values():
                self.durable.check(self.at.folder, copy)
        except (CheckpointCorrupt, CheckpointMissing, OSError):
            return
        self._publish(self.at, copies)
        self.end()

    def end(self) -> None:
        if self.at is not None:
            self.commits.pinned.discard(self.at.step)
        self.at = None

    def is_left(self, newest: Manifest) -> bool:
        """Return True if the ``newest`` commit is to be copied before the run ends; it is tried once."""
        copied = max((manifest.step for manifest in self.durable.manifests()), default=-1)
        if newest.step <= max(self._tried, copied):
            return False
        self._tried = newest.step
        return True

    def publish(self, manifest: Manifest, answers: Mapping[ProcessId, StateFile]) -> None:
        self._publish(manifest, {member.file_name: copy for member, copy in answers.items()})

    def _publish(self, manifest: Manifest, copies: Mapping[str, StateFile]) -> None:
        try:
            source = self.commits.root / manifest.folder
            trainers = self.durable.put(source, manifest.step, self.epoch, manifest.files[TRAINER])
            if self.files is not None:
                self.files.upload()
            self.durable.commit(manifest.step, self.epoch, {**copies, TRAINER: trainers}, self.extra)
            prune_earlier_runs(self.durable)
        except (CheckpointCorrupt, CheckpointMissing, OSError) as error:
            _LOG.warning("step %d was not copied to %s: %s", manifest.step, self.durable.root, error)
