"""The workloads of the ready recipes: one class for each role, each a thin hand on an engine.

They read no configuration: the trainer hands them what they need in ``init_model``.
"""

from dlrover.python.rl.recipe.actor import ActorWorkload
from dlrover.python.rl.recipe.critic import CriticWorkload
from dlrover.python.rl.recipe.model_reward import ModelRewardWorkload
from dlrover.python.rl.recipe.reference import ReferenceWorkload
from dlrover.python.rl.recipe.reward import RewardWorkload
from dlrover.python.rl.recipe.rollout import RolloutWorkload
from dlrover.python.rl.recipe.scorer import ScorerWorkload
from dlrover.python.rl.recipe.teacher import TeacherWorkload

__all__ = [
    "ActorWorkload",
    "CriticWorkload",
    "ModelRewardWorkload",
    "ReferenceWorkload",
    "RewardWorkload",
    "RolloutWorkload",
    "ScorerWorkload",
    "TeacherWorkload",
]
