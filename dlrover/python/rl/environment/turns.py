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
        opening: the text that it begins with, which the policy was given.
        text: what came after that: actions and observations.
        tokens: ``[seq]``.
        action_mask: True where the policy wrote the token, ``[seq]``.
        logprobs: of those tokens, as the engine that sampled them gave them; 0 elsewhere, ``[seq]``.
        versions: of the weights that sampled them; -1 elsewhere, ``[seq]``.
        rewards: at the last token of each action, 0 elsewhere, ``[seq]``.
        score: of the actions, summed.
        finished: whether the last action ended by itself, not by a limit of tokens.
    """

    opening: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    score: float = 0.0
    finished: bool = False

    def give(self, tokens: Sequence[int]) -> None:
        """Add tokens that the policy did not write."""
        self._extend(tokens, False, [0.0] * len(tokens), [-1] * len(tokens))

    def act(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Add tokens that it wrote."""
        self._extend(tokens, True, logprobs, versions)

    def _extend(
        self, tokens: Sequence[int], by_policy: bool, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.tokens += tokens
        self.action_mask += [by_policy] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(tokens)


class Trajectory:
    """Builds the sequences of a sample, turn by turn: ``prompt``, then :meth:`act` and :meth:`observe` in turns.

    What the engine sampled is kept token for token and never encoded again. Where the next state goes on from the last
    state and action, only the rest is encoded, behind them; otherwise a new sequence begins with the whole state.

    Args:
        encode: encodes texts of states.
        state: the first state.
        tokens: its tokens, where they are known (a chat template's, say); by default ``encode(state)``.
        encode_whole: encodes states that begin a sequence, with what the model expects before a text; by default
            ``encode``.

    Attributes:
        sequences: one or more; together they are one sample with one advantage.
        action: the text that the policy wrote to the last state.
    """

    def __init__(
        self, encode: Encode, state: str, tokens: Sequence[int] | None = None, encode_whole: Encode | None = None
    ) -> None:
        self._encode, self._encode_whole = encode, encode_whole or encode
        self._state, self.action = state, ""
        self.sequences: list[TokenSequence] = []
        self._begin(state, self._encode_whole(state) if tokens is None else tokens)

    @property
    def context(self) -> list[int]:
        """The tokens that the policy continues."""
        return self.last.tokens

    def act(
        self, text: str, tokens: Sequence[int], logprobs: Sequence[float], version: int | Sequence[int] = 0
    ) -> None:
        """The policy's action.

        Args:
            text: as the environment sees it: the decoded tokens.
            tokens: as they were sampled.
            logprobs: of each of them.
            version: of the weights, of all tokens or of each.

        Raises:
            DataError: there is not one log-prob, or version, for each token.
        """
        versions = [version] * len(tokens) if isinstance(version, int) else version
        for name, values in (("log-probs", logprobs), ("versions", versions)):
            if len(tokens) != len(values):
                raise DataError(f"{len(values)} {name} for {len(tokens)} tokens")
        self.last.act(tokens, logprobs, versions)
        self.last.text += text
        self.action += text

    def reward(self, value: float, score: float = 0.0) -> None:
        """Credit the last action.

        Raises:
            DataError: there is none that has a token.
        """
        if not any(self.last.action_mask):
            raise DataError("there is no action to be rewarded")
        self.last.rewards[_last_true(self.last.action_mask)] += value
        self.last.score += score

    def observe(self, state: str, fits: Callable[[list[int]], bool] | None = None) -> bool:
        """The next state.

        Args:
            state: what the policy acts on next.
            fits: whether it can go on from these tokens.

        Returns:
            Whether it can; if not, nothing has changed.
        """
        seen = self._state + self.action
        goes_on = state.startswith(seen)
        tokens = self._rest(state[len(seen) :]) if goes_on else self._encode_whole(state)
        if fits is not None and not fits([*self.context, *tokens] if goes_on else tokens):
            return False
        if goes_on:
            self.last.give(tokens)
            self.last.text += state[len(seen) :]
        else:
            self._begin(state, tokens)
        self._state, self.action = state, ""
        return True

    def _rest(self, text: str) -> list[int]:
        return self._encode(text) if text else []

    def _begin(self, state: str, tokens: Sequence[int]) -> None:
        self.sequences.append(TokenSequence(state))
        self.last.give(tokens)

    @property
    def last(self) -> TokenSequence:
        """The sequence that goes on."""
        return self.sequences[-1]


def _last_true(mask: Sequence[bool]) -> int:
    return len(mask) - 1 - mask[::-1].index(True)
