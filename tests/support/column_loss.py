# SPDX-License-Identifier: Apache-2.0
"""A loss from outside the package, which names columns of a rollout engine."""

from dataclasses import dataclass, replace

from dlrover.python.rl.algorithm.grpo import GRPO

annotated, arrived = [], []


@dataclass(frozen=True)
class Doubtful(GRPO):
    """GRPO that is trained more on tokens at which the policy was in doubt."""

    @property
    def needs(self):
        annotate = super().needs.annotate | {"action_mask", "margin", "passes"}
        return replace(super().needs, annotate=annotate, loss=super().needs.loss | {"margin", "likely", "passes"})

    def annotate(self, rows):
        annotated.append(rows)
        return super().annotate(rows)

    def loss(self, logprobs, columns):
        arrived.append({name: column.detach() for name, column in columns.items()})
        return super().loss(logprobs, {**columns, "weight": columns["weight"] / (1.0 + columns["margin"])})
