# SPDX-License-Identifier: Apache-2.0
"""The columns of a loss: of a micro-batch, weights per token with the global normaliser, samples, advantages."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.batch import Array, Batch, Ragged

TokenColumns: TypeAlias = Mapping[str, torch.Tensor]
"""Columns aligned with the action tokens of a micro-batch, each ``[tokens]``, a few ``[tokens, n]``."""

Metrics: TypeAlias = dict[str, Any]
"""0-d tensors without gradient that add up, over micro-batches and ranks, to the weighted mean over the update."""

TokenLosses: TypeAlias = tuple[torch.Tensor, Metrics]  # unweighted losses ``[tokens]``, and weighted metrics


@dataclass(frozen=True)
class Needs:
    """Columns that an algorithm requires besides ``tokens`` and the columns that :meth:`Algorithm.annotate` adds.

    ``annotate``: ragged ``[rows, seq]``, of the rows to annotate; may include ``action_mask``. ``loss``: columns of the
    loss; the train engine computes ``entropy``, and ``candidate_logprobs`` if the batch has ``candidates``.

    ``old_logprobs`` are the policy's before the update, from the train engine or, without a correction, from the
    rollout engine; ``rollout_logprobs`` are the rollout engine's, ``ref_logprobs`` a frozen reference's,
    ``teacher_logprobs`` a teacher's, ``values`` (before each action) a critic's. A column that the rollout engine
    declares (``EngineInfo.columns``) has its own name; one per sample is dense, and repeated over the tokens of a loss.

    ``whole_sequences``: the loss weights or clips whole sequences, so ``old_logprobs`` need a separate forward pass.
    """

    annotate: frozenset[str] = frozenset()
    loss: frozenset[str] = frozenset()
    whole_sequences: bool = False

    @property
    def all(self) -> frozenset[str]:
        return self.annotate | self.loss

    @property
    def recomputes(self) -> bool:
        """Return True if ``old_logprobs`` are the train engine's: the rollout engine's have a separate column."""
        return "rollout_logprobs" in self.all

    def shares_forward(self, updates: int) -> bool:
        """Return True if the loss's own log-probs, detached, are the ``old_logprobs`` of a step with this number of
        ``updates``: before the only one the policy is the old policy, so no separate forward pass is needed."""
        return updates == 1 and self.recomputes and not self.whole_sequences


def column(columns: TokenColumns, name: str) -> torch.Tensor:
    try:
        return columns[name]
    except KeyError:
        raise DataError(f"the loss needs the column '{name}'{hint(name, columns)}") from None


def weighted_sum(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (weight * values.detach()).sum()


Averaging: TypeAlias = Literal["token", "sequence", "sum", "constant"]
"""``token``: mean over all action tokens. ``sequence``, ``sum``: mean over sequences of their token means, or of their
token sums. ``constant``: ``sum`` divided by a fixed length."""


def token_weights(
    action_tokens: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_], mode: Averaging, max_tokens: int | None = None
) -> npt.NDArray[np.float32]:
    """Return the weight of each action token of every row (or sample): ``[rows]``.

    With n_i the action tokens of row i, and N_a and N_s the action tokens and the sequences that count in the whole
    update: ``token`` 1/N_a (DAPO, arXiv:2503.14476, eq. 8), ``sequence`` 1/(n_i N_s) (GRPO, arXiv:2402.03300, eq. 3),
    ``sum`` 1/N_s (a whole sequence is one action: RLOO, arXiv:2402.14740), ``constant`` 1/(N_s ``max_tokens``) (Dr.
    GRPO, arXiv:2503.20783, section 3.2). Rows that are not ``valid`` or have no action token do not count: 0."""
    counted = valid & (action_tokens > 0)
    lengths = np.where(counted, action_tokens, 0).astype(np.float64)
    sequences = max(int(counted.sum()), 1)
    if mode == "token":
        divisor = np.full(len(lengths), max(lengths.sum(), 1.0))
    elif mode == "sequence":
        divisor = np.maximum(lengths, 1.0) * sequences
    elif mode == "sum":
        divisor = np.full(len(lengths), float(sequences))
    elif mode == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError("averaging 'constant' divides by max_tokens: set it to the maximum tokens of a completion")
        divisor = np.full(len(lengths), float(sequences * max_tokens))
    else:
        raise ValueError(f"unknown averaging '{mode}'{hint(mode, get_args(Averaging))}")
    return np.where(counted, 1.0 / divisor, 0.0).astype(np.float32)


def find_masked(rows: Batch) -> npt.NDArray[np.bool_]:
    """Return ``[rows]``: True for rows that the trainer leaves out of the loss."""
    return rows.dense("masked") if "masked" in rows else np.zeros(len(rows), dtype=np.bool_)


def add_token_weights(rows: Batch, mode: Averaging) -> Batch:
    """Add ``weight``, with each row as one sample without a reward."""
    return rows.with_columns(weight=token_weights(rows.dense("action_tokens"), ~find_masked(rows), mode))


@dataclass(frozen=True, eq=False)
class TokenUnits:
    """Groups of tokens that a loss sums, sequences or pairs. ``index``: ``[tokens]``, from 0."""

    index: torch.Tensor
    count: int

    @classmethod
    def of(cls, columns: TokenColumns) -> "TokenUnits":
        numbers, index = torch.unique(column(columns, "unit"), return_inverse=True)
        return cls(index, len(numbers))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        return self.sums(values) / self.sums(torch.ones_like(values))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.index]


_ROUNDING = 1e-9  # relative difference of sums of the same numbers in another order
Normalize: TypeAlias = Literal["none", "std", "std_unbiased"]
"""Division of a group's centred rewards by their standard deviation with divisor n, or n - 1 (RL2, TRL and verl)."""

