# SPDX-License-Identifier: Apache-2.0
"""Two workloads: one pulls the levers of slot machines, one learns which lever pays."""

import math
import random

from dlrover.rl import BaseWorkload, trainer_invocation

Pull = tuple[int, float]
"""The lever pulled, and what it paid."""


class Rollout(BaseWorkload):
    """ROLLOUT: pulls levers as the policy says. It keeps nothing between calls."""

    @trainer_invocation(blocking=False)
    def pull(self, policy: list[float], seeds: list[str]) -> list[Pull]:
        """One pull for each seed: draw a lever from ``policy``, then whether it pays 1 or 0."""
        pulls = []
        for seed in seeds:
            dice = random.Random(seed)
            lever = dice.choices(range(len(policy)), weights=policy)[0]
            pulls.append((lever, float(dice.random() < self.config.payouts[lever])))
        return pulls


class Actor(BaseWorkload):
    """ACTOR: holds the preferences and learns by REINFORCE, with the mean of the batch as its baseline."""

    def init_model(self, levers: int) -> None:
        """Prefer no lever."""
        self.preferences = [0.0] * levers

    def policy(self) -> list[float]:
        """The probability of each lever: softmax of the preferences."""
        powers = [math.exp(preference) for preference in self.preferences]
        return [power / sum(powers) for power in powers]

    def update(self, pulls: list[Pull]) -> float:
        """One step up the policy gradient; the mean reward of ``pulls``."""
        policy = self.policy()
        baseline = sum(reward for _, reward in pulls) / len(pulls)
        for lever, probability in enumerate(policy):
            slope = sum((reward - baseline) * ((pulled == lever) - probability) for pulled, reward in pulls)
            self.preferences[lever] += self.config.lr * slope / len(pulls)
        return baseline

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state from which a replacement of this process continues to learn."""
        return {"preferences": self.preferences}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on from there."""
        self.preferences = state["preferences"]
