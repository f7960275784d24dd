# SPDX-License-Identifier: Apache-2.0
"""ACTOR and CRITIC: the trained models."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

from dlrover.python.rl.algorithm.base import Algorithm, EngineLoss
from dlrover.python.rl.algorithm.losses.values import ValueLoss, shift_to_actions, shift_to_states
from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.data.batch import Batch, Column
from dlrover.python.rl.engine.api.base import OptimizerConfig, UpdateResult
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.engine.model.loading import load_tokenizer, read_eos_ids
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.engine.model.ranks import use_device
from dlrover.python.rl.engine.weight_sync.base import Ticket, waits_for_receivers
from dlrover.python.rl.recipe.base import updates
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import Machine, TrainedWorkload, device_of, on_device, peak_memory
from dlrover.python.rl.recipe.trainers.examples import ExampleData, Examples, Measured, compute_outputs, load_examples
from dlrover.python.rl.trainer.workload import trainer_invocation

_SENT_S = 2.0


class ActorWorkload(TrainedWorkload):
    """ACTOR: trains the policy, and publishes its weights to the rollouts."""

    recipe_class: ClassVar[str | None] = "ActorWorkload"  # the recipes' class that a user's subclass stands for
    guards_state = True
    has_adapters = True
    _sending: "Future[WeightStamp | None] | None" = None

    def init_model(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, algorithm: Algorithm, seed: int = 0
    ) -> str:
        """Load the policy and meet the other ranks; returns the engine's class. ``seed`` sets the random state."""
        self._algorithm = algorithm
        self._load(model, engine, optimizer, seed, engine.lora)
        device = device_of(self, engine)
        self._weights = self._make_weight_transport(engine, device, is_leader=self.rank == 0)
        self._runs_on = device, engine.precision
        return type(self._engine).__name__

    @trainer_invocation(target="RANK0")
    def machine(self) -> Machine:
        return Machine.of(self._engine, *self._runs_on)

    @on_device
    def update(self, rollouts: Batch, rows: Batch, plan: updates.UpdatePlan, *aux: Batch) -> list[UpdateResult]:
        """Take the optimizer steps on this rank's share of a step's rows. ``rows`` are the algorithm's columns and
        ``update``, ``aux`` ragged columns from other roles. Raises RowsDiffer if other rows were scored."""
        generated = rollouts.with_columns(rollout_logprobs=rollouts["logprobs"])
        needs = self._algorithm.needs
        batch = updates.join_columns(
            generated,
            rows,
            [updates.cast_columns(columns, plan.dtypes) for columns in aux],
            needs.loss | {"rollout_logprobs"},
        )
        shares_forward = needs.shares_forward(plan.updates * plan.epochs)
        if "old_logprobs" not in batch and not shares_forward:
            batch = batch.with_columns(old_logprobs=self._old_logprobs(rollouts, plan.temperature))
        loss = EngineLoss(self._algorithm, logs_entropy=True, shares_forward=shares_forward)
        self.wait_until_written()
        return self._measured(
            updates.run_updates(batch, plan, lambda part: self._engine.step(part, loss, plan.temperature))
        )

    def _measured(self, results: list[UpdateResult]) -> list[UpdateResult]:
        return [replace(result, metrics={**result.metrics, **peak_memory(self._runs_on[0])}) for result in results]

    def token_columns(self, rollouts: Batch, names: Sequence[str], temperature: float) -> Batch:
        """Return the columns that an algorithm annotates from."""
        if "rollout_logprobs" in names:
            rollouts = rollouts.with_columns(rollout_logprobs=rollouts["logprobs"])
        if "old_logprobs" not in names:
            return rollouts.select(*names)
        with self._turn() if self._algorithm.needs.recomputes else nullcontext():
            return rollouts.with_columns(old_logprobs=self._old_logprobs(rollouts, temperature)).select(*names)

    @trainer_invocation(blocking=False)
    @on_device
    def reference_logprobs(self, rollouts: Batch, temperature: float) -> Batch:
        """Compute ``ref_logprobs`` of the initial policy: this model without its adapters."""
        with self._engine.without_adapters():
            return Batch(
                {"ref_logprobs": self._engine.evaluate(rollouts.select(*updates.TRAINED), temperature)["logprobs"]}
            )

    def _old_logprobs(self, rollouts: Batch, temperature: float) -> Column:
        """Return the rollouts' log-probs, or this engine's if the algorithm distinguishes them."""
        if not self._algorithm.needs.recomputes:
            return rollouts["logprobs"]
        return self._engine.evaluate(rollouts.select(*updates.TRAINED), temperature)["logprobs"]

    @on_device
    def train(self, batch: Batch) -> UpdateResult:
        self.wait_until_written()
        return self._measured([self._engine.step(batch, EngineLoss(self._algorithm))])[0]

    @on_device
    def measure(self, batch: Batch) -> Measured:
        return Measured.of(self._engine, batch, EngineLoss(self._algorithm))

    @on_device
    def find_nonfinite(self, batch: Batch, names: tuple[str, ...]) -> Batch:
        """Return ``names`` and ``text`` of the rows with a non-finite value in a column or an output."""
        offending = updates.find_nonfinite_rows(batch, compute_outputs(self._engine, batch))
        texts = [self._engine.tokenizer.decode(batch.ragged("tokens")[row]) for row in offending]
        return batch.select(*names).take(offending).with_columns(text=texts)

    def encode(self, model: str, data: ExampleData, evaluates: bool, seed: int) -> Examples:
        """Tokenise examples, and hold some out if the run ``evaluates``. The model need not be loaded."""
        tokenizer = load_tokenizer(model)
        return load_examples(data, tokenizer, evaluates, seed, read_eos_ids(model, tokenizer))

    @trainer_invocation(blocking=False)
    def publish_weights(self) -> Ticket:
        """Send the current weights with the ticket that rank 0 returns. If the transport waits for its receivers, a
        thread sends them after this call; else the last two versions stay available."""
        with self._bare_turn():
            ticket = self._weights.offer(self._engine)
            if not waits_for_receivers(self._weights):
                self._published = self._weights.send(ticket, self._engine)
        if waits_for_receivers(self._weights):
            self._sending = sending = Future[WeightStamp | None]()

            def send() -> None:
                try:
                    use_device(self._runs_on[0])
                    with self._bare_turn():
                        sending.set_result(self._weights.send(ticket, self._engine))
                except BaseException as error:  # noqa: BLE001 - raised by published_stamp()
                    sending.set_exception(error)

            threading.Thread(target=send, daemon=True).start()
        return ticket

    def _finish(self) -> None:
        if self._sending is not None and not wait([self._sending], _SENT_S).done:
            raise EngineError("weights are still being sent")

    @trainer_invocation(target="RANK0")
    def published_stamp(self) -> WeightStamp | None:
        if self._sending is not None:
            self._published = self._sending.result()  # waits: as long as the transport's own timeout
            self._sending = None
        return self._published


