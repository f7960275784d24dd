# SPDX-License-Identifier: Apache-2.0
"""Rewards that an untrained model gets some of."""


def low(completion, answer, extra_info):
    """The share of 8 tokens that are characters below ``@``: a quarter of all bytes are."""
    return sum(character < "@" for character in completion[:8]) / 8


def odd(completion, answer, extra_info):
    """Right half of the time."""
    return float(len(completion.encode()) + sum(completion.encode())) % 2
