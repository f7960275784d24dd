"""ACTOR: the policy that is trained."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from dlrover.python.rl.algorithm.base import Algorithm, EngineLoss
from dlrover.python.rl.data.batch import Batch, Column
from dlrover.python.rl.engine.base import OptimizerConfig, StepResult
from dlrover.python.rl.engine.sync.base import Ticket
from dlrover.python.rl.engine.torch.blueprint import tokenizer_of
from dlrover.python.rl.engine.weights import WeightStamp
from dlrover.python.rl.recipe.config import EngineConfig
from dlrover.python.rl.recipe.device_turns import on_device
from dlrover.python.rl.recipe.disk import patiently
from dlrover.python.rl.recipe.evaluating import Measured, measure, outputs_of
from dlrover.python.rl.recipe.examples import ExampleData, Examples, load_examples
from dlrover.python.rl.recipe.members import TRAINED, device_of, weight_transport
from dlrover.python.rl.recipe.refusals import not_finite_rows
from dlrover.python.rl.recipe.speed import Machine
from dlrover.python.rl.recipe.trained import TrainedWorkload
from dlrover.python.rl.recipe.updates import UpdatePlan, each_update, joined
from dlrover.python.rl.trainer.workload import trainer_invocation


class ActorWorkload(TrainedWorkload):
    """ACTOR: holds the policy that is trained, and gives its weights to the rollouts."""

    def init_model(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, algorithm: Algorithm, seed: int = 0
    ) -> str:
        """Load the policy and meet the other ranks; the process's random generators then follow from ``seed``.

        Returns:
            The class of the engine that runs.
        """
        self._algorithm = algorithm
        self._load(model, engine, optimizer, seed, engine.lora)
        device = device_of(self, engine)
        self._weights = weight_transport(self, device, leads=self.rank == 0)
        self._runs_on = device, engine.precision
        return type(self._engine).__name__

    @trainer_invocation(target="RANK0")
    def machine(self) -> Machine:
        """What trains here, by which its speed can be judged."""
        return Machine.of(self._engine, *self._runs_on)

    @on_device
    def update(self, rollouts: Batch, rows: Batch, plan: UpdatePlan, *opinions: Batch) -> list[StepResult]:
        """The optimizer steps on this rank's share of a step's rows.

        Args:
            rollouts: what rollout members generated.
            rows: what the algorithm adds to the same rows, and the ``update`` each is in.
            plan: the updates.
            opinions: what other roles make of the same rows: ragged columns that the algorithm's loss needs.

        Raises:
            RowsDiffer: other rows were judged than these.
        """
        batch = joined(rollouts, rows, opinions).with_columns(rollout_logprobs=rollouts["logprobs"])
        if "old_logprobs" not in batch:
            batch = batch.with_columns(old_logprobs=self._old_logprobs(rollouts, plan.temperature))
        loss = EngineLoss(self._algorithm)
        return each_update(batch, plan, lambda part: self._engine.step(part, loss, plan.temperature))

    def token_columns(self, rollouts: Batch, names: Sequence[str], temperature: float) -> Batch:
        """The ragged columns that an algorithm wants to see before an update: ``action_mask`` or ``old_logprobs``."""
        if "old_logprobs" not in names:
            return rollouts.select(*names)
        with self._turn() if self._recomputes else nullcontext():
            return rollouts.with_columns(old_logprobs=self._old_logprobs(rollouts, temperature)).select(*names)

    @property
    def _recomputes(self) -> bool:
        """Whether the algorithm tells the rollouts' policy from the one before the update."""
        return "rollout_logprobs" in self._algorithm.needs.all

    def _old_logprobs(self, rollouts: Batch, temperature: float) -> Column:
        """Of the policy before the update: the rollouts' own, or this engine's where the two are told apart."""
        if not self._recomputes:
            return rollouts["logprobs"]
        return self._engine.evaluate(rollouts.select(*TRAINED), temperature)["logprobs"]

    @on_device
    def train(self, batch: Batch) -> StepResult:
        """One optimizer step on annotated rows with ``tokens`` and ``action_mask``."""
        return self._engine.step(batch, EngineLoss(self._algorithm))

    @on_device
    def measure(self, batch: Batch) -> Measured:
        """This rank's part of the loss on annotated rows, which changes nothing."""
        return measure(self._engine, batch, EngineLoss(self._algorithm))

    @on_device
    def not_finite(self, batch: Batch, names: tuple[str, ...]) -> Batch:
        """After an update was refused: the columns ``names`` of the rows of this rank's share with a value that is not
        finite, in a column or in what the model says of them, and their ``text``."""
        bad = not_finite_rows(batch, outputs_of(self._engine, batch))
        texts = [self._engine.tokenizer.decode(batch.ragged("tokens")[row]) for row in bad]
        return batch.select(*names).take(bad).with_columns(text=texts)

    def encode(self, model: str, data: ExampleData, evaluates: bool, seed: int) -> Examples:
        """Tokenise examples, and hold some out if the run ``evaluates``; needs no model to be loaded."""
        return load_examples(data, tokenizer_of(model), evaluates, seed)

    @trainer_invocation(blocking=False)
    def publish_weights(self) -> Ticket:
        """Keep the current weights for rollout members to fetch from here, with the ticket that rank 0 gives.

        The last two versions are kept, in memory that is gone with this process.
        """
        with self._bare_turn():
            ticket = self._weights.offer(self._engine)
            self._published = self._weights.send(ticket, self._engine)
        return ticket

    @trainer_invocation(target="RANK0")
    def published(self) -> WeightStamp | None:
        """Which weights :meth:`publish_weights` kept last."""
        return self._published

    def save(self, path: Path) -> None:
        """Write the policy in Hugging Face format (rank 0 does); waits a while for room on a full disk."""
        patiently(lambda: self._save(path), path)

    def _save(self, path: Path) -> None:
        with self._bare_turn():  # not while it waits for room
            self._engine.save(path)

    def close(self) -> None:
        """Leave the group of ranks, and keep no weights."""
        if hasattr(self, "_weights"):
            self._weights.close()
        super().close()
