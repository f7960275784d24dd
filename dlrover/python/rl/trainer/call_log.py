# SPDX-License-Identifier: Apache-2.0
"""The calls that a trainer may have to issue again: their states, their log, and how they are sent.

::

    ISSUED ---a value---> ANSWERED          an answer is lost with its worker: ISSUED again
       '---an error--> FAILED ---the trainer receives it--> RAISED

A call that has ended is replayed on a new worker to restore its state; the trainer keeps the first answer.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import CallSkipped, InvocationError, ResultLost, WorkloadDied
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.trainer.port import RAW_CALL, STRAGGLER_LOG_INTERVAL_S, Call, Outcome, Port, Ref
from dlrover.python.rl.trainer.shard import Rows

_LOG = get_logger(__name__)

_INLINE_BYTES = 1 << 14
_MAX_CALLS_BEFORE_STEPS = 256
_MAX_RETRIES = 20

LOST_CALL_ERRORS = (WorkloadDied, ResultLost, CallSkipped)
"""Errors that are not the user's: the call has not run, or its answer is lost."""

GRACE_S = 5.0
"""Time to wait for the other calls when one has failed: in collectives its error may be the echo of another rank's
death, which is about to show."""


class CallState(Enum):
    ISSUED = auto()
    ANSWERED = auto()
    FAILED = auto()
    RAISED = auto()


class LoggedCall:
    """A call that was submitted, or a stored value (``role`` is ``""``). Only its methods change it.

    Arguments of ``call`` are values, or refs of other logged calls; it is None once it is no longer needed.
    ``previous`` is the worker's call before this one; ``replay`` the latest repetition of a call that has ended."""

    __slots__ = ("_retries", "_was_raised", "call", "error", "previous", "rank", "ref", "replay", "role", "state")

    def __init__(self, role: str, rank: int, call: Call | None, previous: "LoggedCall | None" = None) -> None:
        self.role, self.rank, self.call, self.previous = role, rank, call, previous
        self.state = CallState.ISSUED
        self.ref: Any = None  # of the inner port
        self.error: InvocationError | None = None
        self.replay: Ref | None = None
        self._retries = 0
        self._was_raised = False

    @property
    def member(self) -> ProcessId:
        return ProcessId(self.role, self.rank)

    @property
    def is_running(self) -> bool:
        return self.state is CallState.ISSUED or self.replay is not None

    @property
    def latest_run(self) -> Ref:
        run: Ref = self.replay or self.ref
        return run

    @property
    def can_retry(self) -> bool:
        return self.call is not None and self._retries < _MAX_RETRIES

    def is_current(self, run: Ref) -> bool:
        """Return False if the call was issued again since ``run``."""
        return run is self.ref or run is self.replay

    def predecessor_id(self) -> tuple[int, int] | None:
        before = self.previous
        while before is not None and before.error is not None:
            before = before.previous  # it may have failed before it reached the worker
        return None if before is None or before.call is None else before.call.call_id

    def issue(self, run: Ref) -> None:
        """Expect the answer from ``run``, which is under way."""
        self.ref, self.state, self.error = run, CallState.ISSUED, None

    def end(self, run: Ref, error: InvocationError | None) -> bool:
        """Record the end of ``run``; return False if it is a replay that fails although the first run succeeded."""
        if run is not self.ref:
            self.replay = None
            return error is None or self.error is not None
        self.error = error
        if error is None:
            self.state = CallState.ANSWERED
        else:
            self.state = CallState.RAISED if self._was_raised else CallState.FAILED
        return True

    def mark_raised(self) -> None:
        self._was_raised = True
        if self.state is CallState.FAILED:
            self.state = CallState.RAISED

    def repeat(self, run: Ref) -> None:
        """Record ``run``, the call to the new worker. An answer that the trainer has or can get stays."""
        self._retries = 0
        if self.state in (CallState.ANSWERED, CallState.RAISED):
            self.replay = run
        else:
            self.issue(run)

    def retry(self, lost: Ref, run: Ref) -> None:
        """Record ``run``, which takes the place of ``lost``, the answer or the replay."""
        self._retries += 1
        if lost is self.replay:
            self.replay = run
        else:
            self.issue(run)

    def forget(self) -> None:
        """Drop the call, which will not be issued again; its answer stays."""
        self.call = self.previous = None


