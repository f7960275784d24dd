# SPDX-License-Identifier: Apache-2.0
"""Two roles for a walk with the debugger: REWARD workers score texts, ACTOR counts the texts that it gets."""

from typing import ClassVar

from dlrover.rl import BaseWorkload


class Reward(BaseWorkload):
    """REWARD: a long text scores well."""

    def score(self, texts: list[str]) -> list[float]:
        """One score for each text."""
        scores = [float(len(text)) for text in texts]
        if 0.0 in scores:
            breakpoint()
        texts.clear()  # no other process sees it: this list is the worker's own copy
        return scores


class Actor(BaseWorkload):
    """ACTOR: adds scores up. Its ranks would meet in collectives, so each needs a separate process."""

    needs_own_process: ClassVar[bool] = True

    total = 0.0

    def add(self, scores: list[float]) -> float:
        """The sum of all scores so far."""
        self.total += sum(scores)
        return self.total

    def state_dict(self) -> dict[str, float]:
        """Return the sum, from which a replacement of this process continues."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there."""
        self.total = state["total"]
