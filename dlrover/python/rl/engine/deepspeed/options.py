"""What only this backend can be told."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DeepSpeedOptions:
    """``settings.backend`` of a DeepSpeed engine."""

    zero_stage: Literal[1, 2, 3] = 3
    """What the ranks divide: 1 the optimizer's state, 2 the gradients too, 3 the weights too."""
