"""PPO (Schulman et al., arXiv:1707.06347) with a critic and generalised advantage estimation, token by token."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from dlrover.python.rl.algorithm.advantages import whitened
from dlrover.python.rl.algorithm.base import Needs
from dlrover.python.rl.algorithm.critic import ValueLoss
from dlrover.python.rl.algorithm.gae import gae
from dlrover.python.rl.algorithm.kl import KLEstimator
from dlrover.python.rl.algorithm.policy import KLPlace, PolicyGradient
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """Advantages against a critic's values, so that a prompt needs one sample only."""

    compares_samples: ClassVar[bool] = False
    judges_tokens: ClassVar[bool] = True

    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL penalty; in the reward k1 is what is meant, and exact in expectation."""

    kl_in: KLPlace = "reward"
    """Where the KL penalty is."""

    gamma: Annotated[float, Ge(0.0), Le(1.0)] = 1.0
    """Discount of later rewards."""

    lam: Annotated[float, Ge(0.0), Le(1.0)] = 0.95
    """How far advantages look ahead before they trust the critic."""

    whiten: bool = True
    """Normalise advantages over all action tokens of the update."""

    value_clip: Annotated[float, Gt(0.0)] | None = 0.2
    """How far a value may move from that before the update; None: freely."""

    @property
    def needs(self) -> Needs:
        """See :class:`~dlrover.python.rl.algorithm.base.Algorithm`."""
        needs = super().needs
        return Needs(needs.annotate | {"values"}, needs.loss)

    @property
    def value_loss(self) -> ValueLoss:
        """The critic's loss."""
        return ValueLoss(self.value_clip)

    def annotate(self, rows: Batch) -> Batch:
        """Add ``advantage`` and ``returns`` (both ragged ``[rows, seq]``) and ``weight``. The critic's loss takes
        ``returns``, ``values`` and ``weight``."""
        samples = Samples.of(rows)
        tokens = samples.tokens
        rewards, values = self.token_rewards(samples), tokens.of_column("values")
        advantage, returns = gae(rewards, values, tokens.lengths, self.gamma, self.lam)
        if self.whiten:
            advantage = whitened(advantage)
        return rows.with_columns(
            advantage=tokens.ragged(advantage), returns=tokens.ragged(returns), weight=self.weights(samples)
        )
