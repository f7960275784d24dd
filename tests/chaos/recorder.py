# SPDX-License-Identifier: Apache-2.0
"""A thread that watches a run from outside, for as long as it lasts."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.checkpoint.runs import roots_of
from dlrover.python.rl.runtime.checkpoint.store import read_manifest
from tests.chaos.ledger import Generation, Ledger, generations, read_ledger

_LOOK_S = 0.01
_JOURNAL_EVERY = 5


@dataclass(frozen=True)
class Commit:
    """A commit as it was first seen."""

    step: int
    epoch: int
    at_s: float


class Recorder:
    """Reads journal and commits again and again.

    Args:
        job: whose files to watch.
    """

    def __init__(self, job: JobSpec) -> None:
        self.journal = job.job_dir / "journal.jsonl"
        self.ledger = Ledger()
        self.commits: list[Commit] = []
        self._job, self._size = job, -1
        self._seen: set[tuple[int, int, int]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-recorder", daemon=True)

    def __enter__(self) -> "Recorder":
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        self._thread.join(timeout=10.0)
        self.read()

    @property
    def root(self) -> Path | None:
        """The folder of the run's commits; None before it is known."""
        submitted = self.ledger.submitted
        if submitted is None:
            return None
        # Looked at only: who watches neither makes the folder nor holds it.
        return roots_of(self._job, submitted.run, epoch=0).commits or memory_path(self._job.name, submitted.run)

    @property
    def step(self) -> int:
        """The newest step that was ever committed."""
        return max((commit.step for commit in self.commits), default=0)

    def newest(self) -> Generation | None:
        """The newest commit that is there now."""
        root = self.root
        return next(iter(generations(root)), None) if root else None

    def read(self) -> Ledger:
        """Read the journal now."""
        fresh = read_ledger(self.journal)
        if fresh.submitted is not None:
            self.ledger = fresh
        return self.ledger

    def _watch(self) -> None:
        turn = 0
        while not self._over.wait(_LOOK_S):
            turn += 1
            if turn % _JOURNAL_EVERY == 0 and self._has_grown():
                self.read()
            if (root := self.root) is not None:
                self._note(generations(root))

    def _has_grown(self) -> bool:
        try:
            size = self.journal.stat().st_size
        except OSError:
            return False
        grown, self._size = size != self._size, size
        return grown

    def _note(self, generations: list[Generation]) -> None:
        now_s, run = time.time(), self.ledger.submitted.run if self.ledger.submitted is not None else ""
        for generation in reversed(generations):
            try:
                serial = read_manifest(generation.folder, run).serial
            except (OSError, CheckpointCorrupt, CheckpointMissing):
                continue  # superfluous by now, or damaged by a fault
            key = (generation.step, generation.epoch, serial)  # it stays when a commit gets the states instead of calls
            if key not in self._seen:
                self._seen.add(key)
                self.commits.append(Commit(generation.step, generation.epoch, now_s))
