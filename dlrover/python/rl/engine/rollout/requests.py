# SPDX-License-Identifier: Apache-2.0
"""The requests of every rollout backend: validation, tokens so far, and when each one ends."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import DataError, EngineError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.common.spans import phase
from dlrover.python.rl.data.batch import GENERATED, SEQUENCE, Batch, ColumnSpec, Ragged, SequenceColumns
from dlrover.python.rl.data.model_text import THOUGHT_TAGS
from dlrover.python.rl.engine.api.base import Completion, Finish, Request, SamplingParams
from dlrover.python.rl.engine.api.registry import read_options
from dlrover.python.rl.engine.model.loading import CausalLM
from dlrover.python.rl.engine.rollout.sampling import uniforms


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Parse a plain mapping. Raises EngineError with every unknown key, its nearest name, and every invalid value."""
    return read_options(SamplingParams, values, "sampling")


def as_batch(completions: Sequence[Completion], columns: Mapping[str, ColumnSpec] = GENERATED) -> Batch:
    """Build the batch that ``BaseRolloutEngine.generate`` returns; ``columns`` are the engine's."""
    requests, specs = [completion.request for completion in completions], {**SEQUENCE, **columns}
    sequences = [SequenceColumns(specs) for _ in requests]
    for sequence, request in zip(sequences, requests, strict=True):
        sequence.give(len(request.prompt), tokens=request.prompt)
        done = {"tokens": request.done, "action_mask": [True] * len(request.done), **request.columns}
        sequence.extend(len(request.done), done)
    return Batch(
        {
            **SequenceColumns.stack(sequences, {name: spec for name, spec in specs.items() if name != "versions"}),
            "finished": np.array([item.finish in ("eos", "stop") for item in completions], dtype=np.bool_),
            "prompt_id": np.array([request.prompt_id for request in requests], dtype=np.int64),
            "sample_index": np.array([request.sample_index for request in requests], dtype=np.int64),
            "version": np.array([request.versions[-1] for request in requests], dtype=np.int64),
            "completion": [completion.text for completion in completions],
        }
    )


_PARTIAL = 4
"""Extra tokens to decode before a stop string: a window may begin inside a character."""


@dataclass(eq=False)
class RunningRequest:
    """A request and its completion so far, in lists, to which each step appends."""

    request: Request
    sampling: SamplingParams  # max_new_tokens fits the model
    seed: tuple[int, ...]
    known_ids: int | None = None  # see ``RunningRequests``
    tokens: list[int] = field(init=False)
    columns: SequenceColumns = field(default_factory=lambda: SequenceColumns(GENERATED))

    def __post_init__(self) -> None:
        self.tokens = self.request.done.tolist()
        try:
            self.columns.extend(len(self.tokens), self.request.columns)
        except DataError as error:
            raise EngineError(f"request {self.request.key}: {error}") from error

    @property
    def sequence(self) -> npt.NDArray[np.int64]:
        """Prompt and completion so far: ``[seq]``."""
        return np.concatenate([self.request.prompt, np.array(self.tokens, dtype=np.int64)])

    @cached_property
    def uniform(self) -> list[float]:
        """The request's ``max_new_tokens`` random numbers by position, computed on first use."""
        return uniforms(self.seed, *self.request.key, self.sampling.max_new_tokens).tolist()

    def next_uniform(self, after: int = 0) -> float:
        """Return the random number of the next token, or of the token ``after`` positions later."""
        return self.uniform[len(self.tokens) + after]


