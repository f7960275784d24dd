# SPDX-License-Identifier: Apache-2.0
"""The loop whose steps are durable."""

import json

from dlrover.rl import BaseTrainer, Replicate, Shard


class DurableTrainer(BaseTrainer):
    """Roles ACTOR (one worker) and ROLLOUT (any number)."""

    def init(self) -> None:
        """Make the same calls in the same order each time: every process that replaces another repeats them."""
        self.RG_ACTOR.init_model(len(self.config.payouts))
        self.state["rewards"] = []

    def fit(self) -> None:
        """Run the steps; what a step needs from earlier steps is in the actor or in ``self.state``."""
        for step in self.steps(self.config.steps):
            (policy,) = self.RG_ACTOR.policy()
            pulls = self.RG_ROLLOUT.pull(Replicate(policy), self.seeds(step), step)
            (reward,) = self.RG_ACTOR.update(Shard(pulls), step)
            self.state["rewards"] = [*self.state["rewards"], reward]
            self.log(step, reward=reward)
        (policy,) = self.RG_ACTOR.policy()
        learnt = {"policy": policy, "rewards": self.state["rewards"]}
        (self.job_dir / "learnt.json").write_text(json.dumps(learnt), encoding="utf-8")

    def seeds(self, step: int) -> list[str]:
        """Return the seed of each pull of a step; it depends neither on the worker nor on earlier pulls."""
        return [f"{self.config.seed}/{step}/{index}" for index in range(self.config.pulls_per_step)]
