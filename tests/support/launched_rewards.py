# SPDX-License-Identifier: Apache-2.0
"""A reward that differs between the samples of a model which has learnt nothing."""


def jumble(completion, answer, extra_info):
    """A number from 0 to 1 that looks drawn by lot, and is the same each time."""
    return sum(place * letter for place, letter in enumerate(completion.encode(), 1)) % 7 / 6


def often_alike(completion, answer, extra_info):
    """The same of all answers to half of the problems."""
    return jumble(completion, answer, extra_info) if int(answer) % 2 else 1.0
