# SPDX-License-Identifier: Apache-2.0
"""Sampling of tokens by inverse CDF: a sample depends on its own random numbers only, not on its batch."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from dlrover.python.rl.engine.api.base import SamplingParams


def uniforms(seed: tuple[int, ...], prompt_id: int, sample_index: int, count: int) -> npt.NDArray[np.float64]:
    """Return the first ``count`` random numbers in [0, 1) of a sample: Philox with a hash of the other arguments."""
    name = "/".join([",".join(map(str, seed)), str(prompt_id), str(sample_index)])
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def sampling_key(sampling: SamplingParams) -> tuple[Any, ...]:
    """Return a key that is equal for requests which can be sampled in one call."""
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs


def choose(logits: Any, sampling: SamplingParams, uniform: Any) -> tuple[Any, Any]:
    """Sample a token for each row of ``logits`` ``[batch, vocab]`` by inverting the cumulative distribution, which is
    summed in float64. ``uniform`` is float64 ``[batch]`` in [0, 1); temperature 0 is greedy, without a cut. Returns
    token ids int64 ``[batch]`` and log-probs float32 ``[batch]``, NaN where the logits are not finite."""
    cooled = logits if sampling.temperature in (0.0, 1.0) else logits.float() / sampling.temperature
    policy = torch.log_softmax(cooled, dim=-1, dtype=torch.float32)
    sampled = policy
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        if sampling.top_k is not None or sampling.top_p < 1.0:
            sampled = torch.log_softmax(cut(policy, sampling.top_k, sampling.top_p), dim=-1)
        tokens = _invert(sampled.exp(), uniform)
    logprobs = policy if sampling.logprobs == "policy" else sampled
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def cut(logprobs: Any, top_k: int | None, top_p: float) -> Any:
    """Set excluded tokens of ``[batch, vocab]`` to minus infinity: first all but ``top_k``, then all but ``top_p`` of
    the remaining probability. Of equally likely tokens the lower ids remain."""
    ranked, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[:, top_k:] = -torch.inf
    if top_p < 1.0:
        probabilities = torch.softmax(ranked, dim=-1, dtype=torch.float64)
        before = probabilities.cumsum(dim=-1) - probabilities
        ranked = ranked.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(logprobs).scatter_(1, ids, ranked)


_WHOLE, _BLOCK = 4096, 512
"""Up to so large a vocabulary the distribution is summed in one pass, a larger one in blocks in parallel."""

_BELOW_ONE = 1.0 - 2.0**-53


def _invert(probabilities: Any, uniform: Any) -> Any:
    rows, vocab = probabilities.shape
    if vocab <= _WHOLE:
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
        return _first_above(cumulative, uniform[:, None] * cumulative[:, -1:]).squeeze(1)
    blocks = functional.pad(probabilities, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform[:, None] * ends[:, -1:]
    block = _first_above(ends, target)
    begins = functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    tokens = block * _BLOCK + _first_above(inside.cumsum(dim=-1, dtype=torch.float64), target - begins)
    return tokens.clamp(max=vocab - 1).squeeze(1)


def _first_above(cumulative: Any, target: Any) -> Any:
    """Return the index of the first sum above the target, ``[rows, 1]``; of NaN the last, whose log-prob is NaN too."""
    # Strictly below the total even after rounding, so that the token found has a positive probability.
    below = torch.minimum(target, cumulative[:, -1:] * _BELOW_ONE)
    return torch.searchsorted(cumulative, below, right=True).clamp(max=cumulative.shape[-1] - 1)
