# SPDX-License-Identifier: Apache-2.0
"""Rewards of whole samples, and metrics of steps and of evaluations by answers to held-out prompts. A sample of an
environment may have several rows. A failed sample has no reward: it is logged with the reason, and never trained on."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.algorithm.losses.columns import SampleView
from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.config import RewardConfig

_LOG = get_logger(__name__)

_MAX_TRUNCATED = 0.5  # share of truncated completions above which a step is warned of

_ALIKE = ("prompt_id", "sample_index", "retry", "turns")
_SUMMED = ("reward", "score", "action_tokens", "token_count")


def number_samples(scored: Batch) -> npt.NDArray[np.int64]:
    """Number the samples from 0, in the order of their first rows; returns each row's sample, ``[rows]``."""
    of_row = SampleView.of(scored).of_row
    _, first = np.unique(of_row, return_index=True)
    numbers: npt.NDArray[np.int64] = np.argsort(np.argsort(first))[of_row]
    return numbers


def merge_rows(scored: Batch) -> Batch:
    """Return one row per sample, in the order of their first rows; rows must be in the order of their generation.

    Columns, as far as ``scored`` has them: ``prompt_id``, ``sample_index``, ``retry`` and ``turns``, equal in all rows
    of a sample; sums (float64) of ``reward``, its parts and ``score``, NaN if a row has none, and of ``action_tokens``
    and ``token_count``; ``finished`` of the last row; ``staleness`` of the stalest."""
    number = number_samples(scored)
    rows, count = np.arange(len(scored)), int(number.max(initial=-1)) + 1
    last, stalest = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.maximum.at(last, number, rows)
    columns = {name: scored.dense(name)[last] for name in (*_ALIKE, "finished") if name in scored}
    summed = [*(name for name in _SUMMED if name in scored), *part_columns(scored)]
    columns |= {name: np.bincount(number, scored.dense(name), count) for name in summed}
    if "staleness" in scored:
        np.maximum.at(stalest, number, scored.dense("staleness"))
        columns["staleness"] = stalest
    return Batch(columns)


def find_cut(rows: Batch) -> npt.NDArray[np.bool_]:
    """Return ``[rows]``: True for the rows of samples whose last row has not finished."""
    cut: npt.NDArray[np.bool_] = ~merge_rows(rows).dense("finished")[number_samples(rows)]
    return cut


def part_columns(scored: Batch) -> list[str]:
    return [name for name in scored.columns if name.startswith("reward/")]


SUMMARIES = ("mean", "std", "min", "max", "score")
"""Names of metrics under ``reward/``, beside the names of reward functions."""

Rewards = npt.NDArray[np.floating[Any]]  # ``[prompts, samples]``; NaN where an answer is unscored


def mean_reward(rewards: Rewards) -> float:
    scored = rewards[~np.isnan(rewards)]
    return float(scored.mean()) if len(scored) else float("nan")


def sample_metrics(rows: Batch) -> dict[str, float]:
    """Return metrics of whole samples: the rewards of scored samples, with the part of each function; an environment's
    score; and the lengths of completions, except of samples that failed before the first token."""
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


def is_unscored(rows: Batch) -> npt.NDArray[np.bool_]:
    """Return ``[rows]``, or ``[samples]`` of merged rows: True without a reward."""
    return np.isnan(rows.dense("reward"))


def find_failed_groups(scored: Batch) -> npt.NDArray[np.int64]:
    ids, retry = scored.dense("prompt_id"), scored.dense("retry")
    _, group = np.unique(ids, return_inverse=True)
    last = np.full(len(ids), -1)
    np.maximum.at(last, group, retry)  # per group, since an earlier step may have retried some
    return np.unique(ids[(retry == last[group]) & is_unscored(scored)])


