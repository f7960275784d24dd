"""GRPO and its kin: sample groups of completions, judge them, push the policy towards the better ones of each group."""

from dlrover.python.rl.recipe.config import GRPOConfig
from dlrover.python.rl.recipe.policy_trainer import PolicyTrainer


class GRPOTrainer(PolicyTrainer):
    """Roles ACTOR, ROLLOUT and REWARD, and REFERENCE where the algorithm has a KL penalty.

    For every algorithm that makes its baseline of the samples themselves: ``grpo``, ``dr_grpo``, ``dapo``, ``rloo``,
    ``reinforce_pp``, ``reinforce_pp_baseline``, ``gspo``, ``cispo`` and one's own.
    """

    config_class = GRPOConfig
    algorithm_name = "grpo"


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("grpo")
