# SPDX-License-Identifier: Apache-2.0
"""Environments that the processes which judge import: without torch."""

from dlrover.python.rl.classic import EnvBase


class Length(EnvBase):
    """Counts characters; takes for ever over Emmy, and raises over Sofia."""

    def get_reward(self, text):
        name = self.prompt[0]["content"]
        if name == "Emmy":
            while True:
                pass
        if name == "Sofia":
            raise ArithmeticError("not this one")
        return len(text)


class Share(EnvBase):
    """The share of letters among the characters; needs no answer."""

    def get_reward(self, text):
        return sum(character.isalpha() for character in text) / max(len(text), 1)


def asked(*names, kind=EnvBase, answers=True):
    """A sample for each name, to be answered with its length."""
    return [kind([{"role": "user", "content": name}], len(name) if answers else None) for name in names]
