# SPDX-License-Identifier: Apache-2.0
"""CRITIC: predicts the remaining reward before each token."""

from pathlib import Path
from typing import ClassVar

from dlrover.python.rl.algorithm.losses.values import ValueLoss, shift_to_actions, shift_to_states
from dlrover.python.rl.common.disk_space import retry_while_full
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, UpdateResult
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import (
    TRAINED,
    TrainedWorkload,
    UpdatePlan,
    join_columns,
    on_device,
    run_updates,
)
from dlrover.python.rl.trainer.workload import trainer_invocation


class CriticWorkload(TrainedWorkload):
    """CRITIC: a model with a head of one score, trained to predict the remaining reward."""

    head: ClassVar[Head] = "token"

    def init_model(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, loss: ValueLoss, seed: int = 0
    ) -> None:
        self._loss = loss
        self._load(model, engine, optimizer, seed)

    @trainer_invocation(blocking=False)
    @on_device
    def values(self, rollouts: Batch) -> Batch:
        scores = self._engine.evaluate(shift_to_states(rollouts.select(*TRAINED))).ragged("scores")
        return Batch({"values": shift_to_actions(scores)})

    @on_device
    def update(self, rollouts: Batch, rows: Batch, plan: UpdatePlan) -> list[UpdateResult]:
        """The optimizer steps on this rank's share of a step's rows; RowsDiffer if other rows were scored.

        ``rows`` are ``returns``, ``values``, ``weight`` and ``update`` of the same rows."""
        batch = shift_to_states(join_columns(rollouts, rows))
        return run_updates(batch, plan, lambda part: self._engine.step(part, self._loss))

    def save(self, path: Path) -> None:
        """Write the critic in Hugging Face format (rank 0 does); waits for space on a full disk."""
        retry_while_full(lambda: self._save(path), path)

    def _save(self, path: Path) -> None:
        with self._bare_turn():  # not while it waits for space
            self._engine.save(path)
