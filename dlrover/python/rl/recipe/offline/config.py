# SPDX-License-Identifier: Apache-2.0
"""A job file's ``config`` for the recipes that learn from examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt

from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.recipe.base.config import EngineConfig, NonNegative, Positive
from dlrover.python.rl.recipe.base.model_saver import KeepConfig
from dlrover.python.rl.recipe.offline.examples import ExampleData, PairData, ScoredPairData, SFTData
from dlrover.python.rl.recipe.online.answers import AnswersConfig
from dlrover.python.rl.recipe.reporting.trackers import LogConfig


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """The keys that they share."""

    model: str
    """Folder or hub name of a causal language model."""

    data: ExampleData
    epochs: Annotated[float, Gt(0.0)] = 1.0
    """Passes over the data."""

    steps: Positive | None = None
    """Optimizer steps, instead of ``epochs``."""

    batch_size: Positive = 32
    """Examples, or pairs, of one optimizer step."""

    seed: NonNegative = 0
    """Decides the order of the data, and which are held out."""

    eval_every: NonNegative = 0
    """Evaluate every this many steps, and after the last; 0: never."""

    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    keep: KeepConfig = KeepConfig()
    log: LogConfig = LogConfig()


@dataclass(frozen=True, kw_only=True)
class SFTConfig(ExampleConfig):
    """Supervised fine-tuning."""

    data: SFTData
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    averaging: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the whole batch, or over rows of their token means."""

    answers: AnswersConfig = AnswersConfig()
    """Evaluation by generated answers, where the job has the roles ``rollout`` and ``reward``."""


@dataclass(frozen=True, kw_only=True)
class RMConfig(ExampleConfig):
    """A reward model from pairs of answers."""

    data: ScoredPairData
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ExampleConfig):
    """Direct preference optimisation."""

    data: PairData
    algorithm: Mapping[str, Any] = field(default_factory=lambda: {"name": "dpo"})
    """``name``, which is ``dpo``, ``ipo`` or ``conservative_dpo``, and its options: ``beta``, ``label_smoothing``."""
