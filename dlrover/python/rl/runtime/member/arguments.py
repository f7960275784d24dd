# SPDX-License-Identifier: Apache-2.0
"""Calls on their way to a worker: what is kept of a value, and the arguments among which are results of other calls."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import cloudpickle

from dlrover.python.rl.trainer.port import Call, Ref
from dlrover.python.rl.trainer.shard import Rows, row_count, take_rows

CallId: TypeAlias = tuple[int, int]

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})  # pickle serializes them as well as cloudpickle


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
        if type(value) in _SCALARS:
            return cls(pickle.dumps(value, protocol=5), (), None)
        buffers: list[pickle.PickleBuffer] = []
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        views = [memoryview(buffer.raw()).toreadonly() for buffer in buffers]
        return cls(data, tuple(memoryview(bytes(view)) if own else view for view in views), row_count(value))

    def load(self) -> Any:
        return pickle.loads(self.data, buffers=self.buffers)  # noqa: TID251 -- brought by Ray's own RPC


def _received(data: bytes, buffers: Sequence[Any], rows: int | None) -> Stored:
    return Stored(data, tuple(memoryview(buffer).toreadonly() for buffer in buffers), rows)


@dataclass(frozen=True)
class ListOfRefs:
    """A list argument that mixes values and tokens of results."""

    items: tuple[Any, ...]
    is_ref: tuple[bool, ...]


@dataclass(frozen=True)
class RowsOfRefs:
    """A shard of pending results, and the tokens of its parts' row counts."""

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
        marked = list(zip(value.items, value.is_ref, strict=True))
        fetched = iter(get([item for item, is_ref in marked if is_ref]))
        return [next(fetched) if is_ref else item for item, is_ref in marked]
    if isinstance(value, RowsOfRefs):
        return take_rows(value.rows, get(list(value.sizes)), get)
    return value


class CallHeader(NamedTuple):
    """A call without its arguments; see :class:`~dlrover.python.rl.trainer.port.Call`."""

    call_id: CallId
    method: str
    keywords: tuple[str, ...] = ()  # names of the trailing keyword arguments
    sized: bool = False
    epoch: int = 0
    incarnation: int = 0  # of the worker that is called, 0 for any
    settled: int = 0
    keep: bool = False
    after: CallId | None = None

    @classmethod
    def of(cls, call: Call, incarnation: int) -> "CallHeader":
        signature = call.call_id, call.method, tuple(call.kwargs), call.sized
        return cls(*signature, call.epoch, incarnation, call.settled, call.keep, call.after)

    def pack(self) -> bytes:
        return pickle.dumps(tuple(self), protocol=5)

    @classmethod
    def unpack(cls, data: bytes) -> "CallHeader":
        return cls(*pickle.loads(data))  # noqa: TID251 -- brought by Ray's own RPC
