"""Advantages of samples against the other samples of their prompt."""

from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.nearest import hint

_ROUNDING = 1e-9
"""How far sums of the same numbers may be apart, as a share of them."""

Normalize: TypeAlias = Literal["none", "std"]
"""``std`` divides a group's centred rewards by their standard deviation; ``none`` does not."""

STD_EPS = 1e-6
"""Added to the standard deviation of a group's rewards before dividing."""


def group_advantages(
    prompt_id: npt.NDArray[np.int64],
    reward: npt.NDArray[np.floating],
    normalize: Normalize,
    valid: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.float32]:
    """Center rewards on the mean of their group: the rows of one prompt, wherever they stand in the batch.

    GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2): ``(r - mean(r)) / std(r)``. The paper does not say which
    deviation it means; this is the **population** one (divisor n, plus 1e-6), so rewards 1 and 0 give +1 and -1. verl,
    TRL and RL2 use the unbiased one (divisor n - 1; +0.71 and -0.71 there); with groups of n samples all their
    advantages are smaller by the factor sqrt((n - 1) / n), which a learning rate absorbs. Dr. GRPO (arXiv:2503.20783)
    does not divide at all.

    Args:
        prompt_id: ``[rows]``.
        reward: ``[rows]``; NaN marks a failed sample.
        normalize: divide by the deviation or not.
        valid: False on further rows to leave out, ``[rows]``.

    Returns:
        ``[rows]``. 0 for rows left out, and for every row of a group whose rewards are all equal or that has one row.

    Raises:
        ValueError: unknown ``normalize``, or an infinite reward.
    """
    if normalize not in get_args(Normalize):
        raise ValueError(f"unknown normalize '{normalize}'{hint(normalize, get_args(Normalize))}")
    if np.isinf(reward).any():
        raise ValueError(f"infinite rewards in rows {np.flatnonzero(np.isinf(reward)).tolist()}")
    counted = ~np.isnan(reward) if valid is None else valid & ~np.isnan(reward)
    advantage = np.zeros(len(reward), dtype=np.float32)
    _, group = np.unique(prompt_id[counted], return_inverse=True)
    advantage[counted] = _centred(group, reward[counted].astype(np.float64), normalize)
    return advantage


def leave_one_out(
    prompt_id: npt.NDArray[np.int64], reward: npt.NDArray[np.floating], valid: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """Center each reward on the mean of the *other* rows of its prompt (RLOO, arXiv:2402.14740, section 3.2).

    That is ``n / (n - 1)`` times the deviation from the mean of all n.

    Args:
        prompt_id: ``[rows]``.
        reward: ``[rows]``.
        valid: False on rows to leave out, ``[rows]``.

    Returns:
        ``[rows]``, 0 for rows that are left out or alone.
    """
    centred = group_advantages(prompt_id, reward, "none", valid).astype(np.float64)
    _, group = np.unique(prompt_id, return_inverse=True)
    count = np.bincount(group, weights=valid)[group]
    return (centred * count / np.maximum(count - 1, 1)).astype(np.float32)


def varied_groups(
    prompt_id: npt.NDArray[np.int64], reward: npt.NDArray[np.floating], valid: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """``[samples]``: True where the valid rewards of a sample's prompt differ, by more than sums of the same numbers in
    another order do, so that there is something to learn.

    DAPO's dynamic sampling (arXiv:2503.14476, eq. 11) draws other prompts in place of the rest.

    Args:
        prompt_id: ``[samples]``.
        reward: ``[samples]``, each of its whole trajectory.
        valid: False on samples to leave out, ``[samples]``.
    """
    _, group = np.unique(prompt_id, return_inverse=True)
    low, high = np.full(len(reward), np.inf), np.full(len(reward), -np.inf)
    np.minimum.at(low, group[valid], reward[valid])
    np.maximum.at(high, group[valid], reward[valid])
    varied: npt.NDArray[np.bool_] = high - low > _ROUNDING * np.maximum(1.0, np.abs(high))
    return varied[group]


def whitened(values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
    """``(values - mean) / sqrt(var + 1e-8)`` with the unbiased variance (divisor n - 1); equal values give 0.

    Over the action tokens of a whole update, as in the published code of PPO and REINFORCE++ (TRL, verl, RL2).

    Args:
        values: ``[n]``.
        counts: how often each of them is there; None: once. With 0 it does not count, and comes back as 0.
    """
    counts = np.ones(len(values), dtype=np.int64) if counts is None else counts
    there = values[counts > 0]
    if not len(there) or there.min() == there.max():
        return np.zeros(len(values))
    total = counts.sum()
    centred = np.where(counts > 0, values - (counts * np.where(counts > 0, values, 0.0)).sum() / total, 0.0)
    deviation = float(np.sqrt((counts * centred**2).sum() / (total - 1) + 1e-8))
    return centred / deviation


def check_group_size(samples_per_prompt: int) -> None:
    """Refuse groups of one: a sample compared with itself has advantage 0, and nothing would ever be learned.

    Raises:
        ValueError: ``samples_per_prompt`` is below 2.
    """
    if samples_per_prompt < 2:
        raise ValueError(
            f"samples_per_prompt is {samples_per_prompt}: the baseline is the mean over a prompt's samples, so a sample"
            " alone always has advantage 0 and nothing is learned; use at least 2"
        )


def _centred(
    group: npt.NDArray[np.int64], reward: npt.NDArray[np.float64], normalize: Normalize
) -> npt.NDArray[np.float64]:
    count = np.bincount(group)
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, group, reward)
    np.maximum.at(high, group, reward)
    # The mean of equal numbers may be off by a rounding error, which a division by eps would blow up.
    varies = (high > low)[group]
    centred = np.where(varies, reward - (np.bincount(group, weights=reward) / count)[group], 0.0)
    if normalize == "none":
        return centred
    deviation = np.sqrt(np.bincount(group, weights=centred**2) / count)
    return centred / (deviation[group] + STD_EPS)
