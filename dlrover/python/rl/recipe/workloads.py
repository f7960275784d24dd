"""The workloads of the ready recipes: one class for each role, each a thin hand on an engine.

They read no configuration: the trainer hands them what they need in ``init_model``.
"""

from dlrover.python.rl.recipe.actor import ActorWorkload
from dlrover.python.rl.recipe.reference import ReferenceWorkload
from dlrover.python.rl.recipe.reward import RewardWorkload
from dlrover.python.rl.recipe.rollout import RolloutWorkload
from dlrover.python.rl.recipe.scorer import ScorerWorkload

__all__ = ["ActorWorkload", "ReferenceWorkload", "RewardWorkload", "RolloutWorkload", "ScorerWorkload"]
