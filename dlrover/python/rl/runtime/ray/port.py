"""Calling members that are Ray actors."""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from dlrover.python.rl.common.errors import InvocationError, ResultLost, WorkloadDied
from dlrover.python.rl.runtime.host import CallHeader
from dlrover.python.rl.runtime.wire import encode
from dlrover.python.rl.trainer.port import Call, Outcome, Ref
from dlrover.python.rl.trainer.recovery import MemberId

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_SETTLE_S = 30.0
"""How long fetching a result that is already there may take."""


class RayPort:
    """The port over Ray actors. Thread safe.

    Args:
        handles: role to actor handles, in rank order.
        incarnations: of the members behind them; 1 where not given.
    """

    def __init__(
        self, handles: Mapping[Any, Sequence[Any]], incarnations: Mapping[MemberId, int] | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._handles: dict[MemberId, Any] = {}
        self._incarnations: dict[MemberId, int] = {}
        self._owners: dict[str, tuple[str, int, int]] = {}
        for role, members in handles.items():
            for rank, handle in enumerate(members):
                self.replace(role, rank, handle, (incarnations or {}).get((role, rank), 1))

    def replace(self, role: str, rank: int, handle: Any, incarnation: int) -> None:
        """Call ``handle`` from now on. What is under way with the former member goes on."""
        with self._lock:
            self._handles[role, rank] = handle
            self._incarnations[role, rank] = incarnation
            self._owners[_actor_id(handle)] = (role, rank, incarnation)

    def incarnations(self) -> dict[MemberId, int]:
        """The incarnation of each member that is called now."""
        with self._lock:
            return dict(self._incarnations)

    def put(self, value: Any) -> Ref:
        return Ref(self, ray.put(value))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        with self._lock:
            handle, incarnation = self._handles[role, rank], self._incarnations[role, rank]
        header = CallHeader.of(call, incarnation)
        values = [encode(value) for value in (*call.args, *call.kwargs.values())]
        if not call.sized:
            result, size = handle.dlrover_invoke.remote(header, *values), None
        else:
            result, size = handle.dlrover_invoke.options(num_returns=2).remote(header, *values)
        return Ref(self, result, size, role, rank, call.method, incarnation)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        # One get for the whole list: it ends at the first error, wherever in the list that is.
        try:
            return [Outcome(value) for value in ray.get([ref.token for ref in refs], timeout=timeout_s)]
        except (GetTimeoutError, RayError):
            return self._standing(refs)

    def _standing(self, refs: Sequence[Ref]) -> list[Outcome]:
        """Where each ref stands now."""
        tokens = list(dict.fromkeys(ref.token for ref in refs))
        ready, _ = ray.wait(tokens, num_returns=len(tokens), timeout=0, fetch_local=False)
        arrived = set(ready)
        return [self._settle(ref) if ref.token in arrived else Outcome(late=True) for ref in refs]

    def _settle(self, ref: Ref) -> Outcome:
        try:
            return Outcome(ray.get(ref.token, timeout=_SETTLE_S))
        except RayError as error:
            return Outcome(error=self._as_invocation_error(error, ref))

    def _as_invocation_error(self, error: RayError, ref: Ref) -> InvocationError:
        """What a failed ref means, in this package's own words."""
        for link in _chain(error):
            with self._lock:
                owner = self._owners.get(str(getattr(link, "actor_id", "")))
            if owner is not None:
                return _died(link, ref, owner)
            if isinstance(link, ObjectLostError):
                return _caused(ResultLost(_in_short(link), role=ref.role, rank=ref.rank, method=ref.method), link)
        if isinstance(error, RayActorError | NodeDiedError | WorkerCrashedError):
            return _died(error, ref, (ref.role, ref.rank, ref.incarnation))
        if not isinstance(error, RayTaskError):
            return _caused(InvocationError(_in_short(error), role=ref.role, rank=ref.rank, method=ref.method), error)
        cause = error.cause
        if isinstance(cause, InvocationError):
            cause.__cause__ = cause.original
            return cause
        failure = InvocationError(
            f"{type(cause).__name__}: {cause}",
            role=ref.role,
            rank=ref.rank,
            method=ref.method,
            remote_traceback=str(error),
        )
        return _caused(failure, cause)


def _died(error: BaseException, ref: Ref, owner: tuple[str, int, int]) -> WorkloadDied:
    """The death of ``owner``, which the call of ``ref`` failed of: it is the member called, or one whose result it was
    to take."""
    role, rank, incarnation = owner
    died = WorkloadDied(_in_short(error), role=role, rank=rank, method=ref.method)
    died.incarnation, died.__cause__ = incarnation, error
    return died


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it came from: Ray wraps what a call's arguments died of, and so does the member."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.cause if isinstance(link, RayTaskError) else getattr(link, "original", None)


def _caused(failure: InvocationError, cause: BaseException) -> InvocationError:
    failure.__cause__ = cause
    return failure


def _in_short(error: BaseException) -> str:
    """What an error of Ray's says, in one line: without colours, and of a traceback the last line."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    if isinstance(error, RayTaskError):
        return lines[-1] if lines else type(error).__name__
    return lines[0] if lines else type(error).__name__


def _actor_id(handle: Any) -> str:
    return str(handle._actor_id.hex())
