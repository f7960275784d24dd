"""What algorithms that learn from rewards have in common: which samples count, and the terms of the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt, Lt

from dlrover.python.rl.algorithm.advantages import check_group_size
from dlrover.python.rl.algorithm.base import Metrics, Needs, TokenColumns, TokenLosses, column, weighted_sum
from dlrover.python.rl.algorithm.fields import check_fields, given
from dlrover.python.rl.algorithm.kl import KLEstimator, check_penalty, kl_estimate, kl_penalty
from dlrover.python.rl.algorithm.mismatch import (
    UNUSED,
    Correction,
    CorrectionLevel,
    check_bounds,
    correction_bounds,
    correction_weights,
)
from dlrover.python.rl.algorithm.policy_loss import clipped_surrogate
from dlrover.python.rl.algorithm.samples import Floats, Samples
from dlrover.python.rl.data.batch import Batch, Column

KLPlace: TypeAlias = Literal["loss", "reward", "advantage"]
"""``loss``: a term that is differentiated. ``reward``: taken off the rewards, before there are advantages.
``advantage``: taken off each token's advantage."""


@dataclass(frozen=True)
class PolicyGradient:
    """The token loss ``c -min(A r, A clip(r)) + kl_coef KL - entropy_coef H``; subclasses say what A is.

    A subclass is a frozen dataclass with :meth:`advantages`; it may put other defaults to these fields, and another
    :meth:`surrogate`.
    """

    compares_samples: ClassVar[bool] = True
    """Whether the baseline of a sample is made of the others of its prompt, so that one alone teaches nothing."""

    judges_tokens: ClassVar[bool] = False
    """Whether the tokens of a sample have advantages of their own."""

    clip_low: Annotated[float, Ge(0.0), Lt(1.0)] = 0.2
    """How far the ratio to the policy before the update may fall below 1."""

    clip_high: Annotated[float, Ge(0.0)] = 0.2
    """How far it may rise above 1."""

    dual_clip: Annotated[float, Gt(1.0)] | None = None
    """Bound of the ratio for negative advantages, beyond which the gradient stops too; 3 is usual."""

    averaging: Literal["token", "sequence", "sum"] = "token"
    """Mean over the tokens of the update; or over samples, of their token means (``sequence``) or sums (``sum``)."""

    kl_coef: Annotated[float, Ge(0.0)] = 0.0
    """Weight of the KL penalty; above 0 the reference's log-probs are needed."""

    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL penalty; ``k1`` cannot be a loss."""

    kl_in: KLPlace = "loss"
    """Where the KL penalty is."""

    entropy_coef: Annotated[float, Ge(0.0)] = 0.0
    """Weight of the entropy bonus; above 0 raises the policy's entropy."""

    correction: Correction = "none"
    """What to do about rollouts drawn by another engine; else than ``none`` needs log-probs that the train engine has
    computed before the update."""

    correction_level: CorrectionLevel = "token"
    """Correct single tokens or whole sequences."""

    correction_low: Annotated[float, Ge(0.0)] | None = None
    """Lower bound of the correction's weight, for ``mask``; None: 0."""

    correction_high: Annotated[float, Gt(0.0)] | None = None
    """Upper bound of the correction's weight; None: 2."""

    def __post_init__(self) -> None:
        if self.kl_in == "loss":
            check_penalty(self.kl_estimator)
        check_fields(self)
        if unused := given(self, *UNUSED[self.correction]):
            raise ValueError(f"{', '.join(unused)}: of no effect with correction '{self.correction}'")
        if self.correction == "mask":
            check_bounds(*correction_bounds(self.correction_low, self.correction_high))

    @property
    def needs(self) -> Needs:
        """See :class:`~dlrover.python.rl.algorithm.base.Algorithm`."""
        in_reward = self.kl_coef > 0 and self.kl_in == "reward"
        wanted = {
            "old_logprobs": True,
            "ref_logprobs": self.kl_coef > 0 and not in_reward,
            "rollout_logprobs": self.correction != "none",
            "entropy": self.entropy_coef > 0,
        }
        judged = {
            "action_mask": self.judges_tokens or in_reward,
            "old_logprobs": in_reward,
            "ref_logprobs": in_reward,
        }
        return Needs(_true(judged), _true(wanted))

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ValueError for groups of one sample, where samples are compared."""
        if self.compares_samples:
            check_group_size(samples_per_prompt)

    # -- the global batch ---------------------------------------------------------------------------------------------

    def annotate(self, rows: Batch) -> Batch:
        """Add ``advantage`` and ``weight``, see :class:`~dlrover.python.rl.algorithm.base.Algorithm`."""
        samples = Samples.of(rows)
        return rows.with_columns(advantage=self.advantages(samples), weight=self.weights(samples))

    def advantages(self, samples: Samples) -> Column:
        """The advantage of each row, float32 ``[rows]``, or of each token, ragged ``[rows, seq]``."""
        raise NotImplementedError

    def weights(self, samples: Samples) -> npt.NDArray[np.float32]:
        """``[rows]``: see :func:`~dlrover.python.rl.algorithm.averaging.token_weights`."""
        return samples.weights(self.averaging)

    def rewards(self, samples: Samples) -> Floats:
        """``[samples]``: less the KL penalty of all their tokens, if that is in the reward."""
        if self.kl_coef > 0 and self.kl_in == "reward":
            return samples.reward - samples.tokens.sums(self._penalties(samples))
        return samples.reward

    def token_rewards(self, samples: Samples) -> Floats:
        """``[actions]``: less each token's KL penalty, if that is in the reward."""
        if self.kl_coef > 0 and self.kl_in == "reward":
            return samples.tokens.rewards() - self._penalties(samples)
        return samples.tokens.rewards()

    def _penalties(self, samples: Samples) -> Floats:
        old, reference = (torch.from_numpy(samples.tokens.of_column(f"{whose}_logprobs")) for whose in ("old", "ref"))
        penalties: Floats = self.kl_coef * kl_estimate(old, reference, self.kl_estimator).numpy()
        return penalties

    # -- the loss -----------------------------------------------------------------------------------------------------

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Weighted sum over the tokens; metrics of the surrogate, and of each term there is: ``kl`` (k3), ``entropy``,
        ``mismatch_kl`` and ``mismatch_bounded``."""
        weight = column(columns, "weight")
        losses, metrics = self.surrogate(logprobs, self._with_kl_in_advantage(columns))
        if self.correction != "none":
            bounds = correction_bounds(self.correction_low, self.correction_high)
            factor, mismatch = correction_weights(columns, self.correction, self.correction_level, *bounds)
            losses, metrics = losses * factor, {**metrics, **mismatch}
        if "ref_logprobs" in self.needs.loss:
            reference = column(columns, "ref_logprobs")
            if self.kl_in == "loss":
                losses = losses + self.kl_coef * kl_penalty(logprobs, reference, self.kl_estimator)
            metrics["kl"] = weighted_sum(weight, kl_estimate(logprobs.detach(), reference, "k3"))
        if self.entropy_coef > 0:
            entropy = column(columns, "entropy")
            losses = losses - self.entropy_coef * entropy
            metrics["entropy"] = weighted_sum(weight, entropy)
        return (weight * losses).sum(), metrics

    def surrogate(self, logprobs: torch.Tensor, columns: TokenColumns) -> TokenLosses:
        """The losses ``[tokens]`` that follow the advantage, and their metrics."""
        log_ratio = logprobs - column(columns, "old_logprobs")
        return clipped_surrogate(log_ratio, columns, self.clip_low, self.clip_high, self.dual_clip)

    def _with_kl_in_advantage(self, columns: TokenColumns) -> TokenColumns:
        if self.kl_coef == 0 or self.kl_in != "advantage":
            return columns
        old, reference = column(columns, "old_logprobs"), column(columns, "ref_logprobs")
        penalty = self.kl_coef * kl_estimate(old, reference, self.kl_estimator)
        return {**columns, "advantage": column(columns, "advantage") - penalty}


def _true(wanted: Mapping[str, bool]) -> frozenset[str]:
    return frozenset(name for name, needed in wanted.items() if needed)
