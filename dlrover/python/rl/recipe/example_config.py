"""What a job file's ``config`` holds for the recipes that learn from examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt

from dlrover.python.rl.engine.base import OptimizerConfig
from dlrover.python.rl.recipe.config import EngineConfig, NonNegative, Positive
from dlrover.python.rl.recipe.examples import ExampleData, PairData, ScoredPairData, SFTData
from dlrover.python.rl.recipe.keeping import KeepConfig
from dlrover.python.rl.recipe.sampled import AnswersConfig
from dlrover.python.rl.recipe.trackers import LogConfig


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """What they have in common."""

    model: str
    """Folder or hub name of a causal language model."""

    data: ExampleData
    epochs: Annotated[float, Gt(0.0)] = 1.0
    """Passes over the data."""

    batch_size: Positive = 32
    """Examples, or pairs, of one optimizer step."""

    seed: NonNegative = 0
    """What the order of the data, and what is held out, depend on."""

    eval_every: NonNegative = 0
    """Evaluate every so many steps, and after the last; 0: never."""

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
    """Evaluation by what the model says, where the job has the roles for it."""


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
