# SPDX-License-Identifier: Apache-2.0
"""SFT: teach a model to continue prompts as the examples do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.recipe.offline.example_trainer import ExampleConfig, ExampleTrainer
from dlrover.python.rl.recipe.offline.examples import Measured, SFTData
from dlrover.python.rl.recipe.online.answers import METRIC, Answers, AnswersConfig, validate_answers
from dlrover.python.rl.trainer.port import Pending


@dataclass(frozen=True, kw_only=True)
class SFTConfig(ExampleConfig):
    """Supervised fine-tuning."""

    data: SFTData
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    averaging: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the batch, or over rows of their token means."""

    answers: AnswersConfig = AnswersConfig()
    """Evaluation by generated answers, if the job has the roles ``rollout`` and ``reward``."""


class SFTTrainer(ExampleTrainer):
    """Supervised fine-tuning; see ``ExampleTrainer``. With the roles ROLLOUT and REWARD evaluations also generate and
    score answers to the held-out prompts."""

    config_class = SFTConfig
    metric_names = {}
    cfg: SFTConfig
    answers: Answers | None = None

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        return SFT(averaging=cfg.averaging)

    @classmethod
    def evaluation_metrics(cls, measured: Measured) -> dict[str, float]:
        """``eval/loss``, the cross-entropy per trained token, and ``eval/perplexity``, its exponential."""
        perplexity = math.exp(measured.loss) if measured.loss < math.log(1e300) else math.inf
        return {**super().evaluation_metrics(measured), "eval/perplexity": perplexity}

    @property
    def evaluation_algorithm(self) -> Algorithm:
        """A mean over tokens, for each ``averaging``."""
        return SFT(averaging="token")

    def load_models(self) -> list[Pending]:
        loading = super().load_models()
        if RLRoleType.ROLLOUT in self.actor_handles and self.examples.prompts is not None:
            self.answers = Answers(self, self.cfg.answers, self.examples.prompts, self.cfg.seed)
            loading += self.answers.load_models(self.cfg.model, self.cfg.engine)
        return loading

    def extra_metrics(self, step: int) -> dict[str, float]:
        """``eval/reward``, the mean over the answers, and ``eval/failed``, the number of unscored ones."""
        if self.answers is None:
            return {}
        metrics = self.answers.metrics(step)
        self.run_log.write_held_out(self.answers.last)
        return metrics

    @classmethod
    def evaluation_names(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> Sequence[str]:
        return [*super().evaluation_names(cfg, roles), *([METRIC] if RLRoleType.ROLLOUT in roles else [])]

    @classmethod
    def find_errors(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        answers = validate_answers(cfg.answers, cfg.engine, cfg.evaluates, roles)
        return [*super().find_errors(cfg, roles), *answers]


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("sft")
