"""The samples that a rollout engine has taken in, whatever draws them."""

from collections.abc import Sequence

import numpy as np

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import Completion, Finish, Request, SamplingParams
from dlrover.python.rl.engine.requests import check_requests, check_sampling, fresh_requests
from dlrover.python.rl.engine.torch.loading import CausalLM
from dlrover.python.rl.engine.torch.sample import Endings, Sample

Key = tuple[int, int]

Drawn = tuple[int, int, float]
"""A sample's number, a token of it and that one's log-prob."""


class Roster:
    """Samples by number, in the order in which they were taken in.

    Args:
        lm: the model's outline.
        longest: most tokens of a sequence, if the backend has a limit of its own.

    Attributes:
        endings: when samples end.
        samples: those that have not.
    """

    def __init__(self, lm: CausalLM, longest: int | None = None) -> None:
        self.endings = Endings.of(lm.tokenizer, lm.eos_ids)
        self.samples: dict[int, Sample] = {}
        self._lm, self._longest, self._count = lm, longest, 0

    def __len__(self) -> int:
        return len(self.samples)

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        """Refuse prompts that cannot be completed.

        Raises:
            EngineError: one is empty, holds unknown ids or leaves no room; or the sampling parameters make no sense.
        """
        check_sampling(sampling)
        if not tokens.lengths.all():
            empty = np.flatnonzero(tokens.lengths == 0).tolist()
            raise EngineError(f"prompts {empty} are empty: generation needs at least one token to begin with")
        longest = int(tokens.lengths.max(initial=0)) + sampling.max_new_tokens
        self._lm.check_tokens(tokens.values, longest)
        if self._longest is not None and longest > self._longest:
            raise EngineError(f"a sequence of {longest} tokens does not fit the backend's limit of {self._longest}")

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> list[int]:
        """Take in requests, all of them or none; returns their numbers in order.

        Raises:
            EngineError: what :meth:`check` says; or one runs already, comes twice, or has ended.
        """
        self.check(Ragged.from_rows([request.prompt for request in requests], dtype=np.int64), sampling)
        self._lm.check_tokens(np.concatenate([np.empty(0, np.int64), *(request.done for request in requests)]), 0)
        check_requests(requests, sampling, (sample.request.key for sample in self.samples.values()))
        taken = [Sample.of(request, sampling, seed) for request in requests]
        for sample in taken:
            if why := self.why_ended(sample):
                raise EngineError(f"request {sample.request.key} has ended already ({why})")
        return self._take(taken)

    def add_batch(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> list[int]:
        """Take in the samples of a batch, whose prompt ids need not differ; returns their numbers in order.

        Raises:
            EngineError: what :meth:`check` says, or others are there already.
        """
        if self.samples:
            raise EngineError(f"{len(self)} requests run: advance until they have ended, or abort them first")
        self.check(prompts.ragged("tokens"), sampling)
        return self._take([Sample.of(request, sampling, seed) for request in fresh_requests(prompts, sampling)])

    def _take(self, samples: Sequence[Sample]) -> list[int]:
        numbers = list(range(self._count, self._count + len(samples)))
        self._count += len(samples)
        self.samples |= dict(zip(numbers, samples, strict=True))
        return numbers

    def numbers(self, keys: Sequence[Key] | None) -> list[int]:
        """Of the samples with these keys, or of all.

        Raises:
            EngineError: there is none of a key.
        """
        if keys is None:
            return list(self.samples)
        running = {sample.request.key: number for number, sample in self.samples.items()}
        if unknown := [key for key in keys if key not in running]:
            raise EngineError(f"no request {', '.join(map(str, unknown))} runs")
        return [running[key] for key in keys]

    def why_ended(self, sample: Sample) -> Finish | None:
        """Why its last token ended it; None when it did not, or when there is none."""
        return self.endings.finish(sample) if sample.tokens else None

    def note(self, drawn: Sequence[Drawn], version: int) -> dict[int, Finish]:
        """Add tokens that were drawn, all of them or none: each sample's in order, up to the one that ends it.

        Returns:
            Why samples have ended, by number; they are to be let go.

        Raises:
            EngineError: a log-prob is no number.
        """
        if not np.isfinite([logprob for _, _, logprob in drawn]).all():
            raise EngineError("the model's logits are not numbers: its weights are broken")
        ended: dict[int, Finish] = {}
        for number, token, logprob in drawn:
            if number not in ended:
                sample = self.samples[number]
                sample.record(token, logprob, version)
                if why := self.endings.finish(sample):
                    ended[number] = why
        return ended

    def end(self, number: int, why: Finish) -> Completion:
        """Let a sample go, with what came out of it."""
        return self.endings.completion(self.samples.pop(number), why)
