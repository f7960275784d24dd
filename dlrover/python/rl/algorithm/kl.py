"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

With x = log pi(a) - log ref(a) and a drawn from pi (Schulman, "Approximating KL Divergence", 2020):
k1 = x, k2 = x^2 / 2, k3 = x + exp(-x) - 1. k1 and k3 are unbiased; k2 and k3 are never negative.
"""

from typing import Literal, TypeAlias, get_args

import torch

from dlrover.python.rl.common.nearest import hint

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
"""Estimators of a value: for metrics and for rewards."""

KLPenalty: TypeAlias = Literal["k2", "k3"]
"""Estimators whose gradient leads to the reference: for losses."""


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KLEstimator) -> torch.Tensor:
    """The estimator's value of each token, ``[tokens]``.

    Raises:
        ValueError: unknown ``kind``.
    """
    x = logprobs - ref_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        return x + torch.expm1(-x)
    raise ValueError(f"unknown KL estimator '{kind}'{hint(kind, get_args(KLEstimator))}")


def kl_penalty(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KLEstimator) -> torch.Tensor:
    """The estimator as a loss per token, ``[tokens]``, to be differentiated through ``logprobs``.

    On-policy the expected gradient is that of KL(pi || ref) for k2, and that of KL(ref || pi) for k3.

    Raises:
        ValueError: ``kind`` is k1 or unknown.
    """
    check_penalty(kind)
    return kl_estimate(logprobs, ref_logprobs, kind)


def check_penalty(kind: str) -> None:
    """Raise ValueError unless ``kind`` may be a loss."""
    if kind == "k1":
        raise ValueError(
            "k1 cannot be a loss: its gradient is that of log pi, whose expectation under pi is zero, so it adds noise"
            " and no pull to the reference; use 'k2' or 'k3'"
        )
    if kind not in get_args(KLPenalty):
        raise ValueError(f"unknown KL estimator '{kind}'{hint(kind, get_args(KLPenalty))}")
