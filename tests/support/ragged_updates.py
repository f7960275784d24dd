# SPDX-License-Identifier: Apache-2.0
"""Random ragged updates, and the plumbing an engine does between ``annotate`` and ``loss``."""

import numpy as np
import torch

from dlrover.python.rl.data.batch import Batch


def rows_of(prompt_id, reward, action_tokens) -> Batch:
    return Batch(
        {
            "prompt_id": np.array(prompt_id, dtype=np.int64),
            "reward": np.array(reward, dtype=np.float64),
            "action_tokens": np.array(action_tokens, dtype=np.int64),
        }
    )


def run(algorithm, annotated: Batch, logprobs, old, ref, parts: int = 1):
    """Loss, gradient and metrics with the rows cut into ``parts`` micro-batches; log-probs are flat ``[tokens]``."""
    lengths = annotated.dense("action_tokens")
    stops = np.cumsum(lengths)
    leaf = logprobs.clone().requires_grad_()
    total, sums = 0.0, {}
    for rows in np.array_split(np.arange(len(lengths)), parts):
        part = slice(int(stops[rows[0]] - lengths[rows[0]]), int(stops[rows[-1]]))
        columns = {
            name: torch.from_numpy(np.repeat(annotated.dense(name)[rows], lengths[rows]))
            for name in ("advantage", "weight")
            if name in annotated
        }
        columns |= {"old_logprobs": old[part], "ref_logprobs": ref[part]}
        loss, metrics = algorithm.loss(leaf[part], columns)
        loss.backward()
        total += float(loss.detach())
        assert not any(torch.as_tensor(value).requires_grad for value in metrics.values())
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in metrics.items()}
    return total, leaf.grad, sums


def random_update(seed: int):
    """``(rows, logprobs, old, ref)``: four prompts, four samples each, unequal lengths; one failed, one empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=16)
    reward = rng.integers(0, 3, size=16).astype(float)
    reward[5], lengths[9] = np.nan, 0
    rows = rows_of(rng.permutation(np.repeat([3, 7, 8, 20], 4)), reward, lengths)
    tokens = int(lengths.sum())
    old = torch.from_numpy(-rng.exponential(1.0, tokens))
    noise = [torch.from_numpy(rng.normal(0, 0.3, tokens)) for _ in range(2)]
    return rows, old + noise[0], old, old + noise[1]
