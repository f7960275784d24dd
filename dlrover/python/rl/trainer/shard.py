# SPDX-License-Identifier: Apache-2.0
"""The division of arguments over the workers of a role group.

==========================================  ===========================================================================
argument                                    each of ``n`` shards gets
==========================================  ===========================================================================
``Shard(x)``                                an even part of ``x`` along its first axis
``Shard(x, rows=[4, 0, 2])``                an even part of these rows, in this order
``Shard(x, rows=[[4], [0, 2]])``            these rows: its item of exactly ``n``
``Replicate(x)``                            all of ``x``
list of exactly ``n`` items                 its item
longer list, tuple, array, tensor, Batch    an even part along the first axis
shorter one                                 refused: :class:`~dlrover.python.rl.common.errors.ShardError`
anything else                               all of it; in ``Shard``, what its method ``chunk(n)`` gives
==========================================  ===========================================================================

Even parts keep the order and differ by at most one row, larger ones first. A named tuple, a string and a 0-d array
count as "anything else"; a dict is divided only inside ``Shard``: each of its columns is.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import DataError, ShardError
from dlrover.python.rl.data.batch import Batch, even_cuts


@dataclass(frozen=True)
class Shard:
    """Split ``value`` along its first axis over the shards: a list, tuple, array, tensor, ``Batch``, dict of equally
    long columns, pending results (one sequence of rows; each shard fetches only the rows it needs), or an object of
    another library that divides itself by ``chunk(n)``.

    ``by`` is ``"rows"``, or ``"tokens"`` for even token counts of a ``Batch``; ``rows`` are indices of the rows to
    take, in order, cut into even parts, or one list per shard."""

    value: Any
    by: str = "rows"
    rows: Sequence[int] | Sequence[Sequence[int]] | None = None


@dataclass(frozen=True)
class Replicate:
    """Give all of ``value`` to every worker."""

    value: Any


@dataclass(frozen=True)
class Rows:
    """One shard of pending results: part ``index`` of ``count`` of the joined rows of ``parts``, or the ``chosen`` rows
    in this order."""

    parts: Sequence[Any]
    index: int
    count: int
    chosen: Sequence[int] | None = None


def divide(value: Any, shards: int, auto_shard: bool, label: str) -> list[Any] | None:
    """Return one part per shard, or None if every worker gets all of ``value``. Raises ShardError; ``label`` names the
    argument."""
    if isinstance(value, Replicate):
        return None
    if isinstance(value, Shard):
        return _divide_rows(value, shards, label)
    if not auto_shard or not is_sequence_of_rows(value):
        return None
    if isinstance(value, list) and len(value) == shards:
        return list(value)
    return split(value, shards, label)


def _divide_rows(value: Shard, shards: int, label: str) -> list[Any]:
    pending = getattr(value.value, "is_pending", False)
    if value.by != "rows" and (pending or value.rows is not None):
        reason = "is pending results" if pending else "has its rows chosen"
        raise ShardError(f"{label} {reason}; only a whole Batch can be split by '{value.by}'")
    if value.rows is None:
        if pending:
            return [Rows(tuple(value.value), index, shards) for index in range(shards)]
        return split(value.value, shards, label, value.by)
    if len(value.rows) and isinstance(value.rows[0], Sequence | np.ndarray):
        if len(value.rows) != shards:
            raise ShardError(f"{label} has rows chosen for {len(value.rows)} shards, not for {shards}")
        chosen = [[int(row) for row in part] for part in value.rows]  # type: ignore[union-attr]
    else:
        chosen = [list(map(int, part)) for part in split(list(value.rows), shards, label)]
    if pending:
        return [Rows(tuple(value.value), index, shards, rows) for index, rows in enumerate(chosen)]
    if not (is_sequence_of_rows(value.value) or isinstance(value.value, range)):
        raise ShardError(f"{label} is {type(value.value).__name__}, which has no rows to choose from")
    _check_rows(chosen, len(value.value), label)
    return [_select(value.value, rows) for rows in chosen]


def _check_rows(chosen: Sequence[Sequence[int]], count: int, label: str) -> None:
    if outside := [row for rows in chosen for row in rows if not 0 <= row < count]:
        raise ShardError(f"{label} has {count} rows, and row {outside[0]} was chosen")


def unwrap(value: Any) -> Any:
    return value.value if isinstance(value, Shard | Replicate) else value


def is_sequence_of_rows(value: Any) -> bool:
    if isinstance(value, list | Batch):
        return True
    if isinstance(value, tuple):
        return not hasattr(value, "_fields")
    return _is_array(value)


def _is_array(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0 and hasattr(value, "__getitem__")


def split(value: Any, shards: int, label: str, by: str = "rows") -> list[Any]:
    """Cut ``value`` into even parts; see the module's table."""
    if by != "rows" and not isinstance(value, Batch):
        raise ShardError(f"{label} is {type(value).__name__}; only a Batch can be split by '{by}'")
    if isinstance(value, dict):
        lengths = {name: row_count(column) for name, column in value.items()}
        without = [name for name, length in lengths.items() if length is None]
        if without or not value:
            raise ShardError(f"{label} is a dict without rows to split: {without or 'it is empty'}")
        if len(set(lengths.values())) != 1:
            raise ShardError(f"{label} has columns of different lengths: {lengths}")
        columns = {name: split(column, shards, f"{label}['{name}']") for name, column in value.items()}
        return [{name: parts[index] for name, parts in columns.items()} for index in range(shards)]
    if not (is_sequence_of_rows(value) or isinstance(value, range)):
        return _chunk(value, shards, label)
    rows = len(value)
    if rows < shards:
        raise ShardError(
            f"{label} has {rows} row{'' if rows == 1 else 's'}, too few to split over {shards} shards; "
            "wrap it in Replicate(...) to give all of it to every worker"
        )
    if isinstance(value, Batch):
        try:
            return list(value.split(shards, by))
        except DataError as error:
            raise ShardError(f"{label}: {error}") from error
    cuts = even_cuts(rows, shards)
    parts = [value[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
    # A torch view is sent with its whole storage: copy the slice.
    return [part.clone() if hasattr(part, "untyped_storage") else part for part in parts]


def _chunk(value: Any, shards: int, label: str) -> list[Any]:
    """Split another library's object of rows, such as verl's ``DataProto``, by its method ``chunk``."""
    kind = type(value).__name__
    if hasattr(value, "shape") or not callable(getattr(value, "chunk", None)):
        raise ShardError(f"{label} is {kind}, which has no rows to split; wrap it in Replicate(...)")
    try:
        parts = list(value.chunk(shards))
    except (AssertionError, ValueError) as error:
        raise ShardError(f"{label} is {kind}, which cannot be divided by {shards}: {error}") from error
    if len(parts) != shards:
        raise ShardError(f"{label} is {kind}, whose chunk({shards}) gave {len(parts)} parts")
    return parts


def take_rows(rows: Rows, sizes: Sequence[int | None], fetch: Callable[[Any], Any]) -> Any:
    """Resolve one shard of pending results: ``fetch`` gets the values of the parts that it needs; ``sizes`` are the row
    counts of all parts (None: no rows). Raises ShardError."""
    row_counts = [size for size in sizes if size is not None]
    if len(row_counts) != len(sizes):
        raise ShardError("Shard(...) of pending results needs results with rows (list, tuple, array or Batch)")
    if rows.chosen is not None:
        return _fetch_chosen(rows, row_counts, fetch)
    total = sum(row_counts)
    if total < rows.count:
        raise ShardError(f"pending results have {total} rows, too few to split over {rows.count} shards")
    cuts = even_cuts(total, rows.count)
    wanted_start, wanted_stop = cuts[rows.index], cuts[rows.index + 1]
    pieces, offset = [], 0
    for part, size in zip(rows.parts, row_counts, strict=True):
        start, stop = max(wanted_start - offset, 0), min(wanted_stop - offset, size)
        if start < stop:
            value = fetch(part)
            if (start, stop) != (0, size):
                value = value.rows(start, stop) if isinstance(value, Batch) else value[start:stop]
            pieces.append(value)
        offset += size
    return join(pieces)


def _fetch_chosen(rows: Rows, sizes: Sequence[int], fetch: Callable[[Any], Any]) -> Any:
    chosen = np.asarray(rows.chosen, dtype=np.int64)
    _check_rows([chosen.tolist()], sum(sizes), "Shard(...) of pending results")
    starts = np.cumsum([0, *sizes])
    part_of = np.searchsorted(starts, chosen, side="right") - 1
    needed = np.unique(part_of).tolist() or [0]
    if needed == [0] and not len(chosen):
        return _select(fetch(rows.parts[0]), [])
    pieces = [_select(fetch(rows.parts[part]), (chosen[part_of == part] - starts[part]).tolist()) for part in needed]
    back = np.argsort(np.argsort(part_of, kind="stable"), kind="stable").tolist()
    return _select(join(pieces), back)


def _select(value: Any, rows: list[int]) -> Any:
    if rows == list(range(len(value))):
        return value
    if isinstance(value, Batch):
        return value.take(rows)
    if _is_array(value):
        return value[rows]
    picked = [value[row] for row in rows]
    return tuple(picked) if isinstance(value, tuple) else picked


def join(pieces: Sequence[Any]) -> Any:
    """Concatenate parts of one kind; raises ShardError for other values."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Batch):
        return Batch.concat(pieces)
    if isinstance(first, list):
        return [item for piece in pieces for item in piece]
    if isinstance(first, tuple):
        return tuple(item for piece in pieces for item in piece)
    if isinstance(first, np.ndarray):
        return np.concatenate(pieces)
    if hasattr(first, "new_empty"):
        try:  # torch is imported where there are tensors, and nowhere else
            return sys.modules["torch"].cat(list(pieces))
        except (RuntimeError, TypeError) as error:
            raise ShardError(f"parts that are tensors cannot be joined: {error}") from error
    raise ShardError(f"parts of type {type(first).__name__} cannot be joined; return a Batch, list, array or tensor")


def row_count(value: Any) -> int | None:
    return len(value) if is_sequence_of_rows(value) else None
