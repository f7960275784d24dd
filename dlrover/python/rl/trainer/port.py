# SPDX-License-Identifier: Apache-2.0
"""The protocols that the package ``runtime`` implements: :class:`Port`, by which the trainer calls the workers, and
:class:`Recovery` and :class:`Checkpoints`, which durable steps need.

There are ports for Ray, for processes that a launcher starts, and for a single process; one contract suite tests all of
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
"""Requests to a worker that do not call its workload's methods; none is a valid method name. See ``MemberHost``."""


@dataclass(frozen=True)
class Standing:
    """The position of a worker. A trainer can continue from each commit from ``since`` to ``at`` with the worker as it
    is, because the worker keeps the results of later calls; from no commit if both are None. ``touched`` is the latest
    step that the worker took part in, or 0. The worker has forgotten the results of its calls up to step ``settled``.
    ``deterministic`` is True if a repeated call gives the same result again."""

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
    epoch: int = 0  # the calling trainer's; the worker then refuses calls of lower epochs. 0: not from a trainer
    settled: int = 0  # the last step that has ended: the worker forgets the results up to it
    keep: bool = False  # the worker keeps the result, and answers a repeated id with it
    after: tuple[int, int] | None = None  # id of a call that the worker must have run before; None: no such call


@dataclass(eq=False, repr=False)  # not frozen, for speed: each call creates several
class Ref:
    """A result that may be pending, or a stored value (``role`` is ``""``). ``token`` and ``size`` are the port's
    handles of the value and, if requested, of its row count; ``incarnation`` is 0 if unknown."""

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
        """Return a ref that shows whether the call succeeded: the row count's, if it was requested, so that the result
        itself is not fetched."""
        if self.size is None:
            return self
        return Ref(self.port, self.size, self.size, self.role, self.rank, self.method, self.incarnation)

    def rebind(self, port: "Port", token: Any) -> "Ref":
        """Return a ref for the same call to callers of ``port``, which wraps this ref's port."""
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
    """The value or the error of a ref; ``late``: there is neither yet."""

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
    """The pending results of a call. Each model replica, which is ``replica`` consecutive ranks, gives one: the ref of
    its first rank. Every rank must succeed. :meth:`result` applies ``post_func``; when the pending results are
    passed to another call, ``post_func`` is not applied."""

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
        """Wait until every worker has succeeded, without fetching the results. Raises as :func:`gather`."""
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
    count: int = 0  #: restarts of the trainer or job so far, also those within its process
    reason: str = ""  #: why it was last restarted, in one line; "" if it was not
    step: int = 0  #: the last committed step, 0 for none


@dataclass(frozen=True)
class Renewed:
    """The workers of a role after a replacement, by rank: the incarnations of all of them, and the raw handles of at
    least the new ones."""

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
    """Replaces lost workers; this base class replaces none. ``fresh``: True if the workers hold no state of an earlier
    epoch."""

    epoch: int = 1
    fresh: bool = True
    restart_info: RestartInfo = RestartInfo()

    def incarnations(self) -> Mapping[ProcessId, int]:
        return {}

    def renew(self, role: str, rank: int, incarnation: int, why: str) -> Renewed:
        """Block until the port calls a later incarnation of the worker and of all workers that restart with it; return
        at once if it already does. ``incarnation`` is the dead one (0: unknown). Thread safe. Raises JobFailed if there
        will be no replacement."""
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
    """A copy of files from one worker's node to another's, in ``parts``. For each part the trainer sends ``READ`` with
    the part to the source, and ``STORE`` with the part and the content that was read to the target. Without a source it
    sends ``content`` instead."""

    target: ProcessId
    parts: tuple[Any, ...]
    source: ProcessId | None = None
    content: Any = None


class Checkpoints(Protocol):
    """A store for commits. The trainer passes its requests to the workers without reading them."""

    run: str
    """The id of the run whose commits the store holds; the run may have begun with another run's commits."""

    spread: bool
    """True if commits are in the memory of several nodes: the trainer then makes the transfers between nodes, and
    reports to the store which commits each node holds."""

    last_known: LastCommit | None
    """The last commit, or None. Even if its files are lost, it distinguishes workers that hold its state from new
    workers."""

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
        """Return the argument of ``WRITTEN``, which a worker answers like ``COMMIT``: at once or, if it ``waits``, once
        its state is written."""

    def copies(self, answers: Mapping[ProcessId, Any], nodes: Mapping[ProcessId, str]) -> list[Transfer] | None:
        """Return the transfers that let the commit survive a node's loss; None while a worker is still writing."""

    def commit(self, step: int, answers: Mapping[ProcessId, Any], copied: Mapping[Transfer, str]) -> None:
        """Complete the commit of ``step`` with the workers' answers; ``copied`` maps each transfer that has arrived to
        its node. Raises StaleEpoch."""

    def trainers_copy(self, nodes: Mapping[ProcessId, str]) -> list[Transfer]:
        """Return the transfer of the trainer's part of the last commit."""

    def transfers_to(self, step: int, members: Collection[ProcessId], nodes: Mapping[ProcessId, str]) -> list[Transfer]:
        """Return the transfers that the nodes of ``members`` need to restore ``step``."""

    def found(self, commits: Mapping[str, Any]) -> None:
        """Record the answer to ``HELD`` of each node that has workers. Called before :meth:`newest`."""

    def persist_request(self) -> Any:
        """Return the argument of ``PERSIST``: finish the copy in ``job_dir``. None if there is nothing to copy."""

    def persisted(self, answers: Mapping[ProcessId, Any]) -> None:
        """Publish the copy, once every worker has finished its part."""


def gone_incarnation(incarnation: int, role: str, rank: int, method: str) -> errors.WorkloadDied:
    """Return the error for a call to an earlier incarnation, whose process now runs a later one."""
    died = errors.WorkloadDied("its peers are being replaced, and it joins them", role=role, rank=rank, method=method)
    died.incarnation = incarnation
    return died


def is_damage(error: BaseException) -> bool:
    original = error.original if isinstance(error, InvocationError) else error
    return isinstance(original, errors.CheckpointCorrupt | errors.CheckpointMissing)


BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds in seconds; one more bucket is unbounded."""

CallCounts = Mapping[tuple[str, str], tuple[float, ...]]
"""Role and method to the number of calls in each bucket; the last value is the sum of their seconds."""
