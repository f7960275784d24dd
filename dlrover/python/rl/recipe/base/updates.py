# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on the rows of a step, and the names of the samples of a refused update."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from dlrover.python.rl.common.errors import InvocationError, NonFiniteUpdate, RowsDiffer
from dlrover.python.rl.data.batch import Array, Batch, Ragged
from dlrover.python.rl.engine.api.base import UpdateResult

TRAINED = ("tokens", "action_mask")

_MAX_NAMES = 8

SampleRows: TypeAlias = Sequence[Mapping[str, Any]]
WriteRefused: TypeAlias = Callable[[int, SampleRows], None]


@dataclass(frozen=True)
class UpdatePlan:
    """The optimizer steps on a step's rows, sampled at ``temperature``. The column ``update`` numbers a row's
    optimizer step within a pass, from 0; without it there is one. ``dtypes`` cast the columns of further roles."""

    temperature: float
    updates: int = 1
    epochs: int = 1
    dtypes: Mapping[str, str] = field(default_factory=dict)


def assign_updates(rows: Batch, updates: int) -> tuple[Batch, int]:
    """Add ``update`` (int64, -1: none): whole samples, by ``trajectory``, are assigned to at most ``updates`` optimizer
    steps in turn, samples without weight to none. Also returns the number of updates, at most one per weighted sample.
    The weights are multiplied by it, so the mean of the updates' gradients is the gradient of all rows."""
    weight = rows.dense("weight")
    samples = rows.dense("trajectory") if "trajectory" in rows else np.arange(len(rows))
    numbers = {sample: number for number, sample in enumerate(dict.fromkeys(samples[weight > 0].tolist()))}
    updates = min(updates, len(numbers))
    update = [numbers[sample] % updates if sample in numbers else -1 for sample in samples.tolist()]
    return rows.with_columns(update=np.array(update, dtype=np.int64), weight=weight * np.float32(updates)), updates


def check_same_samples(rollouts: Batch, rows: Batch) -> None:
    if "digest" in rollouts and "digest" in rows:
        differing = np.flatnonzero(np.asarray(rollouts["digest"]) != np.asarray(rows["digest"])).tolist()
        if differing:
            raise RowsDiffer(f"rows {differing[:20]} of {len(rows)} are not the samples that were scored")


def join_columns(rollouts: Batch, rows: Batch, aux_outputs: Sequence[Batch] = (), needs: Collection[str] = ()) -> Batch:
    """Join the columns that a loss ``needs`` from rollouts, the algorithm's (``rows``), and the outputs of other roles;
    a column of several roles is stacked, ``[seq, n]``. Raises RowsDiffer if other rows were scored."""
    check_same_samples(rollouts, rows)
    names = dict.fromkeys([*TRAINED, *(name for name in sorted(needs) if name in rollouts)])
    columns = {**rollouts.select(*names).columns, **rows.columns}
    for name in dict.fromkeys(name for output in aux_outputs for name in output.columns):
        stacked = [output.ragged(name) for output in aux_outputs if name in output]
        columns[name] = stacked[0]
        if len(stacked) > 1:
            values = [each.values if each.values.ndim > 1 else each.values[:, None] for each in stacked]
            columns[name] = stacked[0].like(np.concatenate(values, axis=1))
    return Batch(columns)


def run_updates(batch: Batch, plan: UpdatePlan, train: Callable[[Batch], UpdateResult]) -> list[UpdateResult]:
    """Train on the rows of each update, epoch by epoch; a rank without rows takes part too."""
    parts = [batch]
    if "update" in batch:
        numbers = batch.dense("update")
        rows = [np.flatnonzero(numbers == number).tolist() for number in range(plan.updates)]
        parts = [batch if len(chosen) == len(batch) else batch.take(chosen) for chosen in rows]
    return [train(part) for _ in range(plan.epochs) for part in parts]


def means_by_weight(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divide an update's weighted sums over tokens by the sum of ``weight``; names with a slash stay as they are."""
    weight = metrics.get("weight", 0.0) or 1.0
    return {name: value if name == "weight" or "/" in name else value / weight for name, value in metrics.items()}


def average_metrics(trained: Sequence[UpdateResult]) -> dict[str, float]:
    """Average a step's updates, without skipped ones unless all are; add the last learning rate and how many are."""
    counted = [one for one in trained if not one.skipped] or trained
    values = [{"loss": one.loss, "grad_norm": one.grad_norm, **means_by_weight(one.metrics)} for one in counted]
    means = {name: sum(one.get(name, 0.0) for one in values) / len(values) for name in values[0]}
    return {**means, "lr": trained[-1].lr, "updates/skipped": float(sum(one.skipped for one in trained))}


def cast_columns(batch: Batch, dtypes: Mapping[str, str]) -> Batch:
    columns = {name: batch.ragged(name) for name in dtypes if name in batch}
    cast = {name: column.like(column.values.astype(dtypes[name], copy=False)) for name, column in columns.items()}
    return batch.with_columns(**cast)


@contextmanager
def annotate_errors_with_samples(
    step: int, write_refused: WriteRefused, samples: SampleRows, find_offending: Callable[[], SampleRows]
) -> Iterator[None]:
    """If the update inside is refused, raise a NonFiniteUpdate with the names of the offending samples."""
    try:
        yield
    except InvocationError as error:
        if not isinstance(error.original, NonFiniteUpdate):
            raise
        reason = "samples with a value that is not finite"
        if not (offending := find_offending()):
            offending, reason = samples, "each sample alone is finite; samples of the update"
        write_refused(step, offending)
        names = ", ".join(str(sample["sample"]) for sample in offending[:_MAX_NAMES])
        more = f" and {len(offending) - _MAX_NAMES} more" if len(offending) > _MAX_NAMES else ""
        cause = f"{error.original}; {reason}: {names}{more} (all in refused.jsonl)"
        raise NonFiniteUpdate(f"step {step}: {cause}") from error


def find_nonfinite_rows(batch: Batch, outputs: Array) -> list[int]:
    """Find the rows with a NaN or an infinity in a column of numbers or in the model's outputs ``[all tokens]``."""
    tokens = batch.ragged("tokens")
    columns = [*batch.columns.values(), tokens.like(outputs)]
    flags = [_is_nonfinite(column) for column in columns]  # each ``[rows]``
    return np.flatnonzero(np.any(flags, axis=0)).tolist()


def _is_nonfinite(column: object) -> Array:
    if isinstance(column, Ragged):
        values = _is_nonfinite(column.values)
        return np.array([bool(row.any()) for row in Ragged(values, column.offsets)], dtype=bool)
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        return np.asarray(~np.isfinite(column).reshape(len(column), -1).all(axis=1))
    return np.zeros(len(column), dtype=bool)  # type: ignore[arg-type]
