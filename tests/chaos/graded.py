# SPDX-License-Identifier: Apache-2.0
"""The reward of the tiny job: exact arithmetic that has something to teach to a model of random weights."""


def graded(completion, answer, extra_info):
    """1 for the answer, else an eighth for each digit and a sixteenth for each other printable character, to 3/4.

    All values are sums of powers of two, so that no rounding depends on the order of anything.
    """
    if completion == answer:
        return 1.0
    digits = sum(character in "0123456789" for character in completion)
    printable = sum(" " <= character <= "~" for character in completion)
    return min(0.125 * digits + 0.0625 * (printable - digits), 0.75)
