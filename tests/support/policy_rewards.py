# SPDX-License-Identifier: Apache-2.0
"""Rewards that an untrained model gets some of."""


def low(completion, answer, extra_info):
    """The share of 8 tokens that are characters below ``@``: a quarter of all bytes are."""
    return sum(character < "@" for character in completion[:8]) / 8


def odd(completion, answer, extra_info):
    """Give 1 half of the time."""
    return float(len(completion.encode()) + sum(completion.encode())) % 2


def jumble(completion, answer, extra_info):
    """A number from 0 to 1 that looks drawn by lot, and is the same each time."""
    return sum(place * letter for place, letter in enumerate(completion.encode(), 1)) % 7 / 6


def often_alike(completion, answer, extra_info):
    """One number for all answers to half of the problems."""
    return jumble(completion, answer, extra_info) if int(answer) % 2 else 1.0