STD_EPS = 1e-6  # added to the standard deviation of a group's rewards before dividing, as in verl and RL2


def group_advantages(
    prompt_id: npt.NDArray[np.int64],
    reward: npt.NDArray[np.floating],
    normalize: Normalize,
    valid: npt.NDArray[np.bool_] | None = None,
    std_eps: float = STD_EPS,
) -> npt.NDArray[np.float32]:
    """Center rewards on the mean of their group, the rows of one prompt: ``[rows]``; ValueError for an infinite reward.

    GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2): ``(r - mean(r)) / std(r)``. The paper leaves the deviation
    open: with ``std`` (divisor n, plus ``std_eps``) rewards 1 and 0 give +1 and -1, with ``std_unbiased`` +0.71 and
    -0.71. Dr. GRPO (arXiv:2503.20783) does not divide. Rows that are not ``valid`` or have reward NaN are left out and
    get 0; so do groups of one row or of equal rewards."""
    if normalize not in get_args(Normalize):
        raise ValueError(f"unknown normalize '{normalize}'{hint(normalize, get_args(Normalize))}")
    if np.isinf(reward).any():
        raise ValueError(f"infinite rewards in rows {np.flatnonzero(np.isinf(reward)).tolist()}")
    counted = ~np.isnan(reward) if valid is None else valid & ~np.isnan(reward)
    advantage = np.zeros(len(reward), dtype=np.float32)
    _, group = np.unique(prompt_id[counted], return_inverse=True)
    count, rewards = np.bincount(group), reward[counted].astype(np.float64)
    # Sums of the same numbers in another order may differ by rounding, which a division by eps would blow up.
    varies = _find_varied(group, rewards, len(count))[group]
    centred = np.where(varies, rewards - (np.bincount(group, weights=rewards) / count)[group], 0.0)
    if normalize != "none":
        divisor = np.maximum(count - 1, 1) if normalize == "std_unbiased" else count
        deviation = np.sqrt(np.bincount(group, weights=centred**2) / divisor)
        centred = centred / (deviation[group] + std_eps)
    advantage[counted] = centred
    return advantage


