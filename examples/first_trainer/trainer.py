# SPDX-License-Identifier: Apache-2.0
"""The loop: pull, learn, pull better."""

import json
from collections.abc import Iterable, Mapping

from omegaconf import DictConfig

from dlrover.python.rl.common.errors import ConfigError
from dlrover.rl import BaseTrainer, Replicate, RLRoleType, Shard


class BanditTrainer(BaseTrainer):
    """Roles ACTOR (one worker) and ROLLOUT (any number)."""

    def init(self) -> None:
        """Let the actor make its model."""
        self.RG_ACTOR.init_model(len(self.config.payouts))

    def fit(self) -> None:
        """The whole training."""
        for step in self.steps(self.config.steps):
            (policy,) = self.RG_ACTOR.policy()
            pulls = self.RG_ROLLOUT.pull(Replicate(policy), self.seeds(step))
            (reward,) = self.RG_ACTOR.update(Shard(pulls))
            self.log(step, reward=reward)
            self.state["reward"] = reward
        (learnt,) = self.RG_ACTOR.policy()
        self.save(self.state["reward"], learnt)

    def seeds(self, step: int) -> list[str]:
        """Return the seed of each pull of a step, however many workers share the pulls."""
        return [f"{self.config.seed}/{step}/{index}" for index in range(self.config.pulls_per_step)]

    def save(self, reward: float, policy: list[float]) -> None:
        """Write what was learnt into the job's directory."""
        learnt = {"reward": reward, "policy": [round(probability, 3) for probability in policy]}
        (self.job_dir / "policy.json").write_text(json.dumps(learnt), encoding="utf-8")

    @classmethod
    def check_config(cls, config: DictConfig, roles: Mapping[RLRoleType, int]) -> Iterable[ConfigError]:
        """Return the errors of the job, which are reported before anything starts."""
        if RLRoleType.ROLLOUT not in roles:
            yield ConfigError("workload", "the role 'rollout' is required by BanditTrainer")
        if not all(0 <= payout <= 1 for payout in config.payouts):
            yield ConfigError("config.payouts", f"must be probabilities, not {list(config.payouts)}")
