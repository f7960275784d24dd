"""On-policy distillation: the policy's own samples, each token judged by a teacher, or by several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.abilities import tells_likely_ids
from dlrover.python.rl.recipe.config import PolicyConfig, Positive, RewardConfig, RolloutConfig, model_problems
from dlrover.python.rl.recipe.drawing import over
from dlrover.python.rl.recipe.policy_trainer import Opinion, PolicyTrainer
from dlrover.python.rl.recipe.step_samples import Drawn
from dlrover.python.rl.recipe.teacher import TeacherConfig
from dlrover.python.rl.trainer.port import Pending


@dataclass(frozen=True)
class DistillationConfig(PolicyConfig):
    """On-policy distillation. Rewards are logged, and nothing is learned from them."""

    prompts_per_step: Positive = 64
    """Prompts of one step; each is sampled ``rollout.samples_per_prompt`` times."""

    rollout: RolloutConfig = RolloutConfig(samples_per_prompt=1)
    reward: RewardConfig = RewardConfig(function="dlrover.python.rl.environment.verifiers:unjudged")

    teachers: Mapping[str, TeacherConfig] = field(default_factory=dict)
    """The teachers, each by the name of its role: ``{teacher: {model: ...}}``. Further ones are further roles of the
    job, of the class ``TeacherWorkload``."""

    top: Positive = 64
    """How many ids each teacher tells of at each token, for ``vocabulary_distillation``."""


class DistillationTrainer(PolicyTrainer):
    """Roles ACTOR, ROLLOUT and REWARD, one for each teacher, and REFERENCE where the algorithm has a KL penalty.

    ::

        ACTOR weights -> ROLLOUT -> REWARD -> annotate -> ACTOR.update
        problems ----------^  '-> TEACHER.judge -------------^
    """

    config_class = DistillationConfig
    algorithm_name = "distillation"
    given = PolicyTrainer.given | {"teacher_logprobs", "candidates"}
    cfg: DistillationConfig

    def init(self) -> None:
        """The teachers have to understand the policy's tokens."""
        super().init()
        self.check_vocabularies(self.cfg.teachers)

    def loading(self) -> list[Pending]:
        """The teachers' models too."""
        loading = super().loading()
        for role, teacher in self.cfg.teachers.items():
            init_model = self.group(role).init_model.options(blocking=False)
            loading.append(init_model(teacher.model, self.cfg.engine))
        return loading

    def judged(self, step: int, drawn: Drawn) -> Batch:
        """All rows, whatever became of their rewards; and what each of several teachers counts."""
        rows = drawn.scored.with_columns(reward=np.nan_to_num(drawn.scored.dense("reward")))
        weights = np.array([teacher.weight for teacher in self.cfg.teachers.values()], dtype=np.float32)
        if len(weights) == 1:
            return rows
        return rows.with_columns(teacher_weights=np.tile(weights / weights.sum(), (len(rows), 1)))

    def opinions(self, drawn: Drawn) -> Sequence[Opinion]:
        """What the teachers say too."""
        top = self.cfg.top if self.uses("candidates") else 0
        columns, temperature = ("teacher_logprobs", "candidates"), self.cfg.rollout.temperature
        judging = [over(self.group(role), "judge", len(drawn.scored)) for role in self.cfg.teachers]
        told = [Opinion(columns, judge(drawn.samples, temperature, top)) for judge in judging]
        return [*super().opinions(drawn), *told]

    @classmethod
    def own_problems(cls, cfg: DistillationConfig, roles: Mapping[RLRoleType, int]) -> list[Problem]:
        """What is wrong about the teachers."""
        problems = [] if cfg.teachers else [Problem("config.teachers", "names no teacher: {teacher: {model: ...}}")]
        drawn = cfg.prompts_per_step * cfg.rollout.samples_per_prompt
        for name, teacher in cfg.teachers.items():
            problems += model_problems(teacher.model, f"config.teachers.{name}.model")
            if name.upper() not in roles:
                what = f"the job has no role '{name}'{hint(name, [role.lower() for role in roles])}"
                problems.append(Problem(f"config.teachers.{name}", what))
            elif roles[RLRoleType(name)] > drawn:
                what = f"{roles[RLRoleType(name)]} members cannot share {drawn} samples"
                problems.append(Problem(f"workload.{name}.num", what))
        try:
            needs = cls.algorithm_of(cfg).needs.all
        except InvalidJob:
            return problems  # said already
        if "teacher_logprobs" not in needs:
            problems.append(Problem("config.algorithm.name", "it does not look at teachers: use distillation"))
        if cfg.rollout.dynamic_filtering != "off":
            what = "goes by rewards, from which nothing is learned here"
            problems.append(Problem("config.rollout.dynamic_filtering", what))
        if "candidates" in needs and not tells_likely_ids(cfg.engine.train):
            what = f"{cfg.engine.train} does not tell the likely ids that {cfg.algorithm.get('name')} needs: use fsdp2"
            problems.append(Problem("config.engine.train", what))
        return problems


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("distill")
