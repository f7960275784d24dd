"""How good a model is on examples that it is not trained on: its loss, and the metrics of that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import TrainEngine
from dlrover.python.rl.engine.torch.packing import columns_at
from dlrover.python.rl.engine.torch.randomness import random_state_kept


@dataclass(frozen=True)
class Measured:
    """A loss and its metrics: sums, whose weights add up to 1 over all ranks."""

    loss: float
    metrics: dict[str, float]

    @classmethod
    def total(cls, parts: Sequence["Measured"]) -> "Measured":
        """The sum over ranks; one without rows has no metrics."""
        names = {name: None for part in parts for name in part.metrics}
        metrics = {name: sum(part.metrics.get(name, 0.0) for part in parts) for name in names}
        return cls(sum(part.loss for part in parts), metrics)


def measure(engine: TrainEngine, batch: Batch, loss: EngineLoss) -> Measured:
    """This rank's part of the loss on annotated rows, which all ranks ask for together. Nothing changes: neither
    weights nor what is drawn later."""
    with random_state_kept(), torch.no_grad():
        outputs = outputs_of(engine, batch)
        flat = np.flatnonzero(batch.ragged("action_mask").values)
        if not len(flat):
            return Measured(0.0, {})
        value, metrics = loss(torch.from_numpy(outputs[flat]), columns_at(batch, flat, "cpu"))
    return Measured(float(value), {name: float(amount) for name, amount in metrics.items()})


def outputs_of(engine: TrainEngine, batch: Batch) -> Any:
    """Log-probs or scores ``[all tokens]``, 0 outside the action mask."""
    told = engine.evaluate(batch.select("tokens", "action_mask"))
    return told.ragged("logprobs" if "logprobs" in told else "scores").values
