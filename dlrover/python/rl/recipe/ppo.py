"""PPO: a critic learns what reward to expect, and the policy is pushed towards what turns out better than that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.checks import role_is_there, train_engine_problems
from dlrover.python.rl.recipe.config import PolicyConfig, Positive, RolloutConfig, model_problems
from dlrover.python.rl.recipe.critic import CriticConfig
from dlrover.python.rl.recipe.held_out import Judged
from dlrover.python.rl.recipe.policy_trainer import Opinion, PolicyTrainer
from dlrover.python.rl.recipe.step_samples import Drawn
from dlrover.python.rl.recipe.updates import figures
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Shard

_OF_CRITIC = ("returns", "values", "weight", "update", "digest")


@dataclass(frozen=True)
class PPOConfig(PolicyConfig):
    """Proximal policy optimisation with a critic."""

    prompts_per_step: Positive = 64
    """Prompts of one step; each is sampled ``rollout.samples_per_prompt`` times."""

    rollout: RolloutConfig = RolloutConfig(samples_per_prompt=1)
    critic: CriticConfig = CriticConfig()


class PPOTrainer(PolicyTrainer):
    """Roles ACTOR, ROLLOUT, REWARD and CRITIC, and REFERENCE where the algorithm has a KL penalty.

    ::

        ACTOR weights -> ROLLOUT -> REWARD -> annotate -> CRITIC.update, ACTOR.update
        problems ----------^  '-> CRITIC.values --^
    """

    config_class = PPOConfig
    algorithm_name = "ppo"
    given = PolicyTrainer.given | {"values"}
    cfg: PPOConfig

    def init(self) -> None:
        """The critic has to understand the policy's tokens."""
        super().init()
        if self.uses("values"):
            self.check_vocabularies(["critic"])

    def loading(self) -> list[Pending]:
        """The critic's model too."""
        loading, cfg = super().loading(), self.cfg
        if self.uses("values"):
            init_model = self.RG_CRITIC.init_model.options(blocking=False)
            loss = self.algorithm.value_loss  # type: ignore[attr-defined]  # who needs values names their loss
            model, optimizer = cfg.critic.model or cfg.model, cfg.critic.optimizer.over(self.update_count)
            loading.append(init_model(model, cfg.engine, optimizer, loss, cfg.seed))
        return loading

    def opinions(self, drawn: Drawn) -> Sequence[Opinion]:
        """The critic's values too."""
        opinions = super().opinions(drawn)
        if not self.uses("values"):
            return opinions
        values = self.RG_CRITIC.values(drawn.in_order(self.RG_CRITIC.data_parallel_size))
        return [*opinions, Opinion(("values",), values)]

    def update(self, step: int, drawn: Drawn, rows: Batch, opinions: Sequence[Opinion]) -> dict[str, float]:
        """Train the critic, and after its first ``critic.warmup_steps`` the actor."""
        if not self.uses("values"):
            return super().update(step, drawn, rows, opinions)
        dealt, plan = self.planned(rows)
        told = dealt.select(*(name for name in _OF_CRITIC if name in dealt))
        # One after the other: both meet in collectives, and may share devices.
        parts = drawn.divided(self.RG_CRITIC.data_parallel_size, dealt.dense("update"))
        trained = self.RG_CRITIC.update(drawn.samples_of(parts), Shard(told, rows=parts), plan)
        critic = {f"critic_{name}": value for name, value in figures(trained[0]).items()}
        if step <= self.cfg.critic.warmup_steps:
            return critic
        columns = {name: column for name, column in rows.columns.items() if name != "returns"}
        return {**super().update(step, drawn, Batch(columns), opinions), **critic}

    def finish(self, before: Judged, after: Batch) -> None:
        """Save the critic too."""
        if self.uses("values"):
            self.RG_CRITIC.save(self.job_dir / "critic")
        super().finish(before, after)

    @classmethod
    def own_problems(cls, cfg: PPOConfig, roles: Mapping[RLRoleType, int]) -> list[Problem]:
        """What is wrong about the critic."""
        problems = role_is_there(cls.__name__, RLRoleType.CRITIC, roles)
        problems += model_problems(cfg.critic.model or "", "config.critic.model")
        if cfg.engine.parallel is not None and RLRoleType.CRITIC in roles:
            problems += train_engine_problems(cfg.engine, roles[RLRoleType.CRITIC], role="critic")
        return problems


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("ppo")
