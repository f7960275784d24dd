"""Correction for rollouts drawn by another engine: its probabilities are never quite those of the train engine.

Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025): tokens come from
pi_rollout, while the surrogate takes them for pi_old's. Each loss is weighted with ``pi_old / pi_rollout``. Both are
the policy *before* the update, so the weight does not change with it: how far the update has moved the policy is the
surrogate's ratio, and counting that twice would square it.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch

from dlrover.python.rl.algorithm.base import Metrics, TokenColumns, column, weighted_sum
from dlrover.python.rl.algorithm.policy_loss import MOST
from dlrover.python.rl.algorithm.units import Units

Correction: TypeAlias = Literal["none", "truncate", "mask"]
"""``truncate``: weights above a bound become the bound (TIS). ``mask``: weights outside of two bounds become 0 (MIS,
IcePop)."""

CorrectionLevel: TypeAlias = Literal["token", "sequence"]
"""Weights of single tokens, or of whole sequences: the product of their tokens'."""


UNUSED: Mapping[Correction, tuple[str, ...]] = {
    "none": ("correction_level", "correction_low", "correction_high"),
    "truncate": ("correction_low",),
    "mask": (),
}
"""Options that each correction does not look at."""


def correction_bounds(low: float | None, high: float | None) -> tuple[float, float]:
    """What the bounds are, where None stands for one that nobody has said."""
    return 0.0 if low is None else low, 2.0 if high is None else high


def check_bounds(low: float, high: float) -> None:
    """Refuse bounds for ``mask`` between which the weight 1, that of equal policies, is not.

    Raises:
        ValueError: it is so.
    """
    if low >= high:
        raise ValueError(f"correction_low {low} is not below correction_high {high}: every weight would become 0")
    if not low <= 1 <= high:
        raise ValueError(f"equal policies have weight 1, which correction_low {low} and correction_high {high} mask")


def correction_weights(
    columns: TokenColumns, kind: Correction, level: CorrectionLevel, low: float, high: float
) -> tuple[torch.Tensor, Metrics]:
    """The factor of each token's loss.

    Args:
        columns: ``old_logprobs`` (recomputed by the train engine before the update), ``rollout_logprobs`` and
            ``weight``, each ``[tokens]``.
        kind: what becomes of weights out of bounds.
        level: whose weights they are.
        low: the lower bound, for ``mask``.
        high: the upper bound.

    Returns:
        The factors, ``[tokens]``, without gradient; and the weighted sums ``mismatch_kl`` (k3 of KL(rollout || old))
        and ``mismatch_bounded`` (tokens whose factor a bound has changed).
    """
    weight = column(columns, "weight")
    log_ratio = (column(columns, "old_logprobs") - column(columns, "rollout_logprobs")).detach()
    metrics = {"mismatch_kl": weighted_sum(weight, torch.expm1(log_ratio.clamp(max=MOST)) - log_ratio)}
    if level == "sequence":
        units = Units.of(columns)
        log_ratio = units.spread(units.sums(log_ratio))
    ratio = log_ratio.clamp(max=MOST).exp()
    within = (ratio >= low) & (ratio <= high)
    factor = ratio.clamp(max=high) if kind == "truncate" else torch.where(within, ratio, 0.0)
    metrics["mismatch_bounded"] = weighted_sum(weight, (factor != ratio).to(weight.dtype))
    return factor, metrics
