# SPDX-License-Identifier: Apache-2.0
"""The workloads of the recipes, one class for each role. They read no configuration: ``init_model`` has arguments."""

from dlrover.python.rl.recipe.roles.actor import ActorWorkload, CriticWorkload, ScorerWorkload
from dlrover.python.rl.recipe.roles.reference import (
    ReferenceWorkload,
    ShardedReferenceWorkload,
    ShardedTeacherWorkload,
    TeacherWorkload,
)
from dlrover.python.rl.recipe.roles.reward import ModelRewardWorkload, RewardWorkload
from dlrover.python.rl.recipe.roles.rollout import RolloutWorkload

__all__ = [
    "ActorWorkload",
    "CriticWorkload",
    "ModelRewardWorkload",
    "ReferenceWorkload",
    "RewardWorkload",
    "RolloutWorkload",
    "ScorerWorkload",
    "ShardedReferenceWorkload",
    "ShardedTeacherWorkload",
    "TeacherWorkload",
]
