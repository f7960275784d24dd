# SPDX-License-Identifier: Apache-2.0
"""The host of one workload: it checks every call, and keeps results until the commit.

::

    call --> a replaced trainer, another incarnation: refused
         --> its id was answered before: the same answer again
         --> the call before it has not run: skipped
         --> the workload's method; the result or error is kept under the id until the step is committed

Beside the workload's methods a host answers ``COMMIT``, ``RESTORE``, ``PERSIST``, ``FORGET`` and ``WHERE``
(``trainer/port.py``). Calls come one at a time; :meth:`MemberHost.current_call` may be called from any thread.
"""

import asyncio
import inspect
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import cloudpickle

from dlrover.python.rl.common.errors import (
    CallSkipped,
    InvocationError,
    ReplayDiverged,
    ResultLost,
    StaleCall,
    user_traceback,
)
from dlrover.python.rl.common.log import cut_middle
from dlrover.python.rl.common.progress import last_progress_s, noted_progress
from dlrover.python.rl.control.liveness import Work
from dlrover.python.rl.runtime.checkpoint.member_state import CommitAnswer, CommitRequest, MemberState, RestoreRequest
from dlrover.python.rl.runtime.process.heartbeat import CONSTRUCTING
from dlrover.python.rl.trainer.port import (
    COMMIT,
    FORGET,
    PERSIST,
    RESTORE,
    WHERE,
    Call,
    Ref,
    Standing,
    gone_incarnation,
)
from dlrover.python.rl.trainer.shard import Rows, row_count, take_rows
from dlrover.python.rl.trainer.workload import MemberContext, member_context

CallId: TypeAlias = tuple[int, int]
Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]

_MOST_TEXT, _MOST_TRACEBACK = 2000, 20_000  # characters of an error that travel
_NEVER: CallId = (-1, -1)


@dataclass(frozen=True)
class Stored:
    """A serialized value: every reader gets a copy, but shares large buffers read-only."""

    data: bytes
    buffers: tuple[memoryview, ...]
    rows: int | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.data, tuple(map(pickle.PickleBuffer, self.buffers)), self.rows)

    @classmethod
    def of(cls, value: Any, own: bool = False) -> "Stored":
        """Serialize ``value``. ``own``: copy large buffers as well, so that later changes to it have no effect."""
        buffers: list[pickle.PickleBuffer] = []
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        views = [memoryview(buffer.raw()).toreadonly() for buffer in buffers]
        return cls(data, tuple(memoryview(bytes(view)) if own else view for view in views), row_count(value))

    def load(self) -> Any:
        return pickle.loads(self.data, buffers=self.buffers)


def _received(data: bytes, buffers: Sequence[Any], rows: int | None) -> Stored:
    return Stored(data, tuple(memoryview(buffer).toreadonly() for buffer in buffers), rows)


@dataclass(frozen=True)
class ListOfRefs:
    """A list argument that mixes values and tokens."""

    items: tuple[Any, ...]
    is_ref: tuple[bool, ...]


@dataclass(frozen=True)
class RowsOfRefs:
    """One shard of pending results, and the tokens of its parts' row counts."""

    rows: Rows
    sizes: tuple[Any, ...]


def encode(value: Any) -> Any:
    """Encode one argument. A :class:`Ref` becomes its token, which Ray resolves before the call."""
    if isinstance(value, Ref):
        return value.token
    if isinstance(value, Rows):
        tokens = tuple(ref.token for ref in value.parts)
        return RowsOfRefs(replace(value, parts=tokens), tuple(ref.size for ref in value.parts))
    if isinstance(value, list) and any(isinstance(item, Ref) for item in value):
        is_ref = tuple(isinstance(item, Ref) for item in value)
        return ListOfRefs(tuple(item.token if isinstance(item, Ref) else item for item in value), is_ref)
    return value


def decode(value: Any, get: Callable[[Any], Any]) -> Any:
    """Decode one argument; ``get`` fetches the value of a token, or the values of a list of tokens."""
    if isinstance(value, ListOfRefs):
        return [get(item) if is_ref else item for item, is_ref in zip(value.items, value.is_ref, strict=True)]
    if isinstance(value, RowsOfRefs):
        return take_rows(value.rows, get(list(value.sizes)), get)
    return value


@dataclass(frozen=True)
class CallHeader:
    """A call without its arguments; see :class:`~dlrover.python.rl.trainer.port.Call`."""

    call_id: CallId
    method: str
    keywords: tuple[str, ...] = ()  # names of the trailing keyword arguments
    sized: bool = False
    epoch: int = 0
    incarnation: int = 0  # of the member that is called, 0 for any
    committed: int = 0
    keep: bool = False
    after: CallId | None = None

    @classmethod
    def of(cls, call: Call, incarnation: int) -> "CallHeader":
        return cls(
            call.call_id,
            call.method,
            tuple(call.kwargs),
            call.sized,
            call.epoch,
            incarnation,
            call.committed,
            call.keep,
            call.after,
        )