@dataclass(frozen=True)
class CallProbe:
    """The token of a ref whose value is not fetched."""

    call: LoggedCall


@dataclass(repr=False)
class CallLog:
    """The calls of ``init`` and up to the first step (``setup``), for the whole run, and of the open ``step``.

    A ``fit`` without steps would make it grow without bound: after 256 calls it drops all outside ``init``
    (``overflowed``)."""

    setup: list[LoggedCall] = field(default_factory=list)
    step: list[LoggedCall] = field(default_factory=list)
    overflowed: bool = False
    _init_count: int | None = None
    _open: list[LoggedCall] | None = None
    _last: dict[tuple[str, int], LoggedCall] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def open(self, calls: list[LoggedCall] | None) -> None:
        """Add calls to ``calls``, ``setup`` or ``step``, from here on; None: to neither."""
        self._open, self._last = calls, {}

    def end_init(self) -> None:
        """Count further calls as made between ``init`` and the first step."""
        self._init_count = len(self.setup)

    def link(self, role: str, rank: int, call: Call) -> LoggedCall:
        """Create the record of a call; :meth:`add` it once it is under way."""
        return LoggedCall(role, rank, call, self._last.get((role, rank)))

    def add(self, call: LoggedCall) -> None:
        assert self._open is not None, "the log is open"
        self._last[call.role, call.rank] = call
        self._open.append(call)
        count = self._init_count
        if self._open is self.setup and count is not None and len(self.setup) > count + _MAX_CALLS_BEFORE_STEPS:
            del self.setup[count:]
            self.overflowed = True
            self.open(None)

    def drop_late(self, role: str, ranks: Collection[int], method: str, together: bool) -> None:
        """Drop the running calls of ``method`` to these ranks, and to the other ranks if they run ``together``: they
        will not be issued again, in this step or on a new worker."""
        late = {
            call.call_id
            for logged in self.running()
            if (call := logged.call) is not None and call.method == method
            if logged.role == role and logged.rank in ranks
        }
        dropped = {
            logged
            for logged in self.all_calls()
            if logged.call is not None and logged.call.call_id in late and logged.role == role
            if logged.rank in ranks or together
        }
        for listed in (self.setup, self.step):
            listed[:] = [call for call in listed if call not in dropped]
        for logged in dropped:
            logged.forget()

    def close_step(self) -> None:
        for call in self.step:
            call.forget()
        self.step.clear()
        self._last = {}

    def all_calls(self) -> list[LoggedCall]:
        return [*self.setup, *self.step]

    def running(self) -> list[LoggedCall]:
        return [call for call in self.all_calls() if call.is_running]

    def sort(self, calls: Iterable[LoggedCall]) -> list[LoggedCall]:
        """Return ``calls`` in the order of the log, calls that are not in it last."""
        remaining = set(calls)
        logged = [call for call in self.all_calls() if call in remaining]
        return [*logged, *remaining.difference(logged)]


