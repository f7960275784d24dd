# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that reports how sure the policy is of each token, and a loss that trains more on doubtful ones."""

from dataclasses import dataclass, replace

import torch
from plain_engine import PlainOptions, PlainRolloutEngine

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import Metrics, Needs, TokenColumns
from dlrover.python.rl.data.batch import ColumnSpec
from dlrover.python.rl.engine.api.base import Completion
from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.rollout.sampling import choose


class MarginEngine(PlainRolloutEngine):
    info = EngineInfo(options=PlainOptions, columns={"margin": ColumnSpec("float32", fill=0.0)})

    @torch.no_grad()
    def _step(self) -> dict[int, Completion]:
        new_tokens = []
        for number, running in self._requests.by_number.items():
            logits = self._model(torch.as_tensor(running.sequence)[None]).logits[:, -1]
            token, logprob = choose(logits, running.sampling, torch.tensor([running.next_uniform()]).double())
            first, second = logits[0].topk(2).values
            new_tokens.append((number, int(token), float(logprob), {"margin": float(first - second)}))
        finished = self._requests.append(new_tokens, self.version)
        return {number: self._requests.remove(number, reason) for number, reason in finished.items()}


@dataclass(frozen=True)
class DoubtfulFirst(GRPO):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, loss=super().needs.loss | {"margin"})

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        weight = columns["weight"] / (1.0 + columns["margin"])
        loss, metrics = super().loss(logprobs, {**columns, "weight": weight})
        return loss, {**metrics, "margin": (weight * columns["margin"]).sum()}
