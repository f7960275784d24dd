"""The workloads of the ready recipes: one class for each role, each a thin hand on an engine.

They read no configuration: the trainer hands them what they need in ``init_model``.
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.algorithm.base import Algorithm, EngineLoss
from dlrover.python.rl.common.errors import (
    DataError,
    EngineError,
    Problem,
    ResultLost,
    VerifierError,
    WeightsLost,
    WeightSyncError,
)
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_prompt
from dlrover.python.rl.data.examples import Counts, Encoding, load_sft
from dlrover.python.rl.engine.base import (
    OptimizerConfig,
    Rendezvous,
    RolloutEngine,
    RolloutSettings,
    SamplingParams,
    StepResult,
    TrainEngine,
    TrainSettings,
)
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.engine.registry import ROLLOUT, TRAIN, engine_class
from dlrover.python.rl.engine.sync.base import SyncSettings, Ticket
from dlrover.python.rl.engine.sync.pull import PullTransport
from dlrover.python.rl.engine.torch.randomness import random_state, seed_random, set_random_state
from dlrover.python.rl.engine.weights import WeightStamp
from dlrover.python.rl.environment.deadline import DeadlineVerifier
from dlrover.python.rl.environment.pool import VerifierPool
from dlrover.python.rl.environment.verifiers import exact
from dlrover.python.rl.recipe.config import EngineConfig, RewardConfig, SFTData
from dlrover.python.rl.recipe.device_turns import EngineWorkload, on_device
from dlrover.python.rl.recipe.disk import patiently
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation

_LOG = get_logger(__name__)

TRAINED = ("tokens", "action_mask")

_PATIENCE_S = 5.0
"""How long a receiver of weights stands by a sender that is silent; it asks the role again then."""


class ActorWorkload(EngineWorkload):
    """ACTOR: holds the policy that is trained. Several members divide the rows, and the model by ``engine.parallel``.

    Every rank saves its own state. Where each has a copy of the model, which is the default where the engine can, that
    is the whole, the same on all of them: 12 bytes a parameter and rank, written side by side. So a rank comes back
    from its own file whatever became of the others, without a collective in the middle of a recovery that another loss
    could break.
    """

    needs_own_process = True

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model, an update and a commit need."""
        _warming().warm_actor()

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
        settings = replace(train_settings(engine, device, _sizes(engine, self.world_size)), lora=engine.lora)
        made = engine_class(TRAIN, engine.train)
        with self._first_turn(device) as memory:
            self._engine: TrainEngine = made(model, optimizer, settings, meeting, memory)
        self._weights = _weight_transport(self, device, leads=self.rank == 0)
        seed_random(seed, self.role, self.rank)
        return type(self._engine).__name__

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        """Members that have rows of their own: without those that split a matrix, a sequence or the layers."""
        engine = require(EngineConfig, config.get("engine") or {}, "config.engine")
        return world_size // (engine.parallel or ParallelSizes()).replica_size

    @on_device
    def update(self, rollouts: Batch, reference: Batch | None, rows: Batch, temperature: float) -> StepResult:
        """One optimizer step on this rank's share.

        Args:
            rollouts: what rollout members generated.
            reference: the reference's ``logprobs`` of the same rows, or None.
            rows: what the algorithm adds to the same rows.
            temperature: the one they were sampled at.
        """
        batch = rollouts.select(*TRAINED).with_columns(old_logprobs=rollouts["logprobs"], **rows.columns)
        if reference is not None:
            batch = batch.with_columns(ref_logprobs=reference["logprobs"])
        return self._engine.step(batch, EngineLoss(self._algorithm), temperature)

    @on_device
    def train(self, batch: Batch) -> StepResult:
        """One optimizer step on annotated rows with ``tokens`` and ``action_mask``."""
        return self._engine.step(batch, EngineLoss(self._algorithm))

    def encode(self, data: SFTData) -> tuple[Batch, Counts]:
        """Tokenise the examples; the batch, and what has become of the rows."""
        encoding = Encoding(data.max_length, data.over_long, data.assistant, data.mask_prompt, data.keys)
        examples, counts = load_sft(data.train, self._engine.tokenizer, encoding)
        return examples.select(*TRAINED), counts

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


