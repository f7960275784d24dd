"""What a role group needs from the place where its members run: three verbs.

``runtime`` supplies this port (Ray, the processes of a launcher, one process); one contract suite runs against every
implementation.
"""

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dlrover.python.rl.common.errors import CallError, InvocationError, InvocationTimeout
from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

STRAGGLER_LOG_INTERVAL_S = 15.0
"""How often the ranks that a call without a deadline still waits for are logged."""


RAW_CALL = (-1, -1)
"""The call id of a call through a raw handle, which belongs to no step."""

COMMIT, RESTORE, PERSIST, FORGET, WHERE = "!commit", "!restore", "!persist", "!forget", "!where"
"""What a member is asked beside its workload's methods, by names that no method can have; see ``runtime/host.py``."""


@dataclass(frozen=True)
class Standing:
    """Which commits a member's state agrees with: commit ``c`` and the kept calls of later steps give it for every
    ``c`` from ``since`` to ``at``; none does when both are None.

    Attributes:
        touched: the latest step that the member has taken part in, 0 for none.
    """

    since: int | None = 0
    at: int | None = 0
    touched: int = 0

    def agrees_with(self, step: int) -> bool:
        """Whether the member can go on from the commit of ``step`` as it is."""
        return self.since is not None and self.at is not None and self.since <= step <= self.at


@dataclass(frozen=True)
class Call:
    """One method call on one member.

    Attributes:
        call_id: ``(step, n)``: the n-th role-group call of that step; the same for all members of the group.
        method: the workload's method.
        args: values, :class:`Ref`, lists of :class:`Ref`, or :class:`~dlrover.python.rl.trainer.shard.Rows`.
        kwargs: likewise, by name.
        sized: whether the row count of the result is wanted beside it.
        epoch: of the trainer that calls; lower ones are refused from then on. 0: not a trainer's.
        committed: the last committed step: the member forgets what it kept of the steps up to there.
        keep: whether the member keeps the result, to give the same answer when the id comes again.
        after: id of the call to this member that must have run before; None for any.
    """

    call_id: tuple[int, int]
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sized: bool = False
    epoch: int = 0
    committed: int = 0
    keep: bool = False
    after: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Ref:
    """A result that may not be there yet, or a value put away for several calls.

    Attributes:
        port: the port that made it.
        token: what the port knows it by.
        size: what the port knows its row count by, or None when it was not asked for.
        role: the role called, ``""`` for a value put away.
        rank: the rank called.
        method: the method called.
        incarnation: of the member called, 0 when unknown.
    """

    port: "Port"
    token: Any
    size: Any = None
    role: str = ""
    rank: int = 0
    method: str = ""
    incarnation: int = 0

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value; see :func:`gather`."""
        return gather([self], timeout)[0]

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()

    def __reduce__(self) -> Any:
        raise CallError(
            f"a pending result of {self.role}.{self.method} is nested too deep in an argument: "
            "pass it as an argument of its own or in a list"
        )


@dataclass(frozen=True)
class Outcome:
    """Where one ref stands: a value, an error, or neither yet."""

    value: Any = None
    error: InvocationError | None = None
    late: bool = False


class Port(Protocol):
    """Where the members of role groups run."""

    def put(self, value: Any) -> Ref:
        """Store ``value`` once, for several calls to take."""
        ...

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        """Start ``call`` on a member and return at once."""
        ...

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        """Wait until all refs are there, one has failed, or the time is up; say where each stands."""
        ...


class Pending(list[Ref]):
    """The refs of a call that was not waited for: one for each model replica, in rank order.

    Args:
        refs: the refs of all ranks.
        replica: how many consecutive ranks form one model replica; its first rank's result stands for it, but every
            rank has to succeed.
        post_func: applied to the gathered results by :meth:`result`; a call that takes the refs as an argument gets the
            members' results as they are.
    """

    is_pending = True

    def __init__(
        self, refs: Sequence[Ref], replica: int = 1, post_func: Callable[[list[Any]], Any] | None = None
    ) -> None:
        super().__init__(refs[::replica])
        self._refs, self._replica, self.post_func = list(refs), replica, post_func

    def result(self, timeout: float | None = None) -> Any:
        """Wait for every member's result, at most ``timeout`` seconds; ``post_func`` is applied.

        Raises:
            InvocationTimeout: names the late ranks and holds what arrived.
            InvocationError: a member failed.
        """
        values = gather(self._refs, timeout)[:: self._replica]
        return values if self.post_func is None else self.post_func(values)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()


def gather(refs: Sequence[Ref], timeout_s: float | None) -> list[Any]:
    """Wait for all refs of one call.

    Without a deadline the wait goes on, and the ranks still waited for are logged every
    :data:`STRAGGLER_LOG_INTERVAL_S`.

    Raises:
        InvocationTimeout: some ranks are late; it names them and holds what arrived.
        InvocationError: a member failed; the first failed rank's error, at once.
    """
    if not refs:
        return []
    port = refs[0].port
    waited_s = 0.0
    while True:
        outcomes = port.wait(refs, STRAGGLER_LOG_INTERVAL_S if timeout_s is None else timeout_s)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        late = [ref.rank for ref, outcome in zip(refs, outcomes, strict=True) if outcome.late]
        if not late:
            return [outcome.value for outcome in outcomes]
        if timeout_s is not None:
            arrived = {ref.rank: outcome.value for ref, outcome in zip(refs, outcomes, strict=True) if not outcome.late}
            raise InvocationTimeout(
                role=refs[0].role, method=refs[0].method, timeout_s=timeout_s, late=late, arrived=arrived
            )
        waited_s += STRAGGLER_LOG_INTERVAL_S
        _LOG.warning("%s.%s: still waiting for ranks %s after %g s", refs[0].role, refs[0].method, late, waited_s)