class FinishRules:
    """Decides when a request has finished, and decodes the text of its completion."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        ids = sorted(tokenizer.all_special_ids)
        added, tags = getattr(tokenizer, "added_tokens_decoder", {}), {*THOUGHT_TAGS, *THOUGHT_TAGS.values()}
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        # Text and id of the tokens that a completion's text leaves out.
        self._special: dict[str, int] = dict(zip(map(str, tokenizer.convert_ids_to_tokens(ids)), ids, strict=True))
        self._special_ids = frozenset(ids)
        # Special tokens that remain in the text, since they separate thoughts from the answer.
        self._tag_ids = frozenset(number for number, token in added.items() if token.special and str(token) in tags)

    def check(self, sampling: SamplingParams) -> None:
        """Raise an ``EngineError`` for values out of their ranges, or a stop string that no text contains."""
        sampling_params(vars(sampling))
        for stop in sampling.stop:
            if not stop:
                raise EngineError("sampling.stop: a stop string is empty")
            if inside := [token for token in self._special if token in stop and token != stop]:
                raise EngineError(f"stop string {stop!r} has the special token {inside[0]!r}, which must be alone")

    def finish_reason(self, running: RunningRequest) -> Finish | None:
        """Return why the last token finished the request, or None if it did not."""
        if not running.tokens:
            return None
        sampling, last = running.sampling, running.tokens[-1]
        if last in self.eos_ids and not sampling.ignore_eos:
            return "eos"
        if sampling.stop and (self._special_stop(running) is not None or self._is_stopped(running)):
            return "stop"
        return "length" if len(running.tokens) >= sampling.max_new_tokens else None

    def _special_stop(self, running: RunningRequest) -> str | None:
        """Return the stop string that is the last token, if that is special."""
        return next((stop for stop in running.sampling.stop if self._special.get(stop) == running.tokens[-1]), None)

    def _is_stopped(self, running: RunningRequest) -> bool:
        """Look for a stop string in the last tokens, then decode the whole text. Each token that is not special is at
        least a byte of text, so a stop string at the end lies within as many tokens as it has bytes."""
        stops = running.sampling.stop
        width = max(len(stop.encode()) for stop in stops) + _PARTIAL
        window: list[int] = []
        for token in reversed(running.tokens):
            if token not in self._special_ids:
                window.append(token)
            if len(window) == width:
                break
        tail = self._decode(window[::-1])
        return any(stop in tail for stop in stops) and _first_stop(self._decode(running.tokens), stops) is not None

    def completion(self, running: RunningRequest, finish: Finish) -> Completion:
        request, text, columns = running.request, self._decode(running.tokens), running.columns.arrays()
        special = self._special_stop(running) if finish == "stop" else None
        span = _first_stop(text, running.sampling.stop) if finish == "stop" else None
        if special is not None:
            text += special if running.sampling.keep_stop else ""
        elif span is not None:
            text = text[: span[1] if running.sampling.keep_stop else span[0]]
        logprobs, versions = columns.pop("logprobs"), columns.pop("versions")
        done = np.array(running.tokens, dtype=np.int64)
        return Completion(replace(request, done=done, logprobs=logprobs, versions=versions, more=columns), finish, text)

    def _decode(self, tokens: Sequence[int]) -> str:
        pieces = groupby(tokens, self._tag_ids.__contains__)
        return "".join(self.tokenizer.decode(list(ids), skip_special_tokens=not shown) for shown, ids in pieces)


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return start and end of the stop string that ends first in ``text``; of two that end there, the longer."""
    starts = [(text.find(stop), len(stop)) for stop in stops]
    spans = [(start, start + length) for start, length in starts if start >= 0]
    return min(spans, key=lambda span: (span[1], span[0])) if spans else None


NewToken: TypeAlias = tuple[int, int, float] | tuple[int, int, float, Mapping[str, Any]]
"""The number of a running request, a token generated for it, the token's log-prob, and the values of columns that the
engine declares, if any; a column per sample may be left out."""


