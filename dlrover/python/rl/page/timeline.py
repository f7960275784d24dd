# SPDX-License-Identifier: Apache-2.0
"""The past of a run by its journals: the use of its hours, its recoveries with their costs, and its processes."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import JournalCorrupt
from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, Event
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState, processes
from dlrover.python.rl.master.process.brain import JOURNAL
from dlrover.python.rl.master.process.metrics import LOSSES, TimeAccount, TimeUse
from dlrover.python.rl.master.process.status import recoveries
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines

REPAIRS = {TimeUse.RECOVERY: "recovery", TimeUse.RESTART: "restart"}


@dataclass(frozen=True)
class Use:
    """A stretch of a run's time; ``end_s`` 0: it has not ended."""

    use: str
    cause: str
    begin_s: float
    end_s: float = 0.0


@dataclass(frozen=True)
class Mark:
    """A recovery, restart, resize or resume. ``step`` 0: unknown; ``cost_s`` None: it is under way, or costs no time of
    its own."""

    kind: str
    at_s: float
    process: str = ""
    cause: str = ""
    message: str = ""
    step: int = 0
    cost_s: float | None = None


@dataclass
class Timeline:
    """What the journals of a run tell, up to their last events."""

    state: JobState = JobState()
    uses: list[Use] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    entries: list[tuple[float, str, str]] = field(default_factory=list)  # time, process, and a line for people
    goodput: float | None = None

    @property
    def began_s(self) -> float:
        return self.uses[0].begin_s if self.uses else 0.0

    def spent_s(self) -> dict[tuple[str, str], float]:
        """Return the seconds by use and cause; the last use counts up to now unless the run has ended."""
        spent: dict[tuple[str, str], float] = {}
        for each in self.uses:
            end_s = each.end_s or time.time()
            spent[each.use, each.cause] = spent.get((each.use, each.cause), 0.0) + end_s - each.begin_s
        return spent


def read_timeline(folder: Path) -> Timeline:
    """Read the journals of the run in ``folder``, those of earlier starts first; a damaged one counts as missing."""
    earlier = sorted(folder.glob("journal.[0-9]*.jsonl"), key=lambda path: int(path.suffixes[0][1:]))
    timeline = Timeline()
    for number, path in enumerate([*earlier, folder / JOURNAL]):
        with suppress(JournalCorrupt, OSError):
            recorded = decode(read_lines(path)) if path.exists() else []
            if recorded and number:
                timeline.marks.append(Mark("resume", recorded[0][0], message="the run was resumed"))
            _add(timeline, recorded)
    return timeline


def _add(timeline: Timeline, recorded: list[tuple[float, Event]]) -> None:
    """Add the events of one start of the run."""
    state, account = JobState(), TimeAccount()
    for at_s, event in recorded:
        before, (state, _) = state, step(state, event, at_s)
        account.take(at_s, before, state, event)
        _note_use(timeline, account, at_s)
        timeline.entries += [(at_s, process, line) for process, line in _lines_of(before, state, event)]
        _mark(timeline, account, at_s, before, state, event)
    total = sum(account.seconds.values())
    timeline.state, timeline.goodput = state, account.goodput if total else None


def _note_use(timeline: Timeline, account: TimeAccount, at_s: float) -> None:
    uses, current = timeline.uses, (account.use.value, account.cause)
    if uses and not uses[-1].end_s and ((uses[-1].use, uses[-1].cause) != current or account.over):
        uses[-1] = replace(uses[-1], end_s=at_s)
    if not account.over and (not uses or uses[-1].end_s):
        uses.append(Use(*current, at_s))


def _mark(
    timeline: Timeline, account: TimeAccount, at_s: float, before: JobState, after: JobState, event: Event
) -> None:
    marks = timeline.marks
    if isinstance(event, events.Resized):
        message = f"{event.role} gets {event.num} workers"
        marks.append(Mark("resize", at_s, event.role, message=message, step=after.committed))
    open_marks = [number for number, mark in enumerate(marks) if mark.kind in REPAIRS.values() and mark.cost_s is None]
    if isinstance(event, LOSSES) and after is not before:
        cause = event.cause
        kind = REPAIRS.get(account.use, "")
        if kind:
            marks.append(Mark(kind, at_s, cause.who, cause.kind.value, cause.message))
    elif account.use not in REPAIRS and open_marks:
        # Losses during one repair end with it: each has the time since its own loss.
        committed = event.step if isinstance(event, events.Progressed) else after.committed
        for number in open_marks:
            marks[number] = replace(marks[number], cost_s=at_s - marks[number].at_s, step=committed)


def _lines_of(before: JobState, after: JobState, event: Event) -> Iterator[tuple[str, str]]:
    """Yield the process and a line for people of an event."""
    cause: Cause | None = getattr(event, "cause", None)
    for line in recoveries(before, after, event):
        yield (cause.who if cause else line.partition(" ")[0]), line
    if isinstance(event, events.Resized):
        yield event.role, f"{event.role} gets {event.num} workers"
    elif isinstance(event, events.Placed):
        yield "job", "its resources are reserved"
    elif isinstance(event, events.StepsOpened):
        yield "trainer", "the trainer has entered its steps"
    if after.phase is not before.phase:
        yield "job", f"the job is {after.phase.value}" + (f": {after.reason}" if after.reason else "")


def members_of(state: JobState, live: dict[str, Any]) -> list[dict[str, Any]]:
    """List the workers and the trainer with their places and, of a live job, heartbeats and current calls."""
    rows, up = [], processes(state)
    ids = [process_id for process_id in state.members] + [each for each in up if each not in state.members]
    for process_id in ids:
        process, member = up.get(process_id), state.members.get(process_id)
        phase = "ended" if state.phase.terminal else "up" if process else member.phase.value if member else "starting"
        age_s, call, call_s = live.get(str(process_id), (None, None, None))
        rows.append(
            {
                "process": str(process_id),
                "role": process_id.role,
                "rank": process_id.rank,
                "node": process.host if process else "",
                "pid": process.pid if process else 0,
                "devices": process.devices if process else "",
                "state": {"waiting": "lost"}.get(phase, phase),
                "heartbeat_age_s": age_s,
                "call": call,
                "call_s": call_s,
            }
        )
    return rows


def with_steps(marks: list[Mark], step_at: Callable[[float], int]) -> list[dict[str, Any]]:
    """Return marks as plain values, each with its step; ``step_at`` returns the step that ran at a Unix time."""
    return [{**vars(mark), "step": mark.step or step_at(mark.at_s)} for mark in marks]