class ScorerWorkload(ActorWorkload):
    """ACTOR: trains a reward model, whose head has no bias, since pairs do not determine one."""

    recipe_class = "ScorerWorkload"
    head: ClassVar[Head] = "token"
    head_bias: ClassVar[bool] = False


class CriticWorkload(TrainedWorkload):
    """CRITIC: a model with a head of one score, trained to predict the remaining reward."""

    recipe_class: ClassVar[str | None] = "CriticWorkload"
    guards_state = True
    head: ClassVar[Head] = "token"
    optimizer_key = "critic.optimizer"

    @classmethod
    def _trained(cls, config: Any) -> tuple[str, OptimizerConfig]:
        critic = config.get("critic") or {}
        optimizer = require(OptimizerConfig, critic.get("optimizer") or {}, "config.critic.optimizer")
        return critic.get("model") or config["model"], optimizer

    def init_model(
        self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, loss: ValueLoss, seed: int = 0
    ) -> None:
        self._loss = loss
        self._load(model, engine, optimizer, seed)

    @trainer_invocation(blocking=False)
    @on_device
    def values(self, rollouts: Batch) -> Batch:
        scores = self._engine.evaluate(shift_to_states(rollouts.select(*updates.TRAINED))).ragged("scores")
        return Batch({"values": shift_to_actions(scores)})

    @on_device
    def update(self, rollouts: Batch, rows: Batch, plan: updates.UpdatePlan) -> list[UpdateResult]:
        """Take the optimizer steps on this rank's share of a step's rows. Raises RowsDiffer as ACTOR does."""
        batch = shift_to_states(updates.join_columns(rollouts, rows))
        self.wait_until_written()
        return updates.run_updates(batch, plan, lambda part: self._engine.step(part, self._loss))
