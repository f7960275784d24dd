# SPDX-License-Identifier: Apache-2.0
"""The batch of a step, the columns that further roles compute for it, and its failed samples: those have no reward, are
logged with the reason, and never trained on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.algorithm.losses.columns import SampleView, find_varied_groups
from dlrover.python.rl.common.errors import ConfigError, DataError, InvocationError, NonFiniteUpdate
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Array, Batch, Ragged, even_cuts
from dlrover.python.rl.data.sampler import partition
from dlrover.python.rl.recipe.base.config import RewardConfig
from dlrover.python.rl.recipe.reporting.rewards import mean_reward, merge_rows, number_samples, part_columns
from dlrover.python.rl.recipe.reporting.run_log import RunLog
from dlrover.python.rl.recipe.reporting.sample_file import NUMBERS
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Shard


@dataclass(frozen=True)
class StepBatch:
    """The rows of a step: groups in the order they were requested, retries at the end. Tokens and texts stay with the
    rollouts until a role needs them; the trainer has references, the order of the rows, and a few numbers of each."""

    rollouts: Pending  # pending batches, which the trainer never reads
    rows: tuple[int, ...]  # those of ``rollouts`` that are trained on, in order
    scored: Batch  # what the trainer knows of these rows
    groups: int
    total: int  # rows of ``rollouts``
    filtered: tuple[Batch, ...] = ()  # ``scored`` of groups whose rewards are all alike
    filtered_rows: tuple[int, ...] = ()  # these rows of ``rollouts``
    # As the algorithm sees them: without the rewards of rows that it may not train on.
    train_rows: Batch = field(default_factory=lambda: Batch({}))

    @classmethod
    def from_rollouts(cls, rollouts: Pending, scored: Batch, order: npt.NDArray[np.int64], groups: int) -> "StepBatch":
        """All rows of ``rollouts`` in this order; ``scored`` is in that of ``rollouts``."""
        rows = order.tolist()
        return cls(rollouts, tuple(rows), scored.take(rows), groups, len(rows))

    @classmethod
    def concat(cls, parts: Sequence["StepBatch"]) -> "StepBatch":
        starts = np.cumsum([0, *(part.total for part in parts)]).tolist()
        placed = list(zip(starts, parts, strict=False))
        return cls(
            Pending([ref for part in parts for ref in part.rollouts]),
            tuple(start + row for start, part in placed for row in part.rows),
            Batch.concat([part.scored for part in parts]),
            sum(part.groups for part in parts),
            starts[-1],
            tuple(rows for part in parts for rows in part.filtered),
            tuple(start + row for start, part in placed for row in part.filtered_rows),
        )

    def drop_uniform_groups(self, rewards: npt.NDArray[np.float64]) -> "StepBatch":
        """Filter out the groups whose rewards are all alike; ``rewards`` is ``[rows]``, NaN in untrained samples."""
        ids, samples = self.scored.dense("prompt_id"), SampleView.of(self.scored.with_columns(reward=rewards))
        is_varied = find_varied_groups(samples.prompt_id, samples.reward, samples.counted)[samples.of_row]
        varied, uniform = np.flatnonzero(is_varied).tolist(), np.flatnonzero(~is_varied).tolist()
        if not uniform:
            return self
        return replace(
            self,
            rows=tuple(self.rows[row] for row in varied),
            scored=self.scored.take(varied),
            groups=len(np.unique(ids[is_varied])),
            filtered=(*self.filtered, self.scored.take(uniform)),
            filtered_rows=(*self.filtered_rows, *(self.rows[row] for row in uniform)),
        )

    # -- dividing -----------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> Shard:
        """The rows that are trained on, for at most as many members as there are rows."""
        return Shard(self.rollouts, rows=self.rows)

    def shard_evenly(self, ranks: int) -> Shard:
        """The same for ranks that all have to take part: with fewer rows than ranks, some get none."""
        rows = range(len(self.rows))
        cuts = even_cuts(len(rows), ranks)
        return self.shard([rows[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)])

    def balance(self, ranks: int, update: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Divide the rows so that all ranks have about as many tokens in each ``update`` ``[rows]``."""
        tokens, parts = self.scored.dense("token_count"), [list[int]() for _ in range(ranks)]
        for number in np.unique(update):
            rows = np.flatnonzero(update == number)
            for part, group in zip(parts, partition(tokens[rows].tolist(), ranks).groups, strict=True):
                part += rows[list(group)].tolist()
        return [tuple(part) for part in parts]

    def shard(self, parts: Sequence[Sequence[int]]) -> Shard:
        return Shard(self.rollouts, rows=[[self.rows[row] for row in part] for part in parts])

    # -- reporting ----------------------------------------------------------------------------------------------------

    @property
    def all_rows(self) -> Batch:
        """``scored`` with the rows that are filtered out at the end."""
        return Batch.concat([self.scored, *self.filtered])

    @property
    def all_numbers(self) -> tuple[int, ...]:
        """The numbers in ``rollouts`` of :attr:`all_rows`."""
        return (*self.rows, *self.filtered_rows)

    def metrics(self) -> dict[str, float]:
        """The number of groups filtered out and the staleness of the others, where there is any."""
        metrics = {}
        if self.filtered:
            metrics["groups/filtered"] = float(sum(len(np.unique(rows.dense("prompt_id"))) for rows in self.filtered))
        if "staleness" in self.scored and len(self.scored):
            staleness = merge_rows(self.scored).dense("staleness")
            metrics |= {
                "samples/staleness_mean": float(staleness.mean()),
                "samples/staleness_max": float(staleness.max()),
            }
        return metrics


