# SPDX-License-Identifier: Apache-2.0
"""The history of a run, read from its journals: the use of its time, its recoveries and their costs, its processes."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JournalCorrupt
from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, Event
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState, processes
from dlrover.python.rl.master.client.explain import when
from dlrover.python.rl.master.process.brain import JOURNAL
from dlrover.python.rl.master.process.metrics import LOSSES, TimeAccount, TimeUse
from dlrover.python.rl.master.process.status import recoveries
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.run.folder import in_use, newest_record
from dlrover.python.rl.runtime.run.names import METRICS

Activities: TypeAlias = Mapping[str, tuple[float | None, str | None, float | None]]
"""Maps a process to the age of its heartbeat, its current call, and the seconds of that call so far."""

REPAIRS = (TimeUse.RECOVERY, TimeUse.RESTART)


@dataclass(frozen=True)
class Use:
    """A stretch of a run's time; ``end_s`` 0: it has not ended."""

    use: str
    cause: str
    begin_s: float
    end_s: float = 0.0


@dataclass(frozen=True)
class Mark:
    """A recovery, restart, resize or resume. ``step`` 0: unknown; ``cost_s`` None: it is under way, or a resume."""

    kind: str
    at_s: float
    process: str = ""
    cause: str = ""
    message: str = ""
    step: int = 0
    cost_s: float | None = None


@dataclass
class Timeline:
    """The history of a run up to the last event in its journals."""

    state: JobState = JobState()
    uses: list[Use] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    entries: list[tuple[float, str, str]] = field(default_factory=list)  # time, process, and a line for people
    error: str = ""  # of a journal that cannot be read

    @property
    def began_s(self) -> float:
        return self.uses[0].begin_s if self.uses else 0.0

    def spent_s(self, until_s: float) -> dict[tuple[str, str], float]:
        """Return the seconds by use and cause; a use that has not ended counts up to the Unix time ``until_s``."""
        spent: dict[tuple[str, str], float] = {}
        for each in self.uses:
            seconds = max((each.end_s or until_s) - each.begin_s, 0.0)
            spent[each.use, each.cause] = spent.get((each.use, each.cause), 0.0) + seconds
        return spent

    def goodput(self, until_s: float) -> float | None:
        """Return the useful share of the run's time; None before any time has passed."""
        spent = self.spent_s(until_s)
        whole_s = sum(spent.values())
        return spent.get((TimeUse.USEFUL.value, ""), 0.0) / whole_s if whole_s else None


def last_sign_s(folder: Path) -> float:
    """Return the time of the last sign of life: now for a run that is in use, else when its owner's record, its journal
    or its metrics were last written."""
    if in_use(folder):
        return time.time()
    written = (newest_record(folder), folder / JOURNAL, folder / METRICS)
    return max((path.stat().st_mtime for path in written if path is not None and path.exists()), default=0.0)


def read_timeline(folder: Path) -> Timeline:
    """Read the journals of the run in ``folder``, in the order of the starts. A damaged one is left out, and named
    by ``error``."""
    earlier = sorted(folder.glob("journal.[0-9]*.jsonl"), key=lambda path: int(path.suffixes[0][1:]))
    timeline = Timeline()
    for number, path in enumerate([*earlier, folder / JOURNAL]):
        try:
            recorded = decode(read_lines(path)) if path.exists() else []
            if recorded and number:
                timeline.marks.append(Mark("resume", recorded[0][0], message="the run was resumed"))
            _add(timeline, recorded)
        except (JournalCorrupt, OSError) as error:
            timeline.state, timeline.error = JobState(), str(error)
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
    timeline.state = state


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
    if isinstance(event, events.Resized) and after is not before:
        marks.append(Mark("resize", at_s, event.role, message=f"{event.role} gets {event.num} workers"))
    elif isinstance(event, LOSSES) and after is not before:
        cause = event.cause
        if account.use in REPAIRS:
            marks.append(Mark(account.use.value, at_s, cause.who, cause.kind.value, cause.message))
    elif account.use not in (*REPAIRS, TimeUse.RESIZE):
        # The next progress ends all recoveries under way; the cost of each is the time since its own event.
        committed = event.step if isinstance(event, events.Progressed) else after.committed
        for number, mark in enumerate(marks):
            if mark.kind != "resume" and mark.cost_s is None:
                marks[number] = replace(mark, cost_s=at_s - mark.at_s, step=committed)


def _lines_of(before: JobState, after: JobState, event: Event) -> Iterator[tuple[str, str]]:
    """Yield lines for people about an event, each with the process that it concerns."""
    cause: Cause | None = getattr(event, "cause", None)
    for line in recoveries(before, after, event):
        yield (cause.who if cause else line.partition(" ")[0]), line
    if isinstance(event, events.Resized) and after is not before:
        yield event.role, f"{event.role} gets {event.num} workers"
    elif isinstance(event, events.Placed):
        yield "job", "its resources are reserved"
    elif isinstance(event, events.StepsOpened):
        yield "trainer", "the trainer has entered its steps"
    if after.phase is not before.phase:
        yield "job", f"the job is {after.phase.value}" + (f": {after.reason}" if after.reason else "")


def use_lines(folder: Path) -> list[str]:
    """Return the use of a run's time and the cost of each recovery, as text. Raises InvalidJob without a journal."""
    timeline = read_timeline(folder)
    if not timeline.uses:
        raise InvalidJob([ConfigError(str(folder), "has no journal: runs in one process or with a launcher have none")])
    until_s = last_sign_s(folder)
    spent = timeline.spent_s(until_s)
    whole_s = max(sum(spent.values()), 1e-9)
    lines = [f"{whole_s / 3600:.3g} h, of which {timeline.goodput(until_s) or 0.0:.1%} made progress"]
    for (use, cause), seconds in sorted(spent.items(), key=lambda item: -item[1]):
        name = f"{use} ({cause})" if cause else use
        lines.append(f"  {name:<32} {seconds:10.1f} s  {seconds / whole_s:6.1%}")
    marks = [mark for mark in timeline.marks if mark.kind != "resume"]
    lines += ["Recoveries, restarts and resizes:"] if marks else []
    for mark in marks:
        cost = "under way" if mark.cost_s is None else f"{mark.cost_s:.1f} s"
        where = f"step {mark.step}, " if mark.step else ""
        lines.append(f"  {when(mark.at_s)} {mark.process}: {mark.cause or 'resize'}: {mark.message} ({where}{cost})")
    return lines


def members_of(state: JobState, live: Activities, is_live: bool) -> list[dict[str, Any]]:
    """List the workers and the trainer with their places and, of a live job, heartbeats and current calls."""
    rows, up = [], processes(state)
    ids = [process_id for process_id in state.members] + [each for each in up if each not in state.members]
    for process_id in ids:
        process, member = up.get(process_id), state.members.get(process_id)
        phase = "ended" if not is_live else "up" if process else member.phase.value if member else "starting"
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
