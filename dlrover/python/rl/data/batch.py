# SPDX-License-Identifier: Apache-2.0
"""Columnar batches with ragged rows, which workloads exchange: contiguous numpy, which Ray's store does not copy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.names import hint

Array: TypeAlias = npt.NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Row ``i`` is ``values[offsets[i]:offsets[i + 1]]``; ``values`` ``[total, ...]``, ``offsets`` int64 ``[rows +
    1]``."""

    values: Array
    offsets: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: npt.DTypeLike | None = None) -> "Ragged":
        """Build from 1-D rows (lists or arrays); ``dtype`` is required if all rows may be empty."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        filled = [array for array in arrays if len(array)]
        values = np.concatenate(filled) if filled else np.empty(0, dtype=dtype or np.int64)
        return cls(np.ascontiguousarray(values, dtype=dtype), offsets)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        row = range(len(self))[row]
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    def rows(self, start: int, stop: int) -> "Ragged":
        """Rows ``start`` to ``stop`` as a view; only that part is sent."""
        first, last = self.offsets[start], self.offsets[stop]
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def take(self, indices: Sequence[int]) -> "Ragged":
        """Copy the rows at ``indices``, in that order; without rows, values keep their width and type."""
        rows = [self[index] for index in indices]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return Ragged(np.concatenate([self.values[:0], *rows]), offsets)

    def like(self, values: Array) -> "Ragged":
        """Replace the values by ``[total, ...]``, with the same row lengths."""
        if len(values) != len(self.values):
            raise DataError(f"{len(values)} values for rows that hold {len(self.values)}")
        return Ragged(values, self.offsets)

    def spread(self, per_row: Array) -> Array:
        """Repeat a value per row over its elements: ``[rows]`` to ``[total]``."""
        return np.repeat(per_row, self.lengths)


Column: TypeAlias = Array | Ragged | list[Any]
"""The values of one column: dense ``[rows, ...]``, ragged, or a list of objects."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Immutable columns of equal length by name: dense ``[rows, ...]``, :class:`Ragged`, or lists; else DataError."""

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        columns: dict[str, Any] = dict(self.columns)
        for value in columns.values():
            if not isinstance(value, Ragged | list) and not (isinstance(value, np.ndarray) and value.ndim > 0):
                raise DataError(f"a column is a numpy array, a Ragged or a list, not {type(value).__name__}")
        lengths = {name: len(value) for name, value in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns differ in length: {lengths}")
        object.__setattr__(self, "columns", columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            raise DataError(f"the batch has no column '{name}'{hint(name, self.columns)}") from None

    def dense(self, name: str) -> Array:
        return self._typed(name, np.ndarray)

    def ragged(self, name: str) -> Ragged:
        return self._typed(name, Ragged)

    def objects(self, name: str) -> list[Any]:
        return self._typed(name, list)

    def _typed(self, name: str, kind: type[T]) -> T:
        column = self[name]
        if not isinstance(column, kind):
            raise DataError(f"column '{name}' is {type(column).__name__}, not {kind.__name__}")
        return column

    def row(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}

    def with_columns(self, **columns: Any) -> "Batch":
        return Batch({**self.columns, **columns})

    def select(self, *names: str) -> "Batch":
        return Batch({name: self[name] for name in names})

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows ``start`` to ``stop``, as views where possible."""
        views: dict[str, Any] = {
            name: column.rows(start, stop) if isinstance(column, Ragged) else column[start:stop]
            for name, column in self.columns.items()
        }
        return Batch(views)

    def take(self, indices: Sequence[int]) -> "Batch":
        """Copy the rows at ``indices``, in that order."""
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            if isinstance(column, Ragged):
                columns[name] = column.take(indices)
            elif isinstance(column, list):
                columns[name] = [column[index] for index in indices]
            else:
                columns[name] = column[np.asarray(indices, dtype=np.int64)]
        return Batch(columns)

    @classmethod
    def concat(cls, parts: Sequence["Batch"]) -> "Batch":
        if not parts:
            raise DataError("nothing to concatenate")
        if len(parts) == 1:
            return parts[0]
        names = list(parts[0].columns)
        for part in parts[1:]:
            if set(part.columns) != set(names):
                raise DataError(f"parts have different columns: {sorted(names)} and {sorted(part.columns)}")
        columns: dict[str, Column] = {}
        for name in names:
            values: list[Any] = [part[name] for part in parts]
            if isinstance(values[0], Ragged):
                lengths = np.concatenate([value.lengths for value in values])
                offsets = np.cumsum([0, *lengths], dtype=np.int64)
                columns[name] = Ragged(np.concatenate([value.values for value in values]), offsets)
            elif isinstance(values[0], list):
                columns[name] = [item for value in values for item in value]
            else:
                columns[name] = np.concatenate(values)
        return cls(columns)

    def split(self, parts: int, by: str = "rows", column: str = "tokens") -> list["Batch"]:
        """Cut into contiguous batches: by ``"rows"`` sizes differ by at most one, larger ones first; by ``"tokens"``
        the summed lengths of the ragged ``column`` are about equal, and neighbours with the same number in a dense
        column ``unit`` stay together."""
        if not 1 <= parts <= len(self):
            raise DataError(f"{len(self)} rows cannot be split into {parts} parts")
        if by not in ("rows", "tokens"):
            raise DataError(f"split by '{by}'{hint(by, ('rows', 'tokens'))}")
        if by == "rows":
            cuts = even_cuts(len(self), parts)
        elif "unit" not in self:
            cuts = token_cuts(self.ragged(column).lengths, parts)
        else:
            unit = self.dense("unit")
            starts = np.flatnonzero(np.concatenate([[True], unit[1:] != unit[:-1]]))
            if parts > len(starts):
                raise DataError(f"{len(starts)} units cannot be split into {parts} parts")
            bounds = [*starts.tolist(), len(self)]
            cuts = [bounds[cut] for cut in token_cuts(np.add.reduceat(self.ragged(column).lengths, starts), parts)]
        return [self.rows(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]


@dataclass(frozen=True)
class ColumnSpec:
    """Declares a column of generated sequences, from the engine that generates it to the loss."""

    dtype: str = "float32"  #: of numpy
    fill: float = 0  #: at tokens that the engine has not generated; per sample, until it gives a value
    per: Literal["token", "sample"] = "token"  #: a column per sample has the engine's last value
    shape: tuple[int, ...] = ()  #: of a value, such as ``(layers, experts)``

    @cached_property
    def filling(self) -> Any:
        return np.full(self.shape, self.fill, self.dtype) if self.shape else self.fill


GENERATED: Mapping[str, ColumnSpec] = {"logprobs": ColumnSpec("float32"), "versions": ColumnSpec("int64", fill=-1)}
"""Columns of every rollout engine: log-probs, and the version of the weights that generated each token."""

SEQUENCE: Mapping[str, ColumnSpec] = {"tokens": ColumnSpec("int64"), "action_mask": ColumnSpec("bool"), **GENERATED}


@dataclass(eq=False)
class SequenceColumns:
    """The columns of one sequence, to which tokens are added: a list per token column, and a value per sample column.

    In an environment's trajectory ``opening`` is the policy's first input, and ``text`` all later actions and
    observations."""

    specs: Mapping[str, ColumnSpec]
    values: dict[str, Any] = field(default_factory=dict)
    opening: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        for name, spec in self.specs.items():
            self.values.setdefault(name, spec.filling if spec.per == "sample" else [])

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.values["tokens"]
        return tokens

    def give(self, count: int, /, **values: Any) -> None:
        """Add ``count`` tokens that the engine has not generated; columns without values are filled."""
        filled = {name: [spec.filling] * count for name, spec in self.specs.items() if spec.per == "token"}
        self.extend(count, filled | values)

    def extend(self, count: int, values: Mapping[str, Any]) -> None:
        """Add ``count`` tokens with the values of all token columns; raises DataError for one that does not fit."""
        self._check_declared(values)
        for name, spec in self.specs.items():
            if spec.per == "token" and len(values.get(name, ())) != count:
                raise DataError(f"{len(values.get(name, ()))} {name} for {count} tokens")
        for name, added in values.items():
            if self.specs[name].per == "sample":
                self.values[name] = added
            else:
                self.values[name] += added.tolist() if np.ndim(added) == 1 and hasattr(added, "tolist") else list(added)

    def append(self, values: Mapping[str, Any]) -> None:
        """Add one token with the values of all token columns."""
        self._check_declared(values)
        for name, value in values.items():
            if self.specs[name].per == "token":
                self.values[name].append(value)
            else:
                self.values[name] = value

    def _check_declared(self, names: Mapping[str, Any]) -> None:
        if not names.keys() <= self.specs.keys():
            name = min(names.keys() - self.specs.keys())
            raise DataError(f"the engine does not declare the column '{name}'{hint(name, self.specs)}")

    def arrays(self) -> dict[str, Array]:
        """Return token columns ``[seq, ...]`` and sample columns ``[...]``."""
        return {
            name: np.asarray(self.values[name], spec.dtype).reshape(((-1,) if spec.per == "token" else ()) + spec.shape)
            for name, spec in self.specs.items()
        }

    @staticmethod
    def stack(rows: Sequence["SequenceColumns"], specs: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """Return the columns of a batch of sequences: ragged per token, dense per sample."""
        arrays, columns = [row.arrays() for row in rows], dict[str, Column]()
        for name, spec in specs.items():
            empty, parts = np.empty((0, *spec.shape), spec.dtype), [row[name] for row in arrays]
            if spec.per == "sample":
                columns[name] = np.stack(parts) if parts else empty
            else:
                offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
                columns[name] = Ragged(np.concatenate([empty, *parts]), offsets)
        return columns


def even_cuts(rows: int, parts: int) -> list[int]:
    """Return ``parts + 1`` boundaries of parts that differ by at most one row, larger ones first."""
    small, larger = divmod(rows, parts)
    return [part * small + min(part, larger) for part in range(parts + 1)]


def token_cuts(lengths: npt.NDArray[np.int64], parts: int) -> list[int]:
    """Return ``parts + 1`` boundaries at which the running total of ``lengths`` is nearest to an even share."""
    totals, cuts = np.concatenate([[0], np.cumsum(lengths)]), [0]
    for part in range(1, parts):
        nearest_cut = int(np.abs(totals - totals[-1] * part / parts).argmin())
        cuts.append(min(max(nearest_cut, cuts[-1] + 1), len(lengths) - (parts - part)))
    return [*cuts, len(lengths)]
