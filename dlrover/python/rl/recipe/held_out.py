"""What the answers to held-out problems say: an accuracy where rewards are right or wrong, else their mean."""

from typing import Any

import numpy as np
import numpy.typing as npt

Rewards = npt.NDArray[np.floating[Any]]
"""``[rows]``; NaN where an answer could not be judged."""


EVALUATED = ("accuracy", "held_out_reward", "held_out_failed")
"""The names in :func:`step_metrics`."""


def is_right_or_wrong(rewards: Rewards) -> bool:
    """Whether every reward is 0 or 1, and there is one: their mean is then an accuracy."""
    judged = rewards[~np.isnan(rewards)]
    return bool(len(judged)) and bool(np.isin(judged, (0.0, 1.0)).all())


def accuracy(rewards: Rewards) -> float:
    """Share of right answers; one that could not be judged is not a right one."""
    return float(np.nan_to_num(rewards).mean())


def mean_reward(rewards: Rewards) -> float:
    """Mean over the judged answers; NaN when there is none."""
    judged = rewards[~np.isnan(rewards)]
    return float(judged.mean()) if len(judged) else float("nan")


def failures(rewards: Rewards) -> int:
    """How many answers could not be judged."""
    return int(np.isnan(rewards).sum())


def step_metrics(rewards: Rewards) -> dict[str, float]:
    """The figures of an evaluation during training; an accuracy among them where every reward is 0 or 1."""
    told = {"held_out_reward": mean_reward(rewards), "held_out_failed": float(failures(rewards))}
    return {"accuracy": accuracy(rewards), **told} if is_right_or_wrong(rewards) else told


def before_and_after(before: Rewards, after: Rewards) -> dict[str, float | int]:
    """The closing figures: both under the same name."""
    failed = {"held-out failed before": failures(before), "held-out failed after": failures(after)}
    if is_right_or_wrong(np.concatenate([before, after])):
        first, last = accuracy(before), accuracy(after)
        return {
            "held-out accuracy before": round(first, 4),
            "held-out accuracy after": round(last, 4),
            "gain in points": round(100 * (last - first), 1),
            **(failed if any(failed.values()) else {}),
        }
    return {
        "held-out mean reward before": round(mean_reward(before), 4),
        "held-out mean reward after": round(mean_reward(after), 4),
        **failed,
    }
