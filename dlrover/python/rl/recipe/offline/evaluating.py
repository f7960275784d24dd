# SPDX-License-Identifier: Apache-2.0
"""The loss of a model on held-out examples, and its metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import BaseTrainEngine
from dlrover.python.rl.engine.model.packing import select_columns
from dlrover.python.rl.engine.model.ranks import preserve_random_state


@dataclass(frozen=True)
class Measured:
    """A loss and its metrics: a rank's weighted sums, whose weights add up to 1 over all ranks."""

    loss: float
    metrics: dict[str, float]

    @classmethod
    def total(cls, parts: Sequence["Measured"]) -> "Measured":
        """Sum over ranks; a rank without rows has no metrics."""
        names = {name: None for part in parts for name in part.metrics}
        metrics = {name: sum(part.metrics.get(name, 0.0) for part in parts) for name in names}
        return cls(sum(part.loss for part in parts), metrics)


def measure(engine: BaseTrainEngine, batch: Batch, loss: EngineLoss) -> Measured:
    """This rank's part of the loss on annotated rows; a collective call. Weights and random state stay unchanged."""
    with preserve_random_state(), torch.no_grad():
        outputs = compute_outputs(engine, batch)
        flat = np.flatnonzero(batch.ragged("action_mask").values)
        if not len(flat):
            return Measured(0.0, {})
        value, metrics = loss(torch.from_numpy(outputs[flat]), select_columns(batch, flat, "cpu"))
    return Measured(float(value), {name: float(amount) for name, amount in metrics.items()})


def compute_outputs(engine: BaseTrainEngine, batch: Batch) -> Any:
    """Log-probs or scores ``[all tokens]``, 0 outside the action mask."""
    evaluated = engine.evaluate(batch.select("tokens", "action_mask"))
    return evaluated.ragged("logprobs" if "logprobs" in evaluated else "scores").values
