"""Continuous batching: requests wait, are seated in a row of the cache, draw a token per step, and leave."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.base import Completion, Finish
from dlrover.python.rl.engine.torch.decoder import Decoder, Prefix
from dlrover.python.rl.engine.torch.sample import Endings, Sample
from dlrover.python.rl.engine.torch.sampling import choose
from dlrover.python.rl.engine.torch.scheduler import Scheduler


class ContinuousBatch:
    """The requests that run, and the decoder that they share.

    A step reads the last token of each seated sequence, and the prompts of those that take free rows; then all draw.
    Sequences that end leave their rows, which are taken in the next step.

    Args:
        decoder: runs the model.
        endings: say when a sample ends.
        device: of the decoder.
        max_rows: most sequences that are decoded at a time.
        prefill_tokens: most tokens, padding included, of one forward pass over prompts.

    Attributes:
        samples: what runs, by a number that rises in the order of :meth:`take`.
    """

    def __init__(self, decoder: Decoder, endings: Endings, device: str, max_rows: int, prefill_tokens: int) -> None:
        self.samples: dict[int, Sample] = {}
        self._decoder, self._endings, self._device = decoder, endings, device
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens
        self._scheduler = Scheduler(max_rows)
        self._next, self._needed, self._length = 0, 0, 0
        self._shared: dict[bytes, Prefix] = {}

    def take(self, samples: Iterable[Sample]) -> list[int]:
        """Let samples run, behind those that do; returns their numbers."""
        taken = []
        self._needed = self._needed if self.samples else 0
        for sample in samples:
            self.samples[self._next] = sample
            self._needed = max(self._needed, sample.longest)
            taken.append(self._next)
            self._next += 1
        self._scheduler.add(taken)
        return taken

    @torch.inference_mode()
    def step(self, version: int) -> dict[int, Completion]:
        """Draw a token more for each sequence that has a row; there must be one that runs.

        Args:
            version: of the weights, which the tokens are stamped with.

        Returns:
            Those that have ended with it, by number.

        Raises:
            EngineError: the logits are no numbers. Whatever is raised, all that runs is kept as it was.
        """
        try:
            logits = self._run()
            tokens, logprobs = self._draw(logits)
        except BaseException:
            self.forget()
            raise
        finishes: dict[int, Finish] = {}
        for number, token, logprob in zip(self._scheduler.seated, tokens, logprobs, strict=True):
            sample = self.samples[number]
            sample.record(token, logprob, version)
            if (finish := self._endings.finish(sample)) is not None:
                finishes[number] = finish
        return self.leave(finishes)

    def leave(self, finishes: Mapping[int, Finish]) -> dict[int, Completion]:
        """End the samples of these numbers; their rows are free."""
        seated = len(self._scheduler.seated)
        rows = self._scheduler.end(finishes)
        if len(rows) < seated:
            self._decoder.keep(rows)
        return {number: self._endings.completion(self.samples.pop(number), why) for number, why in finishes.items()}

    def unseat(self) -> None:
        """Let all wait, to be read anew: what has been computed of them is no longer true."""
        self._scheduler.unseat()
        self._shared = {}
        self._decoder.keep([])

    def forget(self) -> None:
        """Let all wait, and release the cache."""
        self.unseat()
        self._decoder.clear()

    def restore(self) -> None:
        """Take a cache as large as the last one.

        Raises:
            OutOfDeviceMemory: there is no room for it.
        """
        if self._length and not self._decoder.capacity:
            self._scheduler.rows = self._decoder.fit(self._max_rows, self._length)

    # -- schedule, run, record ----------------------------------------------------------------------------------------

    def _run(self) -> Any:
        """Seat who waits; logits of the next token of everyone who is seated: ``[rows, vocab]``."""
        self._fit()
        parts = []
        if seated := self._scheduler.seated:
            last = [self.samples[number].tokens[-1] for number in seated]
            parts.append(self._decoder.step(torch.tensor(last, device=self._device)))
        if admitted := self._scheduler.admit():
            prefixes = self._prefill(admitted)
            self._decoder.seat(prefixes)
            parts.append(torch.stack([prefix.logits for prefix in prefixes]))
        return torch.cat(parts)

    def _fit(self) -> None:
        """Make the cache as long as needed; who is seated is read anew where it has to be replaced."""
        if not self._scheduler.waiting:
            return
        needed = _rounded(self._needed)
        cramped = not self._scheduler.seated and self._scheduler.rows < self._max_rows
        if needed > self._decoder.capacity or (cramped and needed < self._decoder.capacity):
            self.unseat()
            self._scheduler.rows, self._length = self._decoder.fit(self._max_rows, needed), needed

    def _prefill(self, numbers: Sequence[int]) -> list[Prefix]:
        """What the decoder has left of each sequence's tokens; equal ones are read once.

        What has been read of a prompt is kept while the next sample that waits is one of the same.
        """
        pasts = [self.samples[number].past for number in numbers]
        keys = [past.tobytes() for past in pasts]
        known, wanted = dict(self._shared), dict(zip(keys, pasts, strict=True))
        unread = sorted((key for key in wanted if key not in known), key=lambda key: len(wanted[key]))
        for chunk in _chunks(unread, [len(wanted[key]) for key in unread], self._prefill_tokens):
            known.update(zip(chunk, self._decoder.prefill([wanted[key] for key in chunk]), strict=True))
        following = [self.samples[number].past.tobytes() for number in self._scheduler.next()]
        self._shared = {key: known[key] for key in following if key in known}
        return [known[key] for key in keys]

    def _draw(self, logits: Any) -> tuple[list[int], list[float]]:
        """Each row's next token and its log-prob; rows that are drawn alike are drawn together."""
        samples = [self.samples[number] for number in self._scheduler.seated]
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


def _chunks(items: Sequence[bytes], lengths: Sequence[int], budget: int) -> list[list[bytes]]:
    """Cut ``items``, of rising ``lengths``, where padding to the longest would go beyond ``budget``."""
    chunks: list[list[bytes]] = []
    for item, length in zip(items, lengths, strict=True):
        if not chunks or (len(chunks[-1]) + 1) * length > budget:
            chunks.append([])
        chunks[-1].append(item)
    return chunks
