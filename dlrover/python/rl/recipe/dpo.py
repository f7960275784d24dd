# SPDX-License-Identifier: Apache-2.0
"""DPO, IPO and conservative DPO: raise the likelihood of the better answer relative to a frozen reference."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.recipe.rm import METRICS
from dlrover.python.rl.recipe.trainers.example_trainer import ExampleConfig, ExampleTrainer
from dlrover.python.rl.recipe.trainers.examples import PairData


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ExampleConfig):
    """Direct preference optimisation."""

    data: PairData
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """``name`` (``dpo``, ``ipo`` or ``conservative_dpo``) and its options: ``beta``, ``label_smoothing``."""

    reference_model: str | None = None
    """Folder or hub name of the model of the role REFERENCE. None: ``model``."""


class DPOTrainer(ExampleTrainer):
    """Direct preference optimisation, with the role REFERENCE; see ``ExampleTrainer``."""

    config_class = DPOConfig
    algorithm_name = "dpo"
    metric_names = METRICS

    @classmethod
    def reference_of(cls, cfg: DPOConfig) -> str:
        return cfg.reference_model or cfg.model

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        options = dict(cfg.algorithm)
        algorithm = make_algorithm(str(options.pop("name", cls.algorithm_name)), options)
        if not isinstance(algorithm, DPO):
            raise InvalidJob([ConfigError("algorithm.name", "is one of dpo, ipo and conservative_dpo here")])
        return algorithm


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("dpo")
