# SPDX-License-Identifier: Apache-2.0
"""Calling workers that are Ray actors, and measuring how long the trainer's own code runs in between."""

import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray import exceptions

from dlrover.python.rl.common.errors import DLRoverRLError, InvocationError, ResultLost, Scope, WorkloadDied
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.control.events import CauseKind, fault_in, fault_of
from dlrover.python.rl.runtime.member.arguments import CallHeader, encode
from dlrover.python.rl.trainer.port import BUCKETS_S, Call, CallCounts, Outcome, Ref

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_SETTLE_S = 30.0  # for fetching a result that has arrived
_BACK_S = 20.0  # for reaching a worker again whose connection broke
_PING_S, _PAUSE_S = 1.0, 0.5


class RayRef(Ref, ray.ObjectRef):
    """A ref that Ray's functions accept, too, such as ``ray.get``; a repeated call has another ``ref``."""

    def __init__(self, ref: Any, *fields: Any) -> None:
        Ref.__init__(self, *fields)
        ray.ObjectRef.__init__(self, ref.binary())

    def rebind(self, port: Any, token: Any) -> Ref:
        return RayRef(self, port, token, None, self.role, self.rank, self.method)


class RayPort:
    """The port over Ray actors, which ``handles`` lists by role, in rank order. Thread safe."""

    def __init__(self, handles: Mapping[Any, Sequence[Any]]) -> None:
        self._lock = threading.Lock()
        self._members: dict[tuple[str, int], tuple[Any, int]] = {}
        self._owners: dict[str, tuple[str, int, int]] = {}
        for role, members in handles.items():
            for rank, handle in enumerate(members):
                self.replace(role, rank, handle, incarnation=1)

    def replace(self, role: str, rank: int, handle: Any, incarnation: int) -> None:
        """Call ``handle`` from now on. Running calls of the former worker continue."""
        with self._lock:
            self._members[role, rank] = handle, incarnation
            self._owners[str(handle._actor_id.hex())] = (role, rank, incarnation)

    def incarnations(self) -> dict[ProcessId, int]:
        with self._lock:
            return {ProcessId(*member): incarnation for member, (_, incarnation) in self._members.items()}

    def handles(self) -> dict[RLRoleType, list[Any]]:
        handles: dict[RLRoleType, list[Any]] = {}
        with self._lock:
            for (role, _), (handle, _) in sorted(self._members.items(), key=lambda item: item[0]):
                handles.setdefault(RLRoleType(role), []).append(handle)
        return handles

    def put(self, value: Any) -> Ref:
        return Ref(self, ray.put(value))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        with self._lock:
            handle, incarnation = self._members[role, rank]
        header = CallHeader.of(call, incarnation).pack()
        values = [encode(value) for value in (*call.args, *call.kwargs.values())]
        if not call.sized:
            result, size = handle.dlrover_invoke.remote(header, *values), None
        else:
            result, size = handle.dlrover_invoke.options(num_returns=2).remote(header, *values)
        return RayRef(result, self, result, size, role, rank, call.method, incarnation)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        # One get for the whole list ends at the first error, wherever it is.
        try:
            return [Outcome(value) for value in ray.get([ref.token for ref in refs], timeout=timeout_s)]
        except (exceptions.GetTimeoutError, exceptions.RayError):
            pass
        tokens = list(dict.fromkeys(ref.token for ref in refs))
        ready, _ = ray.wait(tokens, num_returns=len(tokens), timeout=0, fetch_local=False)
        arrived = set(ready)
        return [self._settle(ref) if ref.token in arrived else Outcome(late=True) for ref in refs]

    def _settle(self, ref: Ref) -> Outcome:
        try:
            return Outcome(ray.get(ref.token, timeout=_SETTLE_S))
        except exceptions.RayError as error:
            return Outcome(error=self._as_invocation_error(error, ref))

    def _as_invocation_error(self, error: exceptions.RayError, ref: Ref) -> InvocationError:
        for link in _chain(error):
            with self._lock:
                owner = self._owners.get(str(getattr(link, "actor_id", "")))
            if owner is not None and isinstance(link, exceptions.ActorUnavailableError) and self._comes_back(owner):
                return ResultLost("its connection broke", role=ref.role, rank=ref.rank, method=ref.method)
            if owner is not None:
                return _death_of(link, ref, owner)
            if isinstance(link, exceptions.ObjectLostError):
                return _with_cause(ResultLost(_summarize(link), role=ref.role, rank=ref.rank, method=ref.method), link)
        if isinstance(error, exceptions.RayActorError | exceptions.NodeDiedError | exceptions.WorkerCrashedError):
            return _death_of(error, ref, (ref.role, ref.rank, ref.incarnation))
        if not isinstance(error, exceptions.RayTaskError):
            failure = InvocationError(_summarize(error), role=ref.role, rank=ref.rank, method=ref.method)
            return _with_cause(failure, error)
        cause = error.cause
        if isinstance(cause, InvocationError):
            if _needs_new_process(cause) and (cause.role, cause.rank) == (ref.role, ref.rank):
                return _death_of(cause.original or cause, ref, (ref.role, ref.rank, ref.incarnation))
            return _with_cause(cause, cause.original)
        text, trace = f"{type(cause).__name__}: {cause}", str(error)
        failure = InvocationError(text, role=ref.role, rank=ref.rank, method=ref.method, remote_traceback=trace)
        return _with_cause(failure, cause)

    def _comes_back(self, owner: tuple[str, int, int]) -> bool:
        """Return True if a worker with a broken connection is alive; calls have ids, so they can be repeated."""
        role, rank, incarnation = owner
        with self._lock:
            handle, current = self._members[role, rank]
        handle = handle if current == incarnation else None
        deadline_s = time.monotonic() + _BACK_S
        while handle is not None and time.monotonic() < deadline_s:
            ping = handle.dlrover_ping.remote()
            try:
                ray.get(ping, timeout=_PING_S)
            except exceptions.GetTimeoutError:
                return True  # the ping has arrived, and waits for the worker's calls
            except exceptions.ActorUnavailableError:
                time.sleep(_PAUSE_S)
            except exceptions.RayError:
                return False
            else:
                return True
        return False


