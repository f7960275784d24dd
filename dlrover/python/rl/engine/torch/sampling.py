"""Drawing tokens so that a sample depends on its own seed alone, whatever it is batched with."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def uniforms(seed: tuple[int, ...], prompt_id: int, sample_index: int, count: int) -> npt.NDArray[np.float64]:
    """The first ``count`` random numbers in [0, 1) of one sample: ``[count]``.

    They come from the counter-based generator Philox, keyed by a hash of all three, so they are the same in every
    process, batch and order; fewer of them are a prefix of more.
    """
    name = "/".join([",".join(map(str, seed)), str(prompt_id), str(sample_index)])
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def choose(logits: Any, temperature: float, uniform: Any) -> tuple[Any, Any]:
    """Draw a token from ``softmax(logits / temperature)`` by the inverse of its cumulative distribution.

    Float64 keeps the rounding of the cumulative sum far below the spacing of likely tokens.

    Args:
        logits: ``[batch, vocab]``.
        temperature: 0 takes the most likely token.
        uniform: float64 ``[batch]`` in [0, 1).

    Returns:
        Token ids int64 ``[batch]`` and their log-probs float64 ``[batch]``; greedy ones at temperature 1.
    """
    logprobs = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        cumulative = logprobs.exp().cumsum(dim=-1)
        total = cumulative[:, -1]
        # Strictly below the total even after rounding, so that the first token above it has probability.
        target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    # A NaN row finds no place and points past the end; its log-prob is NaN wherever it is read.
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)
