# SPDX-License-Identifier: Apache-2.0
"""The processes, losses and commits of a run, read from its files from outside.

The harness asks no process of the job. So it sees the job while the master, the GCS or a node is away, and checks the
master's word instead of trusting it.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dlrover.python.rl.common.errors import JournalCorrupt
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    Event,
    Failed,
    MasterStarted,
    MemberLost,
    MemberStarted,
    NodeLost,
    Placed,
    StandbyLost,
    StandbyReady,
    Submitted,
    TrainerLost,
    TrainerStarted,
)
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
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
class Loss:
    """A loss that the master has noted; ``pid`` is the process's, or 0 if there is no process."""

    who: str
    number: int
    pid: int
    node: str
    at_s: float
    cause: Cause


@dataclass
class Ledger:
    """A journal, folded."""

    submitted: Submitted | None = None
    up: dict[str, Up] = field(default_factory=dict)
    starts: list[Up] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def take(self, at_s: float, event: Event) -> None:
        """Take one event in."""
        if isinstance(event, Submitted):
            self.submitted = event
        elif isinstance(event, Placed):
            self.up = {process: up for process, up in self.up.items() if process == "master"}
        elif isinstance(event, MasterStarted):
            earlier = sum(up.who == "master" for up in self.starts)
            self._start(Up("master", earlier + 1, event.pid, event.node, at_s))
        elif isinstance(event, MemberStarted | StandbyReady | TrainerStarted):
            self._started(at_s, event)
        elif isinstance(event, MemberLost | StandbyLost | TrainerLost | NodeLost | Failed):
            self._lost(at_s, event)

    def _started(self, at_s: float, event: MemberStarted | StandbyReady | TrainerStarted) -> None:
        if isinstance(event, MemberStarted):
            process, number = f"{event.role}[{event.rank}]", event.incarnation
            if event.standby >= 0:
                self.up.pop(f"{event.role}-standby[{event.standby}]", None)
        elif isinstance(event, StandbyReady):
            process, number = f"{event.role}-standby[{event.number}]", 0
        else:
            process, number = "trainer", event.epoch
        self._start(Up(process, number, event.process.pid, event.process.node, at_s))

    def _start(self, up: Up) -> None:
        self.up[up.who] = up
        self.starts.append(up)

    def _lost(self, at_s: float, event: MemberLost | StandbyLost | TrainerLost | NodeLost | Failed) -> None:
        if isinstance(event, NodeLost):
            self.losses.append(Loss("node", 0, 0, event.node, at_s, event.cause))
            self.up = {process: up for process, up in self.up.items() if up.node != event.node or process == "master"}
            return
        if isinstance(event, Failed):
            self.losses.append(Loss("job", event.incarnation, 0, "", at_s, event.cause))
            return
        if isinstance(event, MemberLost):
            process, number = f"{event.role}[{event.rank}]", event.incarnation
        elif isinstance(event, StandbyLost):
            process, number = f"{event.role}-standby[{event.number}]", 0
        else:
            process, number = "trainer", event.epoch
        known_up = self._known(process, number)
        pid, node = (known_up.pid, known_up.node) if known_up else (0, "")
        self.losses.append(Loss(process, number, pid, event.node or node, at_s, event.cause))
        if process in self.up and self.up[process].number == number:
            del self.up[process]

    def _known(self, process: str, number: int) -> Up | None:
        """The process; a standby that has become a worker is still found by what it was."""
        return next((up for up in reversed(self.starts) if (up.who, up.number) == (process, number)), None)

    # -- what it tells ------------------------------------------------------------------------------------------------

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


def read_ledger(journal: Path) -> Ledger:
    """The journal as it stands. It may be read while it is written: what is not whole yet is left for the next time."""
    try:
        lines = read_lines(journal)
    except JournalCorrupt:
        return Ledger()
    return ledger_of(decode(lines))


def ledger_of(events: Iterable[tuple[float, Event]]) -> Ledger:
    """The fold of a journal's events."""
    ledger = Ledger()
    for at_s, event in events:
        ledger.take(at_s, event)
    return ledger


def is_stopped(pid: int) -> bool:
    """Return True if a process exists but a signal has stopped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


# -- commits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Generation:
    """A committed generation in the memory of this machine."""

    step: int
    epoch: int
    folder: Path


def generations(root: Path) -> list[Generation]:
    """Return the commits under ``root``, newest step first."""
    return sorted(_generations(root), reverse=True)


def _generations(root: Path) -> Iterator[Generation]:
    for manifest in root.glob("step-*.e*/manifest.json"):
        step, _, epoch = manifest.parent.name.removeprefix("step-").partition(".e")
        if step.isdigit() and epoch.isdigit():
            yield Generation(int(step), int(epoch), manifest.parent)
