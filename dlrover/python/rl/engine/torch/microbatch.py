"""From ragged rows to padded micro-batches, and back to ragged."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Array, Batch, Column, Ragged

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some rows of a batch, padded on the right to the longest of them.

    No attention mask is needed: under causal attention nothing on the left sees the padding.

    Attributes:
        tokens: int64 ``[rows, seq]``.
        actions: bool ``[rows, seq]``; True on the tokens whose log-probs are wanted, never in column 0.
        flat: int64 ``[action tokens]``; where the action tokens stand in the batch's flat token column, in the order in
            which they stand in ``actions``.
    """

    tokens: Any
    actions: Any
    flat: npt.NDArray[np.int64]

    def columns(self, batch: Batch, device: str) -> dict[str, Any]:
        """The batch's numeric columns at the action tokens, each ``[action tokens]``.

        Ragged columns aligned with the tokens are picked, dense ``[rows]`` columns are spread over their row's tokens,
        float64 becomes float32. Others (objects, matrices, rows of other lengths) have no value per token and are left
        out.
        """
        tokens = batch.ragged("tokens")
        row_of = np.searchsorted(tokens.offsets, self.flat, side="right") - 1
        picked = {name: _at(column, tokens, self.flat, row_of) for name, column in batch.columns.items()}
        return {name: _to_torch(values, device) for name, values in picked.items() if values is not None}


def _at(column: Column, tokens: Ragged, flat: Array, row_of: Array) -> Array | None:
    if isinstance(column, list):
        return None
    if isinstance(column, Ragged):
        aligned = column.values.ndim == 1 and np.array_equal(column.offsets, tokens.offsets)
        return column.values[flat] if aligned else None
    return column[row_of] if column.ndim == 1 and column.dtype.kind in "biuf" else None


def _to_torch(values: Array, device: str) -> Any:
    tensor = torch.from_numpy(values)
    return tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)


def check_actions(batch: Batch) -> None:
    """Refuse an action mask that is not the tokens' or is set on a row's first token, which nothing predicts.

    Raises:
        EngineError: it is so.
    """
    tokens, actions = batch.ragged("tokens"), batch.ragged("action_mask")
    if not np.array_equal(tokens.offsets, actions.offsets):
        raise EngineError("'action_mask' and 'tokens' have rows of different lengths")
    firsts = tokens.offsets[:-1][tokens.lengths > 0]
    if len(firsts) and actions.values[firsts].any():
        raise EngineError("'action_mask' is set on the first token of a row, which has no log-prob")


def micro_batches(batch: Batch, token_budget: int, pad_id: int, device: str) -> Iterator[MicroBatch]:
    """Cut a batch into micro-batches of rows of similar length; rows without an action token are left out.

    Args:
        batch: columns ``tokens`` and ``action_mask``.
        token_budget: most tokens of a micro-batch, padding included; a row that is longer comes alone.
        pad_id: fills up short rows.
        device: where the tensors go.
    """
    tokens, actions = batch.ragged("tokens"), batch.ragged("action_mask")
    wanted = np.array([mask.any() for mask in actions], dtype=bool)
    order = np.argsort(-tokens.lengths, kind="stable")
    order = order[wanted[order]]
    start = 0
    while start < len(order):
        longest = int(tokens.lengths[order[start]])
        rows = order[start : start + max(1, token_budget // longest)]
        start += len(rows)
        yield _pad(tokens, actions, rows, pad_id, device)


def _pad(tokens: Ragged, actions: Ragged, rows: Array, pad_id: int, device: str) -> MicroBatch:
    within = np.arange(tokens.lengths[rows].max())
    real: Flags = within[None, :] < tokens.lengths[rows][:, None]
    flat = (tokens.offsets[rows][:, None] + within[None, :])[real]
    padded = np.full(real.shape, pad_id, dtype=np.int64)
    padded[real] = tokens.values[flat]
    chosen = np.zeros(real.shape, dtype=bool)
    chosen[real] = actions.values[flat]
    at_actions = flat[actions.values[flat].astype(bool)]
    return MicroBatch(torch.from_numpy(padded).to(device), torch.from_numpy(chosen).to(device), at_actions)


def action_logprobs(model: Any, micro: MicroBatch, temperature: float) -> Any:
    """Log-probs of the action tokens under ``softmax(logits / temperature)``: float32 ``[action tokens]``.

    The vocabulary projection runs only at positions where some row's next token is an action. Temperature 0 stands for
    greedy decoding, whose log-probs are those at temperature 1.
    """
    predicts = micro.actions[:, 1:]
    positions = predicts.any(dim=0).nonzero().squeeze(1)
    # The last token predicts nothing; leaving it out also keeps a full-length row within the model's positions.
    logits = model(input_ids=micro.tokens[:, :-1], use_cache=False, logits_to_keep=positions).logits
    chosen = logits[predicts[:, positions]].float() / (temperature or 1.0)
    return -torch.nn.functional.cross_entropy(chosen, micro.tokens[:, 1:][predicts], reduction="none")
