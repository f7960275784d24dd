"""A trajectory as the policy saw it: the tokens it was given and wrote, in one sequence as long as states go on from
each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dlrover.python.rl.common.errors import DataError

Encode: TypeAlias = Callable[[str], list[int]]
"""Token ids of a text, without special tokens around it."""


@dataclass
class TokenSequence:
    """Tokens in their order.

    Attributes:
        tokens: ``[seq]``.
        action_mask: True where the policy wrote the token, ``[seq]``.
        logprobs: of those tokens, as the engine that sampled them gave them; 0 elsewhere, ``[seq]``.
        versions: of the weights that sampled them; -1 elsewhere, ``[seq]``.
        rewards: at the last token of each action, 0 elsewhere, ``[seq]``.
    """

    tokens: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def _extend(self, tokens: Sequence[int], by_policy: bool, logprobs: Sequence[float], version: int) -> None:
        self.tokens += tokens
        self.action_mask += [by_policy] * len(tokens)
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)
        self.rewards += [0.0] * len(tokens)


class Trajectory:
    """Builds the sequences of a sample, turn by turn: ``prompt``, then :meth:`act` and :meth:`observe` in turns.

    What the engine sampled is kept token for token and never encoded again. Where the next state goes on from the last
    state and action, only the rest is encoded, behind them; otherwise a new sequence begins with the whole state.

    Args:
        encode: encodes texts of states.
        state: the first state.
        tokens: its tokens, where they are known (a chat template's, say); by default ``encode(state)``.

    Attributes:
        sequences: one or more; together they are one sample with one advantage.
    """

    def __init__(self, encode: Encode, state: str, tokens: Sequence[int] | None = None) -> None:
        self._encode, self._state, self._action = encode, state, ""
        self.sequences = [TokenSequence()]
        self._last._extend(*_given(list(tokens) if tokens is not None else encode(state)))

    @property
    def context(self) -> list[int]:
        """The tokens that the policy continues."""
        return self._last.tokens

    def act(self, text: str, tokens: Sequence[int], logprobs: Sequence[float], version: int = 0) -> None:
        """The policy's action.

        Args:
            text: as the environment sees it: the decoded tokens.
            tokens: as they were sampled.
            logprobs: of each of them.
            version: of the weights.

        Raises:
            DataError: there is not one log-prob for each token.
        """
        if len(tokens) != len(logprobs):
            raise DataError(f"{len(logprobs)} log-probs for {len(tokens)} tokens")
        self._last._extend(tokens, True, logprobs, version)
        self._action += text

    def reward(self, value: float) -> None:
        """Credit the last action.

        Raises:
            DataError: there is none that has a token.
        """
        if not any(self._last.action_mask):
            raise DataError("there is no action to be rewarded")
        self._last.rewards[_last_true(self._last.action_mask)] += value

    def observe(self, state: str) -> None:
        """The next state."""
        seen = self._state + self._action
        if state.startswith(seen):
            self._last._extend(*_given(self._encode(state[len(seen) :]) if len(state) > len(seen) else []))
        else:
            self.sequences.append(TokenSequence())
            self._last._extend(*_given(self._encode(state)))
        self._state, self._action = state, ""

    @property
    def _last(self) -> TokenSequence:
        return self.sequences[-1]


def _given(tokens: Sequence[int]) -> tuple[Sequence[int], bool, list[float], int]:
    return tokens, False, [0.0] * len(tokens), -1


def _last_true(mask: Sequence[bool]) -> int:
    return len(mask) - 1 - mask[::-1].index(True)
