# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the rows of the files and the lanes that they make up are read together.
"""The lanes of steps, from the spans in a run's folder: what each process did, and what it waited for.

::

    spans/trainer.jsonl       "step" lines: the attempts of steps; "issue", "wait": what the trainer did in them
    spans/rollout-1.jsonl     "call", "process" lines, found by bisection over time
            '--> a lane: calls; between two calls the causes of the wait, from the trainer's lines

The files may be hostile: lines that do not fit are skipped, and no link is followed."""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from dlrover.python.rl.common.errors import InvalidJob, JournalCorrupt
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.common.private_files import open_below, open_folder
from dlrover.python.rl.common.spans import OLDER, SPANS, SUFFIX
from dlrover.python.rl.control.events import CauseKind, MemberLost
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.master.process.brain import JOURNAL
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.member.heartbeat import CONSTRUCTING

Kind = Literal["call", "wait", "down"]

TRAINER = str(TRAINER_ID)
_CHUNK = 1 << 16
_CLOCK_S = 1.0  # by which the clocks of two nodes may differ
_SHORTEST_S = 1e-6
_REPLACING = "waits for a replacement"


@dataclass(frozen=True)
class Span:
    """A part of a lane, in Unix seconds. ``cause`` of a wait is the process that it waits for, empty if unknown; of an
    interrupted call, its end. ``phases`` are seconds inside a call."""

    begin_s: float
    end_s: float
    kind: Kind
    label: str
    cause: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Lane:
    """The spans of a process in a step, in order and without gaps."""

    process: str
    spans: tuple[Span, ...]


class CallSpan(NamedTuple):
    """A call of a worker; ``n`` is its number in the step, -1 outside of the steps. ``error`` is a class, or empty."""

    step: int
    n: int
    method: str
    begin_s: float
    end_s: float
    phases: dict[str, float]
    error: str


@dataclass(frozen=True)
class Loss:
    """A worker that was replaced: it was gone at ``gone_s``, and its replacement was ready at ``ready_s``. It ran
    ``method`` from ``begin_s`` on, empty if nothing; that call began again at ``end_s``."""

    process: ProcessId
    begin_s: float
    gone_s: float
    ready_s: float
    end_s: float
    method: str = ""
    is_hung: bool = False
    is_reported: bool = False  # in the journal: it was not replaced because of another loss


@dataclass(frozen=True)
class StepLanes:
    """One attempt of a step; a step that a recovery repeated has several. The trainer's lane is the first."""

    step: int
    begin_s: float
    end_s: float
    lanes: tuple[Lane, ...] = ()
    calls: tuple[tuple[ProcessId, CallSpan], ...] = ()
    losses: tuple[Loss, ...] = ()
    is_open: bool = False  # the run has ended in it, or is still in it

    @property
    def replacing_s(self) -> float:
        """The seconds in which the trainer waits for replacements of lost workers."""
        spans = (span for lane in self.lanes[:1] for span in lane.spans)
        return sum(span.end_s - span.begin_s for span in spans if span.label == _REPLACING)


class _Issue(NamedTuple):
    step: int
    n: int
    role: str
    ranks: list[int]
    method: str
    begin_s: float
    sources: list[str]


class _Wait(NamedTuple):
    role: str
    method: str
    begin_s: float
    end_s: float


class _StepRow(NamedTuple):
    step: int
    begin_s: float
    end_s: float


class _StartRow(NamedTuple):
    process: str
    attempt: int
    pid: int
    host: str
    begin_s: float


_Issues: TypeAlias = dict[tuple[int, int], list[_Issue]]  # by the call's id, in order
_Row: TypeAlias = CallSpan | _Issue | _Wait | _StepRow | _StartRow
_ROWS: dict[str, Any] = {"call": CallSpan, "issue": _Issue, "wait": _Wait, "step": _StepRow, "process": _StartRow}


def _parse(line: bytes) -> _Row | None:
    """Read a line; None if it is torn, of another kind, or does not fit."""
    with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        kind, *values = json.loads(line)
        hints = _ROWS[kind].__annotations__.values()
        row: _Row = _ROWS[kind](*(_checked(*each) for each in zip(values, hints, strict=True)))
        return row
    return None


def _checked(value: Any, hint: Any) -> Any:
    """Return a value of a column; raise ValueError if it is of another type, or not finite."""
    if hint is float and isinstance(value, int | float) and isfinite(value):
        return float(value)
    if hint in (int, str) and isinstance(value, hint):
        return value
    if hint == dict[str, float] and isinstance(value, dict | None):
        return {name: _checked(item, float) for name, item in (value or {}).items()}
    if hint in (list[int], list[str]) and isinstance(value, list):
        return [_checked(item, get_args(hint)[0]) for item in value]
    raise ValueError(f"{value!r} is no {hint}")


