"""DAPO (Yu et al., arXiv:2503.14476): decoupled clip, dynamic sampling, token mean and over-long reward shaping."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt

from dlrover.python.rl.algorithm.advantages import Normalize, group_advantages
from dlrover.python.rl.algorithm.fields import given
from dlrover.python.rl.algorithm.policy import PolicyGradient
from dlrover.python.rl.algorithm.samples import Floats, Samples
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class DAPO(PolicyGradient):
    """GRPO with more room upwards than downwards, averaged over tokens, without KL."""

    clip_high: Annotated[float, Ge(0.0)] = 0.28
    """How far the ratio may rise above 1: tokens that are unlikely need the room (section 3.1)."""

    normalize: Normalize = "std"
    """Divide a group's centred rewards by their standard deviation, or not."""

    max_tokens: Annotated[int, Gt(0)] | None = None
    """The most tokens a completion may have; for over-long shaping."""

    overlong_buffer: Annotated[int, Gt(0)] | None = None
    """The last so many of them cost: linearly, up to ``overlong_penalty``. None: they do not."""

    overlong_penalty: Annotated[float, Gt(0.0)] | None = None
    """What a completion of ``max_tokens`` tokens or more loses of its reward; None: 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.overlong_buffer is None) != (self.max_tokens is None):
            raise ValueError("max_tokens and overlong_buffer go together: give both or neither")
        if self.overlong_buffer is not None and self.max_tokens is not None and self.overlong_buffer > self.max_tokens:
            raise ValueError(f"overlong_buffer {self.overlong_buffer} is above max_tokens {self.max_tokens}")
        if self.overlong_buffer is None and given(self, "overlong_penalty"):
            raise ValueError("overlong_penalty without overlong_buffer and max_tokens: nothing is over-long then")

    def shapes(self, longest: int) -> bool:
        """Whether over-long shaping costs completions of ``longest`` tokens something; true where none is wanted."""
        return (
            self.max_tokens is None or self.overlong_buffer is None or longest > self.max_tokens - self.overlong_buffer
        )

    def advantages(self, samples: Samples) -> Column:
        """Shaped rewards less their group's mean, in standard deviations of the group: float32 ``[rows]``."""
        reward = self.rewards(samples)
        if self.max_tokens is not None and self.overlong_buffer is not None:
            shape = overlong_shape(samples.action_tokens, self.max_tokens, self.overlong_buffer)
            reward = reward + (self.overlong_penalty or 1.0) * shape
        return samples.spread(group_advantages(samples.prompt_id, reward, self.normalize, samples.counted))


def overlong_shape(lengths: npt.NDArray[np.int64], max_tokens: int, buffer: int) -> Floats:
    """Eq. 13: 0 up to ``max_tokens - buffer`` tokens, then falling to -1 at ``max_tokens``, and -1 beyond.

    Args:
        lengths: tokens of each completion, ``[samples]``.
        max_tokens: the most there should be.
        buffer: how many of them, the last, cost.
    """
    return -np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)