def sample_metrics(rows: Batch) -> dict[str, float]:
    """Of whole samples: their rewards (of the scored ones) with each function's part, an environment's score, and the
    lengths of their completions, which samples that failed before the first token do not have."""
    samples = merge_rows(rows)
    rewards, tokens = samples.dense("reward"), samples.dense("action_tokens")
    has_completion = (tokens > 0) | ~np.isnan(rewards)
    lengths, finished = tokens[has_completion].astype(np.float64), samples.dense("finished")[has_completion]
    scored, parts = rewards[~np.isnan(rewards)], part_columns(samples)
    metrics = {"reward/mean": mean_reward(rewards)}
    if len(scored):
        metrics |= {"reward/std": scored.std(), "reward/min": scored.min(), "reward/max": scored.max()}
    metrics |= {name: mean_reward(samples.dense(name)) for name in parts}
    if "score" in samples:
        metrics["reward/score"] = mean_reward(samples.dense("score"))
    if len(lengths):
        shares = {"mean": lengths.mean(), "min": lengths.min(), "max": lengths.max()}
        shares |= {f"p{share}": np.percentile(lengths, share) for share in (50, 95)}
        metrics |= {f"completions/length_{name}": value for name, value in shares.items()}
        metrics["completions/truncated"] = 1.0 - finished.mean()
    if "unknown_ids" in rows:
        metrics["completions/unknown_ids"] = rows.dense("unknown_ids").sum()
    return {name: float(value) for name, value in metrics.items()}


@dataclass(frozen=True)
class AuxOutput:
    """Columns that a role computes for the rows of a step, if the algorithm needs one of them.

    The workload's ``method`` takes rollouts (see :func:`~dlrover.python.rl.recipe.rollout.episodes.make_batch`) and
    ``args``, and returns ``columns`` (name to numpy dtype), ragged ``[rows, seq]``, 0 outside the action mask; a column
    of several roles is stacked, ``[rows, seq, roles]``. ``init`` are the arguments of ``init_model``, called before the
    first step; None: it has none. ``collective``: every rank is called, even without a row."""

    role: str
    method: str
    columns: Mapping[str, str]
    args: tuple[Any, ...] = ()
    init: tuple[Any, ...] | None = None
    collective: bool = False

    def is_needed(self, needs: frozenset[str]) -> bool:
        return not needs.isdisjoint(self.columns)