def preserve_arguments(call: Call, port: Port) -> Call:
    """Return ``call`` with ``keep`` set, and with arguments that cannot change: the caller may overwrite its arrays
    before the call is issued again."""

    def preserve(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.nbytes <= _INLINE_BYTES:
            return value.copy()
        return port.put(value) if isinstance(value, np.ndarray | Batch | Ragged) else value

    if not call.args and not call.kwargs:
        return call._replace(keep=True)
    args = tuple(map(preserve, call.args))
    return call._replace(args=args, kwargs={name: preserve(value) for name, value in call.kwargs.items()}, keep=True)


def sources_of(call: Call | None) -> list[LoggedCall]:
    sources: list[LoggedCall] = []
    for value in (*call.args, *call.kwargs.values()) if call is not None else ():
        items = value.parts if isinstance(value, Rows) else value if isinstance(value, list) else [value]
        sources += [item.token for item in items if isinstance(item, Ref) and isinstance(item.token, LoggedCall)]
    return sources


def resolve_refs(value: Any) -> Any:
    if isinstance(value, Ref):
        return value.token.ref if isinstance(value.token, LoggedCall) else value
    if isinstance(value, Rows):
        return replace(value, parts=tuple(map(resolve_refs, value.parts)))
    if isinstance(value, list) and any(isinstance(item, Ref) for item in value):
        return [resolve_refs(item) for item in value]
    return value


def mark_raised(calls: Sequence[LoggedCall], outcomes: Sequence[Outcome]) -> None:
    """Mark the failures of ``calls`` as received by the trainer: one stands for all ranks, and also for the calls whose
    results they take if it was passed on from there."""
    failed = [call for call, outcome in zip(calls, outcomes, strict=True) if outcome.error is not None]
    passed_on = any(
        (call.call is None or (error.role, error.rank, error.method) != (call.role, call.rank, call.call.method))
        or any(source.error is not None for source in sources_of(call.call))
        for call, outcome in zip(calls, outcomes, strict=True)
        if (error := outcome.error) is not None
    )
    marked, waiting = set[LoggedCall](), list(calls if failed else ())
    while waiting:
        call = waiting.pop()
        if call not in marked:
            marked.add(call)
            call.mark_raised()
            waiting += sources_of(call.call) if passed_on else []


def log_late(calls: Sequence[LoggedCall], outcomes: Sequence[Outcome]) -> None:
    late = [call for call, outcome in zip(calls, outcomes, strict=True) if outcome.late]
    names = ", ".join(f"{call.member}.{call.call.method}" for call in late[:8] if call.call is not None)
    if late:
        _LOG.warning("the commit still waits for %d calls: %s", len(late), names)


@dataclass
class CallSender:
    """Sends calls through the inner port, until ``closed`` says that another trainer or trainer object took over."""

    inner: Port
    epoch: int
    settled: int = 0
    closed: BaseException | None = None

    def send(self, logged: LoggedCall, sized: bool) -> Ref:
        if self.closed is not None:
            raise self.closed
        call = logged.call
        assert call is not None, "a call is forgotten only when nothing can need it"
        resolved = Call(
            call.call_id,
            call.method,
            tuple(map(resolve_refs, call.args)),
            {name: resolve_refs(value) for name, value in call.kwargs.items()},
            sized,
            self.epoch,
            self.settled,
            call.keep,
            logged.predecessor_id(),
        )
        return self.inner.submit(logged.role, logged.rank, resolved)

    def ask(self, member: ProcessId, verb: str, *args: Any) -> Ref:
        """Send a request that is not a call of a step."""
        call = Call(RAW_CALL, verb, args, {}, epoch=self.epoch, settled=self.settled)
        return self.inner.submit(member.role, member.rank, call)

    def finish(self, runs: Sequence[Ref], patient: bool = False) -> list[Outcome]:
        """Wait until all runs have ended or a worker has died; unless ``patient``, end :data:`GRACE_S` after the first
        error if nothing else ends."""
        outcomes = [Outcome(late=True)] * len(runs)
        while late := [index for index, outcome in enumerate(outcomes) if outcome.late]:
            failed = not patient and any(outcome.error is not None for outcome in outcomes)
            news = self.inner.wait([runs[index] for index in late], GRACE_S if failed else STRAGGLER_LOG_INTERVAL_S)
            for index, outcome in zip(late, news, strict=True):
                outcomes[index] = outcome
            if failed and all(outcome.late for outcome in news):
                break
            if any(isinstance(outcome.error, WorkloadDied) for outcome in news):
                break
        return outcomes
