"""Environments that the processes which judge import: without torch."""

from dlrover.python.rl.classic import EnvBase


class Length(EnvBase):
    """Counts characters; takes for ever over Emmy, and raises over Sofia."""

    def get_reward(self, text):
        who = self.prompt[0]["content"]
        if who == "Emmy":
            while True:
                pass
        if who == "Sofia":
            raise ArithmeticError("not this one")
        return len(text)