def leave_one_out(
    prompt_id: npt.NDArray[np.int64], reward: npt.NDArray[np.floating], valid: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """Center each reward on the mean of its prompt's *other* rows (RLOO, arXiv:2402.14740, section 3.2): ``[rows]``.

    This is ``n / (n - 1)`` times the deviation from the mean of all n; 0 for rows left out or alone."""
    centred = group_advantages(prompt_id, reward, "none", valid).astype(np.float64)
    _, group = np.unique(prompt_id, return_inverse=True)
    count = np.bincount(group, weights=valid)[group]
    return (centred * count / np.maximum(count - 1, 1)).astype(np.float32)


def find_varied_groups(
    prompt_id: npt.NDArray[np.int64], reward: npt.NDArray[np.floating], valid: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return ``[samples]``: True if the prompt's valid rewards differ; DAPO replaces others (arXiv:2503.14476)."""
    _, group = np.unique(prompt_id, return_inverse=True)
    return _find_varied(group[valid], reward[valid], len(reward))[group]


def _find_varied(group: npt.NDArray[np.int64], reward: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.bool_]:
    """Return ``[count]``: True for groups whose rewards differ by more than rounding."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group, reward)
    np.maximum.at(high, group, reward)
    varied: npt.NDArray[np.bool_] = high - low > _ROUNDING * np.maximum(1.0, np.abs(high))
    return varied


def whiten(values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
    """Return ``(values - mean) / sqrt(var + 1e-8)`` with the unbiased variance; equal values give 0. The values are an
    update's action tokens, as in PPO and REINFORCE++ (TRL, verl, RL2). ``counts`` are their multiplicities, by default
    1; a value with multiplicity 0 is excluded and becomes 0."""
    counts = np.ones(len(values), dtype=np.int64) if counts is None else counts
    counted = values[counts > 0]
    if not len(counted) or counted.min() == counted.max():
        return np.zeros(len(values))
    total = counts.sum()
    centred = np.where(counts > 0, values - (counts * np.where(counts > 0, values, 0.0)).sum() / total, 0.0)
    deviation = float(np.sqrt((counts * centred**2).sum() / (total - 1) + 1e-8))
    return centred / deviation


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SampleView:
    """The samples of an update, each one row or several (a trajectory of an environment).

    ``of_row`` ``[rows]`` is the sample of each row, from 0; ``action_tokens`` and ``counted`` are ``[samples]``.
    ``counted`` is False for samples that failed or have no action."""

    rows: Batch
    of_row: npt.NDArray[np.int64]
    action_tokens: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Batch, by: str = "trajectory") -> "SampleView":
        """Group rows with the same number in the column ``by``; without that column each row is a sample."""
        numbers = rows.dense(by) if by in rows else np.arange(len(rows))
        _, of_row = np.unique(numbers, return_inverse=True)
        of_row = of_row.astype(np.int64)
        action_tokens = np.bincount(of_row, weights=rows.dense("action_tokens")).astype(np.int64)
        counted = action_tokens > 0
        if "reward" in rows:
            counted &= ~np.isnan(np.bincount(of_row, weights=rows.dense("reward")))
        return cls(rows, of_row, action_tokens, counted)

    @property
    def reward(self) -> Floats:
        """``[samples]``: the sum over a sample's rows; NaN where it failed."""
        return np.bincount(self.of_row, weights=self.rows.dense("reward")).astype(np.float64)

    @property
    def prompt_id(self) -> npt.NDArray[np.int64]:
        """``[samples]``: equal for the samples of a group."""
        _, first = np.unique(self.of_row, return_index=True)
        prompt_id: npt.NDArray[np.int64] = self.rows.dense("prompt_id")[first]
        return prompt_id

    def weights(self, mode: Averaging, max_tokens: int | None = None) -> npt.NDArray[np.float32]:
        masked = np.bincount(self.of_row, weights=find_masked(self.rows)) > 0  # a sample is where one of its rows is
        return self.spread(token_weights(self.action_tokens, self.counted & ~masked, mode, max_tokens))

    def spread(self, values: Array) -> npt.NDArray[np.float32]:
        """Repeat each sample's value on its rows, 0 without action tokens: ``[samples]`` to float32 ``[rows]``."""
        return np.where(self.rows.dense("action_tokens") > 0, values[self.of_row], 0).astype(np.float32)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of action tokens of each sample, 0 for samples that do not count: ``[samples]``."""
        return np.where(self.counted, self.action_tokens, 0)

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """The positions of the action tokens among all tokens, sample by sample: ``[actions]``."""
        mask = self.rows.ragged("action_mask")
        flat = np.flatnonzero(mask.values)
        row = np.searchsorted(mask.offsets, flat, side="right") - 1
        if not np.array_equal(np.bincount(row, minlength=len(mask)), self.rows.dense("action_tokens")):
            raise DataError("'action_tokens' differ from the token counts of 'action_mask'")
        sample = self.of_row[row]
        counted = self.counted[sample]
        return flat[counted][np.argsort(sample[counted], kind="stable")]

    def of_tokens(self, name: str) -> Floats:
        """Return the ragged column ``name`` at the action tokens, ``[actions]``."""
        column = self.rows.ragged(name)
        if not np.array_equal(column.offsets, self.rows.ragged("action_mask").offsets):
            raise DataError(f"'{name}' and 'action_mask' have rows of different lengths")
        return column.values[self.positions].astype(np.float64)

    def ragged(self, values: Floats) -> Ragged:
        """Return ``[actions]`` as a float32 column ``[rows, seq]``, 0 at other tokens."""
        mask = self.rows.ragged("action_mask")
        column = np.zeros(len(mask.values), dtype=np.float32)
        column[self.positions] = values
        return mask.like(column)

    def token_rewards(self) -> Floats:
        """Return ``[actions]``: ``token_rewards``, or each row's ``reward`` on its last action; the reward of a row
        without actions is added to the action before it."""
        if "token_rewards" in self.rows:
            return self.of_tokens("token_rewards")
        rows = np.flatnonzero(self.counted[self.of_row])
        rows = rows[np.argsort(self.of_row[rows], kind="stable")]
        starts = np.cumsum(self.lengths) - self.lengths
        last = np.cumsum(self.rows.dense("action_tokens")[rows]) - 1
        rewards = np.zeros(len(self.positions))
        np.add.at(rewards, np.maximum(last, starts[self.of_row[rows]]), self.rows.dense("reward")[rows])
        return rewards


def add_pair_columns(rows: Batch, token_means: bool = False) -> Batch:
    """Add ``unit`` (int64: the pair), ``sign`` and ``weight`` (float32), each ``[rows]``; raise DataError if a pair is
    not one chosen and one rejected row.

    ``sign`` is 1 on chosen and -1 on rejected rows, divided by the row's action tokens with ``token_means``. The
    weights of a pair's tokens add up to 1 / pairs; a pair with an empty row does not count."""
    pair, chosen, length = rows.dense("pair"), rows.dense("chosen"), rows.dense("action_tokens")
    samples = SampleView.of(rows, by="pair")
    sizes = np.bincount(samples.of_row)
    wrong = (sizes != 2) | (np.bincount(samples.of_row, weights=chosen) != 1)
    if wrong.any():
        numbers = np.unique(pair)[wrong].tolist()
        raise DataError(f"a pair is one chosen and one rejected row: {numbers[:20]} are not")
    whole = np.bincount(samples.of_row, weights=length > 0) == 2
    counted = SampleView(rows, samples.of_row, samples.action_tokens, whole)
    sign = np.where(chosen, 1.0, -1.0) * whole[samples.of_row]
    if token_means:
        sign = sign / np.maximum(length, 1)
    return rows.with_columns(unit=pair, sign=sign.astype(np.float32), weight=counted.weights("sequence"))


def pair_margins(
    values: torch.Tensor, columns: TokenColumns, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """Sum ``values`` ``[tokens]`` over each sequence, times the size of ``sign``. Return the chosen sum less the
    rejected sum and the weight, both ``[pairs]``, and metrics of the sums times ``scale``."""
    units, sign = TokenUnits.of(columns), column(columns, "sign")
    sides, weight = (sign.clamp(min=0), (-sign).clamp(min=0)), units.sums(column(columns, "weight"))
    complete = (units.sums(sides[0]) > 0) & (units.sums(sides[1]) > 0)
    if bool(((weight > 0) & ~complete).any()):
        raise DataError("a pair is divided: both rows must be on one rank and in one micro-batch")
    chosen, rejected = (units.sums(side * values) for side in sides)
    margin = chosen - rejected
    sums = {"margin": margin, "chosen": chosen, "rejected": rejected}
    metrics = {"accuracy": weighted_sum(weight, (margin.detach().sign() + 1) / 2)}
    return margin, weight, metrics | {name: scale * weighted_sum(weight, value) for name, value in sums.items()}
