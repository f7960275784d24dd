# SPDX-License-Identifier: Apache-2.0
"""DPO, IPO and conservative DPO: raise the likelihood of the better of two answers over that of a frozen reference."""

from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.recipe.offline.config import DPOConfig
from dlrover.python.rl.recipe.offline.example_trainer import ExampleTrainer
from dlrover.python.rl.recipe.rm import METRICS


class DPOTrainer(ExampleTrainer):
    """Direct preference optimisation, with the role REFERENCE; see ``ExampleTrainer``."""

    config_class = DPOConfig
    metric_names = METRICS

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        options = dict(cfg.algorithm)
        algorithm = make_algorithm(str(options.pop("name", "dpo")), options)
        if not isinstance(algorithm, DPO):
            raise InvalidJob([ConfigError("algorithm.name", "is one of dpo, ipo and conservative_dpo here")])
        return algorithm


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("dpo")
