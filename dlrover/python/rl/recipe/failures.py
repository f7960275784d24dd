"""Samples that the reward function failed on: what becomes of them and of their groups.

A failed sample has no reward, which is not a reward of 0. It is counted, logged with its reason, and never trained on.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.config import RewardConfig
from dlrover.python.rl.recipe.whole_samples import whole_samples

_LOG = get_logger(__name__)


def failed(scored: Batch) -> npt.NDArray[np.bool_]:
    """``[rows]``, or ``[samples]`` of whole ones: those without a reward."""
    return np.isnan(scored.dense("reward"))


def failed_groups(scored: Batch) -> npt.NDArray[np.int64]:
    """Prompt ids of the groups in whose last draw a sample failed, rising."""
    ids, attempt = scored.dense("prompt_id"), scored.dense("attempt")
    _, group = np.unique(ids, return_inverse=True)
    last = np.full(len(ids), -1)
    np.maximum.at(last, group, attempt)  # each one's own: a group that an earlier step drew anew may be among others
    return np.unique(ids[(attempt == last[group]) & failed(scored)])


class Outage:
    """Counts the steps in a row of which no sample is left to train on, since judging failed. It may be over soon (a
    judge that was away for a minute) or never (a reward function with a fault). Belongs into a trainer's ``state``.

    Args:
        config: what a failure costs, and after how many such steps the run ends.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config, self._steps = config, 0

    def stepped(self, step: int, scored: Batch) -> None:
        """Take in all that a step has drawn, what is filtered out included: that has its rewards.

        Raises:
            DataError: nothing is left of the run's first step, or of as many in a row as ``give_up_after``.
        """
        self._steps = self._steps + 1 if np.isnan(rewards_of(scored, self._config)).all() else 0
        if not self._steps:
            return
        what, most = _nothing_left(whole_samples(scored), scored.objects("error")), self._config.give_up_after
        if self._steps >= most > 1:
            what = f"{what}; it was the last of {self._steps} such steps in a row (reward.give_up_after)"
        if step == 1 or self._steps >= most:
            raise DataError([Problem(f"step {step}", what)])
        _LOG.warning("step %d: %s; %d such steps in a row, of which %d end the run", step, what, self._steps, most)

    @property
    def figures(self) -> dict[str, float]:
        """How many steps in a row nothing was left of, with the last one, if there is something to say."""
        return {"steps_without_reward": float(self._steps)} if self._steps else {}

    def state_dict(self) -> dict[str, int]:
        """How many there are."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting."""
        self._steps = state["steps"]


def trainable(scored: Batch, config: RewardConfig) -> Batch:
    """The rows as the algorithm shall see them: those that are not to be trained on have no reward."""
    return scored.with_columns(reward=rewards_of(scored, config))


def rewards_of(scored: Batch, config: RewardConfig) -> npt.NDArray[np.float64]:
    """``[rows]``: rewards, NaN in samples that are not to be trained on."""
    reward = scored.dense("reward").copy()
    if config.on_failure != "drop_sample":
        reward[_in_failed_draw(scored)] = np.nan
    return reward


def _in_failed_draw(scored: Batch) -> npt.NDArray[np.bool_]:
    """``[rows]``: samples of a group that were drawn together with a failed one."""
    draws = np.stack([scored.dense("prompt_id"), scored.dense("attempt")])
    _, draw = np.unique(draws, axis=1, return_inverse=True)
    return np.bincount(draw.reshape(-1), weights=failed(scored))[draw.reshape(-1)] > 0


def _nothing_left(samples: Batch, errors: list[str | None]) -> str:
    last = [error for error in errors if error is not None][-1]
    if failed(samples).all():
        return f"the reward function failed on all {len(samples)} samples, last with: {last}"
    count, groups = int(failed(samples).sum()), len(np.unique(samples.dense("prompt_id")))
    what = f"the reward function failed on {count} of {len(samples)} samples, which are in each of the {groups} groups"
    return f"{what}: none is left to train on (reward.on_failure: drop_sample would keep the others); last with: {last}"


def failure_metrics(scored: Batch, judged: Batch) -> dict[str, float]:
    """Counts of a step: samples that failed, samples drawn anew, and groups of which nothing was trained on.

    Args:
        scored: the rows of all that was drawn.
        judged: the rows that were not filtered out, as :func:`trainable` gives them.
    """
    samples, ids = whole_samples(scored), judged.dense("prompt_id")
    return {
        "failed_samples": float(failed(samples).sum()),
        "redrawn_samples": float((samples.dense("attempt") > 0).sum()),
        "dropped_groups": float(len(np.unique(ids)) - len(np.unique(ids[~failed(judged)]))),
    }
