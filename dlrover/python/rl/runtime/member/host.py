# SPDX-License-Identifier: Apache-2.0
"""The host of one workload: it checks every call, and keeps results until the commit.

::

    call --> from a replaced trainer, or to another incarnation: refused
         --> its id was answered before: the same answer again
         --> the call before it has not run: skipped
         --> the workload's method; the result or error stays under the id until the step has ended

Beside the workload's methods a host answers ``COMMIT``, ``WRITTEN``, ``RESTORE``, ``PERSIST``, ``FORGET`` and ``WHERE``
(``trainer/port.py``). Calls come one at a time; :meth:`MemberHost.current_call` may be called from any thread.
"""

import asyncio
import inspect
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import cloudpickle

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.log import cut_middle, valid_text
from dlrover.python.rl.common.progress import last_progress_s, noted_progress
from dlrover.python.rl.common.spans import SpanFile, record_phases
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.liveness import Work
from dlrover.python.rl.runtime.checkpoint.member_state import (
    CommitAnswer,
    CommitRequest,
    GenerationRequest,
    MemberState,
)
from dlrover.python.rl.runtime.checkpoint.neighbours import held, read, store
from dlrover.python.rl.runtime.member.arguments import CallHeader, CallId, Stored
from dlrover.python.rl.runtime.member.heartbeat import CONSTRUCTING
from dlrover.python.rl.runtime.member.loading import load_workload
from dlrover.python.rl.trainer import port
from dlrover.python.rl.trainer.workload import MemberContext, guards_state, is_stateful, member_context

Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]

_MOST_TEXT, _MOST_TRACEBACK = 2000, 20_000  # characters of an error that travel
_NEVER: CallId = (-1, -1)


_Answer: TypeAlias = tuple[str, Stored | errors.InvocationError | None]  # the method, and its result or error