def is_loss(error: BaseException) -> bool:
    """Return True if an error of ``ray.get`` reports a lost process or result."""
    lost = (
        exceptions.RayActorError
        | exceptions.NodeDiedError
        | exceptions.WorkerCrashedError
        | exceptions.ObjectLostError
        | WorkloadDied
    )
    return any(isinstance(link, lost) for link in _chain(error))


def _needs_new_process(error: InvocationError) -> bool:
    """Return True if the worker's process must be replaced, after its own demand or a device's or link's failure."""
    original = error.original
    fault = fault_in(str(error).partition("\n")[0]) if original is None else fault_of(original)
    if fault in (CauseKind.DEVICE_FAILED, CauseKind.LINK_FAILED):
        return True
    if not isinstance(original, DLRoverRLError) or isinstance(original, InvocationError):
        return False
    return original.retryable and original.restarts is Scope.MEMBER


def _death_of(error: BaseException, ref: Ref, owner: tuple[str, int, int]) -> WorkloadDied:
    """Return the death of ``owner``, the called worker or one whose result was an argument of the call of ``ref``."""
    role, rank, incarnation = owner
    summary = _summarize(error)
    is_ours = isinstance(error, exceptions.RayError | DLRoverRLError)
    text, method = summary if is_ours else f"{type(error).__name__}: {summary}", ref.method
    if (role, rank) != (ref.role, ref.rank):
        text, method = f"its result, which {ref.role}[{ref.rank}].{ref.method} needs, is lost: {text}", ""
    died = WorkloadDied(text, role=role, rank=rank, method=method)
    died.incarnation, died.__cause__ = incarnation, error
    return died


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and its causes: Ray and the worker wrap the errors of a call's arguments."""
    link: BaseException | None = error
    visited: set[int] = set()
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        yield link
        link = link.cause if isinstance(link, exceptions.RayTaskError) else getattr(link, "original", None)


def _with_cause(failure: InvocationError, cause: BaseException | None) -> InvocationError:
    failure.__cause__ = cause
    return failure


def _summarize(error: BaseException) -> str:
    """Return one line without colours, the last one of a traceback."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[-1 if isinstance(error, exceptions.RayTaskError) else 0] if lines else type(error).__name__


_MOST_PENDING = 10_000
_TASK_BYTES = ray.TaskID.size()


def _task_of(ref: Ref) -> bytes:
    """Return the id of a call, the same for its result and its row count."""
    identity: bytes = ref.token.binary()
    return identity[:_TASK_BYTES]


class CallWatch:
    """Records the trainer's calls of its workers, their durations, and its waits. Thread safe."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._waits = 0
        self._since_s = now_s()
        self._pending: dict[bytes, tuple[str, str, float]] = {}
        self._counts: dict[tuple[str, str], list[float]] = {}

    def touch(self) -> None:
        """Record that the trainer's own code has called something."""
        with self._lock:
            self._since_s = self._now_s()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that the trainer waits for other processes inside the block."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1
                self._since_s = self._now_s()

    def own_s(self) -> float | None:
        """Return the seconds that the trainer's own code has run since the last call; None while it waits."""
        with self._lock:
            return None if self._waits else self._now_s() - self._since_s

    def begin(self, call: bytes, role: str, method: str) -> None:
        with self._lock:
            self._since_s = self._now_s()
            if len(self._pending) >= _MOST_PENDING:  # results that were never waited for
                del self._pending[next(iter(self._pending))]
            self._pending[call] = role, method, self._since_s

    def end(self, calls: Iterable[bytes]) -> None:
        """Count calls, except those that have ended already."""
        with self._lock:
            now_s = self._now_s()
            for role, method, began_s in filter(None, (self._pending.pop(call, None) for call in calls)):
                counts = self._counts.setdefault((role, method), [0.0] * (len(BUCKETS_S) + 2))
                counts[bisect_left(BUCKETS_S, now_s - began_s)] += 1
                counts[-1] += now_s - began_s

    def pending(self) -> dict[str, int]:
        with self._lock:
            return dict(Counter(role for role, _, _ in self._pending.values()))

    def drain(self) -> CallCounts:
        with self._lock:
            counts, self._counts = self._counts, {}
        return {key: tuple(values) for key, values in counts.items()}


class WatchedPort(RayPort):
    """The port below the port of durable steps; ``watch`` records every use."""

    def __init__(self, watch: CallWatch) -> None:
        super().__init__({})
        self.watch = watch

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        ref = super().submit(role, rank, call)
        self.watch.begin(_task_of(ref), role, call.method)
        return ref

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        with self.watch.waiting():
            outcomes = super().wait(refs, timeout_s)
        self.watch.end(_task_of(ref) for ref, outcome in zip(refs, outcomes, strict=True) if not outcome.late)
        return outcomes
