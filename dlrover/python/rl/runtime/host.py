"""One workload in whatever process hosts it: the gate that every call passes, and the results kept until the commit.

::

    call --> a trainer that has been replaced, another incarnation: refused
         --> its id has been answered before: the same answer again
         --> the call before it has not run: skipped
         --> the workload's method; result or error kept under the id until a later call says that the step is committed

Beside the workload's methods a host answers ``COMMIT``, ``RESTORE``, ``PERSIST``, ``FORGET`` and ``WHERE``
(``trainer/port.py``). Calls come one at a time; :meth:`MemberHost.doing` may be asked meanwhile from any thread.
"""

import asyncio
import inspect
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import cloudpickle

from dlrover.python.rl.common.clock import Clock, SystemClock
from dlrover.python.rl.common.errors import CallSkipped, InvocationError, ReplayDiverged, ResultLost, StaleCall
from dlrover.python.rl.runtime.beats import CONSTRUCTING
from dlrover.python.rl.runtime.member_state import (
    CommitAnswer,
    CommitRequest,
    MemberState,
    PersistRequest,
    RestoreRequest,
)
from dlrover.python.rl.runtime.state_file import StateFile
from dlrover.python.rl.runtime.stored import Stored
from dlrover.python.rl.trainer.port import COMMIT, FORGET, PERSIST, RESTORE, WHERE, Call, Standing
from dlrover.python.rl.trainer.workload import MemberContext, member_context

CallId: TypeAlias = tuple[int, int]
Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]

_NEVER: CallId = (-1, -1)


@dataclass(frozen=True)
class CallHeader:
    """What a call carries besides its arguments; see :class:`~dlrover.python.rl.trainer.port.Call`.

    Attributes:
        keywords: names of the trailing keyword arguments.
        incarnation: the one of the member that is meant, 0 for any.
    """

    call_id: CallId
    method: str
    keywords: tuple[str, ...] = ()
    sized: bool = False
    epoch: int = 0
    incarnation: int = 0
    committed: int = 0
    keep: bool = False
    after: CallId | None = None

    @classmethod
    def of(cls, call: Call, incarnation: int) -> "CallHeader":
        """The header of ``call`` to one incarnation of a member."""
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
class Doing:
    """The call a member is in: its method, its id (``(-1, -1)`` for none), and seconds since it began."""

    method: str
    call_id: CallId
    age_s: float


