"""How token losses become one number: weights per token that already carry the global normaliser."""

from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.nearest import hint

Averaging: TypeAlias = Literal["token", "sequence", "sum", "constant"]
"""``token``: the mean over all action tokens. ``sequence``: the mean over sequences of each one's token mean. ``sum``:
the mean over sequences of each one's token sum. ``constant``: the same divided by a fixed length."""


def token_weights(
    action_tokens: npt.NDArray[np.int64],
    valid: npt.NDArray[np.bool_],
    mode: Averaging,
    max_tokens: int | None = None,
) -> npt.NDArray[np.float32]:
    """The weight of each action token of every row (or sample, if that is what the arguments are about).

    With n_i the action tokens of row i, and N_a and N_s the action tokens and the sequences that count in the whole
    update: ``token`` 1/N_a (DAPO, arXiv:2503.14476, eq. 8), ``sequence`` 1/(n_i N_s) (GRPO, arXiv:2402.03300, eq. 3),
    ``sum`` 1/N_s (a whole sequence is one action: RLOO, arXiv:2402.14740), ``constant`` 1/(N_s L) (Dr. GRPO,
    arXiv:2503.20783, section 3.2 and the listing of its masked mean).

    Args:
        action_tokens: n_i, ``[rows]``.
        valid: False on rows that count nowhere, ``[rows]``; nor do rows without an action token.
        mode: the average.
        max_tokens: L, the most tokens a completion may have; for ``constant`` alone.

    Returns:
        ``[rows]``, 0 on the rows that do not count.

    Raises:
        ValueError: unknown ``mode``, or ``constant`` without a positive ``max_tokens``.
    """
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
            raise ValueError("averaging 'constant' divides by max_tokens: give the most tokens a completion may have")
        divisor = np.full(len(lengths), float(sequences * max_tokens))
    else:
        raise ValueError(f"unknown averaging '{mode}'{hint(mode, get_args(Averaging))}")
    return np.where(counted, 1.0 / divisor, 0.0).astype(np.float32)
