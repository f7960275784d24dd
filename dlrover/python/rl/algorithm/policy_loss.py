"""The clipped surrogate of PPO (Schulman et al., arXiv:1707.06347, eq. 7)."""

import torch

from dlrover.python.rl.algorithm.base import Metrics, TokenColumns, column, weighted_sum


def clipped_surrogate(
    logprobs: torch.Tensor, columns: TokenColumns, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, Metrics]:
    """Token losses ``-min(A r, A clip(r, 1 - clip_low, 1 + clip_high))`` with ``r = pi / pi_old``.

    Args:
        logprobs: log pi, ``[tokens]``.
        columns: ``old_logprobs``, ``advantage`` and ``weight``, each ``[tokens]``.
        clip_low: how far the ratio may fall below 1 before the gradient stops.
        clip_high: how far it may rise above 1 (a larger value than ``clip_low`` is DAPO's "clip-higher").

    Returns:
        The losses, ``[tokens]``, not yet weighted; and weighted sums over the tokens: ``ratio``, ``clip_fraction``
        (tokens whose gradient the clip stopped), ``approx_kl`` (k3 of KL(pi_old || pi)) and ``weight`` (1 over a whole
        update unless the averaging is by a constant; the others are means after division by it).
    """
    advantage, weight = column(columns, "advantage"), column(columns, "weight")
    log_ratio = logprobs - column(columns, "old_logprobs")
    ratio = log_ratio.exp()
    free = advantage * ratio
    clipped = advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {
        "ratio": weighted_sum(weight, ratio),
        "clip_fraction": weighted_sum(weight, (clipped < free).to(weight.dtype)),
        "approx_kl": weighted_sum(weight, torch.expm1(log_ratio) - log_ratio),
        "weight": weight.sum(),
    }
    return -torch.minimum(free, clipped), metrics