def _end_of(row: _Row) -> float:
    return row.begin_s if isinstance(row, _Issue | _StartRow) else row.end_s


class _File:
    """One file of spans, whose rows are in the order of their ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size

    def content(self) -> bytes:
        return b"".join(self._chunks(0))

    def first(self) -> _Row | None:
        return next(self._rows(0), None)

    def rows(self, begin_s: float, end_s: float) -> Iterator[_Row]:
        """Yield the rows that end after ``begin_s``, up to the first one that begins after ``end_s``."""
        low, high = 0, self.size
        while high - low > _CHUNK:
            middle = (low + high) // 2
            row = next(self._rows(middle), None)
            low, high = (middle, high) if row is not None and _end_of(row) < begin_s else (low, middle)
        for row in self._rows(low):
            if _end_of(row) >= begin_s:
                yield row
                if row.begin_s > end_s:
                    return

    def _rows(self, offset: int) -> Iterator[_Row]:
        """Yield the rows from the first whole line after ``offset`` on."""
        start = b"" if offset == 0 else None  # the line at the offset has begun before it
        for chunk in self._chunks(offset):
            *lines, end = chunk.split(b"\n")
            if start is None:
                lines = lines[1:]
                start = end if b"\n" in chunk else None
            else:
                lines, start = ([start + lines[0], *lines[1:]], end) if lines else (lines, start + end)
            yield from filter(None, map(_parse, lines))

    def _chunks(self, offset: int) -> Iterator[bytes]:
        while chunk := os.pread(self._descriptor, _CHUNK, offset):
            yield chunk
            offset += len(chunk)


def _open_files(folder: Path, opened: ExitStack) -> dict[str, list[_File]]:
    """Open the files of each process, the older one first."""
    files: dict[str, list[_File]] = {}
    try:
        top = open_folder(folder.resolve())
        opened.callback(os.close, top)
        spans = open_below(top, (SPANS, "."), os.O_DIRECTORY)
        opened.callback(os.close, spans)
        names = sorted(os.listdir(spans), reverse=True)  # trainer.jsonl.1 is before trainer.jsonl
    except OSError:
        return files
    for name in (each for each in names if each.endswith((SUFFIX, OLDER))):
        with suppress(OSError):
            descriptor = open_below(spans, (name,))
            opened.callback(os.close, descriptor)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                files.setdefault(name.removesuffix(OLDER).removesuffix(SUFFIX), []).append(_File(descriptor))
    return files


_MARK = re.compile(rb'\n\["(?:step",(-?\d{1,18}),|process",)[^\n]*')
_ISSUE = re.compile(rb'\n\["issue",(\d{1,18}),')


def _attempts(files: Sequence[_File], first: int, last: int, now_s: float | None) -> list[StepLanes]:
    """Return the attempts of some steps, also those that the trainer's end cut off. This looks through all lines, since
    recoveries repeat steps, but reads only a few."""
    data = b"\n" + b"\n".join(file.content() for file in files)
    attempts: list[StepLanes] = []
    trainer, before = None, None
    position = 0
    for mark in _MARK.finditer(data):
        if mark[1] is not None and not first <= int(mark[1]) <= last:
            before, position = mark, mark.end()
            continue
        row = _parse(mark[0])
        if isinstance(row, _StepRow):
            attempts.append(StepLanes(*row))
            before, position = mark, mark.end()
        elif isinstance(row, _StartRow) and trainer != (row.attempt, row.pid):  # no rotation
            attempts += _cut_off(data[position : mark.start()], before, None)
            trainer, before, position = (row.attempt, row.pid), None, mark.end()
    attempts += _cut_off(data[position:], before, now_s)
    return [each for each in attempts if first <= each.step <= last]


def _cut_off(lines: bytes, before: re.Match[bytes] | None, end_s: float | None) -> list[StepLanes]:
    """Return the attempt in a part of the trainer's lines that has no "step" line, if there is one. ``before`` is the
    line of the step before it by the same process."""
    rows = [row for line in lines.splitlines() if (row := _parse(line)) is not None]
    issues = [row for row in rows if isinstance(row, _Issue)]
    if not issues or issues[-1].step < 1:
        return []
    step = issues[-1].step
    ended = _parse(before[0]) if before is not None else None
    begin_s = ended.end_s if isinstance(ended, _StepRow) else min(row.begin_s for row in issues if row.step == step)
    return [StepLanes(step, begin_s, max([end_s or 0.0, *map(_end_of, rows)]), is_open=True)]


def last_step(folder: Path) -> int:
    """Return the number of the last step that has spans, 0 if none has."""
    with ExitStack() as opened:
        data = b"\n" + b"\n".join(file.content() for file in _open_files(folder, opened).get(TRAINER, ()))
    ended = [int(mark[1]) for mark in _MARK.finditer(data) if mark[1] is not None]
    open_steps = _ISSUE.findall(data[max(data.rfind(b'\n["step",'), 0) :])
    return max([0, *ended, *map(int, open_steps)])


def read_steps(folder: Path, first: int, last: int, now_s: float | None = None) -> list[StepLanes]:
    """Return the attempts of the steps from ``first`` to ``last`` in the order of time, none if the run has no spans.
    The last one may be unfinished: then it is cut at ``now_s``, by default at the trainer's last line."""
    with ExitStack() as opened:
        files = _open_files(folder, opened)
        trainer = files.pop(TRAINER, [])
        attempts = _attempts(trainer, first, last, now_s)
        if not attempts:
            return []
        span = min(each.begin_s for each in attempts) - _CLOCK_S, max(each.end_s for each in attempts) + _CLOCK_S
        rows, lost = [row for file in trainer for row in file.rows(*span)], _reported_losses(folder)
        issues = _issues_by_worker(rows)
        workers = [worker for each in files.values() if (worker := _worker(each, span, issues, lost)) is not None]
    workers.sort(key=lambda worker: worker.process)
    return [_Lanes(each, rows, workers).make() for each in attempts]


