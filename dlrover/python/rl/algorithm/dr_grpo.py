# SPDX-License-Identifier: Apache-2.0
"""Dr. GRPO (Liu et al., "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2).

It avoids two biases of GRPO: division by the standard deviation favours questions that are nearly always or never
solved; division by each sample's length makes long wrong samples cheap."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Gt

from dlrover.python.rl.algorithm.losses.columns import SampleView, group_advantages
from dlrover.python.rl.algorithm.losses.policy_gradient import PolicyGradient
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class DrGRPO(PolicyGradient):
    """The clipped surrogate with ``A = reward - mean(rewards of the prompt)``."""

    #: ``constant``, as in the paper, divides each sample's sum by ``max_tokens``, independent of sampled lengths.
    #: ``token``, common in practice, divides by the tokens of the whole update.
    averaging: Literal["token", "constant"] = "token"  # type: ignore[assignment]  # only here "constant" exists
    max_tokens: Annotated[int, Gt(0)] | None = None  #: maximum tokens of a completion; only for averaging ``constant``

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.averaging == "constant") != (self.max_tokens is not None):
            raise ValueError("max_tokens goes with averaging 'constant': give both or neither")

    def advantages(self, samples: SampleView) -> Column:
        reward = self.rewards(samples)
        return samples.spread(group_advantages(samples.prompt_id, reward, "none", samples.counted))

    def weights(self, samples: SampleView) -> npt.NDArray[np.float32]:
        return samples.weights(self.averaging, self.max_tokens)
