"""The environment port: what answers the policy's actions."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class StepResult:
    """What one action led to."""

    next_state: str | None
    """The text the policy acts on next; None when ``done``."""

    reward: float
    """What the policy is trained on: it is credited to the last token of the action, and summed over turns."""

    score: float
    """What people read in the metrics (solved or not, say); summed over turns, never trained on."""

    done: bool
    """The episode is over."""

    extra_info: dict[str, Any] = field(default_factory=dict)
    """The user's data for the next step."""


class Environment(Protocol):
    """Text in, text out. One instance serves many episodes at once, so an episode's state travels in its arguments."""

    async def reset(self, extra_info: dict[str, Any]) -> str:
        """Begin an episode; the first state."""
        ...

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        """Answer one action.

        Args:
            state: the text the policy acted on.
            action: the text it wrote.
            extra_info: the row's data at first, then what the last step returned.
        """
        ...

    async def close(self) -> None:
        """Release everything held; called once, whether episodes ended or not."""
        ...
