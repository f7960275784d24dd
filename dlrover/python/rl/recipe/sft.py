"""SFT: teach a model to continue prompts as the examples do."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.recipe.evaluating import Measured
from dlrover.python.rl.recipe.example_config import SFTConfig
from dlrover.python.rl.recipe.example_trainer import ExampleTrainer
from dlrover.python.rl.recipe.sampled import FIGURE, Answers, answers_problems
from dlrover.python.rl.trainer.port import Pending


class SFTTrainer(ExampleTrainer):
    """Supervised fine-tuning; see :class:`~dlrover.python.rl.recipe.example_trainer.ExampleTrainer`. With the roles
    ROLLOUT and REWARD evaluations also draw and judge answers to the held-out prompts."""

    config_class = SFTConfig
    metric_names = {}

    answers: Answers | None = None

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

    def loading(self) -> list[Pending]:
        """As in the base class."""
        loading = super().loading()
        if RLRoleType.ROLLOUT in self.actor_handles and self.examples.asked is not None:
            cfg = require(SFTConfig, self.config, "config")
            self.answers = Answers(self, cfg.answers, self.examples.asked, cfg.seed)
            loading += self.answers.loading(cfg.model, cfg.engine)
        return loading

    def further_figures(self, step: int) -> dict[str, float]:
        """``eval_reward``, the mean over the answers, and ``eval_failed``, how many could not be judged."""
        if self.answers is None:
            return {}
        found = self.answers.figures(step)
        self.run_log.held_out(self.answers.told)
        return found

    @classmethod
    def further_names(cls, roles: Mapping[RLRoleType, int]) -> Sequence[str]:
        """As in the base class."""
        return (FIGURE,) if RLRoleType.ROLLOUT in roles else ()

    @classmethod
    def own_problems(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[Problem]:
        """As in the base class."""
        return answers_problems(cfg.answers, cfg.engine, cfg.eval_every > 0, roles)


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("sft")