class MemberHost:
    """Hosts one workload; ``node`` is the id of the node for files that only it has, ``""`` in one process. ``spans``
    get its calls."""

    def __init__(
        self,
        incarnation: int = 1,
        node: str = "",
        now_s: Callable[[], float] = time.monotonic,
        spans: SpanFile | None = None,
    ) -> None:
        self.workload: Any = None  # before start()
        self.executed: Counter[str] = Counter()  # runs of each method, without repeated answers
        self._incarnation, self._now_s, self._spans = incarnation, now_s, spans
        self._context = MemberContext()
        self._state = MemberState(self._context.role, self._context.rank, incarnation, node)
        self._epoch = 0
        self._answers: dict[CallId, _Answer] = {}
        self._latest = _NEVER
        self._standing = port.Standing()
        self._now: tuple[str, CallId, float] | None = None
        self._progress, self._progressed_s = 0, 0.0
        self.work = Work()
        self._loop: asyncio.Runner | None = None

    def start(self, workload_class: Any, context: MemberContext, master_handle: Any, config: Any) -> None:
        self._context = context
        self._state = MemberState(context.role, context.rank, self._incarnation, self._state.node, context.world_size)
        with member_context(context), self._in(CONSTRUCTING, _NEVER):
            self.workload = workload_class(master_handle, config)
        self.workload.wait_until_written = self._state.wait_until_written

    def load(self, job: JobSpec, context: MemberContext) -> type[Any]:
        """Import and construct the workload of the context's role, without a master; returns its class."""
        workload: type[Any] = load_workload(job, context.role)
        self.start(workload, context, None, job.config)
        return workload

    @property
    def is_rebuilt(self) -> bool:
        """True once a trainer has called it: a new object in an old process gets its state in such calls."""
        return self._epoch > 0

    def current_call(self) -> tuple[str, CallId, float] | None:
        """Return the current call's method, id ((-1, -1) outside steps) and seconds since its last progress."""
        now, progress = self._now, noted_progress()
        if progress != self._progress:
            self._progress, self._progressed_s = progress, self._now_s()
        return None if now is None else (now[0], now[1], self._now_s() - max(now[2], self._progressed_s))

    def close(self) -> None:
        self._state.wait_until_written()
        try:
            if self.workload is not None:
                self.workload.close()
        finally:
            self.end()

    def end(self) -> None:
        """Drop the workload without closing it, as a killed process does."""
        self.workload = None
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        if self._spans is not None:
            self._spans.flush()

    def invoke(self, header: CallHeader, arguments: Callable[[], Arguments]) -> Any:
        """Run a role group's call, or repeat its answer; ``arguments`` is called only if the method runs.

        Raises:
            StaleCall: from a replaced trainer, or to a later incarnation.
            WorkloadDied: to an earlier incarnation.
            ReplayDiverged: the id belongs to another method, or to the past.
            CallSkipped: a call that it needs has not run.
            ResultLost: an argument's value is lost; the call has not run.
            InvocationError: the method raised; ``original`` is the exception if it can be pickled.
        """
        self._admit(header)
        if header.method.startswith("!"):
            with self._in(header.method, header.call_id):
                return self._serve(header.method, arguments()[0])
        if header.keep:
            if (answer := self._answers.get(header.call_id)) is not None:
                return self._repeat(header, answer)
            if header.call_id < self._latest:
                reason = f"call {header.call_id} is too late: call {self._latest} has already run"
                raise self._refusal(errors.ReplayDiverged, header, reason)
            if header.after is not None and header.after not in self._answers:
                raise self._refusal(errors.CallSkipped, header, f"call {header.after} has not run")
        args, kwargs = arguments()
        return self._execute(header, args, kwargs)

    def run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a raw handle's call, which belongs to no step, keeps no answer, and raises errors unchanged."""
        self._standing = replace(self._standing, since=None, at=None)
        return self._call(method, _NEVER, args, kwargs)

    def failure(self, method: str, error: BaseException) -> errors.InvocationError:
        """Return the handled ``error`` for the trainer, without a traceback if the method was not entered."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_entered = not frames or frames[-1].f_code is not MemberHost._call.__code__
        text = valid_text(errors.user_traceback(error)) if is_entered else ""
        failure = errors.InvocationError(
            valid_text(cut_middle(f"{type(error).__name__}: {error}", _MOST_TEXT)),
            role=self._context.role,
            rank=self._context.rank,
            method=method,
            node=socket.gethostname(),
            remote_traceback=cut_middle(text, _MOST_TRACEBACK, "\n[...]\n"),
        )
        try:
            cloudpickle.loads(cloudpickle.dumps(error))  # noqa: TID251 -- pickled by this process
            "".join(traceback.format_exception(error)).encode()  # without such a text Ray ends the process
        except Exception:  # noqa: BLE001 -- a user's exception may fail to pickle in any way; its text suffices
            return failure
        failure.original = failure.__cause__ = error
        return failure

    def _admit(self, header: CallHeader) -> None:
        if header.epoch and header.epoch < self._epoch:
            raise self._refusal(errors.StaleCall, header, f"attempt {header.epoch} of the trainer has been replaced")
        if 0 < header.incarnation < self._incarnation:
            raise port.gone_incarnation(header.incarnation, self._context.role, self._context.rank, header.method)
        if header.incarnation > self._incarnation:
            reason = f"meant for attempt {header.incarnation} of the worker, this is {self._incarnation}"
            raise self._refusal(errors.StaleCall, header, reason)
        if header.epoch > self._epoch and not is_stateful(type(self.workload)):
            # Another trainer repeats the step: calls that failed last run again.
            while self._answers and isinstance(self._answers[last := max(self._answers)][1], Exception):
                del self._answers[last]
            self._latest = max(self._answers, default=_NEVER)
        self._epoch = max(self._epoch, header.epoch)
        if header.settled > self._standing.settled:
            self._settle(header.settled)

    def _repeat(self, header: CallHeader, answer: _Answer) -> Any:
        method, outcome = answer
        if method != header.method:
            raise self._refusal(errors.ReplayDiverged, header, f"call {header.call_id} was '{method}' the first time")
        if isinstance(outcome, errors.InvocationError):
            raise outcome
        return outcome.load() if outcome is not None else None

    def _refusal(self, kind: type[errors.InvocationError], header: CallHeader, reason: str) -> errors.InvocationError:
        return kind(reason, role=self._context.role, rank=self._context.rank, method=header.method)

    def _execute(self, header: CallHeader, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not header.keep:
            self._standing = replace(self._standing, since=None, at=None)
        try:
            result = self._call(header.method, header.call_id, args, kwargs)
            stored = _stored(result) if header.keep else None
        except errors.ResultLost:  # an argument's value is lost: nothing has run
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 -- the user's code may raise any
            failure = self.failure(header.method, error)
            self._record(header, failure)
            raise failure from failure.original
        self._record(header, stored)
        return result

    def _record(self, header: CallHeader, outcome: Stored | errors.InvocationError | None) -> None:
        if not header.keep:
            return
        self._answers[header.call_id] = header.method, outcome
        self._latest = header.call_id
        if header.call_id[0] > self._standing.touched:
            self._standing = replace(self._standing, touched=header.call_id[0])

    def _call(self, method: str, call_id: CallId, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._in(method, call_id):
            self.executed[method] += 1
            if not guards_state(type(self.workload), method):
                self._state.wait_until_written()
            result = getattr(self.workload, method)(*args, **kwargs)
            if not inspect.isawaitable(result):
                return result
            if self._loop is None:
                self._loop = asyncio.Runner()
            return self._loop.run(_awaited(result))

    @contextmanager
    def _in(self, method: str, call_id: CallId) -> Iterator[None]:
        began_s, noted, around = self._now_s(), noted_progress(), self._now
        self._now = (method, call_id, began_s)
        failure = ""
        try:
            with record_phases() as phases:
                yield
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            self._now = around
            if self._spans is not None:
                self._spans.add_call(call_id, method, self._now_s() - began_s, phases, failure)
            units = noted_progress() - noted
            ended_s = last_progress_s() if units else self._now_s()
            self.work = Work(self.work.units + max(units, 1), self.work.busy_s + max(ended_s - began_s, 0.0))

    def _serve(self, verb: str, args: Sequence[Any]) -> Any:
        verbs: dict[str, Callable[..., Any]] = {
            port.COMMIT: self._commit,
            port.WRITTEN: self._state.written,
            port.RESTORE: self._restore,
            port.PERSIST: self._state.persist,
            port.FORGET: self._forget,
            port.WHERE: self._where,
            port.READ: read,
            port.STORE: partial(store, node=self._state.node),
            port.HELD: partial(held, node=self._state.node),
        }
        try:
            return verbs[verb](*args)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code may raise anything
            raise (failure := self.failure(verb.removeprefix("!"), error)) from failure.original

    def _where(self) -> port.Standing:
        is_deterministic = bool(self.workload.is_deterministic())
        return replace(self._standing, deterministic=is_deterministic, node=self._state.node)

    def _commit(self, request: CommitRequest) -> CommitAnswer:
        answer = self._state.commit(self.workload, request)
        since = request.step if self._standing.since is None else self._standing.since
        touched = max(self._standing.touched, request.step)
        self._standing = replace(self._standing, since=since, at=request.step, touched=touched)
        return answer

    def _restore(self, request: GenerationRequest) -> None:
        self._forget()
        self._state.restore(self.workload, request)
        self._standing = port.Standing(request.step, request.step, request.step)

    def _forget(self) -> None:
        """Forget the steps: the state no longer belongs to a commit. The answers to calls of ``init`` stay."""
        self._drop(lambda step: step == 0)
        self._latest = max(self._answers, default=_NEVER)
        self._standing = port.Standing(None, None)

    def _settle(self, ended: int) -> None:
        """Drop the answers of the steps up to ``ended``, whose calls will not be repeated."""
        self._drop(lambda step: step == 0 or step > ended)
        since, at = self._standing.since or 0, self._standing.at
        if at is None or at < ended:
            self._standing = replace(self._standing, since=None, at=None, settled=ended)
        else:
            self._standing = replace(self._standing, since=max(since, ended), settled=ended)

    def _drop(self, keeps_step: Callable[[int], bool]) -> None:
        self._answers = {call_id: answer for call_id, answer in self._answers.items() if keeps_step(call_id[0])}


def _stored(result: Any) -> Stored:
    try:
        return Stored.of(result, own=True)
    except Exception as error:  # serializing runs the value's own code
        raise TypeError(f"its result cannot be sent: {type(error).__name__}: {error}") from error


async def _awaited(result: Any) -> Any:
    return await result
