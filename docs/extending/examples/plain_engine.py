# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that runs the whole sequence again for each token: slow, and short enough to read."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import Completion, Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.api.weights import WeightSnapshot, verify_snapshot
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.rollout.requests import RunningRequests, as_batch
from dlrover.python.rl.engine.rollout.sampling import choose


@dataclass(frozen=True)
class PlainOptions:
    """What ``engine.rollout_options`` may hold."""

    float64: bool = False
    """Compute in double precision, to see what rounding does to the log-probs."""


class PlainRolloutEngine:
    info = EngineInfo(options=PlainOptions)

    def __init__(self, model: str | Path, settings: RolloutSettings | None = None, memory: Any = None) -> None:
        settings = settings or RolloutSettings()
        options, _ = parse(PlainOptions, dict(settings.backend), "backend")
        lm = load_causal_lm(model)
        self._model = lm.model.double() if options is not None and options.float64 else lm.model
        self._requests = RunningRequests(dataclasses.replace(lm, model=None), columns=self.info.columns)
        self.version = -1

    @property
    def tokenizer(self) -> Any:
        return self._requests.rules.tokenizer

    @property
    def running(self) -> int:
        return len(self._requests)

    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        numbers = self._requests.add_batch(prompts, sampling, seed)
        completions: dict[int, Completion] = {}
        while self.running:
            completions |= self._step()
        return as_batch([completions[number] for number in numbers])

    def check(self, tokens: Any, sampling: SamplingParams) -> None:
        self._requests.check(tokens, sampling)

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        self._requests.add(requests, sampling, seed)

    def advance(self) -> list[Completion]:
        return list(self._step().values())

    def abort(self, keys: Sequence[tuple[int, int]] | None = None) -> list[Completion]:
        return [self._requests.remove(number, "aborted") for number in self._requests.numbers(keys)]

    @torch.no_grad()
    def _step(self) -> dict[int, Completion]:
        """Generate a token for each running request; returns the completions that have ended, by number."""
        new_tokens = []
        for number, running in self._requests.by_number.items():
            logits = self._model(torch.as_tensor(running.sequence)[None]).logits[:, -1]
            uniform = torch.tensor([running.next_uniform()], dtype=torch.float64)
            token, logprob = choose(logits, running.sampling, uniform)
            new_tokens.append((number, int(token), float(logprob)))
        finished = self._requests.append(new_tokens, self.version)
        return {number: self._requests.remove(number, reason) for number, reason in finished.items()}

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        parameters = dict(self._model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        verify_snapshot(weights, shapes, serving=-1 if rewind else self.version)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights.tensor(name))
        self.version = weights.version

    # The engine stays on the host: there is nothing to offload.

    def cpu(self) -> None:
        pass

    def cuda(self, part: str = "all") -> None:
        pass

    def meta(self) -> None:
        pass

    def place(self) -> str:
        return "cpu"

    def footprint(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.abort()
