"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16) over action tokens."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def gae(
    reward: Floats, value: Floats, lengths: npt.NDArray[np.int64], gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """``A_t = d_t + gamma lam A_(t+1)`` with ``d_t = r_t + gamma V_(t+1) - V_t``; V and A after the last action are 0.

    An action's successor is the sample's next *action*: what the environment says in between is no step.

    Args:
        reward: of each action token, one sample after the other, ``[actions]``.
        value: before each, ``[actions]``.
        lengths: actions of each sample, ``[samples]``.
        gamma: discount of later rewards.
        lam: 0 looks one step ahead (bias), 1 to the end (variance).

    Returns:
        Advantages and returns ``A + V``, each ``[actions]``.
    """
    starts = np.cumsum(lengths) - lengths
    advantage = np.zeros(len(reward))
    next_value, next_advantage = np.zeros(len(lengths)), np.zeros(len(lengths))
    for step in range(int(lengths.max(initial=0)) - 1, -1, -1):
        going = np.flatnonzero(lengths > step)
        at = starts[going] + step
        error = reward[at] + gamma * next_value[going] - value[at]
        advantage[at] = next_advantage[going] = error + gamma * lam * next_advantage[going]
        next_value[going] = value[at]
    return advantage, advantage + value


def rewards_to_go(reward: Floats, lengths: npt.NDArray[np.int64], gamma: float = 1.0) -> Floats:
    """``sum over s >= t of gamma^(s - t) r_s`` within each sample, ``[actions]``."""
    return gae(reward, np.zeros(len(reward)), lengths, gamma, 1.0)[0]