class ReferenceWorkload(EngineWorkload):
    """REFERENCE: a frozen copy of the policy at its start."""

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model and evaluating it need."""
        _warming().warm_reference()

    def init_model(self, model: str, engine: EngineConfig) -> None:
        """Load the frozen policy."""
        use_threads(engine.threads)
        device = device_of(self, engine)
        settings, made = train_settings(engine, device, ParallelSizes()), engine_class(TRAIN, engine.train)
        with self._first_turn(device) as memory:
            self._engine: TrainEngine = made(model, None, settings, Rendezvous(), memory)

    @trainer_invocation(blocking=False)
    @on_device
    def logprobs(self, rollouts: Batch, temperature: float) -> Batch:
        """``logprobs`` of the completions, for the actor's update."""
        return self._engine.evaluate(rollouts.select(*TRAINED), temperature)


class RolloutWorkload(EngineWorkload):
    """ROLLOUT: generates completions. Each member serves a whole copy of the policy.

    It holds no state that a step depends on: each step begins by giving it the weights. Samples depend on those, the
    seed, the prompt's id and the sample's index.
    """

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model and generating with it need."""
        _warming().warm_rollout()

    def init_model(self, model: str, engine: EngineConfig) -> str:
        """Load the policy; it serves nothing before the actor's weights have arrived.

        Returns:
            The class of the engine that runs.
        """
        use_threads(engine.threads)
        device = device_of(self, engine)
        settings = RolloutSettings(
            device,
            engine.precision,
            engine.max_batch,
            engine.rollout_tensor_parallel_size,
            engine.gpu_memory_utilization,
            engine.rollout_options,
        )
        with self._first_turn(device) as memory:
            self._engine: RolloutEngine = engine_class(ROLLOUT, engine.rollout)(model, settings, memory)
        self._weights = _weight_transport(self, device)
        return type(self._engine).__name__

    def receive_weights(self, ticket: Ticket) -> WeightStamp:
        """Fetch the actor's weights and take them over, verified; returns which they are.

        They may be older than those served: a run that has gone back to a checkpoint redoes a step. Nothing stale can
        get here otherwise, since calls of an earlier trainer are refused; and the trainer compares what it gets back.

        Raises:
            ResultLost: the actor does not have them any more: it is another process now. It is asked for a new ticket.
            WeightSyncError: they are not those that were sent; the old ones keep serving.
        """
        try:
            weights = self._weights.receive(ticket)
        except WeightsLost as error:
            raise ResultLost(str(error), role=self.role, rank=self.rank, method="receive_weights") from error
        if weights.version < self._engine.version:
            _LOG.warning("weights go back from version %d to %d", self._engine.version, weights.version)
        self._engine.receive(weights, rewind=True)
        return weights.stamp

    def check_prompts(self, prompts: Batch, sampling: SamplingParams) -> list[Problem]:
        """What keeps this model from completing each of the prompts; empty when nothing does.

        Args:
            prompts: as objects ``prompt`` and ``place`` (what a problem calls the row).
            sampling: how they will be completed.
        """
        problems = []
        for place, prompt in zip(prompts.objects("place"), prompts.objects("prompt"), strict=True):
            try:
                tokens = encode_prompt(self._engine.tokenizer, prompt)
            except DataError as error:
                problems += [Problem(place, item.what) for item in error.problems]
                continue
            try:
                self._engine.check(Ragged.from_rows([tokens], dtype=np.int64), sampling)
            except EngineError as error:
                what = f"{len(tokens)} tokens, and up to {sampling.max_new_tokens} new ones"
                problems.append(Problem(place, f"{what}: {error}"))
        return problems

    @trainer_invocation(blocking=False)
    @on_device
    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete the prompts.

        Args:
            prompts: ``prompt_id``, and as objects ``prompt`` (text or messages), ``answer`` and ``extra_info``.
            sampling: how to draw.
            seed: what the samples depend on besides prompt and index.

        Returns:
            The engine's columns, and as objects ``completion`` (text), ``answer`` and ``extra_info``.

        Raises:
            WeightSyncError: the actor's weights have not arrived, or not whole.
        """
        if self._engine.version < 0:
            raise WeightSyncError("no weights yet: this rollout has not received the actor's, and serves no others")
        encoded = [encode_prompt(self._engine.tokenizer, prompt) for prompt in prompts.objects("prompt")]
        asked = Batch({"prompt_id": prompts["prompt_id"], "tokens": Ragged.from_rows(encoded, dtype=np.int64)})
        drawn = self._engine.generate(asked, sampling, seed)
        rows = np.repeat(np.arange(len(prompts)), sampling.samples_per_prompt).tolist()
        told = prompts.select("prompt", "answer", "extra_info").take(rows)
        return drawn.with_columns(**told.columns)