class RunningRequests:
    """Running requests by number, in the order added. ``max_length`` is the backend's limit on a sequence; ``columns``
    are the engine's, besides log-probs and versions."""

    def __init__(
        self, lm: CausalLM, max_length: int | None = None, columns: Mapping[str, ColumnSpec] | None = None
    ) -> None:
        self.columns = {**GENERATED, **(columns or {})}
        self.rules = FinishRules(lm.tokenizer, lm.eos_ids)
        self.by_number: dict[int, RunningRequest] = {}
        self.known_ids = lm.known_ids  # this id and higher ones are never sampled; None: all may be
        self._lm, self._max_length, self._count = lm, max_length, 0

    def __len__(self) -> int:
        return len(self.by_number)

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        self.rules.check(sampling)
        if not tokens.lengths.all():
            empty = np.flatnonzero(tokens.lengths == 0).tolist()
            raise EngineError(f"prompts {empty} are empty: generation needs at least one token")
        longest = int(tokens.lengths.max(initial=0)) + 1
        self._lm.check_tokens(tokens.values, longest)
        if self._max_length is not None and longest > self._max_length:
            raise EngineError(f"a sequence of {longest} tokens does not fit the backend's limit of {self._max_length}")

    def _start(self, request: Request, sampling: SamplingParams, seed: tuple[int, ...]) -> RunningRequest:
        """Limit the new tokens to those that fit after the prompt."""
        limits = [limit for limit in (self._lm.max_positions, self._max_length) if limit is not None]
        room = min(limits, default=len(request.prompt) + sampling.max_new_tokens) - len(request.prompt)
        fitting = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        return RunningRequest(request, fitting, seed, self.known_ids, SequenceColumns(self.columns))

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> list[int]:
        """Add all requests or none; returns their numbers in order."""
        self.check(Ragged.from_rows([request.prompt for request in requests], dtype=np.int64), sampling)
        self._lm.check_tokens(np.concatenate([np.empty(0, np.int64), *(request.done for request in requests)]), 0)
        added = [self._start(request, sampling, seed) for request in requests]
        keys = {running.request.key for running in self.by_number.values()}
        for running in added:
            key, count, most = running.request.key, len(running.tokens), running.sampling.max_new_tokens
            if key in keys:
                raise EngineError(f"request {key} runs already, or is added twice")
            keys.add(key)
            if count >= most:
                raise EngineError(f"request {key} has {count} tokens already, and its limit is {most}")
            if reason := self.rules.finish_reason(running):
                raise EngineError(f"request {key} has ended already ({reason})")
        return self._add(added)

    def add_batch(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> list[int]:
        """Add the samples of a batch, whose prompt ids may repeat, while no other request runs."""
        if self.by_number:
            raise EngineError(f"{len(self)} requests run: advance until they have ended, or abort them")
        self.check(prompts.ragged("tokens"), sampling)
        pairs = zip(prompts.dense("prompt_id").tolist(), prompts.ragged("tokens"), strict=True)
        indices = range(sampling.samples_per_prompt)
        requests = [Request.fresh(prompt_id, index, tokens) for prompt_id, tokens in pairs for index in indices]
        return self._add([self._start(request, sampling, seed) for request in requests])

    def _add(self, added: Sequence[RunningRequest]) -> list[int]:
        numbers = list(range(self._count, self._count + len(added)))
        self._count += len(added)
        self.by_number |= dict(zip(numbers, added, strict=True))
        return numbers

    def numbers(self, keys: Sequence[tuple[int, int]] | None) -> list[int]:
        """Return the numbers of the requests with these keys, or of all. Raises EngineError for unknown keys."""
        if keys is None:
            return list(self.by_number)
        number_of = {running.request.key: number for number, running in self.by_number.items()}
        if unknown := [key for key in keys if key not in number_of]:
            raise EngineError(f"no request {', '.join(map(str, unknown))} runs")
        return [number_of[key] for key in keys]

    def append(self, new_tokens: Sequence[NewToken], version: int) -> dict[int, Finish]:
        """Append all tokens or none, each request's up to the one that finishes it; returns finished requests."""
        if not np.isfinite([logprob for _, _, logprob, *_ in new_tokens]).all():
            raise EngineError("the model's logits are NaN or infinite: its weights are damaged")
        note_progress()
        finished: dict[int, Finish] = {}
        for number, token, logprob, *more in new_tokens:
            if number not in finished:
                running = self.by_number[number]
                running.tokens.append(token)
                running.columns.append({"logprobs": logprob, "versions": version, **(more[0] if more else {})})
                if reason := self.rules.finish_reason(running):
                    finished[number] = reason
        return finished

    def remove(self, number: int, reason: Finish) -> Completion:
        return self.rules.completion(self.by_number.pop(number), reason)


class RolloutEngineBase(ABC):
    """Implements the part of ``BaseRolloutEngine`` that all engines share: requests, from their start to their end."""

    version = -1
    _requests: RunningRequests

    @abstractmethod
    def _check_ready(self) -> None:
        """Raise an ``EngineError`` unless weights and cache are on the device."""

    @abstractmethod
    def _step(self, max_tokens: int | None) -> dict[int, Finish]:
        """Append tokens to the running requests, about ``max_tokens`` if the backend can; returns finished ones."""

    def _queue(self, numbers: Sequence[int]) -> None:
        """Pass added requests to the backend."""

    def _withdraw(self, numbers: Collection[int]) -> None:
        """Remove requests from the backend."""

    @property
    def tokenizer(self) -> Any:
        return self._requests.rules.tokenizer

    @property
    def running(self) -> int:
        return len(self._requests)

    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        self.check(prompts.ragged("tokens"), sampling)
        self._check_ready()
        numbers = self._requests.add_batch(prompts, sampling, seed)
        completions: dict[int, Completion] = {}
        try:
            self._queue(numbers)
            while self.running:
                with phase("generate"):
                    finished = self._step(sampling.max_new_tokens)
                completions |= self._finish(finished)
        finally:
            self.abort()
        return as_batch([completions[number] for number in numbers], self._requests.columns)

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        self._requests.check(tokens, sampling)

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        self._queue(self._requests.add(requests, sampling, seed))

    def advance(self) -> list[Completion]:
        """Return completions in the order of their requests; after an error all requests still run."""
        self._check_ready()
        with phase("generate"):
            finished = self._finish(self._step(None)) if self.running else {}
        return [finished[number] for number in sorted(finished)]

    def abort(self, keys: Sequence[tuple[int, int]] | None = None) -> list[Completion]:
        return list(self._finish(dict.fromkeys(self._requests.numbers(keys), "aborted")).values())

    def _finish(self, finished: Mapping[int, Finish]) -> dict[int, Completion]:
        self._withdraw(finished)
        return {number: self._requests.remove(number, reason) for number, reason in finished.items()}
