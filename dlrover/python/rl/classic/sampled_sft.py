"""SFT as its constructor runs it: for a number of steps, evaluated by rewards too."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge

from dlrover.python.rl.classic.saving import SavesSteps
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.cursor import PromptCursor
from dlrover.python.rl.data.problems import load_prompts
from dlrover.python.rl.engine.base import SamplingParams
from dlrover.python.rl.recipe.config import Positive, RewardConfig
from dlrover.python.rl.recipe.drawing import over
from dlrover.python.rl.recipe.example_config import SFTConfig
from dlrover.python.rl.recipe.example_trainer import ExampleTrainer
from dlrover.python.rl.recipe.problems import as_batch
from dlrover.python.rl.recipe.sft import SFTTrainer
from dlrover.python.rl.recipe.syncing import give_weights
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Replicate, Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer


@dataclass(frozen=True)
class SampledEvaluation:
    """Completions that are drawn to evaluate."""

    prompts: str
    """The file of the prompts."""

    reward: RewardConfig
    max_new_tokens: Positive = 256
    temperature: Annotated[float, Ge(0.0)] = 1.0
    """0 is greedy."""


@dataclass(frozen=True, kw_only=True)
class StepsSFTConfig(SFTConfig):
    """SFT for a number of steps, whatever the number of rows."""

    steps: Positive
    saving_steps: Positive = 10
    sampled: SampledEvaluation | None = None
    """Evaluate by rewards too; needs the roles ROLLOUT and REWARD."""


class StepsSFTTrainer(SavesSteps, SFTTrainer):
    """The recipe ``sft``; and ROLLOUT and REWARD to evaluate with, if that is asked for.

    ::

        examples --> ACTOR.train;   every so often: held out --> ACTOR.measure
                                                    ACTOR weights -> ROLLOUT.generate -> REWARD.score
    """

    config_class: ClassVar[type[SFTConfig]] = StepsSFTConfig

    def init(self) -> None:
        """As the recipe's, with as many rows as the steps take."""
        super().init()
        cfg = self.cfg
        self.rows_in_all = cfg.steps * cfg.batch_size
        self.cursor = self.state["cursor"] = PromptCursor(
            self.unit_count, cfg.batch_size, cfg.seed, total=self.rows_in_all
        )

    def loading(self) -> list[Pending]:
        """As the recipe's; completions are judged by the samples' own rewards."""
        cfg, loading = self.cfg, ExampleTrainer.loading(self)
        if cfg.sampled is not None:
            self._sampler = Sampler(self, cfg)
            loading += self._sampler.loading()
        return loading

    def further_figures(self, step: int) -> dict[str, float]:
        """Those of the completions, if that is asked for."""
        return self._sampler.figures(step) if self.cfg.sampled is not None else {}


class Sampler:
    """Draws a completion of each evaluation sample by the actor's weights, and has them judged.

    Args:
        trainer: has the roles ACTOR, ROLLOUT and REWARD.
        cfg: what to draw.
    """

    def __init__(self, trainer: BaseTrainer, cfg: StepsSFTConfig) -> None:
        assert cfg.sampled is not None
        self._roles: Any = trainer
        self._cfg, self._asked = cfg, cfg.sampled
        self._sampling = SamplingParams(self._asked.max_new_tokens, self._asked.temperature)
        rows = load_prompts(self._asked.prompts)
        self._prompts = as_batch(rows, range(len(rows)))

    def loading(self) -> list[Pending]:
        """Let the roles load what they need."""
        return [
            self._roles.RG_ROLLOUT.init_model.options(blocking=False)(self._cfg.model, self._cfg.engine),
            self._roles.RG_REWARD.init_verifier.options(blocking=False)(self._asked.reward),
        ]

    def figures(self, step: int) -> dict[str, float]:
        """``eval_reward_mean`` and ``eval_reward_std`` (of the population) of the judged, ``eval_failed``, and
        ``eval_completion_tokens``."""
        give_weights(self._roles)
        rows = len(self._prompts)
        generate, score = over(self._roles.RG_ROLLOUT, "generate", rows), over(self._roles.RG_REWARD, "score", rows)
        drawn = generate(Shard(self._prompts), self._sampling, Replicate((self._cfg.seed, step)))
        scored = Batch.concat(score(Shard(drawn)))
        rewards = scored.dense("reward")
        judged = rewards[~np.isnan(rewards)]
        return {
            "eval_reward_mean": float(judged.mean()) if len(judged) else float("nan"),
            "eval_reward_std": float(judged.std()) if len(judged) else float("nan"),
            "eval_failed": float(len(rewards) - len(judged)),
            "eval_completion_tokens": float(scored.dense("action_tokens").mean()),
        }