class RewardFailures:
    """Counts consecutive steps in which scoring left no sample to train on; part of a trainer's ``state``."""

    def __init__(self, config: RewardConfig) -> None:
        self._config, self._steps = config, 0

    def update(self, step: int, scored: Batch) -> None:
        """Count a step, given all of its rows, filtered ones included. Raises DataError if no sample is left in the
        run's first step, or in ``give_up_after`` consecutive ones."""
        self._steps = self._steps + 1 if np.isnan(trainable_rewards(scored, self._config)).all() else 0
        if not self._steps:
            return
        samples, limit = merge_rows(scored), self._config.give_up_after
        last = [error for error in scored.objects("error") if error is not None][-1]
        scorer, unscored = "environment" if "score" in samples else "reward function", is_unscored(samples)
        count = f"all {len(samples)} samples"
        if not unscored.all():
            count = f"{unscored.sum()} of {len(samples)} samples, at least one in each group, and so"
            count = f"{count} reward.on_failure={self._config.on_failure} leaves none to train on"
        message = f"the {scorer} failed on {count}, last with: {last}"
        if self._steps >= limit > 1:
            message = f"{message}; it was the last of {self._steps} such steps in a row (reward.give_up_after)"
        if step == 1 or self._steps >= limit:
            raise DataError([ConfigError(f"step {step}", message)])
        _LOG.warning("step %d: %s; %d such steps in a row, of %d that end the run", step, message, self._steps, limit)

    def metrics(self) -> dict[str, float]:
        return {"samples/steps_without_reward": float(self._steps)} if self._steps else {}

    def state_dict(self) -> dict[str, int]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._steps = state["steps"]


def mask_rewards(scored: Batch, config: RewardConfig) -> Batch:
    """Return the rows for the algorithm: samples that it may not train on have no reward."""
    return scored.with_columns(reward=trainable_rewards(scored, config))


def uniform_share(train_rows: Batch) -> float:
    """Return the share of groups of several samples whose rewards are all equal."""
    samples = merge_rows(train_rows)
    ids, rewards = samples.dense("prompt_id"), samples.dense("reward")
    groups = [rewards[(ids == number) & ~np.isnan(rewards)] for number in np.unique(ids)]
    several = [group for group in groups if len(group) > 1]
    return sum(bool((group == group[0]).all()) for group in several) / len(several) if several else 0.0


def trainable_rewards(scored: Batch, config: RewardConfig) -> npt.NDArray[np.float64]:
    reward = scored.dense("reward").copy()
    if config.on_failure != "drop_sample":
        keys = np.stack([scored.dense("prompt_id"), scored.dense("retry")])
        group = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        has_failure = np.bincount(group, weights=is_unscored(scored)) > 0
        reward[has_failure[group]] = np.nan
    return reward


def failure_metrics(scored: Batch, train_rows: Batch) -> dict[str, float]:
    """Count failures among all rows of a step, and dropped groups among the unfiltered ``train_rows``."""
    samples, ids = merge_rows(scored), train_rows.dense("prompt_id")
    return {
        "samples/failed": float(is_unscored(samples).sum()),
        "samples/redrawn": float((samples.dense("retry") > 0).sum()),
        "groups/dropped": float(len(np.unique(ids)) - len(np.unique(ids[~is_unscored(train_rows)]))),
    }


