# SPDX-License-Identifier: Apache-2.0
"""Custom modules for a train engine: ``class Policy(rl.nn.TrainModule, Qwen2ForCausalLM)``."""

from typing import Any

from dlrover.python.rl import no_attribute
from dlrover.python.rl.engine.model.train_module import TrainModule, empty_weights

__all__ = ["TrainModule", "empty_weights"]


def __getattr__(name: str) -> Any:
    raise no_attribute(__name__, name)