def cast_columns(batch: Batch, dtypes: Mapping[str, str]) -> Batch:
    columns = {name: batch.ragged(name) for name in dtypes if name in batch}
    cast = {name: column.like(column.values.astype(dtypes[name], copy=False)) for name, column in columns.items()}
    return batch.with_columns(**cast)


# -- samples for people -----------------------------------------------------------------------------------------------


def name_samples(rows: Batch) -> list[dict[str, Any]]:
    ids = zip(rows.dense("prompt_id").tolist(), rows.dense("sample_index").tolist(), strict=True)
    return [{"sample": f"sample {index} of prompt {prompt}"} for prompt, index in ids]


def select_logged(scored: Batch, rows: int) -> Batch:
    """The columns of ``samples.jsonl`` but the texts, and ``digest``: ``row`` is the prompt's number among the ``rows``
    of its file; rows with the same ``trajectory`` are one sample."""
    logged = scored.with_columns(trajectory=number_samples(scored), row=scored.dense("prompt_id") % rows)
    names = [name for name in (*NUMBERS, "digest") if name in logged]
    return logged.select(*names, *part_columns(scored), "row")


_LOG = get_logger(__name__)

# -- rewards ----------------------------------------------------------------------------------------------------------


def is_unscored(rows: Batch) -> npt.NDArray[np.bool_]:
    """``[rows]``, or ``[samples]`` of whole ones: those without a reward."""
    return np.isnan(rows.dense("reward"))


def find_failed_groups(scored: Batch) -> npt.NDArray[np.int64]:
    """Prompt ids of the groups in whose last retry a sample failed, rising."""
    ids, retry = scored.dense("prompt_id"), scored.dense("retry")
    _, group = np.unique(ids, return_inverse=True)
    last = np.full(len(ids), -1)
    np.maximum.at(last, group, retry)  # per group: one that an earlier step retried may be among others
    return np.unique(ids[(retry == last[group]) & is_unscored(scored)])


class RewardFailures:
    """Counts consecutive steps without a sample to train on, since scoring failed; part of a trainer's ``state``."""

    def __init__(self, config: RewardConfig) -> None:
        self._config, self._steps = config, 0

    def update(self, step: int, scored: Batch) -> None:
        """Count a step, given all of its rows, filtered ones included. Raises DataError if no sample is left in the
        run's first step, or in ``give_up_after`` consecutive ones."""
        self._steps = self._steps + 1 if np.isnan(trainable_rewards(scored, self._config)).all() else 0
        if not self._steps:
            return
        message, most = _describe_failure(merge_rows(scored), scored.objects("error")), self._config.give_up_after
        if self._steps >= most > 1:
            message = f"{message}; it was the last of {self._steps} such steps in a row (reward.give_up_after)"
        if step == 1 or self._steps >= most:
            raise DataError([ConfigError(f"step {step}", message)])
        _LOG.warning("step %d: %s; %d such steps in a row, of which %d end the run", step, message, self._steps, most)

    def metrics(self) -> dict[str, float]:
        return {"samples/steps_without_reward": float(self._steps)} if self._steps else {}

    def state_dict(self) -> dict[str, int]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._steps = state["steps"]


def mask_rewards(scored: Batch, config: RewardConfig) -> Batch:
    """The rows as the algorithm sees them: those that it may not train on have no reward."""
    return scored.with_columns(reward=trainable_rewards(scored, config))


def uniform_share(train_rows: Batch) -> float:
    """The share of groups of several samples whose rewards are all equal: they have no gradient under a group
    baseline. 0 without such a group."""
    samples = merge_rows(train_rows)
    ids, rewards = samples.dense("prompt_id"), samples.dense("reward")
    groups = [rewards[(ids == number) & ~np.isnan(rewards)] for number in np.unique(ids)]
    several = [group for group in groups if len(group) > 1]
    return sum(bool((group == group[0]).all()) for group in several) / len(several) if several else 0.0


