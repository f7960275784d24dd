"""DPO: make the better one of two answers likelier than a frozen reference does; IPO and conservative DPO."""

from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.recipe.example_config import DPOConfig
from dlrover.python.rl.recipe.example_trainer import ExampleTrainer
from dlrover.python.rl.recipe.rm import METRICS


class DPOTrainer(ExampleTrainer):
    """Direct preference optimisation, with the role REFERENCE; see
    :class:`~dlrover.python.rl.recipe.example_trainer.ExampleTrainer`."""

    config_class = DPOConfig
    metric_names = METRICS

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        """As in the base class."""
        options = dict(cfg.algorithm)
        algorithm = make_algorithm(str(options.pop("name", "dpo")), options)
        if not isinstance(algorithm, DPO):
            raise InvalidJob([Problem("algorithm.name", "is one of dpo, ipo and conservative_dpo here")])
        return algorithm


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("dpo")
