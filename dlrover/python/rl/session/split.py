"""How the arguments and results of a call are divided over the ranks of a train engine.

:class:`NeedParallel` splits lists, tuples, arrays, tensors, dicts of columns and batches by one rule: the parts are
contiguous, in order, and differ by at most one row, larger ones first. Everything else goes to every rank whole.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dlrover.python.rl.common.errors import ShardError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.trainer.port import Port, Ref
from dlrover.python.rl.trainer.shard import join, row_count, split

Merge = Literal["list", "flat", "mean", "sum", "rank0"]
MERGES = ("list", "flat", "mean", "sum", "rank0")

_TOKEN_COLUMNS = ("tokens", "input_ids")
_SCALARS = (type(None), bool, int, float, str)
_INLINE_BYTES = 1024


@dataclass(frozen=True)
class NeedParallel:
    """An argument of which each model replica of a train engine gets its part.

    Args:
        value: a list, tuple, array, tensor, dict of equally long columns, or ``Batch``.
        pad: allow fewer rows than replicas. A replica without a row gets the last one again, so that it takes part in
            the collectives; its gradient counts nothing and its result is left out.
    """

    value: Any
    pad: bool = False


@dataclass(frozen=True)
class Part:
    """What one replica gets of the wrapped arguments of a call.

    Attributes:
        rows: of its own; 0 for padding.
        tokens: in them, to weight results by.
        of: rows of all replicas.
    """

    rows: int
    tokens: int
    of: int


@dataclass(frozen=True)
class Arranged:
    """The arguments of a call for one replica; ``part`` is None where nothing was wrapped."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: Part | None


def parts_of(value: NeedParallel, replicas: int, label: str) -> list[tuple[Any, Part]]:
    """Split one wrapped argument.

    Raises:
        ShardError: it has no rows; or fewer than ``replicas``, and is not to be padded.
    """
    rows = count_rows(value.value)
    if rows is not None and 0 < rows < replicas and not value.pad:
        raise ShardError(
            f"{label} has {rows} row{'' if rows == 1 else 's'} for {replicas} model replicas: "
            "NeedParallel(..., pad=True) lets some of them go without"
        )
    real = replicas if rows is None else max(min(rows, replicas), 1)
    pieces = split(value.value, real, label)
    padding = split(value.value, rows, label)[-1] if real < replicas and rows else None
    told = [(piece, Part(count_rows(piece) or 0, count_tokens(piece), rows or 0)) for piece in pieces]
    return told + [(padding, Part(0, 0, rows or 0))] * (replicas - real)


def count_rows(value: Any) -> int | None:
    """Rows along the first axis, of a dict those of its columns; None where there are none."""
    if isinstance(value, Mapping):
        return next((row_count(column) for column in value.values()), None)
    return len(value) if isinstance(value, range) else row_count(value)


def count_tokens(value: Any) -> int:
    """Tokens in an argument: those of the column ``tokens`` or ``input_ids`` where it has columns, of the rows
    themselves where these have lengths, else one for each row."""
    columns = value.columns if isinstance(value, Batch) else value
    if isinstance(columns, Mapping):
        named = next((columns[name] for name in _TOKEN_COLUMNS if name in columns), None)
        return (count_rows(value) or 0) if named is None else count_tokens(named)
    if isinstance(columns, Ragged):
        return len(columns.values)
    shape = getattr(columns, "shape", None)
    if shape is not None:
        return int(shape[0]) * (int(shape[1]) if len(shape) > 1 else 1)
    return sum(len(row) if hasattr(row, "__len__") and not isinstance(row, str) else 1 for row in columns)


def arrange(
    args: Sequence[Any], kwargs: Mapping[str, Any], replicas: int, label: str, store: Callable[[Any], Any]
) -> list[Arranged]:
    """One set of arguments for each replica.

    Args:
        args: as the caller wrote them.
        kwargs: likewise.
        replicas: of the model.
        label: the call's name in error messages.
        store: puts away a value that every rank takes.

    Raises:
        ShardError: a wrapped argument cannot be split, or two have different numbers of rows.
    """
    parts: list[Part] | None = None

    def divided(value: Any, name: str) -> list[Any]:
        nonlocal parts
        if not isinstance(value, NeedParallel):
            return [store(value)] * replicas
        pieces = parts_of(value, replicas, f"{label}: argument {name}")
        found = [part for _, part in pieces]
        if parts is not None and [part.rows for part in parts] != [part.rows for part in found]:
            raise ShardError(f"{label}: argument {name} has {found[0].of} rows, another one {parts[0].of}")
        # Of two wrapped arguments the one with more tokens in it has the sequences.
        if parts is None or sum(part.tokens for part in found) > sum(part.tokens for part in parts):
            parts = found
        return [piece for piece, _ in pieces]

    positional = [divided(value, str(index)) for index, value in enumerate(args)]
    named = {name: divided(value, f"'{name}'") for name, value in kwargs.items()}
    return [
        Arranged(
            tuple(pieces[at] for pieces in positional),
            {name: pieces[at] for name, pieces in named.items()},
            parts[at] if parts is not None else None,
        )
        for at in range(replicas)
    ]


def stored_by(port: Port) -> Callable[[Any], Any]:
    """Puts a value away once for all ranks, unless it is small."""

    def store(value: Any) -> Any:
        if isinstance(value, Ref) or (isinstance(value, _SCALARS) and sys.getsizeof(value) <= _INLINE_BYTES):
            return value
        return port.put(value)

    return store


# -- results ----------------------------------------------------------------------------------------------------------


def merge(results: Sequence[Any], parts: Sequence[Part | None], how: Merge) -> Any:
    """Put the replicas' results together; those of padding are left out.

    Args:
        results: one for each replica.
        parts: what each got.
        how: ``list``: as they are. ``flat``: lists, arrays, tensors or batches joined in order. ``mean``: numbers,
            tensors, or dicts of them, weighted by tokens: by the entry ``tokens`` of a dict (which is summed), else by
            those of the arguments. ``sum``: likewise, added. ``rank0``: the first.

    Raises:
        ShardError: results cannot be put together in this way.
    """
    pairs = [(result, part) for result, part in zip(results, parts, strict=True) if part is None or part.rows]
    values = [result for result, _ in pairs]
    if how == "list":
        return values
    if how == "rank0":
        return values[0]
    if how == "flat":
        return join(values)
    if how == "sum":
        return _each(values, _added)
    weights = [_weight(result, part) for result, part in pairs]
    return _each(values, lambda numbers: _mean(numbers, weights))


def _weight(result: Any, part: Part | None) -> float:
    if isinstance(result, Mapping) and "tokens" in result:
        return float(result["tokens"])
    return float(part.tokens) if part is not None else 1.0


def _each(values: Sequence[Any], combine: Callable[[Sequence[Any]], Any]) -> Any:
    """``combine`` of the values, of dicts entry by entry; ``tokens`` are added in any case."""
    first = values[0]
    if not isinstance(first, Mapping):
        return combine(values)
    return {name: _each([value[name] for value in values], _added if name == "tokens" else combine) for name in first}


def _added(values: Sequence[Any]) -> Any:
    total = values[0]
    try:
        for value in values[1:]:
            total = total + value
    except TypeError as error:
        raise ShardError(f"results of type {type(total).__name__} cannot be added: {error}") from error
    return total


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    if not sum(weights):
        raise ShardError("the results have no mean: there are no tokens to weight them by")
    try:
        return _added([value * weight for value, weight in zip(values, weights, strict=True)]) / sum(weights)
    except TypeError as error:
        raise ShardError(f"results of type {type(values[0]).__name__} have no mean: {error}") from error
