# SPDX-License-Identifier: Apache-2.0
"""The shared part of algorithms that learn from rewards: counted samples and the terms of the loss.

Terms of a policy's loss on a token: clipped surrogate (PPO, arXiv:1707.06347, eq. 7), correction, KL penalty.

Correction (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025): tokens come
from pi_rollout, while the surrogate assumes pi_old, so losses are multiplied by ``pi_old / pi_rollout``, both *before*
the update.

KL(policy || reference) of sampled tokens (Schulman, "Approximating KL Divergence", 2020): with x = log pi(a) - log
ref(a) k1 = x, k2 = x^2 / 2, k3 = x + exp(-x) - 1. k1 and k3 are unbiased; k2 and k3 are never negative. The exponential
of k3 is bounded by :data:`MAX_KL_LOG_RATIO`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt, Lt

from dlrover.python.rl.algorithm.losses.columns import (
    STD_EPS,
    Floats,
    Metrics,
    Needs,
    Normalize,
    SampleView,
    TokenColumns,
    TokenLosses,
    TokenUnits,
    column,
    group_advantages,
    weighted_sum,
)
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.config.typed import check_fields
from dlrover.python.rl.data.batch import Batch, Column

MAX_LOG_RATIO = 20.0  # upper bound of log-ratios, whose exponentials would overflow
MAX_KL_LOG_RATIO = 10.0
"""Upper bound of log ref(a) - log pi(a) in k3. Beyond it the value stays at 22,015 and the gradient is 0, as beyond the
bound of the surrogate's ratio. k2, a square, has no bound. OpenRLHF (pull request 1335) and verl (``kl_penalty``) bound
the estimate itself, at 10, which a log-ratio of 2.6 reaches."""


def clipped_surrogate(
    log_ratio: torch.Tensor, columns: TokenColumns, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLosses:
    """Unweighted losses ``-min(A r, A clip(r, 1 - clip_low, 1 + clip_high))`` and metrics; arguments are ``[tokens]``.

    ``log_ratio`` is log r: log-probs less ``old_logprobs``, or an algorithm's substitute. A larger ``clip_high`` is
    DAPO's "clip-higher". For A < 0 the loss is constant above the ratio ``dual_clip`` (Ye et al., arXiv:1912.09729,
    eq. 5).

    The metrics are from :func:`ratio_metrics`; a token is clipped if its gradient stopped."""
    advantage, weight = column(columns, "advantage"), column(columns, "weight")
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = advantage * ratio
    objective = torch.minimum(unclipped, advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, advantage * dual_clip), objective)
    return -objective, ratio_metrics(weight, log_ratio, objective != unclipped)


def ratio_metrics(weight: torch.Tensor, log_ratio: torch.Tensor, clipped: torch.Tensor) -> Metrics:
    """Weighted sums over the tokens: ``ratio``; ``clip_fraction`` (tokens that are ``clipped``), of which ``clip_low``
    and ``clip_high`` have a ratio below and above 1; ``approx_kl`` (k3 of KL(pi_old || pi)); and ``weight``, by which
    to divide the others: 1 unless averaging is a sum or by a constant. Arguments are ``[tokens]``."""
    shares = {"clip_fraction": clipped, "clip_low": clipped & (log_ratio < 0), "clip_high": clipped & (log_ratio > 0)}
    return {
        "ratio": weighted_sum(weight, log_ratio.exp()),
        **{name: weighted_sum(weight, share.to(weight.dtype)) for name, share in shares.items()},
        "approx_kl": weighted_sum(weight, torch.expm1(log_ratio) - log_ratio),
        "weight": weight.sum(),
    }


Correction: TypeAlias = Literal["none", "truncate", "mask"]
"""``truncate``: limits weights to a bound (TIS). ``mask``: makes weights outside two bounds 0 (MIS, IcePop)."""

CorrectionLevel: TypeAlias = Literal["token", "sequence"]
"""Weights of single tokens, or of whole sequences: the products of their tokens' weights."""


IGNORED_OPTIONS: Mapping[Correction, tuple[str, ...]] = {
    "none": ("correction_level", "correction_low", "correction_high"),
    "truncate": ("correction_low",),
    "mask": (),
}
"""Options that each correction ignores."""


def correction_bounds(low: float | None, high: float | None) -> tuple[float, float]:
    return 0.0 if low is None else low, 2.0 if high is None else high


