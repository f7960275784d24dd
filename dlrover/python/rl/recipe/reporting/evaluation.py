# SPDX-License-Identifier: Apache-2.0
"""Metrics of an evaluation by answers to held-out prompts."""

import math
from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.reporting.rewards import Rewards, mean_reward, merge_rows

Scores: TypeAlias = Mapping[str, Rewards]
"""``reward`` and, from an environment, ``score``."""

EVALUATED = ("eval/accuracy", "eval/reward", "eval/failed")
"""The names in :func:`step_metrics` of one answer to each prompt."""

SCORED = "eval/score"
"""One more name, with an environment."""


def evaluation_metrics(sets: Collection[str], samples: int, scored: bool) -> list[str]:
    """All names in :func:`step_metrics`; ``scored``: by an environment."""
    passes = [f"eval/{name}" for name in (f"avg@{samples}", *(f"pass@{k}" for k in pass_counts(samples)))]
    names = [*EVALUATED, *([SCORED] if scored else []), *(passes if samples > 1 else [])]
    return [_name_metric(name, of_set) for of_set in sets or [""] for name in names]


def collect_scores(answers: Batch, samples: int = 1) -> Scores:
    """The scores of the answers, ``samples`` to each prompt, as plain arrays for a trainer's state."""
    merged = merge_rows(answers)
    return {name: merged.dense(name).reshape(-1, samples) for name in ("reward", "score") if name in merged}


def pass_counts(samples: int) -> list[int]:
    """The k of pass@k: powers of 2, and all samples."""
    return [*(2**power for power in range(1, (samples - 1).bit_length())), *([samples] if samples > 1 else [])]


def pass_at_k(right: npt.NDArray[np.bool_], k: int) -> float:
    """The probability that one of ``k`` of the answers to a prompt is right, the mean over prompts.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) from n answers, of which c are right (Chen et al., arXiv:2107.03374,
    equation 1). ``right``: ``[prompts, n]``."""
    samples = right.shape[1]
    wrong = samples - right.sum(axis=1)
    return float(np.mean([1.0 - math.comb(count, k) / math.comb(samples, k) for count in wrong.tolist()]))


def is_binary(rewards: Rewards) -> bool:
    """Return True if there are rewards and each is 0 or 1: their mean is then an accuracy."""
    scored = rewards[~np.isnan(rewards)]
    return bool(len(scored)) and bool(np.isin(scored, (0.0, 1.0)).all())


def accuracy(rewards: Rewards) -> float:
    """Share of right answers; an unscored one is not right."""
    return float(np.nan_to_num(rewards).mean())


def count_failures(rewards: Rewards) -> int:
    return int(np.isnan(rewards).sum())


def step_metrics(answers: Mapping[str, Scores]) -> dict[str, float]:
    """The metrics of an evaluation during training, by set; the name of a single one is empty."""
    return {
        _name_metric(name, of_set): value
        for of_set, scores in answers.items()
        for name, value in _metrics_of_set(scores).items()
    }


def _name_metric(name: str, of_set: str) -> str:
    return name.replace("eval/", f"eval/{of_set}/", 1) if of_set else name


def _metrics_of_set(scores: Scores) -> dict[str, float]:
    """An accuracy is among them where every reward is 0 or 1."""
    rewards = scores["reward"]
    metrics = {"eval/reward": mean_reward(rewards), "eval/failed": float(count_failures(rewards))}
    if "score" in scores:
        metrics[SCORED] = mean_reward(scores["score"])
    metrics |= {f"eval/{name}": value for name, value in _repeated(scores).items()}
    return {"eval/accuracy": accuracy(rewards), **metrics} if is_binary(rewards) else metrics


def _repeated(scores: Scores) -> dict[str, float]:
    """avg@n and pass@k of n answers to each prompt, where there are several: of the environment's scores if there are,
    else of the rewards."""
    values = scores.get("score", scores["reward"])
    samples = values.shape[1]
    if samples == 1:
        return {}
    if not is_binary(values):
        return {f"avg@{samples}": mean_reward(values)}
    passes = {f"pass@{k}": pass_at_k(np.nan_to_num(values) == 1.0, k) for k in pass_counts(samples)}
    return {f"avg@{samples}": accuracy(values), **passes}


def summarize_evaluations(
    before: Mapping[str, Scores], after: Mapping[str, Scores], names: Collection[str]
) -> dict[str, float]:
    """The closing metrics: all ``names`` of an evaluation after training, and with ``before/`` the same ones of before.

    NaN stands for what is undefined: an accuracy where rewards are not all 0 or 1, and every metric from before
    training of a set that had other prompts or samples then.
    """
    sizes = {of_set: scores["reward"].shape for of_set, scores in after.items()}
    same = {of_set: scores for of_set, scores in before.items() if scores["reward"].shape == sizes.get(of_set)}
    undefined = dict.fromkeys(names, math.nan)
    first, last = (undefined | step_metrics(scores) for scores in (same, after))
    return {**{f"before/{name}": value for name, value in first.items()}, **last}
