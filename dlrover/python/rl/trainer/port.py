# SPDX-License-Identifier: Apache-2.0
"""The protocols that ``runtime`` implements: the port to the workers' processes, and the needs of durable steps.

There are ports for Ray, for the processes of a launcher, and for one process; one contract suite runs against all of
them. A trainer can run without :class:`Recovery` and :class:`Checkpoints`; a failure then ends it."""

import asyncio
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId

_LOG = get_logger(__name__)

STRAGGLER_LOG_INTERVAL_S = 15.0

RAW_CALL = (-1, -1)
"""The id of a call through a raw handle, which belongs to no step."""

COMMIT, WRITTEN, RESTORE, PERSIST = "!commit", "!written", "!restore", "!persist"
READ, STORE, HELD = "!read", "!store", "!held"
FORGET, WHERE = "!forget", "!where"
"""Requests to a worker that are not methods of its workload, and no valid names of methods. See ``MemberHost``."""


@dataclass(frozen=True)
class Standing:
    """The position of a worker. Its state agrees with each commit from ``since`` to ``at``, together with the calls of
    later steps that it keeps; with none if both are None. ``touched`` is the latest step that it took part in, 0 for
    none; it has forgotten the results of its calls up to step ``settled``. ``deterministic``: a repeated call gives the
    same result again."""

    since: int | None = 0
    at: int | None = 0
    touched: int = 0
    settled: int = field(default=0, compare=False)
    deterministic: bool = field(default=False, compare=False)
    node: str = field(default="", compare=False)  # where the worker runs

    def agrees_with(self, step: int) -> bool:
        return self.since is not None and self.at is not None and self.since <= step <= self.at


class Call(NamedTuple):
    call_id: tuple[int, int]  # (step, n): the n-th role-group call of that step; the same for all workers of the group
    method: str
    args: tuple[Any, ...]  # values, Refs, lists of Refs, or Rows
    kwargs: Mapping[str, Any]
    sized: bool = False  # return the row count of the result beside it
    epoch: int = 0  # of the calling trainer; the worker refuses lower ones from then on. 0: not a trainer's call
    settled: int = 0  # the last ended step, up to which the worker forgets its results
    keep: bool = False  # the worker keeps the result, and answers a repeated id with it
    after: tuple[int, int] | None = None  # id of the call to this worker that must have run before; None for any


@dataclass(eq=False, repr=False)  # not frozen: each call makes some, and a frozen one sets its fields one by one
class Ref:
    """A result that may be pending, or a stored value (``role`` is ``""``). ``token`` and ``size`` are the port's
    handles of the value and, if requested, of its row count; ``incarnation`` 0 is unknown."""

    port: "Port"
    token: Any
    size: Any = None
    role: str = ""
    rank: int = 0
    method: str = ""
    incarnation: int = 0

    def result(self, timeout: float | None = None) -> Any:
        return gather([self], timeout)[0]

    def probe(self) -> "Ref":
        """Return a ref that tells whether the call succeeded; it avoids the value if the row count was requested."""
        if self.size is None:
            return self
        return Ref(self.port, self.size, self.size, self.role, self.rank, self.method, self.incarnation)

    def rebind(self, port: "Port", token: Any) -> "Ref":
        """Return the ref that an outer port hands out for the same call."""
        return Ref(port, token, None, self.role, self.rank, self.method)

    def __repr__(self) -> str:
        return f"<result of {ProcessId(self.role, self.rank)}.{self.method}>" if self.role else "<stored value>"

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()

    def __reduce__(self) -> Any:
        raise errors.CallError(
            f"a pending result of {self.role}.{self.method} is nested too deep in an argument: "
            "pass it as a separate argument or in a list"
        )


class Outcome(NamedTuple):
    """The value or the error of a ref; ``late``: neither yet."""

    value: Any = None
    error: InvocationError | None = None
    late: bool = False


class Port(Protocol):
    def put(self, value: Any) -> Ref:
        """Store ``value`` once, for several calls."""

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        """Start ``call`` on a worker and return at once."""

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        """Wait until all refs have values, one has failed, or the time is up."""


