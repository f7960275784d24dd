"""Continuous batching: requests wait, are seated in a row of the cache, draw a token per step, and leave."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.base import Completion, Finish
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.roster import Roster
from dlrover.python.rl.engine.torch.decoder import Decoder, Ids, Prefix
from dlrover.python.rl.engine.torch.sampling import choose
from dlrover.python.rl.engine.torch.scheduler import Scheduler


@dataclass(frozen=True)
class Limits:
    """What runs at a time at most.

    Attributes:
        rows: sequences that are decoded.
        prefill_tokens: tokens, padding included, of one forward pass over prompts.
    """

    rows: int
    prefill_tokens: int


class ContinuousBatch:
    """The samples of a roster, and the decoder that they share.

    A step reads the last token of each seated sequence, and the prompts of those that take free rows; then all draw.
    Sequences that end leave their rows, which are taken as the scheduler says.

    Args:
        roster: of the samples that run.
        decoder: runs the model.
        limits: on what runs at a time.
        memory: of the decoder's device.
        owner: who the decoder's memory is accounted to.
    """

    def __init__(self, roster: Roster, decoder: Decoder, limits: Limits, memory: DeviceMemory, owner: str) -> None:
        self._roster, self._decoder, self._limits = roster, decoder, limits
        self._memory, self._owner = memory, owner
        self._scheduler = Scheduler(limits.rows)
        self._needed, self._length = 0, 0
        self._kept: dict[bytes, Prefix] = {}

    def take(self, numbers: Sequence[int]) -> None:
        """Let these samples of the roster run, behind those that do."""
        longest = max((self._roster.samples[number].longest for number in numbers), default=0)
        self._needed = max(self._needed, longest) if self._scheduler.busy else longest
        self._scheduler.add(numbers)

    @torch.inference_mode()
    def step(self, version: int) -> dict[int, Completion]:
        """Draw a token more for each sequence that has a row; there must be one that runs.

        Args:
            version: of the weights, which the tokens are stamped with.

        Returns:
            Those that have ended with it, by number.

        Raises:
            EngineError: the logits are no numbers. Whatever is raised, all that runs is kept as it was.
            OutOfDeviceMemory: the device is full; names who holds what.
        """
        try:
            with self._memory.computing(self._owner):
                tokens, logprobs = self._draw(self._run())
        except BaseException:
            self.forget()
            raise
        finishes: dict[int, Finish] = {}
        for number, token, logprob in zip(self._scheduler.seated, tokens, logprobs, strict=True):
            sample = self._roster.samples[number]
            sample.record(token, logprob, version)
            if (finish := self._roster.endings.finish(sample)) is not None:
                finishes[number] = finish
        return self.leave(finishes)

    @torch.inference_mode()
    def leave(self, finishes: Mapping[int, Finish]) -> dict[int, Completion]:
        """End the samples of these numbers; their rows are free."""
        seated = len(self._scheduler.seated)
        rows = self._scheduler.end(finishes)
        if len(rows) < seated:
            self._decoder.keep(rows)
        return {number: self._roster.end(number, why) for number, why in finishes.items()}

    def unseat(self) -> None:
        """Let all wait, to be read anew: what has been computed of them is no longer true."""
        self._scheduler.unseat()
        self._kept = {}
        self._decoder.keep([])

    def forget(self) -> None:
        """Let all wait, and release the cache."""
        self.unseat()
        self._decoder.clear()

    @torch.inference_mode()
    def restore(self) -> None:
        """Take a cache as large as the last one.

        Raises:
            OutOfDeviceMemory: there is no room for it.
        """
        if self._length and not self._decoder.capacity:
            self._scheduler.rows = self._decoder.fit(self._limits.rows, self._length)

    # -- schedule, run, record ----------------------------------------------------------------------------------------

    def _run(self) -> Any:
        """Seat who waits; logits of the next token of everyone who is seated: ``[rows, vocab]``."""
        self._fit()
        parts = []
        if seated := self._scheduler.seated:
            last = [self._roster.samples[number].tokens[-1] for number in seated]
            parts.append(self._decoder.step(torch.tensor(last, device=self._memory.device)))
        parts += self._read(self._scheduler.admit())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _fit(self) -> None:
        """Make the cache as long as needed; who is seated is read anew where it has to be replaced."""
        if not self._scheduler.waiting:
            return
        needed = _rounded(self._needed)
        cramped = not self._scheduler.seated and self._scheduler.rows < self._limits.rows
        if needed > self._decoder.capacity or (cramped and needed < self._decoder.capacity):
            self.unseat()
            self._scheduler.rows, self._length = self._decoder.fit(self._limits.rows, needed), needed

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        """Seat these; logits of their next tokens, ``[rows, vocab]`` in parts.

        They are read part by part, within the token budget. Sequences that are equal are read once if they are in one
        part or follow each other, as the samples of a prompt do.
        """
        logits: list[Any] = []
        seats: list[bytes] = []
        unread: dict[bytes, Ids] = {}
        for number in numbers:
            past = self._roster.samples[number].past
            key = past.tobytes()
            if key not in self._kept and key not in unread:
                if unread and self._width([*unread.values(), past]) > self._limits.prefill_tokens:
                    logits.append(self._seat(seats, unread))
                    seats, unread = [], {}
                unread[key] = past
            seats.append(key)
        if seats:
            logits.append(self._seat(seats, unread))
            following = [self._roster.samples[number].past.tobytes() for number in self._scheduler.next()]
            self._kept = {key: self._kept[key] for key in following if key in self._kept}
        return logits

    def _seat(self, seats: Sequence[bytes], unread: Mapping[bytes, Ids]) -> Any:
        """Read what is unread, and use a row for each of ``seats``; the last one's prefix is kept for the next."""
        if unread:
            self._kept.update(zip(unread, self._decoder.prefill(list(unread.values())), strict=True))
        prefixes = [self._kept[key] for key in seats]
        self._decoder.seat(prefixes)
        self._kept = {seats[-1]: prefixes[-1]}
        return torch.stack([prefix.logits for prefix in prefixes])

    @staticmethod
    def _width(sequences: Sequence[Ids]) -> int:
        """Tokens of a forward pass over them, padding included."""
        return len(sequences) * max(map(len, sequences))

    def _draw(self, logits: Any) -> tuple[list[int], list[float]]:
        """Each row's next token and its log-prob; rows that are drawn alike are drawn together."""
        samples = [self._roster.samples[number] for number in self._scheduler.seated]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for row, sample in enumerate(samples):
            alike.setdefault(sample.draw, []).append(row)
        tokens, logprobs = [0] * len(samples), [0.0] * len(samples)
        for rows in alike.values():
            uniform = torch.tensor([samples[row].next_uniform() for row in rows], dtype=torch.float64)
            chosen = logits if len(rows) == len(samples) else logits[torch.tensor(rows, device=logits.device)]
            drawn = choose(chosen, samples[rows[0]].sampling, uniform.to(logits.device))
            for row, token, logprob in zip(rows, drawn[0].tolist(), drawn[1].tolist(), strict=True):
                tokens[row], logprobs[row] = token, logprob
        if not math.isfinite(sum(logprobs)):
            raise EngineError("the model's logits are not numbers: its weights are broken")
        return tokens, logprobs


def _rounded(length: int) -> int:
    """Room for a sequence in the cache, so that a little more does not need another cache."""
    step = 64 if length <= 256 else 256
    return -(-length // step) * step
