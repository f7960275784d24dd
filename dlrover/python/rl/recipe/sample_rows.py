"""Samples as rows of a batch: all of them for those who train, and what the trainer is told of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.recipe.playing import Row, Sample

_TOLD = (
    "prompt_id", "sample_index", "attempt", "trajectory", "turns", "finished", "version", "oldest", "digest",
    "prompt", "completion", "answer", "reward", "score", "error",
)  # fmt: skip

_BITS = {"begun_at": 14, "attempt": 6, "prompt_id": 28, "sample_index": 14}
"""Of a trajectory's number: 62 in all. What has more is cut, which no two samples of a step differ by."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt.

    Attributes:
        prompt_id: of the row.
        attempt: how often its group was drawn before.
        begun_at: the step that asked for it.
        answer: of the row.
        extra_info: of the row.
        samples: all of them, over.
    """

    prompt_id: int
    attempt: int
    begun_at: int
    answer: Any
    extra_info: dict[str, Any]
    samples: Sequence[Sample]


def as_batch(groups: Sequence[Group], judged: bool) -> Batch:
    """The rows of groups in their order, samples by index, sequences of a sample adjacent.

    Args:
        groups: of which all samples are over.
        judged: whether an environment has; their rewards are told then.

    Returns:
        Ragged ``[rows, seq]``: ``tokens``, ``action_mask``, ``logprobs``, ``versions`` (int64, -1 on given tokens) and,
        where judged, ``token_rewards``. Dense: ``prompt_id``, ``sample_index``, ``attempt``, ``turns`` (of the sample),
        ``finished``, ``version`` and ``oldest`` (newest and oldest weights of the row, -1 without a drawn token),
        ``trajectory`` (the same on the rows of one sample), ``digest`` (of the tokens) and, where judged, ``reward``
        and ``score`` (float64; of the row's own actions, NaN where the sample failed). Objects: ``completion``,
        ``prompt``, ``answer``, ``extra_info`` and, where judged, ``error`` (None, or why it failed).
    """
    told = [(group, sample, row) for group in groups for sample in group.samples for row in sample.rows]
    rows = [row for _, _, row in told]
    columns: dict[str, Any] = {
        "tokens": Ragged.from_rows([row.tokens for row in rows], dtype=np.int64),
        "action_mask": Ragged.from_rows([row.action_mask for row in rows], dtype=np.bool_),
        "logprobs": Ragged.from_rows([row.logprobs for row in rows], dtype=np.float32),
        "versions": Ragged.from_rows([row.versions for row in rows], dtype=np.int64),
        "prompt_id": _numbers(group.prompt_id for group, _, _ in told),
        "sample_index": _numbers(sample.index for _, sample, _ in told),
        "attempt": _numbers(group.attempt for group, _, _ in told),
        "turns": _numbers(sample.turns for _, sample, _ in told),
        "finished": np.array([row.finished for row in rows], dtype=np.bool_),
        "version": _numbers(row.versions.max() for row in rows),
        "oldest": _numbers(_oldest(row.versions) for row in rows),
        "trajectory": _numbers(_trajectory(group, sample) for group, sample, _ in told),
        "digest": _numbers(_digest(row.tokens) for row in rows),
        "completion": [row.completion for row in rows],
        "prompt": [row.prompt for row in rows],
        "answer": [group.answer for group, _, _ in told],
        "extra_info": [group.extra_info for group, _, _ in told],
    }
    if judged:
        columns |= _judged([sample for _, sample, _ in told], rows)
    return Batch(columns)


def told_of(rollouts: Batch) -> Batch:
    """What the trainer needs to know of each row: the numbers and texts there are, and its ``action_tokens`` and
    ``token_count``."""
    actions = rollouts.ragged("action_mask")
    starts, totals = actions.offsets[:-1], np.concatenate([[0], np.cumsum(actions.values)])
    return rollouts.select(*(name for name in _TOLD if name in rollouts)).with_columns(
        action_tokens=totals[actions.offsets[1:]] - totals[starts], token_count=actions.lengths
    )


def _judged(samples: Sequence[Sample], rows: Sequence[Row]) -> dict[str, Any]:
    rewards = Ragged.from_rows([row.rewards for row in rows], dtype=np.float32)
    failed = np.array([sample.error is not None for sample in samples], dtype=np.bool_)
    sums = np.array([row.rewards.sum(dtype=np.float64) for row in rows], dtype=np.float64)
    scores = np.array([row.score for row in rows], dtype=np.float64)
    return {
        "token_rewards": rewards,
        "reward": np.where(failed, np.nan, sums),
        "score": np.where(failed, np.nan, scores),
        "error": [sample.error for sample in samples],
    }


def _numbers(values: Any) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _oldest(versions: npt.NDArray[np.int64]) -> int:
    drawn = versions[versions >= 0]
    return int(drawn.min()) if len(drawn) else -1


def _digest(tokens: npt.NDArray[np.int64]) -> int:
    return int.from_bytes(blake2b(tokens.tobytes(), digest_size=8).digest(), "little", signed=True)


def _trajectory(group: Group, sample: Sample) -> int:
    parts = {
        "begun_at": group.begun_at,
        "attempt": group.attempt,
        "prompt_id": group.prompt_id,
        "sample_index": sample.index,
    }
    number = 0
    for name, bits in _BITS.items():
        number = number << bits | parts[name] % (1 << bits)
    return number
