"""The workloads of the ready recipes: one class for each role, each a thin hand on an engine.

They read no configuration: the trainer hands them what they need in ``init_model``.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.common.errors import DataError, EngineError, Problem, VerifierError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_prompt, load_sft
from dlrover.python.rl.engine.base import OptimizerConfig, SamplingParams, StepResult
from dlrover.python.rl.engine.torch.distributed import RankGroup
from dlrover.python.rl.engine.torch.rollout import TorchRolloutEngine
from dlrover.python.rl.engine.torch.train import TorchTrainEngine
from dlrover.python.rl.engine.weights import WeightSnapshot
from dlrover.python.rl.environment.deadline import DeadlineVerifier
from dlrover.python.rl.recipe.config import EngineConfig, RewardConfig, SFTData
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation

_LOG = get_logger(__name__)

TRAINED = ("tokens", "action_mask")


class ActorWorkload(BaseWorkload):
    """ACTOR: holds the policy that is trained. Several members are data-parallel ranks."""

    needs_own_process = True

    def init_model(self, model: str, engine: EngineConfig, optimizer: OptimizerConfig, algorithm: Algorithm) -> None:
        """Load the policy and meet the other ranks."""
        self._group = RankGroup.connect(self.rank, self.world_size, self.torch_master_addr, self.torch_master_port)
        self._algorithm = algorithm
        self._engine = TorchTrainEngine(
            model,
            optimizer,
            device=engine.device,
            max_tokens_per_microbatch=engine.max_tokens_per_microbatch,
            gradient_checkpointing=engine.gradient_checkpointing,
            group=self._group,
        )

    def update(self, rollouts: Batch, reference: Batch | None, rows: Batch, temperature: float) -> StepResult:
        """One optimizer step on this rank's share.

        Args:
            rollouts: what rollout members generated.
            reference: the reference's ``logprobs`` of the same rows, or None.
            rows: ``advantage`` and ``weight`` of the same rows.
            temperature: the one they were sampled at.
        """
        batch = rollouts.select(*TRAINED).with_columns(
            old_logprobs=rollouts["logprobs"], advantage=rows["advantage"], weight=rows["weight"]
        )
        if reference is not None:
            batch = batch.with_columns(ref_logprobs=reference["logprobs"])
        return self._engine.step(batch, self._algorithm.loss, temperature)

    def train(self, batch: Batch) -> StepResult:
        """One optimizer step on annotated rows with ``tokens`` and ``action_mask``."""
        return self._engine.step(batch, self._algorithm.loss)

    def encode(self, data: SFTData) -> tuple[Batch, int]:
        """Tokenise a file of examples; the batch, and how many rows were dropped."""
        return load_sft(data.train, self._engine.tokenizer, data.max_length, data.assistant)

    @trainer_invocation(blocking=False, target="RANK0")
    def publish_weights(self) -> WeightSnapshot:
        """The current weights, for rollout members to receive."""
        return self._engine.publish()

    def save(self, path: Path) -> None:
        """Write the policy in Hugging Face format (rank 0 does)."""
        self._engine.save(path)

    def close(self) -> None:
        """Leave the group of ranks."""
        if hasattr(self, "_group"):
            self._group.close()


class ReferenceWorkload(BaseWorkload):
    """REFERENCE: a frozen copy of the policy at its start."""

    def init_model(self, model: str, engine: EngineConfig) -> None:
        """Load the frozen policy."""
        self._engine = TorchTrainEngine(
            model, None, device=engine.device, max_tokens_per_microbatch=engine.max_tokens_per_microbatch
        )

    @trainer_invocation(blocking=False)
    def logprobs(self, rollouts: Batch, temperature: float) -> Batch:
        """``logprobs`` of the completions, for the actor's update."""
        logprobs: Batch = self._engine.logprobs(rollouts.select(*TRAINED), temperature)
        return logprobs


class RolloutWorkload(BaseWorkload):
    """ROLLOUT: generates completions. Each member serves a whole copy of the policy."""

    def init_model(self, model: str, engine: EngineConfig) -> None:
        """Load the policy; it serves nothing before the actor's weights have arrived."""
        self._engine = TorchRolloutEngine(model, device=engine.device, max_batch=engine.max_batch)

    def receive_weights(self, weights: WeightSnapshot) -> int:
        """Take over the actor's weights, verified; returns their version."""
        self._engine.receive(weights)
        return self._engine.version

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
    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete the prompts.

        Args:
            prompts: ``prompt_id``, and as objects ``prompt`` (text or messages), ``answer`` and ``extra_info``.
            sampling: how to draw.
            seed: what the samples depend on besides prompt and index.

        Returns:
            The engine's columns, and as objects ``completion`` (text), ``answer`` and ``extra_info``.
        """
        tokenizer = self._engine.tokenizer
        encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts.objects("prompt")]
        asked = Batch({"prompt_id": prompts["prompt_id"], "tokens": Ragged.from_rows(encoded, dtype=np.int64)})
        drawn: Batch = self._engine.generate(asked, sampling, seed)
        rows = np.repeat(np.arange(len(prompts)), sampling.samples_per_prompt).tolist()
        told = prompts.select("prompt", "answer", "extra_info").take(rows)
        return drawn.with_columns(completion=_texts(tokenizer, drawn), **told.columns)


def _texts(tokenizer: Any, drawn: Batch) -> list[str]:
    tokens, actions = drawn.ragged("tokens"), drawn.ragged("action_mask")
    completions = [row[mask] for row, mask in zip(tokens, actions, strict=True)]
    return [str(text) for text in tokenizer.batch_decode(completions, skip_special_tokens=True)]


class RewardWorkload(BaseWorkload):
    """REWARD: judges completions, in a process that can be killed."""

    def init_verifier(self, reward: RewardConfig) -> None:
        """Start the verifier's process."""
        self._verifier = DeadlineVerifier(reward.function, reward.timeout_s)

    def score(self, rollouts: Batch) -> Batch:
        """Judge completions.

        Returns:
            What the trainer needs to know of each row: ``prompt_id``, ``sample_index``, ``reward`` (float64, NaN where
            the verifier failed), ``error`` (why, or None), ``action_tokens``, ``token_count``, ``finished``,
            ``version``, and the texts.
        """
        told = rollouts.select("prompt_id", "sample_index", "finished", "version", "prompt", "completion", "answer")
        asked = zip(
            rollouts.objects("completion"), rollouts.objects("answer"), rollouts.objects("extra_info"), strict=True
        )
        judged = [self._judge(*row) for row in asked]
        actions = rollouts.ragged("action_mask")
        return told.with_columns(
            reward=np.array([reward for reward, _ in judged], dtype=np.float64),
            error=[error for _, error in judged],
            action_tokens=np.array([int(mask.sum()) for mask in actions], dtype=np.int64),
            token_count=actions.lengths,
        )

    def _judge(self, completion: str, answer: str | None, extra_info: dict[str, Any]) -> tuple[float, str | None]:
        try:
            return self._verifier(completion, answer, extra_info), None
        except VerifierError as error:
            why = str(error).splitlines()[0]
            _LOG.warning("a sample failed: %s", why)
            return float("nan"), why

    def close(self) -> None:
        """End the verifier's process."""
        if hasattr(self, "_verifier"):
            self._verifier.close()
