"""Calling members that are Ray actors."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from dlrover.python.rl.common.errors import InvocationError, WorkloadDied
from dlrover.python.rl.runtime.ray.member import CallHeader
from dlrover.python.rl.runtime.ray.wire import encode
from dlrover.python.rl.trainer.port import Call, Outcome, Ref

_SETTLE_S = 30.0
"""How long fetching a result that is already there may take."""


class RayPort:
    """The port over Ray actors.

    Args:
        handles: role to actor handles, in rank order.
    """

    def __init__(self, handles: Mapping[Any, Sequence[Any]]) -> None:
        self._handles = handles

    def put(self, value: Any) -> Ref:
        return Ref(self, ray.put(value))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        header = CallHeader(call.call_id, call.method, tuple(call.kwargs), call.sized)
        values = [encode(value) for value in (*call.args, *call.kwargs.values())]
        method = self._handles[role][rank].dlrover_invoke
        if not call.sized:
            return Ref(self, method.remote(header, *values), None, role, rank, call.method)
        result, size = method.options(num_returns=2).remote(header, *values)
        return Ref(self, result, size, role, rank, call.method)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        # One get for the whole list: it ends at the first error, wherever in the list that is.
        try:
            return [Outcome(value) for value in ray.get([ref.token for ref in refs], timeout=timeout_s)]
        except (GetTimeoutError, RayError):
            return self._standing(refs)

    def _standing(self, refs: Sequence[Ref]) -> list[Outcome]:
        """Where each ref stands now."""
        tokens = [ref.token for ref in refs]
        ready, _ = ray.wait(tokens, num_returns=len(tokens), timeout=0, fetch_local=False)
        arrived = set(ready)
        return [self._settle(ref) if ref.token in arrived else Outcome(late=True) for ref in refs]

    def _settle(self, ref: Ref) -> Outcome:
        try:
            return Outcome(ray.get(ref.token, timeout=_SETTLE_S))
        except RayError as error:
            return Outcome(error=as_invocation_error(error, ref))


def as_invocation_error(error: RayError, ref: Ref) -> InvocationError:
    """What a failed ref means, in this package's own words."""
    if isinstance(error, RayTaskError):
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
        failure.__cause__ = cause
        return failure
    kind = WorkloadDied if isinstance(error, RayActorError) else InvocationError
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    failure = kind("; ".join(lines[:2]), role=ref.role, rank=ref.rank, method=ref.method)
    failure.__cause__ = error
    return failure
