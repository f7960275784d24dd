"""Role groups: all members of a role, called as one."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import CallError, UnknownMethod
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.trainer.invocation import InvocationPolicy, policy_of
from dlrover.python.rl.trainer.port import Call, Pending, Port, Ref, gather
from dlrover.python.rl.trainer.shard import Rows, divide, unwrap

_SCALARS = (type(None), bool, int, float, str, bytes)
_INLINE_BYTES = 1024


@dataclass
class CallCounter:
    """Numbers the role-group calls of a trainer: ``(step, n)``. Whoever takes a number holds the lock until the call is
    on its way, so that calls from several threads are sent in the order of their numbers."""

    step: int = 0
    _next: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def open(self, step: int) -> None:
        """Begin ``step``: its first call is number 0."""
        self.step, self._next = step, 0

    def take(self) -> tuple[int, int]:
        """The id of the next call."""
        number, self._next = self._next, self._next + 1
        return self.step, number


@dataclass(frozen=True)
class RoleGroup:
    """The members of one role. ``group.method(...)`` calls ``method`` on them as its policy says.

    The policy is the method's :func:`~dlrover.python.rl.trainer.invocation.trainer_invocation`, or its defaults for an
    undecorated method. A name that the workload does not have fails at once, with the nearest one, before anything is
    sent. ``len(group)`` is the number of members.

    Attributes:
        role: the role's name.
        workload_class: the user's class, unwrapped from any decorator.
        world_size: the number of members.
        data_parallel_size: the number of model replicas; consecutive ranks form one, get the same shard, and give one
            result.
    """

    role: RLRoleType
    workload_class: type[Any]
    world_size: int
    data_parallel_size: int
    _port: Port = field(repr=False)
    _counter: CallCounter = field(repr=False)

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"RG_{self.role} is called as one; the members are in trainer.actor_handles['{self.role}']")

    def __getattr__(self, name: str) -> "Invocation":
        if name.startswith("_"):
            raise AttributeError(f"RG_{self.role} has no attribute '{name}'")
        method = getattr(self.workload_class, name, None)
        if not callable(method):
            kind = "a property, not a method, of" if method is not None else "no method of"
            raise UnknownMethod(
                f"'{name}' is {kind} {self.workload_class.__name__}, the workload of {self.role}"
                f"{hint(name, public_methods(self.workload_class))}"
            )
        return Invocation(self, name, policy_of(method))

    def __dir__(self) -> list[str]:
        return sorted([*object.__dir__(self), *public_methods(self.workload_class)])


@dataclass(frozen=True)
class Invocation:
    """One method of a role group, ready to be called."""

    group: RoleGroup
    method: str
    policy: InvocationPolicy

    def options(self, **options: Any) -> "Invocation":
        """The same method with some of its ``trainer_invocation`` options changed for this call."""
        return Invocation(self.group, self.method, self.policy.replace(**options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy
        if policy.pre_func is not None:
            changed = policy.pre_func(*args, **kwargs)
            args, kwargs = (changed if isinstance(changed, tuple) else (changed,)), {}
        refs, replica = self._submit(args, kwargs)
        if not policy.blocking:
            return Pending(refs, replica, policy.post_func)
        results = gather(refs, policy.timeout if policy.is_async else None)[::replica]
        return results if policy.post_func is None else policy.post_func(results)

    def _submit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Ref], int]:
        """Send the call; return the refs of all ranks and how many ranks make one model replica."""
        group, policy = self.group, self.policy
        port, sized = group._port, not policy.blocking
        if policy.target == "RANK0":
            world_size = shards = 1
        else:
            world_size, shards = group.world_size, group.data_parallel_size
        replica = world_size // shards
        auto_shard = policy.auto_shard and policy.target == "ALL"
        arranged = _Arguments(port, shards, replica, auto_shard, self._label).arrange(args, kwargs)
        with group._counter.lock:
            call_id = group._counter.take()
            refs = [
                port.submit(group.role, rank, Call(call_id, self.method, *arranged[rank // replica], sized))
                for rank in range(world_size)
            ]
        return refs, replica

    def _label(self, argument: str) -> str:
        return f"{self.group.role}.{self.method}: argument {argument}"


@dataclass(frozen=True)
class _Arguments:
    """Turns the caller's arguments into one set per shard."""

    port: Port
    shards: int
    replica: int
    auto_shard: bool
    label: Callable[[str], str]

    def arrange(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        positional = [self._one(value, str(index)) for index, value in enumerate(args)]
        named = {name: self._one(value, f"'{name}'") for name, value in kwargs.items()}
        return [
            (tuple(parts[shard] for parts in positional), {name: parts[shard] for name, parts in named.items()})
            for shard in range(self.shards)
        ]

    def _one(self, value: Any, name: str) -> list[Any]:
        pending = unwrap(value)
        if isinstance(pending, Pending) and pending.post_func is not None:
            raise CallError(f"{self.label(name)} is pending with a post_func, which runs here: pass its .result()")
        parts = divide(value, self.shards, self.auto_shard, self.label(name))
        if parts is None:
            return [self._stored(unwrap(value), self.shards * self.replica, name)] * self.shards
        return [self._stored(part, self.replica, name) for part in parts]

    def _stored(self, value: Any, takers: int, name: str) -> Any:
        """A value that several members take is stored once and handed out by reference.

        So is one that may turn out to be unsendable: that has to show before any member has begun the call.
        """
        if isinstance(value, Ref | Rows) or (isinstance(value, list) and any(isinstance(item, Ref) for item in value)):
            return value
        if isinstance(value, _SCALARS) and sys.getsizeof(value) <= _INLINE_BYTES:
            return value
        if takers == 1 and _is_plain_data(value):
            return value
        try:
            return self.port.put(value)
        except Exception as error:  # noqa: BLE001 -- serialising runs the value's own code
            root = error.__cause__ or error  # Ray wraps it in a page of advice
            raise CallError(f"{self.label(name)} cannot be sent: {type(root).__name__}: {root}") from error


def _is_plain_data(value: Any) -> bool:
    """Whether a value certainly can be sent: numbers in arrays."""
    if isinstance(value, Batch):
        return all(_is_plain_data(column) for column in value.columns.values())
    if isinstance(value, Ragged):
        return _is_plain_data(value.values)
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def public_methods(workload_class: type[Any]) -> list[str]:
    """Names of the methods a role group can call: public and callable."""
    return sorted(
        name
        for name in dir(workload_class)
        if not name.startswith("_") and callable(getattr(workload_class, name, None))
    )


def replicas_of(workload_class: type[Any], config: Any, world_size: int) -> int:
    """Ask the workload class for its data-parallel size and check that it divides the group.

    Raises:
        CallError: the answer is not a divisor of ``world_size``.
    """
    size = int(workload_class.data_parallel_size(config, world_size))
    if size < 1 or world_size % size:
        raise CallError(
            f"{workload_class.__name__}.data_parallel_size gave {size}, which does not divide its {world_size} members"
        )
    return size
