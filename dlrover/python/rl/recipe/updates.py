"""One step's rows, from several roles, and how they become optimizer steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dlrover.python.rl.common.errors import RowsDiffer
from dlrover.python.rl.data.batch import Batch, Column, Ragged
from dlrover.python.rl.engine.base import StepResult
from dlrover.python.rl.recipe.members import TRAINED


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's rows are trained on.

    Attributes:
        temperature: the one they were sampled at.
        updates: optimizer steps of one pass over the rows; a row's ``update`` says in which it is, from 0. Without that
            column there is one, of all rows.
        epochs: passes.
    """

    temperature: float
    updates: int = 1
    epochs: int = 1


def over_updates(rows: Batch, updates: int) -> tuple[Batch, int]:
    """Deal whole samples out to ``updates`` optimizer steps in turn; those that count nowhere are in none of them.

    It is in the same update that a row is trained on, however many members divide the rows. The weights grow by the
    number of updates: the mean of their gradients, at the same model, is the gradient of all rows together.

    Args:
        rows: annotated; ``trajectory`` (int64 ``[rows]``), where they have it, says of which sample a row is.
        updates: how many are wanted.

    Returns:
        ``rows`` with ``update`` (int64; -1: in none); and how many updates there are: not more than samples that count.
    """
    weight = rows.dense("weight")
    samples = rows.dense("trajectory") if "trajectory" in rows else np.arange(len(rows))
    numbers = {sample: at for at, sample in enumerate(dict.fromkeys(samples[weight > 0].tolist()))}
    updates = min(updates, len(numbers))
    update = [numbers[sample] % updates if sample in numbers else -1 for sample in samples.tolist()]
    return rows.with_columns(update=np.array(update, dtype=np.int64), weight=weight * np.float32(updates)), updates


def joined(rollouts: Batch, rows: Batch, opinions: Sequence[Batch] = ()) -> Batch:
    """What is to be trained on, of the same rows from several places.

    Args:
        rollouts: what rollout members generated.
        rows: what the algorithm adds to them.
        opinions: what other roles make of them. Columns that several of them have come side by side, ``[seq, n]``.

    Raises:
        RowsDiffer: ``digest`` says that these are not the samples that were judged.
    """
    if "digest" in rollouts and "digest" in rows:
        differing = np.flatnonzero(np.asarray(rollouts["digest"]) != np.asarray(rows["digest"])).tolist()
        if differing:
            raise RowsDiffer(f"rows {differing[:20]} of {len(rows)} are not the samples that were judged")
    columns = {**rollouts.select(*TRAINED).columns, **rows.columns}
    for name in dict.fromkeys(name for opinion in opinions for name in opinion.columns):
        columns[name] = _side_by_side([opinion.ragged(name) for opinion in opinions if name in opinion])
    return Batch(columns)


def _side_by_side(columns: Sequence[Ragged]) -> Column:
    if len(columns) == 1:
        return columns[0]
    values = [column.values if column.values.ndim > 1 else column.values[:, None] for column in columns]
    return columns[0].like(np.concatenate(values, axis=1))


def each_update(batch: Batch, plan: UpdatePlan, train: Callable[[Batch], StepResult]) -> list[StepResult]:
    """Train on the rows of each update, epoch by epoch. A rank may have no row of an update; it takes part in it."""
    return [train(part) for _ in range(plan.epochs) for part in _parts(batch, plan.updates)]


def _parts(batch: Batch, updates: int) -> Iterator[Batch]:
    if "update" not in batch:
        yield batch
        return
    update = batch.dense("update")
    for number in range(updates):
        wanted = np.flatnonzero(update == number).tolist()
        yield batch if len(wanted) == len(batch) else batch.take(wanted)


def figures(trained: Sequence[StepResult]) -> dict[str, float]:
    """The figures of a step: means over its updates, and the last learning rate."""
    told = [{"loss": one.loss, "grad_norm": one.grad_norm, "lr": one.lr, **one.metrics} for one in trained]
    return {name: sum(one.get(name, 0.0) for one in told) / len(told) for name in told[0]} | {"lr": trained[-1].lr}
