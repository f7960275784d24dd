"""ROLLOUT: draws completions from the policy."""

import numpy as np

from dlrover.python.rl.common.errors import (
    DataError,
    EngineError,
    Problem,
    ResultLost,
    WeightsLost,
    WeightSyncError,
)
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_prompt
from dlrover.python.rl.engine.base import (
    RolloutEngine,
    RolloutSettings,
    SamplingParams,
)
from dlrover.python.rl.engine.registry import ROLLOUT, engine_class
from dlrover.python.rl.engine.sync.base import Ticket
from dlrover.python.rl.engine.weights import WeightStamp
from dlrover.python.rl.recipe.config import EngineConfig
from dlrover.python.rl.recipe.device_turns import EngineWorkload, on_device
from dlrover.python.rl.recipe.members import device_of, use_threads, warming, weight_transport
from dlrover.python.rl.trainer.workload import trainer_invocation

_LOG = get_logger(__name__)


class RolloutWorkload(EngineWorkload):
    """ROLLOUT: generates completions. Each member serves a whole copy of the policy.

    It holds no state that a step depends on: each step begins by giving it the weights. Samples depend on those, the
    seed, the prompt's id and the sample's index.
    """

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model and generating with it need."""
        warming().warm_rollout()

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
        self._weights = weight_transport(self, device)
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
