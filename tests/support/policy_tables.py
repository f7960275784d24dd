# SPDX-License-Identifier: Apache-2.0
"""A policy that is a table: one distribution over a few tokens, trained by an algorithm as an engine would."""

import numpy as np
import torch

from dlrover.python.rl.data.batch import Batch, Ragged
from tests.support.loss_updates import outcome

VOCABULARY = 7
GROUPS, GROUP = 8, 16


def table(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def divergence(logits: torch.Tensor, other: torch.Tensor) -> float:
    """KL(logits || other)."""
    mine, theirs = logits.log_softmax(-1), other.log_softmax(-1)
    return float((mine.exp() * (mine - theirs)).sum())


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum()


def drawn(logits: torch.Tensor, reference: torch.Tensor, seed: int) -> tuple[Batch, torch.Tensor]:
    """Samples of one token each, and their ids."""
    rows, generator = GROUPS * GROUP, torch.Generator().manual_seed(seed)
    ids = torch.multinomial(logits.softmax(-1), rows, replacement=True, generator=generator)
    mask = Ragged.from_rows([[False, True]] * rows, dtype=np.bool_)

    def column(values):
        flat = np.zeros((2 * rows, *values.shape[1:]), dtype=np.float32)
        flat[1::2] = values.numpy()
        return mask.like(flat)

    columns = {
        "tokens": mask.like(np.arange(2 * rows)),
        "action_mask": mask,
        "prompt_id": np.repeat(np.arange(GROUPS), GROUP),
        "reward": np.zeros(rows),
        "action_tokens": np.ones(rows, dtype=np.int64),
        "old_logprobs": column(logits.log_softmax(-1)[ids]),
        "ref_logprobs": column(reference.log_softmax(-1)[ids]),
        "values": column(torch.zeros(rows)),
    }
    return Batch(columns), ids


def trained(algorithm, start, reference, steps=50, lr=1.0, more=lambda ids: {}, reward=None):
    """The table after so many updates. ``more`` gives further columns of the samples, by name, each ``[rows, ...]``."""
    logits = start.clone()
    for step in range(steps):
        rows, ids = drawn(logits, reference, step)
        if reward is not None:
            rows = rows.with_columns(reward=reward(ids).numpy())
        mask = rows.ragged("action_mask")
        extra = {name: mask.like(np.repeat(values.numpy(), 2, axis=0)) for name, values in more(ids).items()}
        leaf = logits.clone().requires_grad_()
        whole = leaf.log_softmax(-1)
        made = {"entropy": entropy_of(leaf).expand(2 * len(ids))}
        if "candidates" in extra:
            made["candidate_logprobs"] = whole[torch.from_numpy(extra["candidates"].values)]
        outputs = whole[ids.repeat_interleave(2)]
        found = outcome(
            algorithm,
            rows.with_columns(**extra),
            outputs.detach(),
            **{name: values.detach() for name, values in made.items()},
        )
        tensors = [outputs, *made.values()]
        parts = found.gradient.split([tensor.numel() for tensor in tensors])
        torch.autograd.backward(tensors, [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])
        logits -= lr * leaf.grad
    return logits