@dataclass(frozen=True)
class _Worker:
    """A worker's calls and losses by the trainer's clock, in order, and what the trainer issued to it."""

    process: ProcessId
    home: tuple[str, int]  # host and pid of its last process
    calls: tuple[CallSpan, ...]
    losses: tuple[Loss, ...]
    issues: _Issues

    def issue_of(self, call: CallSpan) -> _Issue | None:
        """Return the last issue of ``call`` before it began."""
        issues = self.issues.get((call.step, call.n), ())
        return next((each for each in reversed(issues) if each.begin_s <= call.begin_s), None)


def _issues_by_worker(rows: Iterable[_Row]) -> dict[tuple[str, int], _Issues]:
    issues: dict[tuple[str, int], _Issues] = {}
    for row in (row for row in rows if isinstance(row, _Issue)):
        for rank in row.ranks:
            issues.setdefault((row.role, rank), {}).setdefault((row.step, row.n), []).append(row)
    return issues


def _waiting_issue(issues: _Issues, calls: Iterable[CallSpan], end_s: float) -> _Issue | None:
    """Return the first call that was issued before ``end_s`` in the newest step, and after all ``calls`` that had begun
    by then. The calls of earlier steps have ended, even if a killed process has lost their lines."""
    sent = [each for same in issues.values() for each in same if each.begin_s < end_s]
    step = max(sent, key=_end_of).step if sent else -1
    last = max(((call.step, call.n) for call in calls if call.n >= 0 and call.begin_s < end_s), default=(-1, -1))
    return min((each for each in sent if each.step == step and (step, each.n) > last), key=_end_of, default=None)


def _worker(
    files: Sequence[_File],
    span: tuple[float, float],
    issued: Mapping[tuple[str, int], _Issues],
    lost: Sequence[tuple[float, str, bool]],
) -> _Worker | None:
    """Return a worker in a span of time; None for a file of another process."""
    titles = [file.first() for file in files]
    newest = titles[-1]
    try:
        process = ProcessId.parse(newest.process if isinstance(newest, _StartRow) else "")
    except ValueError:
        return None
    issues = issued.get((process.role, process.rank), {})
    rows = [row for file in files for row in file.rows(*span) if row not in titles]
    early = (
        issues[call.step, call.n][0].begin_s - call.begin_s for call in _calls(rows) if (call.step, call.n) in issues
    )
    shift_s = max([0.0, *(seconds for seconds in early if seconds < _CLOCK_S)])  # its clock is behind the trainer's
    calls = [call._replace(begin_s=call.begin_s + shift_s, end_s=call.end_s + shift_s) for call in _calls(rows)]
    calls.sort(key=lambda call: call.begin_s)
    starts = [row for row in rows if isinstance(row, _StartRow)]
    losses = [_loss(process, row.begin_s + shift_s, calls, issues, lost) for row in starts]
    last = starts[-1] if starts else newest
    home = (last.host, last.pid) if isinstance(last, _StartRow) else ("", 0)
    return _Worker(process, home, tuple(calls), tuple(losses), issues)


