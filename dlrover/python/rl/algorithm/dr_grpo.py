"""Dr. GRPO: GRPO done right (Liu et al., "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2).

Two biases of GRPO are gone. Dividing by the standard deviation favours questions that are nearly always or nearly never
solved; dividing by the length of each sample makes long wrong samples cheap. There is no KL term either.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Gt

from dlrover.python.rl.algorithm.advantages import group_advantages
from dlrover.python.rl.algorithm.policy import PolicyGradient
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class DrGRPO(PolicyGradient):
    """The clipped surrogate with ``A = reward - mean(rewards of the prompt)``."""

    averaging: Literal["token", "constant"] = "token"  # type: ignore[assignment]  # the one that has a constant
    """``constant`` is the paper's: each sample's sum is divided by ``max_tokens``, so the step does not depend on the
    lengths sampled. ``token``, common in practice, divides by the tokens of the whole update instead."""

    max_tokens: Annotated[int, Gt(0)] | None = None
    """The most tokens a completion may have; for averaging ``constant`` alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.averaging == "constant") != (self.max_tokens is not None):
            raise ValueError("max_tokens goes with averaging 'constant': give both or neither")

    def advantages(self, samples: Samples) -> Column:
        """Rewards less their group's mean: float32 ``[rows]``."""
        reward = self.rewards(samples)
        return samples.spread(group_advantages(samples.prompt_id, reward, "none", samples.counted))

    def weights(self, samples: Samples) -> npt.NDArray[np.float32]:
        """``[rows]``: see :func:`~dlrover.python.rl.algorithm.averaging.token_weights`."""
        return samples.weights(self.averaging, self.max_tokens)
