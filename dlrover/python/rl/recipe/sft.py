# SPDX-License-Identifier: Apache-2.0
"""SFT: teach a model to continue prompts as the examples do, and evaluate it by its answers."""

import math
from collections.abc import Collection, Mapping
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
from dlrover.python.rl.recipe.base.config import Positive, RewardConfig
from dlrover.python.rl.recipe.online.collector import bind_method, sync_weights
from dlrover.python.rl.recipe.online.prompts import find_columns, make_prompt_batch
from dlrover.python.rl.recipe.reporting.rewards import mean_reward
from dlrover.python.rl.recipe.reporting.sample_file import TEXTS
from dlrover.python.rl.recipe.trainers.example_trainer import ExampleConfig, ExampleTrainer
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
    """A file of prompts; None: the prompts of the held-out examples."""

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


class SFTTrainer(ExampleTrainer):
    """Supervised fine-tuning; with the roles ROLLOUT and REWARD, evaluations also score generated answers."""

    config_class = SFTConfig
    metric_names = {}
    cfg: SFTConfig
    prompts: Batch | None = None
    """Prompts to answer: ``prompt``, ``answer`` and ``extra_info`` as objects."""

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        return SFT(averaging=cfg.averaging)

    @classmethod
    def evaluation_names(cls, cfg: Any, roles: Collection[RLRoleType]) -> list[str]:
        return [*super().evaluation_names(cfg, roles), *([METRIC] if RLRoleType.ROLLOUT in roles else [])]

    @classmethod
    def validate_own(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        answering, reward = {RLRoleType.ROLLOUT, RLRoleType.REWARD} & roles.keys(), cfg.answers.reward
        if not answering:
            return []
        errors = [*validate_rollout_engine(cfg.engine), *validate_reward(reward.function, "config.answers.reward")]
        if reward.model is not None:
            errors.append(ConfigError("config.answers.reward.model", "is not used: reward.function scores answers"))
        if len(answering) == 1:
            errors.append(ConfigError("workload", "answers need both of the roles 'rollout' and 'reward'"))
        if not cfg.evaluates:
            errors.append(ConfigError("config.eval_every", "the roles 'rollout' and 'reward' need evaluations"))
        return errors

    @classmethod
    def evaluation_metrics(cls, measured: Measured) -> dict[str, float]:
        """``eval/loss``, the cross-entropy per trained token, and ``eval/perplexity``, its exponential."""
        perplexity = math.exp(measured.loss) if measured.loss < math.log(1e300) else math.inf
        return {**super().evaluation_metrics(measured), "eval/perplexity": perplexity}

    @property
    def evaluation_algorithm(self) -> Algorithm:
        return SFT(averaging="token")  # for each ``averaging`` of the training

    def load_models(self) -> list[Pending]:
        loading, prompts, cfg = super().load_models(), self.examples.prompts, self.cfg
        if RLRoleType.ROLLOUT not in self.actor_handles or prompts is None:
            return loading
        columns = list[str]()
        if cfg.answers.prompts is not None:
            loaded = load_prompts(cfg.answers.prompts)[: cfg.answers.rows]
            self.prompts, columns = make_prompt_batch(loaded, range(len(loaded))), find_columns(loaded)
        else:
            rows = min(len(prompts), cfg.answers.rows)
            self.prompts = prompts.rows(0, rows).with_columns(prompt_id=np.arange(rows))
        init_model = self.RG_ROLLOUT.init_model.options(blocking=False)
        loading.append(init_model(cfg.model, cfg.engine, template_kwargs=cfg.data.chat_template_kwargs))
        init_verifier = self.RG_REWARD.init_verifier.options(blocking=False)
        return [*loading, init_verifier(cfg.answers.reward, Replicate(columns))]

    def extra_metrics(self, step: int) -> dict[str, float]:
        """Answer with the actor's weights: ``eval/reward`` and ``eval/failed``, the number of unscored answers."""
        if self.prompts is None:
            return {}
        sync_weights(self)
        sampling = SamplingParams(self.cfg.answers.max_new_tokens, self.cfg.answers.temperature, samples_per_prompt=1)
        rows = len(self.prompts)
        generate, score = bind_method(self.RG_ROLLOUT, "generate", rows), bind_method(self.RG_REWARD, "score", rows)
        rollouts = generate(Shard(self.prompts), sampling, Replicate((self.cfg.seed, step)))
        rewards = Batch.concat(score(Shard(rollouts))).dense("reward")
        texts = bind_method(self.RG_ROLLOUT, "texts", rows)(Shard(rollouts)).result()  # waits: for a selection
        logged = Batch.concat(texts).select(*TEXTS).with_columns(reward=rewards)
        self.run_log.write_held_out(step, [logged.row(row) for row in range(rows)])
        return {METRIC: mean_reward(rewards), "eval/failed": float(np.isnan(rewards).sum())}


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("sft")