def _calls(rows: Iterable[_Row]) -> Iterator[CallSpan]:
    return (row for row in rows if isinstance(row, CallSpan))


def _loss(
    process: ProcessId,
    started_s: float,
    calls: Sequence[CallSpan],
    issues: _Issues,
    lost: Sequence[tuple[float, str, bool]],
) -> Loss:
    """Return the loss after which another process of the worker started."""
    ended_s = max((call.end_s for call in calls if call.end_s <= started_s), default=0.0)
    issue = _waiting_issue(issues, calls, started_s)
    begin_s = started_s if issue is None else max(ended_s, issue.begin_s)
    reports = [each for each in lost if begin_s - _CLOCK_S < each[0] <= started_s and each[1] == str(process)]
    gone_s, is_hung = (min(max(reports[0][0], begin_s), started_s), reports[0][2]) if reports else (begin_s, False)
    ready_s = next(
        (call.end_s for call in calls if call.method == CONSTRUCTING and call.begin_s >= started_s), started_s
    )
    if issue is None:
        return Loss(process, gone_s, gone_s, ready_s, ready_s, is_hung=is_hung, is_reported=bool(reports))
    again = (call.begin_s for call in calls if (call.step, call.n) == (issue.step, issue.n) and call.begin_s >= ready_s)
    return Loss(process, begin_s, gone_s, ready_s, next(again, ready_s), issue.method, is_hung, bool(reports))


def _reported_losses(folder: Path) -> list[tuple[float, str, bool]]:
    """Return the time and process of each loss in the run's journal, and True for a hang."""
    with suppress(OSError, InvalidJob, JournalCorrupt):
        events = decode(read_lines(folder / JOURNAL))
        lost = [(at_s, event) for at_s, event in events if isinstance(event, MemberLost)]
        return [(at_s, str(ProcessId(each.role, each.rank)), each.cause.kind is CauseKind.HUNG) for at_s, each in lost]
    return []


