"""Evaluation by what a model says: greedy answers to held-out prompts, judged by a reward function."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import SamplingParams
from dlrover.python.rl.recipe.checks import reward_problems, rollout_engine_problems
from dlrover.python.rl.recipe.config import EngineConfig, Positive, RewardConfig
from dlrover.python.rl.recipe.drawing import over
from dlrover.python.rl.recipe.held_out import failures, mean_reward
from dlrover.python.rl.recipe.syncing import give_weights
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Replicate, Shard

FIGURE = "eval_reward"


@dataclass(frozen=True)
class AnswersConfig:
    """How answers are drawn and judged, in a job with the roles ``rollout`` and ``reward``."""

    max_new_tokens: Positive = 64
    """Tokens of an answer at most, the end-of-sequence token included."""

    rows: Positive = 200
    """How many of the held-out prompts to answer, the first ones."""

    reward: RewardConfig = RewardConfig()


def answers_problems(
    config: AnswersConfig, engine: EngineConfig, evaluates: bool, roles: Mapping[RLRoleType, int]
) -> list[Problem]:
    """What is wrong with it, in a job with these roles."""
    asked = {RLRoleType.ROLLOUT, RLRoleType.REWARD} & roles.keys()
    if not asked:
        return []
    problems = [*rollout_engine_problems(engine), *reward_problems(config.reward.function, "config.answers.reward")]
    if config.reward.model is not None:
        problems.append(Problem("config.answers.reward.model", "is not asked here: reward.function judges answers"))
    if len(asked) == 1:
        problems.append(Problem("workload", "answers are drawn and judged by the roles 'rollout' and 'reward': both"))
    if not evaluates:
        problems.append(Problem("config.eval_every", "is 0: the roles 'rollout' and 'reward' would have nothing to do"))
    return problems


class Answers:
    """The answers to a run's held-out prompts.

    Args:
        trainer: has the role groups.
        config: how answers are drawn and judged.
        asked: ``prompt`` and ``answer``, as objects.
        seed: of the run; greedy answers do not depend on it.
    """

    def __init__(self, trainer: Any, config: AnswersConfig, asked: Batch, seed: int) -> None:
        self._trainer, self._config, self._seed = trainer, config, seed
        rows = min(len(asked), config.rows)
        self._asked = asked.rows(0, rows).with_columns(prompt_id=np.arange(rows), extra_info=[None] * rows)
        self.told: list[dict[str, Any]] = []

    def loading(self, model: str, engine: EngineConfig) -> list[Pending]:
        """Let the roles load what they need."""
        return [
            self._trainer.RG_ROLLOUT.init_model.options(blocking=False)(model, engine),
            self._trainer.RG_REWARD.init_verifier.options(blocking=False)(self._config.reward),
        ]

    def figures(self, step: int) -> dict[str, float]:
        """Answer with the actor's weights: the mean reward, and how many answers could not be judged."""
        give_weights(self._trainer)
        greedy = SamplingParams(self._config.max_new_tokens, temperature=0.0, samples_per_prompt=1)
        rows = len(self._asked)
        draw, score = over(self._trainer.RG_ROLLOUT, "generate", rows), over(self._trainer.RG_REWARD, "score", rows)
        judged = Batch.concat(score(Shard(draw(Shard(self._asked), greedy, Replicate((self._seed, step))))))
        rewards = judged.dense("reward")
        texts = zip(
            *(judged.objects(name) for name in ("prompt", "completion", "answer")), rewards.tolist(), strict=True
        )
        self.told = [dict(zip(("prompt", "completion", "answer", "reward"), text, strict=True)) for text in texts]
        return {FIGURE: mean_reward(rewards), "eval_failed": float(failures(rewards))}
