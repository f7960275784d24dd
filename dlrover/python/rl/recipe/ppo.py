# SPDX-License-Identifier: Apache-2.0
"""PPO: a critic predicts the reward, and the policy is trained on the advantages over its predictions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.recipe.base.config import NonNegative, PolicyConfig, Positive, RolloutConfig
from dlrover.python.rl.recipe.base.model_files import validate_model, validate_vocabulary
from dlrover.python.rl.recipe.base.updates import average_metrics
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse
from dlrover.python.rl.recipe.online.batch import AuxOutput, StepBatch
from dlrover.python.rl.recipe.reporting.rewards import Scores
from dlrover.python.rl.recipe.trainers.policy_plan import require_role
from dlrover.python.rl.recipe.trainers.policy_trainer import AuxResults, PolicyTrainer
from dlrover.python.rl.recipe.trainers.recipe_plan import validate_optimizer, validate_train_engine
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Shard

_CRITIC_COLUMNS = ("returns", "values", "weight", "update", "digest")


@dataclass(frozen=True)
class CriticConfig:
    """The critic of PPO, with the engine, precision and parallelism of the policy."""

    model: str | None = None
    """Folder or hub name of the initial model, which gets a scalar head if it has none; None: the policy's model."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6)
    """Optimizer of the critic."""

    warmup_steps: NonNegative = 0
    """Number of first steps that train only the critic."""


@dataclass(frozen=True)
class PPOConfig(PolicyConfig):
    """Proximal policy optimisation with a critic."""

    prompts_per_step: Positive = 64
    """Prompts of a step, each sampled ``rollout.samples_per_prompt`` times."""

    rollout: RolloutConfig = RolloutConfig(samples_per_prompt=1)
    critic: CriticConfig = CriticConfig()


class PPOTrainer(PolicyTrainer):
    """Roles ACTOR, ROLLOUT, REWARD and CRITIC, and REFERENCE if the algorithm has a KL penalty.

    ::

        ACTOR weights -> ROLLOUT -> REWARD -> annotate -> CRITIC.update, ACTOR.update
        prompts -----------^  '-> CRITIC.values --^
    """

    config_class = PPOConfig
    algorithm_name = "ppo"
    cfg: PPOConfig

    @classmethod
    def further_models(cls, cfg: Any) -> dict[RLRoleType, ModelUse]:
        model = cfg.critic.model or cfg.model
        return {RLRoleType.CRITIC: ModelUse("trained", model, optimizer=cfg.critic.optimizer, head="token")}

    @classmethod
    def validate_own(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        errors, where = require_role(cls.__name__, RLRoleType.CRITIC, roles), "config.critic.model"
        if cfg.critic.model:
            errors += validate_model(cfg.critic.model, where) or validate_vocabulary(cfg.critic.model, cfg.model, where)
        errors += validate_optimizer(cfg.engine, cfg.critic.optimizer, "config.critic.optimizer")
        if cfg.engine.parallel is not None and RLRoleType.CRITIC in roles:
            errors += validate_train_engine(cfg.engine, roles[RLRoleType.CRITIC], role="critic")
        return errors

    @classmethod
    def aux_outputs(cls, cfg: Any) -> list[AuxOutput]:
        values = AuxOutput("critic", "values", {"values": "float32"}, collective=True)
        return [*super().aux_outputs(cfg), values]

    def init(self) -> None:
        super().init()
        if self.uses("values"):
            self.check_vocabularies(["critic"])

    def load_models(self) -> list[Pending]:
        pending, cfg = super().load_models(), self.cfg
        if self.uses("values"):
            loss = self.algorithm.value_loss  # type: ignore[attr-defined]  # an algorithm that needs values has one
            model, optimizer = cfg.critic.model or cfg.model, cfg.critic.optimizer.over(self.update_count)
            pending.append(self.begin_loading(self.RG_CRITIC, model, cfg.engine, optimizer, loss, cfg.seed))
        return pending

    def update(self, step: int, batch: StepBatch, rows: Batch, aux: AuxResults) -> dict[str, float]:
        """Train the critic, and after its first ``critic.warmup_steps`` the actor."""
        if not self.uses("values"):
            return super().update(step, batch, rows, aux)
        planned, plan = self.plan_updates(rows)
        columns = planned.select(*(name for name in _CRITIC_COLUMNS if name in planned))
        # One role after the other: both meet in collectives, and may share devices.
        parts = batch.balance(self.RG_CRITIC.data_parallel_size, planned.dense("update"))
        results = self.RG_CRITIC.update(batch.shard(parts), Shard(columns, rows=parts), plan)
        critic = {f"critic/{name}": value for name, value in average_metrics(results[0]).items()}
        if not self.policy_ranks(step):
            return critic
        without_returns = Batch({name: column for name, column in rows.columns.items() if name != "returns"})
        return {**super().update(step, batch, without_returns, aux), **critic}

    def policy_ranks(self, step: int) -> range:
        is_warming = self.uses("values") and step <= self.cfg.critic.warmup_steps
        return range(0) if is_warming else super().policy_ranks(step)

    def finish(self, before: Mapping[str, Scores], after: StepBatch) -> None:
        if self.uses("values"):
            self.RG_CRITIC.save(self.results_dir / "critic")
        super().finish(before, after)


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("ppo")
