"""A reward model: learn from pairs which of two answers is the better one."""

from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.recipe.example_config import RMConfig
from dlrover.python.rl.recipe.example_trainer import ExampleTrainer

METRICS = {
    "accuracy": "accuracy",
    "margin": "margins",
    "chosen": "rewards/chosen",
    "rejected": "rewards/rejected",
}
"""What the metrics of losses on pairs are called in the log: as in other libraries."""


class RMTrainer(ExampleTrainer):
    """A reward model; role ACTOR is a
    :class:`~dlrover.python.rl.recipe.scorer.ScorerWorkload`. See
    :class:`~dlrover.python.rl.recipe.example_trainer.ExampleTrainer`."""

    config_class = RMConfig
    metric_names = METRICS
    bare_head = True

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        """As in the base class."""
        return RewardModel()


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("rm")