class Pending(list[Ref]):
    """The refs of a call that was not waited for: the first rank's of each model replica of ``replica`` consecutive
    ranks, though every rank must succeed. :meth:`result` applies ``post_func``; as an argument of a call it is not
    applied."""

    is_pending = True
    __eq__ = object.__eq__

    def __init__(
        self, refs: Sequence[Ref], replica: int = 1, post_func: Callable[[list[Any]], Any] | None = None
    ) -> None:
        super().__init__(refs[::replica])
        self._refs, self._replica, self.post_func = list(refs), replica, post_func

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)  # asyncio.gather needs it

    def __repr__(self) -> str:
        return f"<{len(self)} results of {self[0].role}.{self[0].method}>" if self else "<no results>"

    @property
    def refs(self) -> list[Ref]:
        """The refs of all ranks, in rank order."""
        return list(self._refs)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for every worker's result, at most ``timeout`` seconds, and apply ``post_func``. Raises as
        :func:`gather`."""
        values = gather(self._refs, timeout)[:: self._replica]
        return values if self.post_func is None else self.post_func(values)

    def wait(self) -> None:
        """Wait until every worker has succeeded; the results stay where they are. Raises as :func:`gather`."""
        gather([ref.probe() for ref in self._refs], None)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()


def gather(refs: Sequence[Ref], timeout_s: float | None) -> list[Any]:
    """Wait for all refs of one call; without a deadline, log late ranks every ``STRAGGLER_LOG_INTERVAL_S``. Raises the
    first InvocationError at once, or InvocationTimeout with the late ranks and the results that arrived."""
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
            raise errors.InvocationTimeout(
                role=refs[0].role, method=refs[0].method, timeout_s=timeout_s, late=late, arrived=arrived
            )
        waited_s += STRAGGLER_LOG_INTERVAL_S
        _LOG.warning("%s.%s: still waiting for ranks %s after %g s", refs[0].role, refs[0].method, late, waited_s)


@dataclass(frozen=True)
class RestartInfo:
    count: int = 0  #: of the trainer or the job so far, including those inside its process
    reason: str = ""  #: of the last restart, one line; "" for none
    step: int = 0  #: the last committed step, 0 for none


@dataclass(frozen=True)
class Renewed:
    """The workers of a role after a replacement: all incarnations, and at least the new raw handles, by rank."""

    role: str
    incarnations: Mapping[int, int]
    handles: Mapping[int, Any]


@dataclass(frozen=True)
class RoleTraits:
    """The properties of a role that matter to recovery. ``together``: its ranks meet in collectives, so all restart
    if one fails."""

    size: int
    stateful: bool = False
    together: bool = False


def members_of(roles: Mapping[str, RoleTraits], stateful_only: bool = False) -> list[ProcessId]:
    return [
        ProcessId(role, rank)
        for role, traits in roles.items()
        for rank in range(traits.size)
        if traits.stateful or not stateful_only
    ]


class Recovery:
    """Replaces lost workers; this base class none. ``fresh``: the workers hold no state of an earlier epoch."""

    epoch: int = 1
    fresh: bool = True
    restart_info: RestartInfo = RestartInfo()

    def incarnations(self) -> Mapping[ProcessId, int]:
        return {}

    def renew(self, role: str, rank: int, incarnation: int, why: str) -> Renewed:
        """Block until the port calls a later incarnation of the worker, and of all that restart with it; return at once
        if it already does. ``incarnation`` is the dead one (0: unknown). Thread safe. Raises JobFailed if there will be
        no replacement."""
        raise errors.JobFailed(f"{ProcessId(role, rank)} is lost, and nothing replaces it here: {why}")

    def opened(self) -> None:
        """Called once in each epoch, when the trainer enters ``steps()``: from here on failures are recovered."""

    def began(self, step: int, /) -> None:
        """Called at the start of a step; must return at once."""

    def progressed(self, step: int, /) -> None:
        """Called after a commit; must return at once."""


@dataclass(frozen=True)
class LastCommit:
    """The last commit, even if it is lost, and the latest incarnation of each stateful worker in it."""

    step: int
    incarnations: Mapping[ProcessId, int]


@dataclass(frozen=True, eq=False)
class Transfer:
    """Files on their way from one worker's node to another's, in ``parts``. Each part is the argument of ``READ`` to
    the source, and of ``STORE`` to the target, with the content that was read or, without a source, ``content``."""

    target: ProcessId
    parts: tuple[Any, ...]
    source: ProcessId | None = None
    content: Any = None


class Checkpoints(Protocol):
    """A store for commits. The trainer passes its requests to the workers without reading them."""

    run: str
    """The id of the run whose commits it keeps; it may begin with another run's commits."""

    spread: bool
    """True if commits are in the memory of several nodes: then the trainer makes the transfers, and reports the
    contents of the nodes."""

    last_known: LastCommit | None
    """The last commit, None for none. Even if it is lost, it tells workers that hold its state from new ones."""

    roots: Any
    """The argument of ``HELD``, the request for the commits on a node."""

    def newest(self) -> int | None:
        """Return the step of the newest commit that looks intact from here, None before the first one. Discard damaged
        commits, with a log line. Raises CheckpointMissing if all are lost."""

    def load(self, step: int) -> Mapping[str, Any]:
        """Return the trainer's state in the commit that :meth:`newest` returned. Raises CheckpointCorrupt,
        CheckpointMissing."""

    def discard(self, step: int, why: str) -> None:
        """Discard the commit of ``step``: a worker could not read its part."""

    def restore_request(self, step: int) -> Any:
        """Return the argument of ``RESTORE``, the request to go back to ``step``."""

    @property
    def adapts(self) -> bool:
        """True if commits may be several steps apart, provided that the steps are deterministic."""

    def set_deterministic(self, deterministic: bool) -> None:
        """Set whether repeated steps give the same results again."""

    def is_due(self, step: int, last: bool) -> bool:
        """Return True if ``step``, which has just ended, is to be committed. ``last``: no step follows."""

    def commit_request(self, step: int, last: bool) -> Any:
        """Return the argument of ``COMMIT``, the request to begin to write the state after ``step``."""

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the trainer's state after ``step``, whose commit was requested."""

    def written_request(self, waits: bool) -> Any:
        """Return the argument of ``WRITTEN``: answer like ``COMMIT``, once the state is written if it ``waits``."""

    def copies(self, answers: Mapping[ProcessId, Any], nodes: Mapping[ProcessId, str]) -> list[Transfer] | None:
        """Return the transfers that let the commit survive a node's loss; None while a worker writes its state."""

    def commit(self, step: int, answers: Mapping[ProcessId, Any], copied: Mapping[Transfer, str]) -> None:
        """Make ``step`` a commit of the workers' answers; ``copied`` has the node of each transfer that has arrived.
        Raises StaleEpoch."""

    def trainers_copy(self, nodes: Mapping[ProcessId, str]) -> list[Transfer]:
        """Return the transfer of the trainer's part of the last commit."""

    def transfers_to(self, step: int, members: Collection[ProcessId], nodes: Mapping[ProcessId, str]) -> list[Transfer]:
        """Return the transfers that the nodes of ``members`` need to restore ``step``."""

    def found(self, commits: Mapping[str, Any]) -> None:
        """Take note of the answer of each node that has workers, before :meth:`newest`."""

    def persist_request(self) -> Any:
        """Return the argument of ``PERSIST``: finish the copy in ``job_dir``. None if there is nothing to copy."""

    def persisted(self, answers: Mapping[ProcessId, Any]) -> None:
        """Publish the copy, once every worker has finished its part."""


def gone_incarnation(incarnation: int, role: str, rank: int, method: str) -> errors.WorkloadDied:
    """Return the error of a call to an incarnation whose process continues as a later one."""
    died = errors.WorkloadDied("its peers are being replaced, and it joins them", role=role, rank=rank, method=method)
    died.incarnation = incarnation
    return died


def is_damage(error: BaseException) -> bool:
    original = error.original if isinstance(error, InvocationError) else error
    return isinstance(original, errors.CheckpointCorrupt | errors.CheckpointMissing)


BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds in seconds; one more bucket is unbounded."""

CallCounts = Mapping[tuple[str, str], tuple[float, ...]]
"""(role, method) to the count of each bucket; the last value is the sum of seconds."""
