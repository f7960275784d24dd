"""CRITIC: says before each token what reward it expects."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dlrover.python.rl.algorithm.critic import ValueLoss, at_actions, before_actions
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import OptimizerConfig, StepResult
from dlrover.python.rl.engine.torch.packing import Head
from dlrover.python.rl.recipe.config import EngineConfig, NonNegative
from dlrover.python.rl.recipe.device_turns import on_device
from dlrover.python.rl.recipe.disk import patiently
from dlrover.python.rl.recipe.members import TRAINED
from dlrover.python.rl.recipe.trained import TrainedWorkload
from dlrover.python.rl.recipe.updates import UpdatePlan, each_update, joined
from dlrover.python.rl.trainer.workload import trainer_invocation


@dataclass(frozen=True)
class CriticConfig:
    """The critic of PPO. It runs on the engine of the policy, in the same precision and layout."""

    model: str | None = None
    """Folder or hub name of what it starts from; None: of what the policy starts from. Without a head of one score, it
    is given a new one."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-6)
    """How it is trained."""

    warmup_steps: NonNegative = 0
    """Steps at the beginning in which the critic alone is trained: the policy stays what it is."""


class CriticWorkload(TrainedWorkload):
    """CRITIC: a model with a head of one score, which is trained to say what reward is still to come."""

    head: ClassVar[Head] = "token"

    def init_model(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, loss: ValueLoss, seed: int = 0
    ) -> None:
        """Load the model and meet the other ranks."""
        self._loss = loss
        self._load(model, engine, optimizer, seed)

    @trainer_invocation(blocking=False)
    @on_device
    def values(self, rollouts: Batch) -> Batch:
        """``values`` before each action."""
        scores = self._engine.evaluate(before_actions(rollouts.select(*TRAINED))).ragged("scores")
        return Batch({"values": at_actions(scores)})

    @on_device
    def update(self, rollouts: Batch, rows: Batch, plan: UpdatePlan) -> list[StepResult]:
        """The optimizer steps on this rank's share of a step's rows.

        Args:
            rollouts: what rollout members generated.
            rows: of the same rows ``returns``, ``values`` and ``weight``, and the ``update`` each is in.
            plan: the updates.

        Raises:
            RowsDiffer: other rows were judged than these.
        """
        batch = before_actions(joined(rollouts, rows))
        return each_update(batch, plan, lambda part: self._engine.step(part, self._loss))

    def save(self, path: Path) -> None:
        """Write the critic in Hugging Face format (rank 0 does); waits a while for room on a full disk."""
        patiently(lambda: self._save(path), path)

    def _save(self, path: Path) -> None:
        with self._bare_turn():  # not while it waits for room
            self._engine.save(path)
