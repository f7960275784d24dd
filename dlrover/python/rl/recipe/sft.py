# SPDX-License-Identifier: Apache-2.0
"""SFT: teach a model to continue prompts as the examples do, and evaluate it by its own answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.prompts import load_prompts
from dlrover.python.rl.engine.api.base import OptimizerConfig, SamplingParams
from dlrover.python.rl.recipe.base.config import EngineConfig, Positive, RewardConfig
from dlrover.python.rl.recipe.online.collector import bind_method, sync_weights
from dlrover.python.rl.recipe.online.prompts import find_columns, make_prompt_batch
from dlrover.python.rl.recipe.reporting.rewards import count_failures, mean_reward
from dlrover.python.rl.recipe.reporting.sample_file import TEXTS
from dlrover.python.rl.recipe.trainers.example_trainer import ExampleConfig, ExamplePlan, ExampleTrainer
from dlrover.python.rl.recipe.trainers.examples import Measured, SFTData
from dlrover.python.rl.recipe.trainers.recipe_plan import validate_reward, validate_rollout_engine
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Replicate, Shard

METRIC = "eval/reward"


@dataclass(frozen=True)
class AnswersConfig:
    """Generation and scoring of answers, in a job with the roles ``rollout`` and ``reward``."""

    max_new_tokens: Positive = 64
    """Maximum tokens of an answer, the end-of-sequence token included."""

    rows: Positive = 200
    """Maximum number of held-out prompts to answer."""

    prompts: str | None = None
    """A file of prompts; None: those of the held-out examples."""

    temperature: Annotated[float, Ge(0.0)] = 0.0
    """Sampling temperature; 0: greedy."""

    reward: RewardConfig = RewardConfig()


@dataclass(frozen=True, kw_only=True)
class SFTConfig(ExampleConfig):
    """Supervised fine-tuning."""

    data: SFTData
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    averaging: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the batch, or over rows of their token means."""

    answers: AnswersConfig = AnswersConfig()
    """Evaluation by generated answers, if the job has the roles ``rollout`` and ``reward``."""


class SFTPlan(ExamplePlan):
    """Plans jobs of an :class:`SFTTrainer`."""

    def evaluation_names(self, cfg: Any, roles: Mapping[RLRoleType, int]) -> Sequence[str]:
        return [*super().evaluation_names(cfg, roles), *([METRIC] if RLRoleType.ROLLOUT in roles else [])]

    def find_errors(self, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        errors, answering = super().find_errors(cfg, roles), {RLRoleType.ROLLOUT, RLRoleType.REWARD} & roles.keys()
        if not answering:
            return errors
        reward = cfg.answers.reward
        errors += [*validate_rollout_engine(cfg.engine), *validate_reward(reward.function, "config.answers.reward")]
        if reward.model is not None:
            message = "is not used here: reward.function scores answers"
            errors.append(ConfigError("config.answers.reward.model", message))
        if len(answering) == 1:
            errors.append(ConfigError("workload", "answers need both of the roles 'rollout' and 'reward'"))
        if not cfg.evaluates:
            message = "without evaluations the roles 'rollout' and 'reward' would have nothing to do"
            errors.append(ConfigError("config.eval_every", message))
        return errors


class SFTTrainer(ExampleTrainer):
    """Supervised fine-tuning; see ``ExampleTrainer``. With the roles ROLLOUT and REWARD evaluations also generate and
    score answers to the held-out prompts."""

    config_class = SFTConfig
    plan = SFTPlan
    metric_names = {}
    cfg: SFTConfig
    answers: "Answers | None" = None

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


class Answers:
    """The answers to a run's held-out prompts, which have ``prompt``, ``answer`` and ``extra_info`` as objects."""

    def __init__(self, trainer: Any, config: AnswersConfig, prompts: Batch, seed: int) -> None:
        self._trainer, self._config, self._seed = trainer, config, seed
        if config.prompts is not None:
            loaded = load_prompts(config.prompts)[: config.rows]
            self._prompts = make_prompt_batch(loaded, range(len(loaded)))
        else:
            loaded, rows = [], min(len(prompts), config.rows)
            self._prompts = prompts.rows(0, rows).with_columns(prompt_id=np.arange(rows))
        self._columns = find_columns(loaded)
        self.last: list[dict[str, Any]] = []  # of the last evaluation, as plain rows

    def load_models(self, model: str, engine: EngineConfig) -> list[Pending]:
        init_verifier = self._trainer.RG_REWARD.init_verifier.options(blocking=False)
        return [
            self._trainer.RG_ROLLOUT.init_model.options(blocking=False)(
                model, engine, template_kwargs=self._trainer.cfg.data.chat_template_kwargs
            ),
            init_verifier(self._config.reward, Replicate(self._columns)),
        ]

    def metrics(self, step: int) -> dict[str, float]:
        """Answer with the actor's weights: the mean reward, and the number of unscored answers."""
        sync_weights(self._trainer)
        sampling = SamplingParams(self._config.max_new_tokens, self._config.temperature, samples_per_prompt=1)
        rows = len(self._prompts)
        generate = bind_method(self._trainer.RG_ROLLOUT, "generate", rows)
        score = bind_method(self._trainer.RG_REWARD, "score", rows)
        rollouts = generate(Shard(self._prompts), sampling, Replicate((self._seed, step)))
        rewards = Batch.concat(score(Shard(rollouts))).dense("reward")
        texts = bind_method(self._trainer.RG_ROLLOUT, "texts", rows)(Shard(rollouts)).result()  # waits: for a selection
        logged = Batch.concat(texts).select(*TEXTS).with_columns(reward=rewards)
        self.last = [logged.row(row) for row in range(rows)]
        return {METRIC: mean_reward(rewards), "eval/failed": float(count_failures(rewards))}


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("sft")
