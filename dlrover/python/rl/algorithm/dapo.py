# SPDX-License-Identifier: Apache-2.0
"""DAPO (Yu et al., arXiv:2503.14476): decoupled clip, dynamic sampling, token mean and over-long reward shaping."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from dlrover.python.rl.algorithm.losses.columns import Floats, SampleView
from dlrover.python.rl.algorithm.losses.policy_gradient import GroupRelative, changed_fields


@dataclass(frozen=True)
class DAPO(GroupRelative):
    """GRPO with a wider upper clip, averaged over tokens, without KL."""

    #: how far the ratio may rise above 1; unlikely tokens need a wide bound (section 3.1)
    clip_high: Annotated[float, Ge(0.0)] = 0.28
    max_tokens: Annotated[int, Gt(0)] | None = None  #: maximum tokens of a completion; for over-long shaping
    #: number of last tokens over which the penalty grows linearly to ``overlong_penalty``; None: no penalty
    overlong_buffer: Annotated[int, Gt(0)] | None = None
    #: penalty of a completion of ``max_tokens`` tokens or more; None: 1
    overlong_penalty: Annotated[float, Gt(0.0)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.overlong_buffer is None) != (self.max_tokens is None):
            raise ValueError("max_tokens and overlong_buffer go together: give both or neither")
        if self.overlong_buffer is not None and self.max_tokens is not None and self.overlong_buffer > self.max_tokens:
            raise ValueError(f"overlong_buffer {self.overlong_buffer} is above max_tokens {self.max_tokens}")
        if self.overlong_buffer is None and changed_fields(self, "overlong_penalty"):
            raise ValueError("overlong_penalty needs overlong_buffer and max_tokens")

    def can_penalize(self, longest: int) -> bool:
        """Return False if over-long shaping is on but cannot lower the reward of a completion of ``longest`` tokens."""
        return not self.max_tokens or not self.overlong_buffer or longest > self.max_tokens - self.overlong_buffer

    def rewards(self, samples: SampleView) -> Floats:
        """Eq. 13: no penalty up to ``max_tokens - overlong_buffer`` tokens, the full penalty from ``max_tokens`` on."""
        reward = super().rewards(samples)
        if self.max_tokens is None or self.overlong_buffer is None:
            return reward
        excess = samples.action_tokens - (self.max_tokens - self.overlong_buffer)
        return reward - (self.overlong_penalty or 1.0) * np.clip(excess / self.overlong_buffer, 0.0, 1.0)
