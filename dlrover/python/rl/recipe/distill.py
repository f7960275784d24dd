# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: one or several teachers compute the log-probs of each token of the policy's own samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Gt

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType, hint
from dlrover.python.rl.config.typed import Translation
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_info
from dlrover.python.rl.engine.model.model_shape import shape_of
from dlrover.python.rl.recipe.base.config import (
    DISTILLATION_ELSEWHERE,
    DISTILLATION_NAMES,
    PolicyConfig,
    Positive,
    RewardConfig,
    RolloutConfig,
)
from dlrover.python.rl.recipe.base.model_files import validate_model, validate_vocabulary
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse
from dlrover.python.rl.recipe.online.batch import AuxOutput, StepBatch
from dlrover.python.rl.recipe.reporting.rewards import find_cut
from dlrover.python.rl.recipe.trainers.policy_trainer import PolicyTrainer

_TEACHER_COLUMNS = {"teacher_logprobs": "float32", "candidates": "int64"}


@dataclass(frozen=True)
class TeacherConfig:
    """A teacher."""

    model: str
    """Folder or hub name of a causal language model with the policy's vocabulary."""

    weight: Annotated[float, Gt(0.0)] = 1.0
    """Weight among several teachers."""


@dataclass(frozen=True)
class DistillationConfig(PolicyConfig):
    """On-policy distillation. Rewards are only logged."""

    other_names: ClassVar[Mapping[str, str | Translation]] = DISTILLATION_NAMES
    elsewhere: ClassVar[Mapping[str, str]] = DISTILLATION_ELSEWHERE

    prompts_per_step: Positive = 64
    """Prompts of a step, each sampled ``rollout.samples_per_prompt`` times."""

    rollout: RolloutConfig = RolloutConfig(samples_per_prompt=1)
    reward: RewardConfig = RewardConfig(function="dlrover.python.rl.environment.verifiers:unjudged")

    teachers: Mapping[str, TeacherConfig] = field(default_factory=dict)
    """Teachers by role name: ``{teacher: {model: ...}}``. Each is a role of the job, of class ``TeacherWorkload``."""

    top: Positive = 64
    """Number of most likely ids that each teacher reports per token, for ``vocabulary_distillation``."""


class DistillationTrainer(PolicyTrainer):
    """Roles ACTOR, ROLLOUT and REWARD, one for each teacher, and REFERENCE if the algorithm has a KL penalty.

    ::

        ACTOR weights -> ROLLOUT -> REWARD -> annotate -> ACTOR.update
        prompts -----------^  '-> TEACHER.teacher_logprobs ----^
    """

    config_class = DistillationConfig
    algorithm_name = "distillation"
    own_columns = PolicyTrainer.own_columns | _TEACHER_COLUMNS.keys()  # even if the job names no teacher
    cfg: DistillationConfig

    @classmethod
    def further_models(cls, cfg: Any) -> dict[RLRoleType, ModelUse]:
        return {
            RLRoleType(name): ModelUse("frozen", teacher.model, sharded_class="ShardedTeacherWorkload")
            for name, teacher in cfg.teachers.items()
        }

    @classmethod
    def validate_own(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        messages = {} if cfg.teachers else {"config.teachers": "names no teacher: {teacher: {model: ...}}"}
        if cfg.reward.on_failure != "drop_sample":
            messages["config.reward.on_failure"] = "has no effect: distillation trains on all samples"
        needs = cls.needs_of(cfg)
        if needs and "teacher_logprobs" not in needs:
            messages["config.algorithm.name"] = "it does not use teachers: use distillation"
        if needs and cfg.rollout.dynamic_filtering != "off":
            messages["config.rollout.dynamic_filtering"] = "depends on rewards, which are not trained on here"
        shape = shape_of(cfg.model, cfg.model_config)
        if "candidates" in needs and shape is not None and cfg.top > shape.vocabulary:
            messages["config.top"] = f"is {cfg.top}, but {cfg.model} has only {shape.vocabulary} tokens"
        if "candidates" in needs and not engine_info(TRAIN_ENGINES, cfg.engine.train).top_token_ids:
            message = f"does not report the likely ids that {cfg.algorithm.get('name')} needs: use fsdp2"
            messages["config.engine.train"] = f"{cfg.engine.train} {message}"
        errors, samples = list[ConfigError](), cfg.prompts_per_step * cfg.rollout.samples_per_prompt
        for name, teacher in cfg.teachers.items():
            where = f"config.teachers.{name}.model"
            errors += validate_model(teacher.model, where) or validate_vocabulary(teacher.model, cfg.model, where)
            if name.upper() not in roles:
                near = hint(name, [role.lower() for role in roles])
                messages[f"config.teachers.{name}"] = f"the job has no role '{name}'{near}"
            elif (workers := roles[RLRoleType(name)]) > samples:
                messages[f"workload.{name}.num"] = f"{workers} workers cannot share {samples} samples"
        return [*errors, *(ConfigError(where, message) for where, message in messages.items())]

    @classmethod
    def aux_outputs(cls, cfg: Any) -> list[AuxOutput]:
        top = cfg.top if "candidates" in cls.needs_of(cfg) else 0
        args = cfg.rollout.temperature, top
        teachers = [
            AuxOutput(role, "teacher_logprobs", _TEACHER_COLUMNS, args, init=(teacher.model, cfg.engine))
            for role, teacher in cfg.teachers.items()
        ]
        return [*super().aux_outputs(cfg), *teachers]

    def init(self) -> None:
        super().init()
        self.check_vocabularies(self.cfg.teachers)

    def score(self, step: int, batch: StepBatch) -> StepBatch:
        """Use all rows, with or without a reward. Raises DataError if the environment fails for too many steps."""
        if self.cfg.has_environment:  # samples stay usable if a reward function fails
            self.count_failures(step, batch, batch.scored)
        rows = batch.scored.with_columns(reward=np.nan_to_num(batch.scored.dense("reward")))
        weights = np.array([teacher.weight for teacher in self.cfg.teachers.values()], dtype=np.float32)
        if len(weights) > 1:
            rows = rows.with_columns(teacher_weights=np.tile(weights / weights.sum(), (len(rows), 1)))
        if self.cfg.rollout.mask_truncated:
            rows = rows.with_columns(masked=find_cut(rows))
        return replace(batch, train_rows=rows)


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("distill")
