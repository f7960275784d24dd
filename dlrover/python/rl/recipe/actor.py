"""ACTOR: the policy that is trained."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from dlrover.python.rl.algorithm.base import Algorithm, EngineLoss
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.data.batch import Batch, Column
from dlrover.python.rl.engine.base import (
    OptimizerConfig,
    Rendezvous,
    StepResult,
    TrainEngine,
)
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.engine.registry import TRAIN, engine_class
from dlrover.python.rl.engine.sync.base import Ticket
from dlrover.python.rl.engine.torch.blueprint import tokenizer_of
from dlrover.python.rl.engine.torch.packing import Head
from dlrover.python.rl.engine.torch.randomness import random_state, seed_random, set_random_state
from dlrover.python.rl.engine.weights import WeightStamp
from dlrover.python.rl.recipe.config import EngineConfig
from dlrover.python.rl.recipe.device_turns import EngineWorkload, on_device
from dlrover.python.rl.recipe.disk import patiently
from dlrover.python.rl.recipe.evaluating import Measured, measure, outputs_of
from dlrover.python.rl.recipe.examples import ExampleData, Examples, load_examples
from dlrover.python.rl.recipe.members import (
    TRAINED,
    device_of,
    parallel_sizes,
    train_settings,
    use_threads,
    warming,
    weight_transport,
)
from dlrover.python.rl.recipe.refusals import not_finite_rows
from dlrover.python.rl.recipe.speed import Machine
from dlrover.python.rl.recipe.updates import UpdatePlan, each_update, joined
from dlrover.python.rl.trainer.workload import trainer_invocation


class ActorWorkload(EngineWorkload):
    """ACTOR: holds the policy that is trained. Several members divide the rows, and the model by ``engine.parallel``.

    Every rank saves its own state. Where each has a copy of the model, which is the default where the engine can, that
    is the whole, the same on all of them: 12 bytes a parameter and rank, written side by side. So a rank comes back
    from its own file whatever became of the others, without a collective in the middle of a recovery that another loss
    could break.
    """

    needs_own_process = True

    head: ClassVar[Head] = "causal"
    """What the model's outputs are."""

    head_bias: ClassVar[bool] = True
    """Whether a token head has a bias."""

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model, an update and a commit need."""
        warming().warm_actor()

    def init_model(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, algorithm: Algorithm, seed: int = 0
    ) -> str:
        """Load the policy and meet the other ranks; the process's random generators then follow from ``seed``.

        Returns:
            The class of the engine that runs.
        """
        use_threads(engine.threads)
        self._algorithm = algorithm
        meeting = Rendezvous(self.rank, self.world_size, self.torch_master_addr, self.torch_master_port)
        device = device_of(self, engine)
        settings = train_settings(engine, device, parallel_sizes(engine, self.world_size))
        settings = replace(settings, lora=engine.lora, head=self.head, head_bias=self.head_bias)
        made = engine_class(TRAIN, engine.train)
        with self._first_turn(device) as memory:
            self._engine: TrainEngine = made(model, optimizer, settings, meeting, memory)
        self._weights = weight_transport(self, device, leads=self.rank == 0)
        self._runs_on = device, engine.precision
        seed_random(seed, self.role, self.rank)
        return type(self._engine).__name__

    @trainer_invocation(target="RANK0")
    def machine(self) -> Machine:
        """What trains here, by which its speed can be judged."""
        return Machine.of(self._engine, *self._runs_on)

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        """Members that have rows of their own: without those that split a matrix, a sequence or the layers."""
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        return world_size // (engine.parallel or ParallelSizes()).replica_size

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

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, version and random states: all that later steps depend on, bit for bit."""
        return {"engine": self._engine.state_dict(), "random": random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state_dict` gave; the model has been loaded by ``init_model``."""
        self._engine.load_state_dict(state["engine"])
        set_random_state(state["random"])

    def close(self) -> None:
        """Leave the group of ranks, and keep no weights."""
        if hasattr(self, "_weights"):
            self._weights.close()
        super().close()
