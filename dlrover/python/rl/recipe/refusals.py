"""An update that was refused, since its loss or gradient is no number: which samples are to blame."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from dlrover.python.rl.common.errors import InvocationError, NonFiniteUpdate
from dlrover.python.rl.data.batch import Array, Batch, Ragged
from dlrover.python.rl.recipe.tracking import RunLog

_NAMED = 8

Samples: TypeAlias = Sequence[Mapping[str, Any]]


@contextmanager
def naming_samples(step: int, run_log: RunLog, everything: Samples, look: Callable[[], Samples]) -> Iterator[None]:
    """Where the update inside is refused, say which samples are to blame, and write them to ``refused.jsonl``.

    Args:
        step: the step.
        run_log: writes them.
        everything: the samples of the step; each has a name under ``sample``.
        look: asks the actors for those of :func:`not_finite_rows`, with their texts.

    Raises:
        NonFiniteUpdate: names the step and the samples.
    """
    try:
        yield
    except InvocationError as error:
        if not isinstance(error.original, NonFiniteUpdate):
            raise
        found = look()
        run_log.refused(step, found or everything)
        what = "samples with a value that is not finite" if found else "each sample alone is finite; together they were"
        raise NonFiniteUpdate(f"step {step}: {error.original}; {what}: {_named(found or everything)}") from error


def _named(samples: Samples) -> str:
    names = ", ".join(str(sample["sample"]) for sample in samples[:_NAMED])
    more = f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else ""
    return f"{names}{more} (all in refused.jsonl)"


def not_finite_rows(batch: Batch, outputs: Array) -> list[int]:
    """The rows with a NaN or an infinity, in a column or in what the model says of them.

    Args:
        batch: ragged ``tokens``, and columns of numbers.
        outputs: ``[all tokens]``.
    """
    tokens = batch.ragged("tokens")
    columns = [*batch.columns.values(), tokens.like(outputs)]
    return np.flatnonzero(sum((_bad(column) for column in columns), np.zeros(len(batch), dtype=bool))).tolist()


def _bad(column: object) -> Array:
    """``[rows]``: whether a row of the column has such a value."""
    if isinstance(column, Ragged):
        bad = _bad(column.values)
        return np.array([bool(row.any()) for row in Ragged(bad, column.offsets)], dtype=bool)
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        return np.asarray(~np.isfinite(column).reshape(len(column), -1).all(axis=1))
    return np.zeros(len(column), dtype=bool)  # type: ignore[arg-type]
