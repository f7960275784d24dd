# SPDX-License-Identifier: Apache-2.0
"""The processes, losses and commits of a run, read from its files from outside.

The harness asks no process of the job. So it sees the job while the master, the GCS or a node is away, and checks the
master's word instead of trusting it.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, JournalCorrupt
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, CauseKind, Event
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.checkpoint.runs import roots_of
from dlrover.python.rl.runtime.checkpoint.store import read_manifest
from tests.support.commands import is_alive

MEMORY = Path(f"/dev/shm/dlrover-rl-{os.geteuid()}")


@dataclass(frozen=True)
class Up:
    """A process that is up: ``who`` is ``"ROLLOUT[1]"``, ``"ROLLOUT-standby[0]"``, ``"trainer"`` or ``"master"``."""

    who: str
    number: int
    pid: int
    node: str
    at_s: float


@dataclass(frozen=True)
class Loss(Up):
    """A loss that the master has noted; ``pid`` is the process's, or 0 if there is no process."""

    cause: Cause


@dataclass
class Ledger:
    """A journal, folded."""

    submitted: events.Submitted | None = None
    up: dict[str, Up] = field(default_factory=dict)
    starts: list[Up] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def take(self, at_s: float, event: Event) -> None:
        """Take one event in."""
        if isinstance(event, events.Submitted):
            self.submitted = event
        elif isinstance(event, events.Placed):
            self.up = {process: up for process, up in self.up.items() if process == "master"}
        elif isinstance(event, events.MasterStarted):
            earlier = sum(up.who == "master" for up in self.starts)
            self._start(Up("master", earlier + 1, event.pid, event.node, at_s))
        elif isinstance(event, events.MemberStarted | events.StandbyReady | events.TrainerStarted):
            if isinstance(event, events.MemberStarted) and event.standby >= 0:
                self.up.pop(f"{event.role}-standby[{event.standby}]", None)
            self._start(Up(*_name_of(event), event.process.pid, event.process.node, at_s))
        elif isinstance(event, events.NodeLost):
            self.losses.append(Loss("node", 0, 0, event.node, at_s, event.cause))
            self.up = {process: up for process, up in self.up.items() if up.node != event.node or process == "master"}
        elif isinstance(event, events.Failed):
            self.losses.append(Loss("job", event.incarnation, 0, "", at_s, event.cause))
        elif isinstance(event, events.MemberLost | events.StandbyLost | events.TrainerLost):
            self._lost(at_s, event)

    def _start(self, up: Up) -> None:
        self.up[up.who] = up
        self.starts.append(up)

    def _lost(self, at_s: float, event: events.MemberLost | events.StandbyLost | events.TrainerLost) -> None:
        process, number = _name_of(event)
        # A standby that has become a worker is still found by what it was.
        started = next((up for up in reversed(self.starts) if (up.who, up.number) == (process, number)), None)
        pid, node = (started.pid, started.node) if started else (0, "")
        self.losses.append(Loss(process, number, pid, event.node or node, at_s, event.cause))
        if process in self.up and self.up[process].number == number:
            del self.up[process]

    def complete(self) -> bool:
        """Return True if all workers, standbys and the trainer are up."""
        if self.submitted is None:
            return False
        wanted = {"master": 1, "trainer": 1}
        for role, terms in self.submitted.roles.items():
            wanted |= {role: terms.num, f"{role}-standby": terms.standby}
        running = Counter(up.who.partition("[")[0] for up in self.up.values() if is_alive(up.pid))
        return all(running[kind] >= count for kind, count in wanted.items())

    def pids(self) -> set[int]:
        """Every process the run ever had."""
        return {up.pid for up in self.starts if up.pid}

    def real_losses(self) -> list[Loss]:
        """Return the losses without processes that were ended on purpose because others had to restart."""
        return [loss for loss in self.losses if loss.cause.kind is not CauseKind.PREEMPTED]


def _name_of(event: Any) -> tuple[str, int]:
    """The process of an event, and its number."""
    if isinstance(event, events.MemberStarted | events.MemberLost):
        return f"{event.role}[{event.rank}]", event.incarnation
    if isinstance(event, events.StandbyReady | events.StandbyLost):
        return f"{event.role}-standby[{event.number}]", 0
    return "trainer", event.epoch


def ledger_of(events: Iterable[tuple[float, Event]]) -> Ledger:
    """The fold of a journal's events."""
    ledger = Ledger()
    for at_s, event in events:
        ledger.take(at_s, event)
    return ledger


def is_stopped(pid: int) -> bool:
    """Return True if a process exists but a signal has stopped it."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


@dataclass(frozen=True, order=True)
class Generation:
    """A committed generation in the memory of this machine."""

    step: int
    epoch: int
    folder: Path


def generations(root: Path) -> list[Generation]:
    """Return the commits under ``root``, newest step first."""
    folders = [manifest.parent for manifest in root.glob("step-*.e*/manifest.json")]
    named = [(folder.name.removeprefix("step-").partition(".e")[::2], folder) for folder in folders]
    numbered = [(*numbers, folder) for numbers, folder in named if all(map(str.isdigit, numbers))]
    return sorted((Generation(int(step), int(epoch), folder) for step, epoch, folder in numbered), reverse=True)


_LOOK_S = 0.01
_JOURNAL_EVERY = 5


@dataclass(frozen=True)
class Commit:
    """A commit as it was first seen."""

    step: int
    epoch: int
    at_s: float


class Recorder:
    """Reads journal and commits of ``job`` again and again."""

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
        """Read the journal now. While it is written, what is not whole yet is left for the next time."""
        with suppress(JournalCorrupt):
            self.ledger = ledger_of(decode(read_lines(self.journal)))
        return self.ledger

    def _watch(self) -> None:
        turn = 0
        while not self._over.wait(_LOOK_S):
            turn += 1
            size = self.journal.stat().st_size if self.journal.exists() else 0
            if turn % _JOURNAL_EVERY == 0 and size != self._size:
                self._size = size
                self.read()
            if (root := self.root) is not None:
                self._note(generations(root))

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
