"""From ragged rows to packed micro-batches without padding, and from their outputs back to the batch's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.balance import lightest_first
from dlrover.python.rl.data.batch import Array, Batch, Column, Ragged

Ids = npt.NDArray[np.int64]
Head = Literal["causal", "token"]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of a batch one after the other in a single row: documents, none of which may see another.

    A document goes no further than it is needed: to the token before its last action (``head: causal``), or to its last
    action (``head: token``).

    Attributes:
        inputs: ``[tokens]``: what the model reads.
        lengths: ``[documents]``: tokens of each document; longest first, so documents of equal length are neighbours.
        reads: ``[actions]``: where in ``inputs`` the outputs of the action tokens are, rising.
        targets: ``[actions]``: the action tokens.
        flat: ``[actions]``: where the action tokens stand in the batch's flat token column.
        candidates: ``[actions, n]``: ids whose log-probs are wanted too, or None.
        top: how many of the most likely ids are wanted too.
    """

    inputs: Ids
    lengths: Ids
    reads: Ids
    targets: Ids
    flat: Ids
    candidates: Ids | None = None
    top: int = 0

    @property
    def asked(self) -> Ids:
        """The ids whose log-probs are wanted: ``targets``, or ``[actions, 1 + n]`` with candidates behind each."""
        return self.targets if self.candidates is None else np.column_stack([self.targets, self.candidates])

    @cached_property
    def positions(self) -> Ids:
        """``[tokens]``: the position of each input in its document, from 0."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.inputs)) - np.repeat(starts, self.lengths)

    def padded(self, fill: int) -> tuple[Ids, Ids]:
        """For models that cannot keep packed documents apart: a document a row, filled up on the right.

        Under causal attention nothing on the left sees the filling, so no attention mask is needed.

        Returns:
            Ids ``[documents, longest]``, and ``[actions]``: ``reads`` as places in their flat form.
        """
        longest = int(self.lengths.max(initial=1))
        document = np.repeat(np.arange(len(self.lengths)), self.lengths)
        ids = np.full((len(self.lengths), longest), fill, dtype=np.int64)
        ids[document, self.positions] = self.inputs
        return ids, document[self.reads] * longest + self.positions[self.reads]

    def columns(self, batch: Batch, device: str) -> dict[str, Any]:
        """The batch's numeric columns at the action tokens, see :func:`columns_at`."""
        return columns_at(batch, self.flat, device)


def columns_at(batch: Batch, flat: Ids, device: str) -> dict[str, Any]:
    """A batch's numeric columns at some of its tokens, each ``[actions, ...]``.

    Ragged columns aligned with the tokens are picked, dense ones are spread over their row's tokens, float64 becomes
    float32. Others (objects, rows of other lengths) have no value per token and are left out. ``unit``, if the batch
    has none, is the number of each token's row.

    Args:
        batch: ragged ``tokens``, and others.
        flat: ``[actions]``: where the tokens stand in the flat column.
        device: where the columns are wanted.
    """
    tokens = batch.ragged("tokens")
    row_of = np.searchsorted(tokens.offsets, flat, side="right") - 1
    columns = {"unit": np.arange(len(batch)), **batch.columns}
    picked = {name: _at(column, tokens, flat, row_of) for name, column in columns.items()}
    return {name: _to_torch(values, device) for name, values in picked.items() if values is not None}


def _at(column: Column, tokens: Ragged, flat: Array, row_of: Array) -> Array | None:
    if isinstance(column, list):
        return None
    if isinstance(column, Ragged):
        return column.values[flat] if np.array_equal(column.offsets, tokens.offsets) else None
    return column[row_of] if column.dtype.kind in "biuf" else None


def _to_torch(values: Array, device: str) -> Any:
    tensor = torch.from_numpy(values)
    return tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)


def check_actions(batch: Batch, head: Head = "causal") -> None:
    """Refuse an action mask that is not the tokens', or, of a language model, set on a row's first token, which nothing
    predicts.

    Raises:
        EngineError: it is so.
    """
    tokens, actions = batch.ragged("tokens"), batch.ragged("action_mask")
    if not np.array_equal(tokens.offsets, actions.offsets):
        raise EngineError("'action_mask' and 'tokens' have rows of different lengths")
    firsts = tokens.offsets[:-1][tokens.lengths > 0]
    if head == "causal" and len(firsts) and actions.values[firsts].any():
        raise EngineError("'action_mask' is set on the first token of a row, which has no log-prob")


