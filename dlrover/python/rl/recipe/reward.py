"""REWARD: judges completions."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import Problem, VerifierError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.typed import salvage
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.environment.deadline import DeadlineVerifier
from dlrover.python.rl.environment.pool import VerifierPool
from dlrover.python.rl.environment.verifiers import exact
from dlrover.python.rl.recipe.config import RewardConfig
from dlrover.python.rl.recipe.sample_rows import told_of
from dlrover.python.rl.trainer.workload import BaseWorkload

_LOG = get_logger(__name__)


class RewardWorkload(BaseWorkload):
    """REWARD: judges completions, in processes that can be killed."""

    @classmethod
    def warm_up(cls) -> None:
        """Start a verifier's process and end it: its interpreter and libraries are in memory then."""
        DeadlineVerifier(exact, timeout_s=5.0).close()

    @classmethod
    def check_config(cls, config: Any) -> Iterable[Problem]:
        """A model judges in another class."""
        reward, _ = salvage(RewardConfig, config.get("reward") or {}, "config.reward")
        if reward is None or reward.model is None:
            return []
        what = f"{cls.__name__} calls reward.function: with reward.model it has to be ModelRewardWorkload"
        return [Problem("workload.reward.class", what)]

    def init_verifier(self, reward: RewardConfig) -> None:
        """Start the verifiers' processes."""
        start = partial(DeadlineVerifier, reward.function, reward.timeout_s, memory_mb=reward.memory_mb)
        self._verifiers = VerifierPool(reward.workers, start)

    def score(self, rollouts: Batch) -> Batch:
        """Judge completions.

        Returns:
            What the trainer needs to know of each row, see :func:`~dlrover.python.rl.recipe.sample_rows.told_of`, with
            ``reward`` (float64, NaN where the verifier failed) and ``error`` (why, or None).
        """
        columns = [rollouts.objects(name) for name in ("completion", "answer", "extra_info")]
        judged = self._verifiers.judge(zip(*columns, strict=True))
        errors = [_reason(reward) if isinstance(reward, VerifierError) else None for reward in judged]
        rewards = [float("nan") if isinstance(reward, VerifierError) else reward for reward in judged]
        return told_of(rollouts).with_columns(reward=np.array(rewards, dtype=np.float64), error=errors)

    def close(self) -> None:
        """End the verifiers' processes."""
        if hasattr(self, "_verifiers"):
            self._verifiers.close()


def _reason(error: VerifierError) -> str:
    why = str(error).splitlines()[0]
    _LOG.warning("a sample failed: %s", why)
    return why