def correction_weights(
    columns: TokenColumns, kind: Correction, level: CorrectionLevel, low: float, high: float
) -> tuple[torch.Tensor, Metrics]:
    """Return the factors of token losses ``[tokens]``, without gradient, and metrics.

    ``columns`` hold ``old_logprobs`` (of the train engine, before the update), ``rollout_logprobs`` and ``weight``. The
    metrics are ``mismatch_kl``, k3 of KL(rollout || old), and with a correction ``mismatch_bounded`` (tokens with a
    bounded factor)."""
    weight = column(columns, "weight")
    log_ratio = (column(columns, "old_logprobs") - column(columns, "rollout_logprobs")).detach()
    kl = torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) - log_ratio
    metrics = {"mismatch_kl": weighted_sum(weight, kl)}
    if kind == "none":
        return torch.ones_like(weight), metrics
    if level == "sequence":
        units = TokenUnits.of(columns)
        log_ratio = units.spread(units.sums(log_ratio))
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    within = (ratio >= low) & (ratio <= high)
    factor = ratio.clamp(max=high) if kind == "truncate" else torch.where(within, ratio, 0.0)
    metrics["mismatch_bounded"] = weighted_sum(weight, (factor != ratio).to(weight.dtype))
    return factor, metrics


KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]  # estimators of a value: for metrics and for rewards


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KLEstimator) -> torch.Tensor:
    """Return the estimator's value of each token, ``[tokens]``, differentiable in ``logprobs``.

    On-policy the expected gradient of k2 is the gradient of KL(pi || ref), and k3's is the gradient of KL(ref || pi),
    but 0 beyond :data:`MAX_KL_LOG_RATIO`."""
    x = logprobs - ref_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        log_ratio = (-x).clamp(max=MAX_KL_LOG_RATIO)
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown KL estimator '{kind}'{hint(kind, get_args(KLEstimator))}")


def changed_fields(config: Any, *names: str) -> list[str]:
    """Return the fields ``names`` of a dataclass instance that differ from their defaults."""
    return [item.name for item in fields(config) if item.name in names and getattr(config, item.name) != item.default]


KLTerm: TypeAlias = Literal["loss", "reward", "advantage"]
"""A differentiable term of the loss, or subtracted from rewards or from each token's advantage."""