@dataclass
class StepWarnings:
    """Logs steps without a gradient, with truncated samples, or with ids that have no text."""

    compares_samples: bool
    max_new_tokens: int
    _without_signal: int = field(default=0, init=False)
    _had_room: bool = field(default=True, init=False)
    _had_unknown_ids: bool = field(default=False, init=False)

    def note_rewards(self, step: int, rows: Batch) -> None:
        """Log steps whose rewards give no gradient: the 1st, 2nd, 4th, 8th and so on."""
        if not self.compares_samples or uniform_share(rows) < 1.0:
            return
        self._without_signal += 1
        if self._without_signal.bit_count() == 1:
            cause = "no gradient: in every group all rewards are equal"
            advice = "check the reward function on samples.jsonl, raise the temperature, or use easier prompts"
            _LOG.warning("step %d: %s; %s", step, cause, advice)

    def note_completions(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the first of several steps in a row of mostly truncated completions, and the first unknown ids."""
        share, count = metrics.get("completions/truncated", 0.0), metrics.get("completions/unknown_ids", 0)
        if share > _MAX_TRUNCATED and self._had_room:
            advice = f"raise rollout.max_new_tokens, now {self.max_new_tokens}, or see samples.jsonl for the cause"
            _LOG.warning("step %d: %.0f %% of the completions were cut off: %s", step, 100 * share, advice)
        self._had_room = share <= _MAX_TRUNCATED
        if count and not self._had_unknown_ids:
            self._had_unknown_ids = True
            cause = f"{count:.0f} sampled ids are not in the tokenizer, so no reward sees them"
            _LOG.warning("step %d: %s: engine.mask_unknown_ids masks them in engines torch and vllm", step, cause)


Scores: TypeAlias = Mapping[str, Rewards]  # ``reward`` and, from an environment, ``score``


def evaluation_metrics(sets: Collection[str], samples: int, scored: bool) -> list[str]:
    passes = [f"eval/{name}" for name in (f"avg@{samples}", *(f"pass@{k}" for k in pass_counts(samples)))]
    names = ["eval/accuracy", "eval/reward", "eval/failed"]
    names += [*(["eval/score"] if scored else []), *(passes if samples > 1 else [])]
    return [_name_metric(name, of_set) for of_set in sets or [""] for name in names]


def collect_scores(answers: Batch, samples: int = 1) -> Scores:
    """Return the scores of the answers, ``samples`` per prompt, as plain arrays for a trainer's state."""
    merged = merge_rows(answers)
    return {name: merged.dense(name).reshape(-1, samples) for name in ("reward", "score") if name in merged}


def pass_counts(samples: int) -> list[int]:
    return [*(2**power for power in range(1, (samples - 1).bit_length())), *([samples] if samples > 1 else [])]


def pass_at_k(right: npt.NDArray[np.bool_], k: int) -> float:
    """Estimate the probability that one of ``k`` answers to a prompt is right, the mean over prompts: 1 - C(n - c, k) /
    C(n, k) for n answers, c of them right (arXiv:2107.03374, equation 1). ``right`` is ``[prompts, n]``."""
    samples = right.shape[1]
    wrong = samples - right.sum(axis=1)
    return float(np.mean([1.0 - math.comb(count, k) / math.comb(samples, k) for count in wrong.tolist()]))


def is_binary(rewards: Rewards) -> bool:
    """Return True if every reward is 0 or 1, and there is one: their mean is then an accuracy."""
    scored = rewards[~np.isnan(rewards)]
    return bool(len(scored)) and bool(np.isin(scored, (0.0, 1.0)).all())


def accuracy(rewards: Rewards) -> float:
    return float(np.nan_to_num(rewards).mean())


def step_metrics(answers: Mapping[str, Scores]) -> dict[str, float]:
    """Return the metrics of an evaluation during training, by set; a single set has an empty name."""
    named = dict[str, float]()
    for of_set, scores in answers.items():
        rewards = scores["reward"]
        metrics = {"eval/accuracy": accuracy(rewards)} if is_binary(rewards) else {}
        metrics |= {"eval/reward": mean_reward(rewards), "eval/failed": float(np.isnan(rewards).sum())}
        if "score" in scores:
            metrics["eval/score"] = mean_reward(scores["score"])
        values = scores.get("score", rewards)  # an environment's scores count before its rewards
        if (samples := values.shape[1]) > 1:
            has_right = is_binary(values)
            metrics[f"eval/avg@{samples}"] = accuracy(values) if has_right else mean_reward(values)
            for k in pass_counts(samples) if has_right else ():
                metrics[f"eval/pass@{k}"] = pass_at_k(np.nan_to_num(values) == 1.0, k)
        named |= {_name_metric(name, of_set): value for name, value in metrics.items()}
    return named


def _name_metric(name: str, of_set: str) -> str:
    return name.replace("eval/", f"eval/{of_set}/", 1) if of_set else name


def summarize_evaluations(
    before: Mapping[str, Scores], after: Mapping[str, Scores], names: Collection[str]
) -> dict[str, float]:
    """Return the closing metrics: all ``names`` of an evaluation after training, and with ``before/`` before it. NaN:
    an accuracy unless all rewards are 0 or 1, and metrics before training of a set that had other prompts."""
    sizes = {of_set: scores["reward"].shape for of_set, scores in after.items()}
    same = {of_set: scores for of_set, scores in before.items() if scores["reward"].shape == sizes.get(of_set)}
    undefined = dict.fromkeys(names, math.nan)
    first, last = (undefined | step_metrics(scores) for scores in (same, after))
    return {**{f"before/{name}": value for name, value in first.items()}, **last}
