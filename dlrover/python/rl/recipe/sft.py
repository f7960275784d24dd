"""SFT: teach a model to continue prompts as the examples do."""

import math
from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.recipe.evaluating import Measured
from dlrover.python.rl.recipe.example_config import SFTConfig
from dlrover.python.rl.recipe.example_trainer import ExampleTrainer


class SFTTrainer(ExampleTrainer):
    """Supervised fine-tuning; see :class:`~dlrover.python.rl.recipe.example_trainer.ExampleTrainer`."""

    config_class = SFTConfig
    metric_names = {}

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        """As in the base class."""
        return SFT(averaging=cfg.averaging)

    @classmethod
    def evaluation_figures(cls, measured: Measured) -> dict[str, float]:
        """``eval_loss``, the cross-entropy per trained token, and ``eval_perplexity``, its exponential."""
        perplexity = math.exp(measured.loss) if measured.loss < math.log(1e300) else math.inf
        return {**super().evaluation_figures(measured), "eval_perplexity": perplexity}

    @property
    def algorithm_of_evaluation(self) -> Algorithm:
        """A mean over tokens, whatever is trained."""
        return SFT(averaging="token")


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("sft")
