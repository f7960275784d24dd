# SPDX-License-Identifier: Apache-2.0
"""Packing of ragged rows into micro-batches without padding, and of their outputs back into the batch's tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Array, Batch, Ragged
from dlrover.python.rl.data.sampler import lightest_first

Ids = npt.NDArray[np.int64]
Head = Literal["causal", "token"]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of a batch, one after the other in a single row: documents that must not see each other.

    A document ends at the token before its last action (``head: causal``), or at its last action (``head: token``).
    Documents are sorted by length, longest first, so equal lengths are neighbours."""

    inputs: Ids  # [tokens]
    positions: Ids  # [tokens]: of each input in its document, from 0
    lengths: Ids  # [documents]
    reads: Ids  # [actions]: where in `inputs` the outputs of the action tokens are, rising
    targets: Ids  # [actions]: the action tokens
    flat: Ids  # [actions]: where the action tokens are in the batch's flat token column
    candidates: Ids | None = None  # [actions, n]: ids whose log-probs are requested too
    top: int = 0  # number of most likely ids that are requested too

    @property
    def target_ids(self) -> Ids:
        return self.targets if self.candidates is None else np.column_stack([self.targets, self.candidates])

    def padded(self, fill: int) -> tuple[Ids, Ids]:
        """Return ids ``[documents, longest]``, padded on the right, and ``reads`` as indices of their flat form. Causal
        attention needs no mask for this padding."""
        longest = int(self.lengths.max(initial=1))
        document = np.repeat(np.arange(len(self.lengths)), self.lengths)
        ids = np.full((len(self.lengths), longest), fill, dtype=np.int64)
        ids[document, self.positions] = self.inputs
        return ids, document[self.reads] * longest + self.positions[self.reads]


def select_columns(batch: Batch, flat: Ids, device: str) -> dict[str, Any]:
    """Select a batch's numeric columns at the tokens ``flat`` (indices of the flat column), each ``[actions, ...]``.

    Dense columns are repeated over their row's tokens, and float64 becomes float32. Other columns (objects, rows of
    other lengths than the tokens') are left out. ``unit`` defaults to the number of each token's row."""
    tokens = batch.ragged("tokens")
    row_of = np.searchsorted(tokens.offsets, flat, side="right") - 1
    columns = {"unit": np.arange(len(batch)), **batch.columns}
    picked: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Ragged) and np.array_equal(column.offsets, tokens.offsets):
            values = column.values[flat]
        elif isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
            values = column[row_of]
        else:
            continue
        tensor = torch.from_numpy(values)
        picked[name] = tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)
    return picked


def check_actions(batch: Batch, head: Head = "causal") -> None:
    """Raise an ``EngineError`` unless the mask matches the tokens, without a row's first token for a causal head."""
    tokens, actions = batch.ragged("tokens"), batch.ragged("action_mask")
    if not np.array_equal(tokens.offsets, actions.offsets):
        raise EngineError("'action_mask' and 'tokens' have rows of different lengths")
    firsts = tokens.offsets[:-1][tokens.lengths > 0]
    if head == "causal" and len(firsts) and actions.values[firsts].any():
        raise EngineError("'action_mask' is set on the first token of a row, which has no log-prob")


