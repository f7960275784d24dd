# SPDX-License-Identifier: Apache-2.0
"""PPO (Schulman et al., arXiv:1707.06347) with a critic and generalised advantage estimation, token by token."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from dlrover.python.rl.algorithm.losses.columns import Needs, SampleView, whiten
from dlrover.python.rl.algorithm.losses.policy_gradient import KLEstimator, KLTerm, PolicyGradient
from dlrover.python.rl.algorithm.losses.values import ValueLoss, gae
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """Advantages against a critic's values, so one sample per prompt is enough."""

    compares_samples: ClassVar[bool] = False
    has_token_advantages: ClassVar[bool] = True

    kl_estimator: KLEstimator = "k1"  #: estimator of the KL penalty; in the reward, k1 is exact in expectation
    kl_in: KLTerm = "reward"

    gamma: Annotated[float, Ge(0.0), Le(1.0)] = 1.0  #: discount of later rewards
    #: GAE's lambda: 0 trusts the critic's next value alone, 1 only the rewards
    lam: Annotated[float, Ge(0.0), Le(1.0)] = 0.95
    whiten: bool = True  #: normalise advantages over all action tokens of the update
    #: how far a value may move from its value before the update; None: no bound
    value_clip: Annotated[float, Gt(0.0)] | None = 0.2

    @property
    def needs(self) -> Needs:
        needs = super().needs
        return replace(needs, annotate=needs.annotate | {"values"})

    @property
    def value_loss(self) -> ValueLoss:
        return ValueLoss(self.value_clip)

    def annotate(self, rows: Batch) -> Batch:
        """Add ``weight``, and ragged ``[rows, seq]`` ``advantage`` and ``returns`` (for the critic's loss)."""
        samples = SampleView.of(rows)
        rewards, values = self.token_rewards(samples), samples.of_tokens("values")
        advantage, returns = gae(rewards, values, samples.lengths, self.gamma, self.lam)
        if self.whiten:
            advantage = whiten(advantage)
        return rows.with_columns(
            advantage=samples.ragged(advantage), returns=samples.ragged(returns), weight=self.weights(samples)
        )
