"""What the answers to held-out problems say: an accuracy where rewards are right or wrong, else their mean."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.whole_samples import whole_samples

Rewards = npt.NDArray[np.floating[Any]]
"""``[answers]``; NaN where an answer could not be judged."""

Judged: TypeAlias = Mapping[str, Rewards]
"""``reward`` and, where an environment has judged, ``score``."""

EVALUATED = ("accuracy", "held_out_reward", "held_out_failed")
"""The names in :func:`step_metrics`."""

SCORED = "held_out_score"
"""Another one, where an environment has judged."""


def judged(answers: Batch) -> Judged:
    """What was said of each answer, which may be several rows; plain enough for a trainer's state."""
    samples = whole_samples(answers)
    return {name: samples.dense(name) for name in ("reward", "score") if name in samples}


def is_right_or_wrong(rewards: Rewards) -> bool:
    """Whether every reward is 0 or 1, and there is one: their mean is then an accuracy."""
    there = rewards[~np.isnan(rewards)]
    return bool(len(there)) and bool(np.isin(there, (0.0, 1.0)).all())


def accuracy(rewards: Rewards) -> float:
    """Share of right answers; one that could not be judged is not a right one."""
    return float(np.nan_to_num(rewards).mean())


def mean_reward(rewards: Rewards) -> float:
    """Mean over the judged answers; NaN when there is none."""
    there = rewards[~np.isnan(rewards)]
    return float(there.mean()) if len(there) else float("nan")


def failures(rewards: Rewards) -> int:
    """How many answers could not be judged."""
    return int(np.isnan(rewards).sum())


def step_metrics(answers: Judged) -> dict[str, float]:
    """The figures of an evaluation during training; an accuracy among them where every reward is 0 or 1."""
    rewards = answers["reward"]
    told = {"held_out_reward": mean_reward(rewards), "held_out_failed": float(failures(rewards))}
    if "score" in answers:
        told[SCORED] = mean_reward(answers["score"])
    return {"accuracy": accuracy(rewards), **told} if is_right_or_wrong(rewards) else told


def before_and_after(before: Judged, after: Judged) -> dict[str, float | int]:
    """The closing figures: both under the same name."""
    rewards = before["reward"], after["reward"]
    failed = dict(zip(("held-out failed before", "held-out failed after"), map(failures, rewards), strict=True))
    scores = _means("score", before, after) if "score" in before and "score" in after else {}
    if is_right_or_wrong(np.concatenate(rewards)):
        first, last = map(accuracy, rewards)
        return {
            "held-out accuracy before": round(first, 4),
            "held-out accuracy after": round(last, 4),
            "gain in points": round(100 * (last - first), 1),
            **scores,
            **(failed if any(failed.values()) else {}),
        }
    return {**_means("reward", before, after), **scores, **failed}


def _means(name: str, before: Judged, after: Judged) -> dict[str, float | int]:
    return {
        f"held-out mean {name} before": round(mean_reward(before[name]), 4),
        f"held-out mean {name} after": round(mean_reward(after[name]), 4),
    }