def check_tokens(tokens: Ragged, vocab_size: int, max_positions: int | None) -> None:
    """Raise an ``EngineError`` if an id is not below ``vocab_size`` or a row is too long; names a row."""
    ids, lengths = tokens.values, tokens.lengths
    if max_positions is not None and lengths.max(initial=0) > max_positions:
        row = int(lengths.argmax())
        raise EngineError(
            f"row {row} of the batch has {lengths[row]} tokens and does not fit the model's {max_positions} positions"
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        row = int(np.searchsorted(tokens.offsets, at, side="right")) - 1
        raise EngineError(f"row {row} of the batch has the id {ids[at]}, but the model has ids 0 to {vocab_size - 1}")


def pack(batch: Batch, token_budget: int, head: Head = "causal", at_least: int = 0) -> list[MicroBatch]:
    """Divide a batch into micro-batches of similar size; rows without an action token are left out.

    Args:
        batch: columns ``tokens`` and ``action_mask``; rows with the same number in the dense column ``unit``, if any,
            stay together; ``candidates`` (ragged ``[rows, seq, n]``), if any, are more ids for a causal head.
        token_budget: maximum tokens of a micro-batch; a row or unit that exceeds it is a micro-batch by itself.
        at_least: minimum number of micro-batches, of which the last ones may be empty: all ranks need the same number.
    """
    tokens, actions = batch.ragged("tokens"), batch.ragged("action_mask")
    positions = [np.flatnonzero(mask) for mask in actions]
    # A document ends with the token before its last action, or with the action itself if scores are read.
    spans = np.array([int(at[-1]) + (head == "token") if len(at) else 0 for at in positions], dtype=np.int64)
    rows = np.flatnonzero(spans)
    if "unit" in batch and len(rows):
        _, of_row = np.unique(batch.dense("unit")[rows], return_inverse=True)
        order = np.argsort(of_row, kind="stable")
        units = np.split(order, np.flatnonzero(np.diff(of_row[order])) + 1)
        shares = [
            sorted((row for unit in share for row in units[unit]), key=lambda row: -int(spans[rows[row]]))
            for share in balance_by_tokens([int(spans[rows[unit]].sum()) for unit in units], token_budget, at_least)
        ]
    else:
        shares = balance_by_tokens(spans[rows].tolist(), token_budget, at_least)
    micros = [_join(tokens, actions, rows[share], spans) for share in shares]
    if head != "causal" or "candidates" not in batch:
        return micros
    candidates = batch.ragged("candidates")
    if not np.array_equal(candidates.offsets, tokens.offsets) or candidates.values.ndim != 2:
        raise EngineError("'candidates' and 'tokens' have rows of different lengths")
    return [replace(micro, candidates=candidates.values[micro.flat]) for micro in micros]


def balance_by_tokens(lengths: Sequence[int], budget: int, at_least: int = 0) -> list[list[int]]:
    """Divide items into few groups of at most ``budget``, of nearly equal sums: indices, longest first.

    ``data.sampler.partition`` finds no fewer groups and is far slower for hundreds of items."""
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    alone = [[item] for item in order if lengths[item] >= budget]
    small = order[len(alone) :]
    count = max(-(-sum(lengths[item] for item in small) // budget), at_least - len(alone))
    while True:
        groups = lightest_first(small, lengths, count)
        if all(sum(lengths[item] for item in group) <= budget for group in groups):
            return alone + groups
        count += 1


def _join(tokens: Ragged, actions: Ragged, rows: Array, spans: Ids) -> MicroBatch:
    if not len(rows):
        empty = np.empty(0, dtype=np.int64)
        zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
        return MicroBatch(zero, zero, one, empty, empty, empty)
    lengths, starts = spans[rows], tokens.offsets[:-1][rows]
    inputs = [tokens.values[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    positions = [np.flatnonzero(actions[row]) for row in rows]
    flat = np.concatenate([start + at for start, at in zip(starts, positions, strict=True)])
    # The output of an action is read at the token before it, or at the action itself. Either way a document's last
    # input gives the output of its last action.
    begins = np.cumsum(lengths) - lengths
    shift = [begin + length - 1 - at[-1] for begin, length, at in zip(begins, lengths, positions, strict=True)]
    reads = np.concatenate([at + by for at, by in zip(positions, shift, strict=True)])
    places = np.arange(lengths.sum()) - np.repeat(begins, lengths)
    return MicroBatch(np.concatenate(inputs), places, lengths, reads, tokens.values[flat], flat)


def gather_outputs(
    batch: Batch, head: Head, results: Iterable[tuple[MicroBatch, tuple[Any, ...]]], entropy: bool = False, top: int = 0
) -> Batch:
    """Return the outputs of micro-batches as columns like ``tokens``, 0 outside the action mask.

    ``results`` are micro-batches with outputs (``[actions]``, or ``[actions, 1 + n]`` with candidates), entropies or
    None, and the most likely ids if requested."""
    tokens, name = batch.ragged("tokens"), "logprobs" if head == "causal" else "scores"
    total = len(tokens.values)
    columns: dict[str, Array] = {name: np.zeros(total, dtype=np.float32)}
    if entropy:
        columns["entropy"] = np.zeros(total, dtype=np.float32)
    if top:
        columns["candidates"] = np.zeros((total, top), dtype=np.int64)
        columns["candidate_logprobs"] = np.zeros((total, top), dtype=np.float32)
    elif name == "logprobs" and "candidates" in batch:
        columns["candidate_logprobs"] = np.zeros(batch.ragged("candidates").values.shape, dtype=np.float32)
    for micro, (outputs, entropies, *likely) in results:
        values = {name: outputs if outputs.ndim == 1 else outputs[:, 0], "entropy": entropies}
        if outputs.ndim == 2:
            values |= {"candidate_logprobs": outputs[:, 1:], "candidates": likely[0] if likely else None}
        for key, column in columns.items():
            column[micro.flat] = values[key].cpu().numpy()
    return Batch({key: tokens.like(values) for key, values in columns.items()})
