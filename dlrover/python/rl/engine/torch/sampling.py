"""Drawing tokens so that a sample depends on its own seed alone, whatever it is batched with."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlrover.python.rl.engine.base import SamplingParams


def uniforms(seed: tuple[int, ...], prompt_id: int, sample_index: int, count: int) -> npt.NDArray[np.float64]:
    """The first ``count`` random numbers in [0, 1) of one sample: ``[count]``.

    They come from the counter-based generator Philox, keyed by a hash of all three, so they are the same in every
    process, batch and order; fewer of them are a prefix of more.
    """
    name = "/".join([",".join(map(str, seed)), str(prompt_id), str(sample_index)])
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def choose(logits: Any, sampling: SamplingParams, uniform: Any) -> tuple[Any, Any]:
    """Draw a token of each row, as ``sampling`` wants it, by the inverse of the cumulative distribution.

    That is summed in float64, which keeps its rounding far below the spacing of likely tokens.

    Args:
        logits: ``[batch, vocab]``.
        sampling: its ``temperature``, ``top_k``, ``top_p`` and ``logprobs`` count. At temperature 0 the most likely
            token is taken, and nothing is cut.
        uniform: float64 ``[batch]`` in [0, 1).

    Returns:
        Token ids int64 ``[batch]`` and their log-probs float32 ``[batch]``; NaN where the logits are no numbers.
    """
    cooled = logits.float() if sampling.temperature in (0.0, 1.0) else logits.float() / sampling.temperature
    policy = torch.log_softmax(cooled, dim=-1)
    drawn = policy
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        if sampling.top_k is not None or sampling.top_p < 1.0:
            drawn = torch.log_softmax(cut(policy, sampling.top_k, sampling.top_p), dim=-1)
        tokens = _invert(drawn.exp(), uniform)
    told = policy if sampling.logprobs == "policy" else drawn
    return tokens, told.gather(1, tokens[:, None]).squeeze(1)


def cut(logprobs: Any, top_k: int | None, top_p: float) -> Any:
    """Set what is not drawn from to minus infinity: ``[batch, vocab]``, not normalised.

    First to the ``top_k`` most likely tokens, then to the fewest most likely of these that have together at least the
    share ``top_p`` of what they all have. Among equally likely tokens the lower ids stay.

    Args:
        logprobs: ``[batch, vocab]``, normalised.
        top_k: None keeps all.
        top_p: in (0, 1].
    """
    ranked, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[:, top_k:] = -torch.inf
    if top_p < 1.0:
        probabilities = torch.softmax(ranked, dim=-1, dtype=torch.float64)
        before = probabilities.cumsum(dim=-1) - probabilities
        ranked = ranked.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(logprobs).scatter_(1, ids, ranked)


def _invert(probabilities: Any, uniform: Any) -> Any:
    """The token at which the cumulative distribution passes ``uniform``: ``[batch, vocab]`` to ``[batch]``."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Strictly below the total even after rounding, so that the first token above it has probability.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    # A row of NaN finds no place and points past the end; its log-prob is NaN wherever it is read.
    return tokens.clamp(max=probabilities.shape[-1] - 1)