def check_tokens(tokens: Ragged, vocab_size: int, max_positions: int | None) -> None:
    """Refuse ids that are not below ``vocab_size``, and rows of more than ``max_positions`` tokens.

    Raises:
        EngineError: either is the case; names a row.
    """
    ids, lengths = tokens.values, tokens.lengths
    if max_positions is not None and lengths.max(initial=0) > max_positions:
        row = int(lengths.argmax())
        raise EngineError(
            f"row {row} of the batch, of {lengths[row]} tokens, does not fit the model's {max_positions} positions"
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        row = int(np.searchsorted(tokens.offsets, at, side="right")) - 1
        raise EngineError(f"row {row} of the batch has the id {ids[at]}, but the model knows 0 to {vocab_size - 1}")


def pack(batch: Batch, token_budget: int, head: Head = "causal", at_least: int = 0) -> list[MicroBatch]:
    """Divide a batch into micro-batches of about equally many tokens; rows without an action token are left out.

    Args:
        batch: columns ``tokens`` and ``action_mask``; rows with the same number in ``unit`` (dense, if there is one)
            stay together; ``candidates`` (ragged ``[rows, seq, n]``, if there are any) are ids that a causal head is
            asked for.
        token_budget: most tokens of a micro-batch; a row or unit that is longer comes alone.
        head: of the model that will read them.
        at_least: make so many, the last of them without rows if the others have taken all: ranks that work in step need
            equally many.
    """
    tokens, actions = batch.ragged("tokens"), batch.ragged("action_mask")
    spans = np.array([_needed(mask, head) for mask in actions], dtype=np.int64)
    rows = np.flatnonzero(spans)
    if "unit" in batch:
        units = _units(batch.dense("unit")[rows])
        shares = [
            _longest_first([row for unit in share for row in units[unit]], spans[rows])
            for share in balanced([int(spans[rows[unit]].sum()) for unit in units], token_budget, at_least)
        ]
    else:
        shares = balanced(spans[rows].tolist(), token_budget, at_least)
    micros = [_join(tokens, actions, rows[share], spans) for share in shares]
    if head != "causal" or "candidates" not in batch:
        return micros
    candidates = batch.ragged("candidates")
    if not np.array_equal(candidates.offsets, tokens.offsets) or candidates.values.ndim != 2:
        raise EngineError("'candidates' and 'tokens' have rows of different lengths")
    return [replace(micro, candidates=candidates.values[micro.flat]) for micro in micros]


def _units(numbers: Ids) -> list[Ids]:
    """The places of each number."""
    _, of_row = np.unique(numbers, return_inverse=True)
    order = np.argsort(of_row, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(of_row[order])) + 1) if len(order) else []


def _longest_first(rows: list[int], spans: Ids) -> list[int]:
    return sorted(rows, key=lambda row: -int(spans[row]))


def _needed(mask: Array, head: Head) -> int:
    """How many of a row's tokens the model has to read; 0 without an action."""
    chosen = np.flatnonzero(mask)
    return int(chosen[-1]) + (head == "token") if len(chosen) else 0


def balanced(lengths: Sequence[int], budget: int, at_least: int = 0) -> list[list[int]]:
    """Divide items into as few groups of at most ``budget`` as are easily found, of nearly equal sums.

    The longest item goes first, each to the lightest group; where a group gets too heavy, one group more is tried. The
    differencing of :func:`~dlrover.python.rl.data.balance.partition` ends in as many groups, and takes a thousand times
    as long where they are hundreds.

    Args:
        lengths: of the items, each at least 1.
        budget: most of a group; an item that is longer is a group of its own.
        at_least: so many groups at least, empty ones if there are too few items.

    Returns:
        Indices of the items of each group, longest first.
    """
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    alone = [[item] for item in order if lengths[item] >= budget]
    rest = order[len(alone) :]
    count = max(-(-sum(lengths[item] for item in rest) // budget), at_least - len(alone))
    groups = lightest_first(rest, lengths, count)
    while any(sum(lengths[item] for item in group) > budget for group in groups):
        count += 1
        groups = lightest_first(rest, lengths, count)
    return alone + groups


def _join(tokens: Ragged, actions: Ragged, rows: Array, spans: Ids) -> MicroBatch:
    if not len(rows):
        none = np.empty(0, dtype=np.int64)
        return MicroBatch(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), none, none, none)
    lengths, starts = spans[rows], tokens.offsets[:-1][rows]
    inputs = [tokens.values[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    chosen = [np.flatnonzero(actions[row]) for row in rows]
    flat = np.concatenate([start + at for start, at in zip(starts, chosen, strict=True)])
    # The output of an action is read at the token before it, or at the action itself: the last one's is a document's
    # last input in either case.
    begins = np.cumsum(lengths) - lengths
    shift = [begin + length - 1 - at[-1] for begin, length, at in zip(begins, lengths, chosen, strict=True)]
    reads = np.concatenate([at + by for at, by in zip(chosen, shift, strict=True)])
    return MicroBatch(np.concatenate(inputs), lengths, reads, tokens.values[flat], flat)