@dataclass(frozen=True)
class _Kept:
    """What came of a call."""

    method: str
    result: Stored | None = None
    error: InvocationError | None = None

    def answer(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result.load() if self.result is not None else None


class MemberHost:
    """Hosts one workload; see the module.

    Args:
        incarnation: which of the member's processes this is, from 1.
        node: id of the node, for files that only this node has; ``""`` in one process.
        clock: monotonic time.

    Attributes:
        workload: the workload, None before :meth:`start`.
        executed: method to how often it really ran.
    """

    def __init__(self, incarnation: int = 1, node: str = "", clock: Clock | None = None) -> None:
        self.workload: Any = None
        self.executed: Counter[str] = Counter()
        self._incarnation, self._node = incarnation, node
        self._clock = clock or SystemClock()
        self._context = MemberContext()
        self._state = MemberState(self._context.role, self._context.rank, incarnation, node)
        self._epoch = 0
        self._kept: dict[CallId, _Kept] = {}
        self._latest, self._settled = _NEVER, 0
        self._standing = Standing()
        self._now: tuple[str, CallId, float] | None = None
        self._loop: asyncio.Runner | None = None
        self._verbs: dict[str, Callable[..., Any]] = {
            COMMIT: self._commit,
            RESTORE: self._restore,
            PERSIST: self._persist,
            FORGET: self._forget,
            WHERE: self._where,
        }

    def start(self, workload_class: Any, context: MemberContext, master_handle: Any, config: Any) -> None:
        """Construct the workload; what its constructor raises is raised."""
        self._context = context
        self._state = MemberState(context.role, context.rank, self._incarnation, self._node)
        with member_context(context), self._in(CONSTRUCTING, _NEVER):
            self.workload = workload_class(master_handle, config)

    def doing(self) -> Doing | None:
        """The call under way, None when idle. Thread safe."""
        now = self._now
        return None if now is None else Doing(now[0], now[1], self._clock.now_s() - now[2])

    def close(self) -> None:
        """Let the workload give back what it holds."""
        try:
            if self.workload is not None:
                self.workload.close()
        finally:
            self.end()

    def end(self) -> None:
        """Let go of the workload without a word to it, as a killed process does."""
        self.workload = None
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    # -- calls --------------------------------------------------------------------------------------------------------

    def invoke(self, header: CallHeader, arguments: Callable[[], Arguments]) -> Any:
        """Carry out a role group's call, or repeat its answer.

        Args:
            header: what the call is.
            arguments: gives the positional and the keyword arguments; asked only when the call is carried out. What it
                raises is raised as it is, and the call has not run.

        Raises:
            StaleCall: of a trainer that has been replaced, or meant for another incarnation.
            ReplayDiverged: the id belongs to another method, or to the past.
            CallSkipped: the call that must have run before has not.
            ResultLost: the method raised it: what an argument stands for is gone, and the call has not run.
            InvocationError: the method raised; carries role, rank, method, host, traceback, and the exception itself
                (as ``original``) when it can be pickled.
        """
        self._admit(header)
        if header.method.startswith("!"):
            with self._in(header.method, header.call_id):
                return self._serve(header.method, arguments()[0])
        if header.keep and header.call_id in self._kept:
            return self._repeat(header)
        if header.keep:
            self._check_order(header)
        args, kwargs = arguments()
        return self._carry_out(header, args, kwargs)

    def run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call through a raw handle: of no step, nothing kept; what the method raises is raised as it is."""
        self._standing = replace(self._standing, since=None, at=None)
        return self._call(method, _NEVER, args, kwargs)

    def failure(self, method: str, error: BaseException) -> InvocationError:
        """``error``, which is being handled, as the trainer gets to see it."""
        failure = InvocationError(
            f"{type(error).__name__}: {error}",
            role=self._context.role,
            rank=self._context.rank,
            method=method,
            node=socket.gethostname(),
            remote_traceback=traceback.format_exc(),
        )
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # noqa: BLE001 -- a user's exception may fail to pickle in any way; its text is carried anyway
            return failure
        failure.original = failure.__cause__ = error
        return failure

    # -- the gate -----------------------------------------------------------------------------------------------------

    def _admit(self, header: CallHeader) -> None:
        if header.epoch and header.epoch < self._epoch:
            raise self._refusal(StaleCall, header, f"the trainer of epoch {header.epoch} has been replaced")
        if header.incarnation not in (0, self._incarnation):
            what = f"meant for incarnation {header.incarnation}, this is {self._incarnation}"
            raise self._refusal(StaleCall, header, what)
        self._epoch = max(self._epoch, header.epoch)
        if header.committed > self._settled:
            self._settle(header.committed)

    def _repeat(self, header: CallHeader) -> Any:
        kept = self._kept[header.call_id]
        if kept.method != header.method:
            what = f"call {header.call_id} was {kept.method} before"
            raise self._refusal(ReplayDiverged, header, what)
        return kept.answer()

    def _check_order(self, header: CallHeader) -> None:
        if header.call_id < self._latest:
            what = f"call {header.call_id} comes after call {self._latest} has run"
            raise self._refusal(ReplayDiverged, header, what)
        if header.after is not None and header.after not in self._kept:
            raise self._refusal(CallSkipped, header, f"call {header.after} has not run")

    def _refusal(self, kind: type[InvocationError], header: CallHeader, what: str) -> InvocationError:
        return kind(what, role=self._context.role, rank=self._context.rank, method=header.method)

    # -- carrying out -------------------------------------------------------------------------------------------------

    def _carry_out(self, header: CallHeader, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not header.keep:
            self._standing = replace(self._standing, since=None, at=None)
        try:
            result = self._call(header.method, header.call_id, args, kwargs)
            stored = Stored.of(result, own=True) if header.keep else None
        except ResultLost:  # the workload says that what an argument stands for is gone: nothing has run
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: whatever it raises travels on
            failure = self.failure(header.method, error)
            self._keep(header, _Kept(header.method, error=failure))
            raise failure from error
        self._keep(header, _Kept(header.method, stored))
        return result

    def _keep(self, header: CallHeader, kept: _Kept) -> None:
        if not header.keep:
            return
        self._kept[header.call_id] = kept
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
        self._now = (method, call_id, self._clock.now_s())
        try:
            yield
        finally:
            self._now = None

    # -- what is asked beside the methods -----------------------------------------------------------------------------

    def _serve(self, verb: str, args: Sequence[Any]) -> Any:
        try:
            return self._verbs[verb](*args)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: whatever it raises travels on
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

    def _persist(self, request: PersistRequest) -> StateFile:
        return self._state.persist(request)

    def _forget(self) -> None:
        """Let go of the steps: the state is no commit's any more. What ``init`` asked for stays."""
        self._drop(lambda step: step == 0)
        self._settled = 0
        self._latest = max(self._kept, default=_NEVER)
        self._standing = Standing(None, None)

    def _where(self) -> Standing:
        return self._standing

    def _settle(self, committed: int) -> None:
        """The steps up to ``committed`` will not be asked about again."""
        self._settled = committed
        self._drop(lambda step: step == 0 or step > committed)
        at = self._standing.at
        if at is None or at < committed:
            self._standing = replace(self._standing, since=None, at=None)
        else:
            self._standing = replace(self._standing, since=max(self._standing.since or 0, committed))

    def _drop(self, stays: Callable[[int], bool]) -> None:
        self._kept = {call_id: kept for call_id, kept in self._kept.items() if stays(call_id[0])}


async def _awaited(result: Any) -> Any:
    return await result
