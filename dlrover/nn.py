"""Modules of your own for a train engine: ``class Policy(rl.nn.TrainModule, Qwen2ForCausalLM)``."""

from dlrover.python.rl.engine.module import TrainModule, empty_weights

__all__ = ["TrainModule", "empty_weights"]
