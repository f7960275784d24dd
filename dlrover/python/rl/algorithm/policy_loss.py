"""The clipped surrogate of PPO (Schulman et al., arXiv:1707.06347, eq. 7)."""

import torch

from dlrover.python.rl.algorithm.base import TokenColumns, TokenLosses, column, weighted_sum

MOST = 20.0
"""Log-ratios above it are taken for it: their exponentials soon are no numbers."""


def clipped_surrogate(
    log_ratio: torch.Tensor,
    columns: TokenColumns,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """Token losses ``-min(A r, A clip(r, 1 - clip_low, 1 + clip_high))``.

    Args:
        log_ratio: log r, ``[tokens]``: log-probs less ``old_logprobs``, or what an algorithm puts in their place.
        columns: ``advantage`` and ``weight``, each ``[tokens]``.
        clip_low: how far the ratio may fall below 1 before the gradient stops.
        clip_high: how far it may rise above 1 (a larger value than ``clip_low`` is DAPO's "clip-higher").
        dual_clip: for A < 0, the ratio beyond which the loss ``-A r`` grows no further and the gradient stops (Ye et
            al., arXiv:1912.09729, eq. 5); None: it may grow without end.

    Returns:
        The losses, ``[tokens]``, not yet weighted; and weighted sums over the tokens: ``ratio``, ``clip_fraction``
        (tokens whose gradient the clips stopped), ``approx_kl`` (k3 of KL(pi_old || pi)) and ``weight`` (1 over a whole
        update unless the averaging is a sum or by a constant; the others are means after division by it).
    """
    advantage, weight = column(columns, "advantage"), column(columns, "weight")
    log_ratio = log_ratio.clamp(max=MOST)
    ratio = log_ratio.exp()
    free = advantage * ratio
    objective = torch.minimum(free, advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, advantage * dual_clip), objective)
    metrics = {
        "ratio": weighted_sum(weight, ratio),
        "clip_fraction": weighted_sum(weight, (objective != free).to(weight.dtype)),
        "approx_kl": weighted_sum(weight, torch.expm1(log_ratio) - log_ratio),
        "weight": weight.sum(),
    }
    return -objective, metrics