def trainable_rewards(scored: Batch, config: RewardConfig) -> npt.NDArray[np.float64]:
    """``[rows]``: rewards, NaN in samples that are not trained on."""
    reward = scored.dense("reward").copy()
    if config.on_failure != "drop_sample":
        keys = np.stack([scored.dense("prompt_id"), scored.dense("retry")])
        group = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        has_failure = np.bincount(group, weights=is_unscored(scored)) > 0
        reward[has_failure[group]] = np.nan
    return reward


def _describe_failure(samples: Batch, errors: list[str | None]) -> str:
    last = [error for error in errors if error is not None][-1]
    scorer = "environment" if "score" in samples else "reward function"
    if is_unscored(samples).all():
        return f"the {scorer} failed on all {len(samples)} samples, last with: {last}"
    count, groups = int(is_unscored(samples).sum()), len(np.unique(samples.dense("prompt_id")))
    fault = f"the {scorer} failed on {count} of {len(samples)} samples, which are in each of the {groups} groups"
    return (
        f"{fault}: none is left to train on (reward.on_failure: drop_sample would keep the others); last with: {last}"
    )


def failure_metrics(scored: Batch, train_rows: Batch) -> dict[str, float]:
    """Counts of a step, of all its rows and of those from :func:`mask_rewards`, which were not filtered out."""
    samples, ids = merge_rows(scored), train_rows.dense("prompt_id")
    return {
        "samples/failed": float(is_unscored(samples).sum()),
        "samples/redrawn": float((samples.dense("retry") > 0).sum()),
        "groups/dropped": float(len(np.unique(ids)) - len(np.unique(ids[~is_unscored(train_rows)]))),
    }


# -- non-finite updates -----------------------------------------------------------------------------------------------

_MAX_NAMES = 8

SampleRows: TypeAlias = Sequence[Mapping[str, Any]]


@contextmanager
def annotate_errors_with_samples(
    step: int, run_log: RunLog, samples: SampleRows, find_offending: Callable[[], SampleRows]
) -> Iterator[None]:
    """If the update inside is refused, write the offending samples, or all ``samples``, to ``refused.jsonl``, and raise
    a NonFiniteUpdate that names them (by ``sample``) and the step."""
    try:
        yield
    except InvocationError as error:
        if not isinstance(error.original, NonFiniteUpdate):
            raise
        offending = find_offending()
        run_log.write_refused(step, offending or samples)
        reason = "samples with a value that is not finite"
        if not offending:
            reason = "each sample alone is finite; together they were"
        names = _list_names(offending or samples)
        raise NonFiniteUpdate(f"step {step}: {error.original}; {reason}: {names}") from error


def _list_names(samples: SampleRows) -> str:
    names = ", ".join(str(sample["sample"]) for sample in samples[:_MAX_NAMES])
    more = f" and {len(samples) - _MAX_NAMES} more" if len(samples) > _MAX_NAMES else ""
    return f"{names}{more} (all in refused.jsonl)"


def find_nonfinite_rows(batch: Batch, outputs: Array) -> list[int]:
    """The rows with a NaN or an infinity, in a column of numbers or in the outputs ``[all tokens]`` of the model."""
    tokens = batch.ragged("tokens")
    columns = [*batch.columns.values(), tokens.like(outputs)]
    return np.flatnonzero(sum((_is_nonfinite(column) for column in columns), np.zeros(len(batch), dtype=bool))).tolist()


def _is_nonfinite(column: object) -> Array:
    """``[rows]``."""
    if isinstance(column, Ragged):
        values = _is_nonfinite(column.values)
        return np.array([bool(row.any()) for row in Ragged(values, column.offsets)], dtype=bool)
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        return np.asarray(~np.isfinite(column).reshape(len(column), -1).all(axis=1))
    return np.zeros(len(column), dtype=bool)  # type: ignore[arg-type]
