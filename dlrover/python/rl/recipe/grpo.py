# SPDX-License-Identifier: Apache-2.0
"""GRPO-family algorithms: sample groups of completions, score them, and reinforce the better ones of each group."""

from dataclasses import dataclass

from dlrover.python.rl.recipe.base.config import PolicyConfig
from dlrover.python.rl.recipe.trainers.policy_trainer import PolicyTrainer


@dataclass(frozen=True)
class GRPOConfig(PolicyConfig):
    """Group-relative policy optimisation, and other algorithms without a further model."""


class GRPOTrainer(PolicyTrainer):
    """Roles ACTOR, ROLLOUT and REWARD, and REFERENCE if the algorithm has a KL penalty.

    For every algorithm whose baseline comes from the samples: ``grpo``, ``dr_grpo``, ``dapo``, ``rloo``,
    ``reinforce_pp``, ``reinforce_pp_baseline``, ``gspo``, ``cispo`` and your own.
    """

    config_class = GRPOConfig
    algorithm_name = "grpo"


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("grpo")
