# SPDX-License-Identifier: Apache-2.0
"""A role, its column, an algorithm whose loss needs the column, and the trainer that brings them together."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import Metrics, Needs, TokenColumns
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.recipe.grpo import GRPOConfig, GRPOTrainer
from dlrover.python.rl.recipe.online.batch import AuxOutput
from dlrover.python.rl.trainer.workload import BaseWorkload


class RepetitionWorkload(BaseWorkload):
    """REPETITION: the share of the last tokens that equal a token."""

    def init_model(self, window: int) -> None:
        self.window = window

    def repetition(self, rollouts: Batch) -> Batch:
        shares = []
        for tokens, is_action in zip(rollouts.ragged("tokens"), rollouts.ragged("action_mask"), strict=True):
            before = [tokens[max(at - self.window, 0) : at] for at in range(len(tokens))]
            share = [
                float(np.mean(last == token)) if len(last) else 0.0 for last, token in zip(before, tokens, strict=True)
            ]
            shares.append(np.where(is_action, share, 0.0))
        return Batch({"repetition": Ragged.from_rows(shares, dtype=np.float64)})


@dataclass(frozen=True)
class WithoutRepetition(GRPO):
    """GRPO that lowers the probability of repeated tokens."""

    repetition_coef: Annotated[float, Ge(0.0)] = 0.1

    @property
    def needs(self) -> Needs:
        return replace(super().needs, loss=super().needs.loss | {"repetition"})

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(logprobs, columns)
        weight = columns["weight"] * columns["repetition"]
        return loss + self.repetition_coef * (weight * logprobs).sum(), {**metrics, "repetition": weight.sum()}


class RepetitionTrainer(GRPOTrainer):
    """GRPO with the role REPETITION, which is called if the algorithm needs its column."""

    @classmethod
    def aux_outputs(cls, cfg: GRPOConfig) -> list[AuxOutput]:
        repetition = AuxOutput(
            "repetition", "repetition", {"repetition": "float32"}, init=(cfg.rollout.max_new_tokens,)
        )
        return [*super().aux_outputs(cfg), repetition]
