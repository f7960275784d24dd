# SPDX-License-Identifier: Apache-2.0
"""Role groups: all workers of a role, called as one."""

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import CallError, UnknownMethod
from dlrover.python.rl.common.names import RLRoleType, hint
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.trainer.port import Call, Pending, Port, Ref, gather
from dlrover.python.rl.trainer.shard import Rows, divide, unwrap
from dlrover.python.rl.trainer.workload import InvocationOptions, get_invocation_options

_SCALARS = (type(None), bool, int, float, str, bytes)
_INLINE_BYTES, _INLINE_ALONE_BYTES = 1024, 1 << 20  # for several workers, and for one


@dataclass
class CallCounter:
    """Numbers the calls of a trainer: ``(step, n)``. A caller holds the lock until its call is sent, so that several
    threads send calls in the order of their numbers."""

    step: int = 0
    count: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def open(self, step: int) -> None:
        self.step, self.count = step, 0


@dataclass(frozen=True)
class RoleGroup:
    """The workers of one role. ``group.method(...)`` calls ``method`` on them, with the options of its
    :func:`~dlrover.python.rl.trainer.workload.trainer_invocation` or the defaults.

    An unknown method fails before anything is sent, and names the nearest one. ``len(group)`` is ``world_size``, the
    number of workers. Consecutive ranks form one of ``data_parallel_size`` model replicas: they get the same shard, and
    give one result. ``workload_class`` is the user's class without any decorator."""

    role: RLRoleType
    workload_class: type[Any]
    world_size: int
    data_parallel_size: int
    _port: Port = field(repr=False)
    _counter: CallCounter = field(repr=False)
    full_size: int = 0
    """Number of workers when none lacks a place; 0: ``world_size``."""

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[Any]:
        raise self._refusal()

    def __getitem__(self, rank: Any) -> Any:
        raise self._refusal()

    def _refusal(self) -> TypeError:
        return TypeError(f"RG_{self.role} is called as one; the workers are in trainer.actor_handles['{self.role}']")

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
        return Invocation(self, name, get_invocation_options(method))

    def __dir__(self) -> list[str]:
        return sorted([*object.__dir__(self), *public_methods(self.workload_class)])


@dataclass(frozen=True)
class Invocation:
    group: RoleGroup
    method: str
    settings: InvocationOptions

    def options(self, **options: Any) -> "Invocation":
        """Return the same method with some of its ``trainer_invocation`` options changed for this call."""
        return Invocation(self.group, self.method, self.settings.replace(**options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.settings
        if settings.pre_func is not None:
            changed = settings.pre_func(*args, **kwargs)
            args, kwargs = (changed if isinstance(changed, tuple) else (changed,)), {}
        refs, replica = self._submit(args, kwargs)
        if not settings.blocking:
            return Pending(refs, replica, settings.post_func)
        results = gather(refs, settings.timeout if settings.is_async else None)[::replica]
        return results if settings.post_func is None else settings.post_func(results)

    def _submit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Ref], int]:
        group, settings = self.group, self.settings
        port, sized = group._port, not settings.blocking
        if settings.target == "RANK0":
            world_size = shards = 1
        else:
            world_size, shards = group.world_size, group.data_parallel_size
        replica = world_size // shards
        positional = [self._divide(value, str(index), shards, replica) for index, value in enumerate(args)]
        named = {name: self._divide(value, f"'{name}'", shards, replica) for name, value in kwargs.items()}
        shard_args = [
            (tuple(parts[shard] for parts in positional), {name: parts[shard] for name, parts in named.items()})
            for shard in range(shards)
        ]
        counter = group._counter
        with counter.lock:
            call_id = counter.step, counter.count
            counter.count += 1
            refs = [
                port.submit(group.role, rank, Call(call_id, self.method, *shard_args[rank // replica], sized))
                for rank in range(world_size)
            ]
        return refs, replica

    def _divide(self, value: Any, name: str, shards: int, replica: int) -> list[Any]:
        """Return the part of an argument for each shard, which ``replica`` workers get."""
        label = f"{self.group.role}.{self.method}: argument {name}"
        pending, auto_shard = unwrap(value), self.settings.auto_shard and self.settings.target == "ALL"
        if isinstance(pending, Pending) and pending.post_func is not None:
            raise CallError(f"{label} is pending with a post_func, which runs here: pass its .result()")
        parts = divide(value, shards, auto_shard, label)
        if parts is None:
            return [_store(pending, shards * replica, label, self.group._port)] * shards
        return [_store(part, replica, label, self.group._port) for part in parts]


def _store(value: Any, readers: int, label: str, port: Port) -> Any:
    """Store a value once that several workers take, and return its ref. Also store one that may not be serializable,
    since that must show before any worker begins the call."""
    if isinstance(value, Ref | Rows) or (isinstance(value, list) and any(isinstance(item, Ref) for item in value)):
        return value
    if isinstance(value, _SCALARS) and sys.getsizeof(value) <= _INLINE_BYTES:
        return value
    if readers == 1 and _is_plain_data(value):
        return value
    try:
        return port.put(value)
    except Exception as error:
        root = error.__cause__ or error  # Ray wraps it in a page of advice
        raise CallError(f"{label} cannot be sent: {type(root).__name__}: {root}") from error


def _is_plain_data(value: Any) -> bool:
    if isinstance(value, Batch):
        return all(_is_plain_data(column) for column in value.columns.values())
    if isinstance(value, Ragged):
        return _is_plain_data(value.values)
    if isinstance(value, bytes):
        return len(value) <= _INLINE_ALONE_BYTES
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def public_methods(workload_class: type[Any]) -> list[str]:
    return sorted(
        name
        for name in dir(workload_class)
        if not name.startswith("_") and callable(getattr(workload_class, name, None))
    )


def replicas_of(workload_class: type[Any], config: Any, world_size: int) -> int:
    """Return the workload class's data-parallel size. Raises CallError if it does not divide ``world_size``."""
    size = int(workload_class.data_parallel_size(config, world_size))
    if size < 1 or world_size % size:
        raise CallError(
            f"{workload_class.__name__}.data_parallel_size gave {size}, which does not divide its {world_size} workers"
        )
    return size