@dataclass(frozen=True)
class PolicyGradient:
    """The token loss ``c -min(A r, A clip(r)) + kl_coef KL - entropy_coef H``, c the correction; subclasses define A.

    A subclass is a frozen dataclass with :meth:`advantages`; it may change defaults and override :meth:`surrogate`."""

    #: a sample's baseline comes from the other samples of its prompt, so a group of one teaches nothing
    compares_samples: ClassVar[bool] = True
    #: each token has a separate advantage: ``advantages`` returns a ragged column
    has_token_advantages: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "judges_tokens" in vars(cls):
            raise TypeError(f"{cls.__name__}.judges_tokens is now called has_token_advantages")

    #: how far the ratio to the policy before the update may fall below 1
    clip_low: Annotated[float, Ge(0.0), Lt(1.0)] = 0.2
    clip_high: Annotated[float, Ge(0.0)] = 0.2  #: how far it may rise above 1
    #: bound of the ratio for negative advantages, beyond which the gradient stops too; 3 is usual
    dual_clip: Annotated[float, Gt(1.0)] | None = None
    #: mean over the tokens of the update; or over samples, of their token means (``sequence``) or sums (``sum``)
    averaging: Literal["token", "sequence", "sum"] = "token"
    kl_coef: Annotated[float, Ge(0.0)] = 0.0  #: weight of the KL penalty; above 0 the reference's log-probs are needed
    kl_estimator: KLEstimator = "k3"  #: estimator of the KL penalty; ``k1`` cannot be a loss
    kl_in: KLTerm = "loss"  #: the term that holds the KL penalty
    entropy_coef: Annotated[float, Ge(0.0)] = 0.0  #: weight of the entropy bonus; above 0 raises the policy's entropy
    #: importance correction of rollouts of another engine; all but ``none`` need log-probs of the train engine from
    #: before the update
    correction: Correction = "none"
    #: correct single tokens or whole sequences; if a step has one update, ``token`` needs no further forward pass
    correction_level: CorrectionLevel = "token"
    #: lower bound of the correction's weight, for ``mask``; None: 0
    correction_low: Annotated[float, Ge(0.0)] | None = None
    correction_high: Annotated[float, Gt(0.0)] | None = None  #: upper bound of the correction's weight; None: 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            reason = "its expected gradient is zero, so it adds noise and no pull to the reference"
            raise ValueError(f"k1 cannot be a loss: {reason}; use 'k2' or 'k3'")
        if unused := changed_fields(self, *IGNORED_OPTIONS[self.correction]):
            raise ValueError(f"{', '.join(unused)}: no effect with correction '{self.correction}'")
        if self.correction == "mask":
            low, high = correction_bounds(self.correction_low, self.correction_high)
            if low >= high or not low <= 1 <= high:
                bounds = f"correction_low {low} and correction_high {high}"
                raise ValueError(f"{bounds} are not around 1, the weight of equal policies")

    @property
    def needs(self) -> Needs:
        in_reward = self.kl_coef > 0 and self.kl_in == "reward"
        annotate = {"action_mask"} if self.has_token_advantages else set()
        loss = {"old_logprobs"}
        if in_reward:
            annotate |= {"action_mask", "old_logprobs", "ref_logprobs"}
        elif self.kl_coef > 0:
            loss.add("ref_logprobs")
        if self.correction != "none":
            loss.add("rollout_logprobs")
        if self.entropy_coef > 0:
            loss.add("entropy")
        return Needs(frozenset(annotate), frozenset(loss), whole_sequences=self.correction_level == "sequence")

    def check_group_size(self, samples_per_prompt: int) -> None:
        if self.compares_samples and samples_per_prompt < 2:
            reason = "a single sample equals its baseline, the mean of the prompt's samples, and nothing is learned"
            raise ValueError(f"samples_per_prompt is {samples_per_prompt}: {reason}; use at least 2")

    def annotate(self, rows: Batch) -> Batch:
        """Add ``advantage`` and ``weight``."""
        samples = SampleView.of(rows)
        return rows.with_columns(advantage=self.advantages(samples), weight=self.weights(samples))

    def advantages(self, samples: SampleView) -> Column:
        """Return the advantage of each row, float32 ``[rows]``, or of each token, ragged ``[rows, seq]``."""
        raise NotImplementedError

    def weights(self, samples: SampleView) -> npt.NDArray[np.float32]:
        return samples.weights(self.averaging)

    def rewards(self, samples: SampleView) -> Floats:
        if self.kl_coef > 0 and self.kl_in == "reward":
            sample = np.repeat(np.arange(len(samples.lengths)), samples.lengths)
            return samples.reward - np.bincount(sample, self._penalties(samples), len(samples.lengths))
        return samples.reward

    def token_rewards(self, samples: SampleView) -> Floats:
        if self.kl_coef > 0 and self.kl_in == "reward":
            return samples.token_rewards() - self._penalties(samples)
        return samples.token_rewards()

    def _penalties(self, samples: SampleView) -> Floats:
        old, reference = (torch.from_numpy(samples.of_tokens(f"{model}_logprobs")) for model in ("old", "ref"))
        penalties: Floats = self.kl_coef * kl_estimate(old, reference, self.kl_estimator).numpy()
        return penalties

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Adds metrics of the active terms: ``kl`` (k3), ``entropy``, ``mismatch_kl`` and ``mismatch_bounded``."""
        weight = column(columns, "weight")
        if self.kl_coef > 0 and self.kl_in == "advantage":
            old, reference = column(columns, "old_logprobs"), column(columns, "ref_logprobs")
            penalty = self.kl_coef * kl_estimate(old, reference, self.kl_estimator)
            columns = {**columns, "advantage": column(columns, "advantage") - penalty}
        losses, metrics = self.surrogate(logprobs, columns)
        if self.correction != "none" or "rollout_logprobs" in columns:
            bounds = correction_bounds(self.correction_low, self.correction_high)
            factor, mismatch = correction_weights(columns, self.correction, self.correction_level, *bounds)
            losses, metrics = losses * factor, {**metrics, **mismatch}
        if "ref_logprobs" in self.needs.loss:
            reference = column(columns, "ref_logprobs")
            if self.kl_in == "loss":
                losses = losses + self.kl_coef * kl_estimate(logprobs, reference, self.kl_estimator)
            metrics["kl"] = weighted_sum(weight, kl_estimate(logprobs.detach(), reference, "k3"))
        if self.entropy_coef > 0:
            entropy = column(columns, "entropy")
            losses = losses - self.entropy_coef * entropy
            metrics["entropy"] = weighted_sum(weight, entropy)
        return (weight * losses).sum(), metrics

    def surrogate(self, logprobs: torch.Tensor, columns: TokenColumns) -> TokenLosses:
        log_ratio = logprobs - column(columns, "old_logprobs")
        return clipped_surrogate(log_ratio, columns, self.clip_low, self.clip_high, self.dual_clip)


@dataclass(frozen=True)
class GroupRelative(PolicyGradient):
    """Rewards less their group's mean, in standard deviations of the group."""

    #: divide a group's centred rewards by their standard deviation, as in the papers, or not. ``std_unbiased`` has the
    #: divisor n - 1, as in RL2, TRL and verl.
    normalize: Normalize = "std"
    std_eps: Annotated[float, Ge(0.0)] = STD_EPS  #: added to that deviation; 1e-4 in TRL

    def advantages(self, samples: SampleView) -> Column:
        reward = self.rewards(samples)
        advantages = group_advantages(samples.prompt_id, reward, self.normalize, samples.counted, self.std_eps)
        return samples.spread(advantages)