@dataclass(frozen=True)
class CurrentCall:
    """The current call of a member, and seconds since its last progress, at first its begin; its id is ``(-1, -1)`` for
    a call of no step."""

    method: str
    call_id: CallId
    age_s: float


@dataclass(frozen=True)
class _Answer:
    method: str
    result: Stored | None = None
    error: InvocationError | None = None

    def load(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result.load() if self.result is not None else None


class MemberHost:
    """Hosts one workload; see the module. ``node`` is the id of the node, for files that only this node has; ``""`` in
    one process."""

    def __init__(self, incarnation: int = 1, node: str = "", now_s: Callable[[], float] = time.monotonic) -> None:
        self.workload: Any = None  # before start()
        self.executed: Counter[str] = Counter()  # how often each method ran, repeated answers not counted
        self._incarnation, self._node = incarnation, node
        self._now_s = now_s
        self._context = MemberContext()
        self._state = MemberState(self._context.role, self._context.rank, incarnation, node)
        self._epoch = 0
        self._answers: dict[CallId, _Answer] = {}
        self._latest, self._settled = _NEVER, 0
        self._standing = Standing()
        self._now: tuple[str, CallId, float] | None = None
        self._progress, self._progressed_s = 0, 0.0
        self.work = Work()
        self._loop: asyncio.Runner | None = None
        self._verbs: dict[str, Callable[..., Any]] = {
            COMMIT: self._commit,
            RESTORE: self._restore,
            PERSIST: lambda request: self._state.persist(request),
            FORGET: self._forget,
            WHERE: lambda: self._standing,
        }

    def start(self, workload_class: Any, context: MemberContext, master_handle: Any, config: Any) -> None:
        self._context = context
        self._state = MemberState(context.role, context.rank, self._incarnation, self._node)
        with member_context(context), self._in(CONSTRUCTING, _NEVER):
            self.workload = workload_class(master_handle, config)

    @property
    def is_rebuilt(self) -> bool:
        """Whether a trainer has called it: an object that is new in an old process gets its state in such calls."""
        return self._epoch > 0

    def current_call(self) -> CurrentCall | None:
        now, progress = self._now, noted_progress()
        if progress != self._progress:
            self._progress, self._progressed_s = progress, self._now_s()
        return None if now is None else CurrentCall(now[0], now[1], self._now_s() - max(now[2], self._progressed_s))

    def close(self) -> None:
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

    # -- calls --------------------------------------------------------------------------------------------------------

    def invoke(self, header: CallHeader, arguments: Callable[[], Arguments]) -> Any:
        """Run a role group's call, or repeat its answer; ``arguments`` is called only if the method runs.

        Raises:
            StaleCall: from a replaced trainer, or to an incarnation that is not there yet.
            WorkloadDied: to an earlier incarnation.
            ReplayDiverged: the id belongs to another method, or to the past.
            CallSkipped: the call that must have run before has not.
            ResultLost: an argument's value is lost; the call has not run.
            InvocationError: the method raised; ``original`` is the exception if it can be pickled.
        """
        self._admit(header)
        if header.method.startswith("!"):
            with self._in(header.method, header.call_id):
                return self._serve(header.method, arguments()[0])
        if header.keep and header.call_id in self._answers:
            return self._repeat(header)
        if header.keep:
            self._check_order(header)
        args, kwargs = arguments()
        return self._execute(header, args, kwargs)

    def run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call through a raw handle: it belongs to no step, nothing is kept, and errors are raised unchanged."""
        self._standing = replace(self._standing, since=None, at=None)
        return self._call(method, _NEVER, args, kwargs)

    def failure(self, method: str, error: BaseException) -> InvocationError:
        """``error``, which is being handled, as the trainer receives it."""
        failure = InvocationError(
            cut_middle(f"{type(error).__name__}: {error}", _MOST_TEXT),
            role=self._context.role,
            rank=self._context.rank,
            method=method,
            node=socket.gethostname(),
            remote_traceback=cut_middle(user_traceback(error), _MOST_TRACEBACK, "\n[...]\n"),
        )
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # noqa: BLE001 -- a user's exception may fail to pickle in any way; its text is enough
            return failure
        failure.original = failure.__cause__ = error
        return failure

    # -- the gate -----------------------------------------------------------------------------------------------------

    def _admit(self, header: CallHeader) -> None:
        if header.epoch and header.epoch < self._epoch:
            raise self._refusal(StaleCall, header, f"the trainer of epoch {header.epoch} has been replaced")
        if 0 < header.incarnation < self._incarnation:
            raise gone_incarnation(header.incarnation, self._context.role, self._context.rank, header.method)
        if header.incarnation > self._incarnation:
            reason = f"meant for incarnation {header.incarnation}, this is {self._incarnation}"
            raise self._refusal(StaleCall, header, reason)
        self._epoch = max(self._epoch, header.epoch)
        if header.committed > self._settled:
            self._settle(header.committed)

    def _repeat(self, header: CallHeader) -> Any:
        answer = self._answers[header.call_id]
        if answer.method != header.method:
            raise self._refusal(ReplayDiverged, header, f"call {header.call_id} was {answer.method} before")
        return answer.load()

    def _check_order(self, header: CallHeader) -> None:
        if header.call_id < self._latest:
            reason = f"call {header.call_id} comes after call {self._latest} has run"
            raise self._refusal(ReplayDiverged, header, reason)
        if header.after is not None and header.after not in self._answers:
            raise self._refusal(CallSkipped, header, f"call {header.after} has not run")

    def _refusal(self, kind: type[InvocationError], header: CallHeader, reason: str) -> InvocationError:
        return kind(reason, role=self._context.role, rank=self._context.rank, method=header.method)

    # -- execution ----------------------------------------------------------------------------------------------------

    def _execute(self, header: CallHeader, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not header.keep:
            self._standing = replace(self._standing, since=None, at=None)
        try:
            result = self._call(header.method, header.call_id, args, kwargs)
            stored = Stored.of(result, own=True) if header.keep else None
        except ResultLost:  # an argument's value is lost: nothing has run
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code may raise anything
            failure = self.failure(header.method, error)
            self._keep(header, _Answer(header.method, error=failure))
            raise failure from error
        self._keep(header, _Answer(header.method, stored))
        return result

    def _keep(self, header: CallHeader, answer: _Answer) -> None:
        if not header.keep:
            return
        self._answers[header.call_id] = answer
        self._latest = header.call_id
        self._standing = replace(self._standing, touched=max(self._standing.touched, header.call_id[0]))

    def _call(self, method: str, call_id: CallId, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._in(method, call_id):
            self.executed[method] += 1
            result = getattr(self.workload, method)(*args, **kwargs)
            if not inspect.isawaitable(result):
                return result
            if self._loop is None:
                self._loop = asyncio.Runner()
            return self._loop.run(_awaited(result))

    @contextmanager
    def _in(self, method: str, call_id: CallId) -> Iterator[None]:
        began_s, noted = self._now_s(), noted_progress()
        self._now = (method, call_id, began_s)
        try:
            yield
        finally:
            self._now = None
            units = noted_progress() - noted
            ended_s = last_progress_s() if units else self._now_s()
            self.work = Work(self.work.units + max(units, 1), self.work.busy_s + max(ended_s - began_s, 0.0))

    # -- requests beside the methods ----------------------------------------------------------------------------------

    def _serve(self, verb: str, args: Sequence[Any]) -> Any:
        try:
            return self._verbs[verb](*args)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code may raise anything
            raise self.failure(verb.removeprefix("!"), error) from error

    def _commit(self, request: CommitRequest) -> CommitAnswer:
        answer = self._state.commit(self.workload, request)
        since = request.step if self._standing.since is None else self._standing.since
        self._standing = Standing(since, request.step, max(self._standing.touched, request.step))
        return answer

    def _restore(self, request: RestoreRequest) -> None:
        self._forget()
        self._state.restore(self.workload, request)
        self._standing = Standing(request.step, request.step, request.step)

    def _forget(self) -> None:
        """Forget the steps: the state is no longer that of a commit. The answers to calls of ``init`` stay."""
        self._drop(lambda step: step == 0)
        self._settled = 0
        self._latest = max(self._answers, default=_NEVER)
        self._standing = Standing(None, None)

    def _settle(self, committed: int) -> None:
        """The calls of the steps up to ``committed`` will not be repeated."""
        self._settled = committed
        self._drop(lambda step: step == 0 or step > committed)
        at = self._standing.at
        if at is None or at < committed:
            self._standing = replace(self._standing, since=None, at=None)
        else:
            self._standing = replace(self._standing, since=max(self._standing.since or 0, committed))

    def _drop(self, keeps_step: Callable[[int], bool]) -> None:
        self._answers = {call_id: answer for call_id, answer in self._answers.items() if keeps_step(call_id[0])}


async def _awaited(result: Any) -> Any:
    return await result