class _Lanes:
    """Makes the lanes of one attempt of a step."""

    def __init__(self, attempt: StepLanes, trainer: Sequence[_Row], workers: Sequence[_Worker]) -> None:
        self._attempt, self._workers = attempt, workers
        self._sharing: dict[tuple[str, int], list[_Worker]] = {}  # by process
        self._calls: dict[str, list[tuple[_Worker, CallSpan]]] = {}
        for worker in workers:
            self._sharing.setdefault(worker.home, []).append(worker)
            for call in worker.calls:
                if call.end_s > attempt.begin_s and call.begin_s < attempt.end_s:
                    self._calls.setdefault(_name(worker.process.role, call.method), []).append((worker, call))
        waits = (row for row in trainer if isinstance(row, _Wait))
        self._trainer = tuple(self._trainer_spans(sorted(waits, key=lambda wait: wait.begin_s)))

    def make(self) -> StepLanes:
        lanes = [Lane(TRAINER, self._trainer)]
        lanes += [Lane(str(worker.process), tuple(self._worker_spans(worker))) for worker in self._workers]
        calls = [(each.process, call) for same in self._calls.values() for each, call in same]
        losses = [
            loss
            for worker in self._workers
            for loss in worker.losses
            if loss.end_s > self._attempt.begin_s and loss.begin_s < self._attempt.end_s
        ]
        return replace(self._attempt, lanes=tuple(lanes), calls=tuple(calls), losses=tuple(losses))

    def _trainer_spans(self, waits: Iterable[_Wait]) -> Iterator[Span]:
        """Yield the trainer's waits, and its own code in between, in which it may wait for a replacement."""
        at_s, end_s = self._attempt.begin_s, self._attempt.end_s
        for wait in (each for each in waits if each.begin_s < end_s):
            if wait.end_s - max(at_s, wait.begin_s) > _SHORTEST_S:
                yield from self._own_code(at_s, wait.begin_s)
                target, begin_s = _name(wait.role, wait.method), max(at_s, wait.begin_s)
                at_s = min(wait.end_s, end_s)
                yield Span(begin_s, at_s, "wait", f"waits for {target}", self._last_of(target, begin_s, at_s))
        yield from self._own_code(at_s, end_s)

    def _own_code(self, begin_s: float, end_s: float) -> Iterator[Span]:
        losses = sorted(
            (loss.gone_s, loss.ready_s, str(loss.process)) for each in self._workers for loss in each.losses
        )
        for gone_s, ready_s, process in losses:
            if gone_s < end_s and ready_s > begin_s:
                yield from _span(begin_s, gone_s, "call", TRAINER)
                yield from _span(max(begin_s, gone_s), min(ready_s, end_s), "wait", _REPLACING, process)
                begin_s = ready_s
        yield from _span(begin_s, end_s, "call", TRAINER)

    def _last_of(self, target: str, begin_s: float, end_s: float) -> str:
        """Return the process that was the last to run ``target`` in a span of time, also in a call that a loss cut."""
        ends = [(call.begin_s, call.end_s, worker.process) for worker, call in self._calls.get(target, ())]
        for loss in (loss for worker in self._workers for loss in worker.losses):
            if _name(loss.process.role, loss.method) == target:
                ends.append((loss.begin_s, loss.gone_s, loss.process))
        last = [(each[1], str(each[2])) for each in ends if each[0] < end_s and each[1] > begin_s]
        return max(last, default=(0.0, ""))[1]

    def _worker_spans(self, worker: _Worker) -> Iterator[Span]:
        at_s, end_s = self._attempt.begin_s, self._attempt.end_s
        rows: list[CallSpan | Loss] = sorted([*worker.calls, *worker.losses], key=lambda row: row.begin_s)
        for row in (each for each in rows if each.begin_s < end_s):
            ended_s = row.ready_s if isinstance(row, Loss) else row.end_s
            if ended_s <= at_s:
                continue
            begin_s = max(at_s, row.begin_s)
            if isinstance(row, Loss):
                yield from self._waits(worker, at_s, begin_s, None)
                yield from _span(begin_s, min(row.gone_s, end_s), "call", row.method, "hung" if row.is_hung else "lost")
                yield from _span(max(begin_s, row.gone_s), min(row.ready_s, end_s), "down", "is being replaced")
            else:
                yield from self._waits(worker, at_s, begin_s, worker.issue_of(row))
                label = "starts" if row.method == CONSTRUCTING else row.method.lstrip("!")
                yield Span(begin_s, min(row.end_s, end_s), "call", label, row.error, row.phases)
            at_s = ended_s
        running = _waiting_issue(worker.issues, worker.calls, end_s) if self._attempt.is_open else None
        if running is None:
            yield from self._waits(worker, at_s, end_s, None)
            return
        began_s = max(at_s, running.begin_s)
        yield from self._waits(worker, at_s, began_s, None)
        yield from _span(began_s, end_s, "call", running.method, "has not ended")

    def _waits(self, worker: _Worker, begin_s: float, end_s: float, issue: _Issue | None) -> Iterator[Span]:
        """Yield the waits between two calls, of which the second one was issued as ``issue``."""
        issued_s = end_s if issue is None else min(max(issue.begin_s, begin_s), end_s)
        for each in self._trainer:
            label, cause = (each.label, each.cause) if each.kind == "wait" else ("waits for the trainer", TRAINER)
            yield from _span(max(each.begin_s, begin_s), min(each.end_s, issued_s), "wait", label, cause)
        for target in issue.sources if issue is not None else ():
            ends = [min(call.end_s, end_s) for _, call in self._calls.get(target, ()) if call.begin_s < end_s]
            needed_s = max(ends, default=issued_s)
            cause = self._last_of(target, issued_s, needed_s)
            yield from _span(issued_s, needed_s, "wait", f"waits for {target}", cause)
            issued_s = max(issued_s, needed_s)
        sharing = self._sharing[worker.home]  # their calls run one at a time
        calls = ((call.begin_s, call.end_s, each.process, call.method) for each in sharing for call in each.calls)
        for call_begin_s, call_end_s, process, method in sorted(calls) if len(sharing) > 1 else ():
            if call_end_s > issued_s and call_begin_s < end_s:
                target = _name(process.role, method)
                yield from _span(issued_s, min(call_end_s, end_s), "wait", f"behind {target}", str(process))
                issued_s = min(max(issued_s, call_end_s), end_s)
        yield from _span(issued_s, end_s, "wait", "is being called", "")


def _name(role: str, method: str) -> str:
    return f"{role}.{method.lstrip('!')}"


def _span(begin_s: float, end_s: float, kind: Kind, label: str, cause: str = "") -> Iterator[Span]:
    if end_s > begin_s:
        yield Span(begin_s, end_s, kind, label, cause)
