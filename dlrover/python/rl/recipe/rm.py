# SPDX-License-Identifier: Apache-2.0
"""A reward model, trained on pairs of a better and a worse answer."""

from dataclasses import dataclass
from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.recipe.trainers.example_trainer import ExampleConfig, ExampleTrainer
from dlrover.python.rl.recipe.trainers.examples import ScoredPairData


@dataclass(frozen=True, kw_only=True)
class RMConfig(ExampleConfig):
    """A reward model from pairs of answers."""

    data: ScoredPairData
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


METRICS = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "chosen": "rewards/chosen",
    "rejected": "rewards/rejected",
}
"""The names in the log of the metrics of losses on pairs, as in other libraries."""


class RMTrainer(ExampleTrainer):
    """A reward model; role ACTOR is a ``ScorerWorkload``. See ``ExampleTrainer``."""

    config_class = RMConfig
    metric_names = METRICS
    bare_head = True

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        return RewardModel()


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("rm")
