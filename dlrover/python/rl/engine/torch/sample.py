"""A sample while it is being drawn, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.engine.base import Completion, Finish, Request, SamplingParams
from dlrover.python.rl.engine.torch.sampling import uniforms

_PARTIAL = 4
"""Tokens beside those of a stop string that are looked at: the first of a window may begin inside a character."""


@dataclass(eq=False)
class Sample:
    """What has been drawn of a request; lists, since a token is added per step.

    Attributes:
        request: as it came in.
        sampling: how it is drawn.
        seed: what its random numbers depend on besides the request.
        tokens: of the completion so far.
        logprobs: theirs.
        versions: the weights that drew each.
    """

    request: Request
    sampling: SamplingParams
    seed: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, sampling: SamplingParams, seed: tuple[int, ...]) -> "Sample":
        """Go on with ``request``."""
        drawn = request.done.tolist(), request.logprobs.tolist(), request.versions.tolist()
        return cls(request, sampling, seed, *drawn)

    @property
    def past(self) -> npt.NDArray[np.int64]:
        """Prompt and completion so far: ``[seq]``."""
        return np.concatenate([self.request.prompt, np.array(self.tokens, dtype=np.int64)])

    @property
    def longest(self) -> int:
        """Tokens that it can have at its end, the prompt's included."""
        return len(self.request.prompt) + self.sampling.max_new_tokens

    @cached_property
    def draw(self) -> tuple[Any, ...]:
        """Samples for which this is equal draw their tokens the same way."""
        sampling = self.sampling
        return sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs

    @cached_property
    def uniform(self) -> list[float]:
        """Its random numbers, by position: as many as it may have tokens. Those that wait have none in memory."""
        asked = self.request
        return uniforms(self.seed, asked.prompt_id, asked.sample_index, self.sampling.max_new_tokens).tolist()

    def next_uniform(self) -> float:
        """The random number of the next token."""
        return self.uniform[len(self.tokens)]

    def record(self, token: int, logprob: float, version: int) -> None:
        """Note the next token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)


@dataclass(frozen=True, eq=False)
class Endings:
    """When a sample ends, and what its text is then.

    Attributes:
        tokenizer: the model's.
        eos_ids: the tokens that end a completion.
        special_ids: the tokens that have no text.
    """

    tokenizer: Any
    eos_ids: frozenset[int]
    special_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, eos_ids: Sequence[int]) -> "Endings":
        """Those of a model."""
        return cls(tokenizer, frozenset(eos_ids), frozenset(tokenizer.all_special_ids))

    def finish(self, sample: Sample) -> Finish | None:
        """Why the sample has ended with its last token; None when it has not."""
        sampling = sample.sampling
        if sample.tokens[-1] in self.eos_ids and not sampling.ignore_eos:
            return "eos"
        if sampling.stop and self._stops(sample):
            return "stop"
        return "length" if len(sample.tokens) >= sampling.max_new_tokens else None

    def _stops(self, sample: Sample) -> bool:
        """Whether the last token completes a stop string.

        Each token that is not special is at least a byte of the text, so a stop string that ends with the last one
        lies within as many tokens as it has bytes. The whole text is only decoded when it is found there.
        """
        stops = sample.sampling.stop
        width = max(len(stop.encode()) for stop in stops) + _PARTIAL
        window: list[int] = []
        for token in reversed(sample.tokens):
            if token not in self.special_ids:
                window.append(token)
            if len(window) == width:
                break
        near = self._decode(window[::-1])
        return any(stop in near for stop in stops) and _first_stop(self._decode(sample.tokens), stops) is not None

    def completion(self, sample: Sample, finish: Finish) -> Completion:
        """What the engine hands out."""
        asked, text = sample.request, self._decode(sample.tokens)
        found = _first_stop(text, sample.sampling.stop) if finish == "stop" else None
        if found is not None:
            text = text[: found[1] if sample.sampling.keep_stop else found[0]]
        request = Request(
            asked.prompt_id,
            asked.sample_index,
            asked.prompt,
            np.array(sample.tokens, dtype=np.int64),
            np.array(sample.logprobs, dtype=np.float32),
            np.array(sample.versions, dtype=np.int64),
        )
        return Completion(request, finish, text)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Begin and end of the stop string that ends first in ``text``; None without one."""
    places = [(text.find(stop), len(stop)) for stop in stops]
    found = [(start, start + length) for start, length in places if start >= 0]
    return min(found, key=lambda place: (place[1], place[0])) if found else None
