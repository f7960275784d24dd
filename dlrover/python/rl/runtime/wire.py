"""How arguments travel to a member of another process: plain values, top-level refs as the port knows them, and the two
shapes that hold nested ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dlrover.python.rl.trainer.port import Ref
from dlrover.python.rl.trainer.shard import Rows, take_rows


@dataclass(frozen=True)
class ListOfRefs:
    """A list argument that mixes values and refs; ``is_ref`` says which is which."""

    items: tuple[Any, ...]
    is_ref: tuple[bool, ...]


@dataclass(frozen=True)
class RowsOfRefs:
    """One shard of pending results, whose parts are refs, and refs of the parts' row counts."""

    rows: Rows
    sizes: tuple[Any, ...]


def encode(value: Any) -> Any:
    """What is sent for one argument. A :class:`Ref` becomes its token, which Ray resolves before the call."""
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
    """What the workload's method sees of one argument; ``get`` fetches a token's value, or those of a list of
    them."""
    if isinstance(value, ListOfRefs):
        return [get(item) if is_ref else item for item, is_ref in zip(value.items, value.is_ref, strict=True)]
    if isinstance(value, RowsOfRefs):
        return take_rows(value.rows, get(list(value.sizes)), get)
    return value