class RewardWorkload(BaseWorkload):
    """REWARD: judges completions, in processes that can be killed."""

    @classmethod
    def warm_up(cls) -> None:
        """Start a verifier's process and end it: its interpreter and libraries are in memory then."""
        DeadlineVerifier(exact, timeout_s=5.0).close()

    def init_verifier(self, reward: RewardConfig) -> None:
        """Start the verifiers' processes."""
        start = partial(DeadlineVerifier, reward.function, reward.timeout_s, memory_mb=reward.memory_mb)
        self._verifiers = VerifierPool(reward.workers, start)

    def score(self, rollouts: Batch) -> Batch:
        """Judge completions.

        Returns:
            What the trainer needs to know of each row: ``prompt_id``, ``sample_index``, ``reward`` (float64, NaN where
            the verifier failed), ``error`` (why, or None), ``action_tokens``, ``token_count``, ``finished``,
            ``version``, and the texts.
        """
        told = rollouts.select("prompt_id", "sample_index", "finished", "version", "prompt", "completion", "answer")
        columns = [rollouts.objects(name) for name in ("completion", "answer", "extra_info")]
        judged = self._verifiers.judge(zip(*columns, strict=True))
        errors = [_reason(reward) if isinstance(reward, VerifierError) else None for reward in judged]
        rewards = [float("nan") if isinstance(reward, VerifierError) else reward for reward in judged]
        actions = rollouts.ragged("action_mask")
        return told.with_columns(
            reward=np.array(rewards, dtype=np.float64),
            error=errors,
            action_tokens=np.array([int(mask.sum()) for mask in actions], dtype=np.int64),
            token_count=actions.lengths,
        )

    def close(self) -> None:
        """End the verifiers' processes."""
        if hasattr(self, "_verifiers"):
            self._verifiers.close()


def _reason(error: VerifierError) -> str:
    why = str(error).splitlines()[0]
    _LOG.warning("a sample failed: %s", why)
    return why


def _warming() -> Any:
    """Not imported above: who does not wait for a death needs none of the classes it loads."""
    return importlib.import_module("dlrover.python.rl.recipe.warming")


def device_of(workload: BaseWorkload, engine: EngineConfig) -> str:
    """The torch device of a member: where the job says ``cuda``, the first one reserved for this member, or that of its
    place on the node."""
    if engine.device != "cuda":
        return engine.device
    return f"cuda:{workload.devices[0] if workload.devices else workload.local_rank}"


def _weight_transport(member: BaseWorkload, device: str, leads: bool = False) -> PullTransport:
    """How weights get from the actor to the rollouts: each fetches them, from its own node's memory or through TCP."""
    settings = SyncSettings(f"{member.role}[{member.rank}]", leads=leads, patience_s=_PATIENCE_S, device=device)
    return PullTransport(settings, member.torch_master_addr or "127.0.0.1")


def train_settings(engine: EngineConfig, device: str, parallel: ParallelSizes) -> TrainSettings:
    """How a train engine runs by a job's ``engine``."""
    return TrainSettings(
        device,
        engine.precision,
        max_tokens_per_microbatch=engine.max_tokens_per_microbatch,
        gradient_checkpointing=engine.gradient_checkpointing,
        parallel=parallel,
        backend=engine.train_options,
    )


def _sizes(engine: EngineConfig, members: int) -> ParallelSizes:
    """Copies of the whole model by default, where they can be had: none needs another one to come back."""
    return engine.parallel or ParallelSizes(ddp_size=members if engine.train == "fsdp2" else 1)


def use_threads(count: int | None) -> None:
    """Compute with so many CPU threads; None changes nothing."""
    if count is not None:
        torch.set_num_threads(count)
