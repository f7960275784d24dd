# SPDX-License-Identifier: Apache-2.0
"""Division of a call's arguments and results over the ranks of a train engine.

:class:`NeedParallel` splits lists, tuples, arrays, tensors, dicts of columns and batches by one rule: the parts are
contiguous, in order, and differ by at most one row, larger ones first. Every rank gets all other arguments whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dlrover.python.rl.common.errors import ShardError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.model.train_module import WHOLE, CallShare
from dlrover.python.rl.trainer.shard import Replicate, Shard, join, row_count, split

Merge = Literal["list", "flat", "mean", "sum", "rank0"]
MERGES = ("list", "flat", "mean", "sum", "rank0")
TYPES = ("dp", "seq")

_TOKEN_COLUMNS = ("tokens", "input_ids")


@dataclass(frozen=True)
class NeedParallel:
    """An argument that is split over the model replicas of a train engine.

    Args:
        value: a list, tuple, array, tensor, dict of equally long columns, or ``Batch``.
        pad: allow fewer rows than replicas. A replica without a row gets the last one again to take part in the
            collectives; its gradient counts nothing and its result is left out.
        type: ``"dp"``: split the rows; all ranks of a replica get the same. ``"seq"``: split the second axis as well,
            into equal parts for the ``context_parallel_size`` ranks of a replica that share its sequences.
    """

    value: Any
    pad: bool = False
    type: Literal["dp", "seq"] = "dp"


def parts_of(value: NeedParallel, replicas: int, context: int, label: str) -> list[tuple[Any, CallShare]]:
    if value.type not in TYPES:
        raise ShardError(f"{label}: NeedParallel has no type '{value.type}'{hint(value.type, TYPES)}")
    rows = count_rows(value.value)
    if rows == 0:
        raise ShardError(f"{label} has no rows for {replicas} model replicas")
    if rows is not None and 0 < rows < replicas and not value.pad:
        count = f"{rows} row{'' if rows == 1 else 's'} for {replicas} model replicas"
        raise ShardError(f"{label} has {count}: NeedParallel(..., pad=True) leaves some without a row")
    real = replicas if rows is None else max(min(rows, replicas), 1)
    pieces = split(value.value, real, label)
    padding = split(value.value, rows, label)[-1] if real < replicas and rows else None
    of_replicas = [(piece, CallShare(count_rows(piece) or 0, count_tokens(piece), rows or 0)) for piece in pieces]
    of_replicas += [(padding, CallShare(of=rows or 0))] * (replicas - real)
    parts: list[tuple[Any, CallShare]] = []
    for piece, share in of_replicas:
        if value.type == "dp" or context == 1:
            parts += [(piece, share)] * context
            continue
        for part in split_sequences(piece, context, label):
            tokens = count_tokens(part) if share.rows else 0
            parts.append((part, replace(share, tokens=tokens, sequences=True)))
    return parts


def split_sequences(value: Any, ranks: int, label: str) -> list[Any]:
    """Cut the second axis of a tensor, array, list of equally long rows, or dict of such columns into equal parts.
    Raises ShardError if there is no such axis, or ``ranks`` does not divide it."""
    if isinstance(value, Mapping):
        columns = {name: split_sequences(column, ranks, f"{label}['{name}']") for name, column in value.items()}
        return [{name: parts[rank] for name, parts in columns.items()} for rank in range(ranks)]
    shape = getattr(value, "shape", None)
    lengths: set[int] = set()
    if shape is not None:
        lengths = set(shape[1:2])
    elif isinstance(value, list | tuple) and all(hasattr(row, "__len__") for row in value):
        lengths = {len(row) for row in value}
    if len(lengths) != 1:
        raise ShardError(f"{label} has no sequences of one length to split: pad its rows to the same length")
    (length,) = lengths
    if length % ranks:
        raise ShardError(f"{label} has sequences of {length} tokens for {ranks} ranks: pad them to a multiple")
    size = length // ranks
    cuts = [slice(start, start + size) for start in range(0, length, size)]
    if shape is None:
        return [[_copied(row[cut]) for row in value] for cut in cuts]
    return [_copied(value[:, cut]) for cut in cuts]


def _copied(part: Any) -> Any:
    return part.clone() if hasattr(part, "untyped_storage") else part  # a torch view is sent with its whole storage


def count_rows(value: Any) -> int | None:
    """Count the rows along the first axis, of a dict in its first column; None if there is none."""
    if isinstance(value, Mapping):
        return next((row_count(column) for column in value.values()), None)
    return len(value) if isinstance(value, range) else row_count(value)


def count_tokens(value: Any) -> int:
    """Count the tokens of an argument: in its column ``tokens`` or ``input_ids``, in rows that have lengths, else one
    for each row."""
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


def split_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], replicas: int, context: int, label: str
) -> tuple[list[Any], dict[str, Any], list[CallShare], list[int | str]]:
    """Split the arguments of one call into a set for each context rank of each replica. Returns positional and named
    arguments for a role group; each set's share of the rows, taken from the wrapped argument with split sequences, or
    else with the most tokens; and positions and names of the wrapped arguments."""
    split: list[int | str] = []
    shares: list[CallShare] = [WHOLE] * (replicas * context)
    divided: dict[int | str, Any] = {}
    named: Iterable[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for at, value in named:
        argument = f"argument {at}" if isinstance(at, int) else f"argument '{at}'"
        if not isinstance(value, NeedParallel):
            items = list(value.values()) if isinstance(value, Mapping) else value
            if isinstance(items, list | tuple) and any(isinstance(item, NeedParallel) for item in items):
                raise ShardError(f"{label}: {argument} has a NeedParallel in it: wrap the whole argument")
            divided[at] = Replicate(value)
            continue
        pieces = parts_of(value, replicas, context, f"{label}: {argument}")
        parts = [share for _, share in pieces]
        if split and [share.rows for share in shares] != [share.rows for share in parts]:
            raise ShardError(f"{label}: {argument} has {parts[0].of} rows, another argument {shares[0].of}")
        weights = [(each[0].sequences, sum(share.tokens for share in each)) for each in (shares, parts)]
        if not split or weights[1] > weights[0]:
            shares = parts
        split.append(at)
        divided[at] = Shard([piece for piece, _ in pieces])
    return [divided[at] for at in range(len(args))], {name: divided[name] for name in kwargs}, shares, split


def merge(results: Sequence[Any], shares: Sequence[CallShare], how: Merge) -> Any:
    """Merge results, without the results of padding. Raises ShardError for results that cannot be merged in this way.

    Args:
        results: one for each replica, or for each rank that has a part of the sequences.
        shares: the share of the rows that each result is of.
        how: ``list``: all results. ``flat``: lists, arrays, tensors or batches joined in order. ``mean``: numbers,
            tensors, or dicts of them, weighted by tokens: by the entry ``tokens`` of a dict (which is summed), else by
            the tokens of the arguments. ``sum``: the same, added. ``rank0``: the first. All but ``list`` give None for
            a method that returns nothing.
    """
    pairs = [(result, share) for result, share in zip(results, shares, strict=True) if share.rows or not share.of]
    values = [result for result, _ in pairs]
    if how == "list":
        return values
    if how == "rank0" or all(value is None for value in values):
        return values[0]
    if how == "flat":
        return join(values)
    if how == "sum":
        return _each(values, _added)
    weights = [float(share.tokens) if share.of else 1.0 for _, share in pairs]
    for at, result in enumerate(values):
        if isinstance(result, Mapping) and "tokens" in result:
            weights[at] = float(result["tokens"])
    return _each(values, lambda numbers: _mean(numbers, weights))


def _each(values: Sequence[Any], combine: Callable[[Sequence[Any]], Any]) -> Any:
    """Combine values, of dicts entry by entry; entries ``tokens`` are always added."""
    first = values[0]
    if not isinstance(first, Mapping):
        return combine(values)
    names = [", ".join(map(repr, each)) if isinstance(each, Mapping) else type(each).__name__ for each in values]
    for value, name in zip(values, names, strict=True):
        if not isinstance(value, Mapping) or value.keys() != first.keys():
            raise ShardError(f"results differ in their entries: {names[0]}; {name}")
    return {name: _each([value[name] for value in values], _added if name == "tokens" else combine) for name in first}


def _added(values: Sequence[Any]) -> Any:
    total = values[0]
    shapes = list(dict.fromkeys(tuple(getattr(value, "shape", ())) for value in values))
    if len(shapes) > 1:
        raise ShardError(f"results of shapes {shapes[0]} and {shapes[1]} have no sum: merge='flat' joins their rows")
    try:
        for value in values[1:]:
            total = total + value
    except TypeError as error:
        raise ShardError(f"results of type {type(total).__name__} cannot be added: {error}") from error
    return total


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    if not sum(weights):
        raise ShardError("the results have no mean: there are no tokens to weight them")
    try:
        return _added([value * weight for value, weight in zip(values, weights, strict=True)]) / sum(weights)
    except TypeError as error:
        raise ShardError(f"results of type {type(values[0]).__name__} have no mean: {error}") from error
