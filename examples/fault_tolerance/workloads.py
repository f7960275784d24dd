# SPDX-License-Identifier: Apache-2.0
"""The slot machines again, in a job that survives lost processes: only the state that the workloads name is kept."""

import math
import os
import random
import signal
from typing import Any

from dlrover.rl import BaseWorkload, trainer_invocation

Pull = tuple[int, float]
"""The lever pulled, and what it paid."""


class BadLuck(Exception):
    """A temporary error: the step may succeed if it is repeated."""

    retryable = True


class Stumbling(BaseWorkload):
    """A workload that fails once, as ``config.how`` says; ``config.stumble`` names rank and step: ``ROLLOUT-1:5``."""

    stumbled = False

    def stumble(self, step: int) -> None:
        """Die or raise if ``config.stumble`` names this worker and step; a replacement process does neither."""
        if self.config.stumble != f"{self.role}-{self.rank}:{step}" or self.stumbled or self.restart_info.count:
            return
        self.stumbled = True
        if self.config.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise BadLuck(f"{self.role}[{self.rank}] stumbles in step {step}")


class Rollout(Stumbling):
    """ROLLOUT: pulls levers as the policy says. It keeps nothing between calls, so it has no ``state_dict``."""

    @trainer_invocation(blocking=False)
    def pull(self, policy: list[float], seeds: list[str], step: int) -> list[Pull]:
        """One pull for each seed: draw a lever from ``policy``, then whether it pays 1 or 0."""
        self.stumble(step)
        pulls = []
        for seed in seeds:
            dice = random.Random(seed)
            lever = dice.choices(range(len(policy)), weights=policy)[0]
            pulls.append((lever, float(dice.random() < self.config.payouts[lever])))
        return pulls


class Actor(Stumbling):
    """ACTOR: holds the preferences, which every step changes: they are its state."""

    def init_model(self, levers: int) -> None:
        """Prefer no lever."""
        self.preferences = [0.0] * levers

    def state_dict(self) -> dict[str, Any]:
        """Everything that later calls depend on."""
        return {"preferences": self.preferences}

    def load_state_dict(self, state: Any) -> None:
        """Continue from ``state``, in a new process or in this one."""
        self.preferences = list(state["preferences"])

    def policy(self) -> list[float]:
        """The probability of each lever: softmax of the preferences."""
        powers = [math.exp(preference) for preference in self.preferences]
        return [power / sum(powers) for power in powers]

    def update(self, pulls: list[Pull], step: int) -> float:
        """One step up the policy gradient; the mean reward of ``pulls``."""
        self.stumble(step)
        policy = self.policy()
        baseline = sum(reward for _, reward in pulls) / len(pulls)
        for lever, probability in enumerate(policy):
            slope = sum((reward - baseline) * ((pulled == lever) - probability) for pulled, reward in pulls)
            self.preferences[lever] += self.config.lr * slope / len(pulls)
        return baseline
