"""ROLLOUT: draws completions from the policy."""

import numpy as np

from dlrover.python.rl.common.errors import DataError, EngineError, Problem, ResultLost, WeightsLost
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_prompt
from dlrover.python.rl.data.problems import PromptFaults
from dlrover.python.rl.engine.base import (
    RolloutEngine,
    RolloutSettings,
    SamplingParams,
)
from dlrover.python.rl.engine.registry import ROLLOUT, engine_class
from dlrover.python.rl.engine.sync.base import Ticket
from dlrover.python.rl.engine.weights import WeightStamp
from dlrover.python.rl.environment.base import Environment
from dlrover.python.rl.environment.functions import load_environment
from dlrover.python.rl.environment.guard import Guard
from dlrover.python.rl.environment.isolated import IsolatedEnvironment
from dlrover.python.rl.recipe.config import EngineConfig, RolloutConfig
from dlrover.python.rl.recipe.device_turns import EngineWorkload, on_device
from dlrover.python.rl.recipe.event_loops import EventLoop, LoopBeside, LoopHere
from dlrover.python.rl.recipe.members import device_of, use_threads, warming, weight_transport
from dlrover.python.rl.recipe.rolling import Limits, Roller
from dlrover.python.rl.recipe.sample_rows import told_of
from dlrover.python.rl.trainer.workload import trainer_invocation

_LOG = get_logger(__name__)


_ONE_COMPLETION = RolloutConfig()


class RolloutWorkload(EngineWorkload):
    """ROLLOUT: generates completions. Each member serves a whole copy of the policy.

    It holds no state that a step depends on: each step begins by giving it the weights, and names the groups it shall
    have. Samples depend on those, the seed, the prompt's id and the sample's index.

    ::

        receive_weights -> draw (wanted groups) -> [begun: reset, generate, step, generate, ..., close] -> take
                            '----- until enough of them are complete -----'
    """

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model and generating with it need."""
        warming().warm_rollout()

    def init_model(self, model: str, engine: EngineConfig, rollout: RolloutConfig = _ONE_COMPLETION) -> str:
        """Load the policy, which serves nothing before the actor's weights have arrived, and the environment.

        Args:
            model: folder or hub name.
            engine: how it runs.
            rollout: names the environment; with ``max_staleness`` samples go on between calls.

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
            if rollout.max_staleness and self._leases:
                raise EngineError("a rollout on a shared device cannot run ahead: rollout.max_staleness has to be 0")
            self._engine: RolloutEngine = engine_class(ROLLOUT, engine.rollout)(model, settings, memory)
        self._weights = weight_transport(self, device)
        guard = Guard(_environment(rollout), rollout.env_timeout_s) if rollout.env_path else None
        self._loop: EventLoop = LoopBeside(engine.threads) if rollout.max_staleness else LoopHere()
        self._roller = Roller(self._engine, guard, Limits(engine.max_batch, rollout.max_turns))
        if self._loop.beside:
            self._loop.run(self._roller.go_on())
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
        self._loop.run(self._roller.receive(weights))
        return weights.stamp

    def check_prompts(
        self, prompts: Batch, sampling: SamplingParams, max_prompt_tokens: int | None = None
    ) -> PromptFaults:
        """What keeps this model from completing some of the prompts.

        Args:
            prompts: as objects ``prompt`` and ``place`` (what a problem calls the row).
            sampling: how they will be completed.
            max_prompt_tokens: longer ones are too long whatever the model can do.
        """
        found = PromptFaults([], [])
        for place, prompt in zip(prompts.objects("place"), prompts.objects("prompt"), strict=True):
            if not prompt and self._roller.guard is not None:
                continue  # The environment says what it begins with.
            try:
                tokens = encode_prompt(self._engine.tokenizer, prompt)
            except DataError as error:
                found.wrong.extend(Problem(place, item.what) for item in error.problems)
                continue
            if max_prompt_tokens is not None and len(tokens) > max_prompt_tokens:
                found.too_long.append(Problem(place, f"{len(tokens)} tokens, {max_prompt_tokens} at most"))
                continue
            try:
                self._engine.check(Ragged.from_rows([tokens], dtype=np.int64), sampling)
            except EngineError as error:
                what = f"{len(tokens)} tokens, and up to {sampling.max_new_tokens} new ones"
                found.wrong.append(Problem(place, f"{what}: {error}"))
        return found

    @on_device
    def draw(self, wanted: Batch, sampling: SamplingParams, seed: int, enough: int, patience_s: float) -> Batch:
        """Have just these groups under way, and wait.

        A group that is new is begun as soon as there is room, in the order given; one that is known goes on, or stays
        complete; what is not listed any more is given up.

        Args:
            wanted: all groups that this member shall have: ``prompt_id``, ``attempt`` and ``begun_at`` (int64; the step
                that asked for it), which together name it, and as objects ``prompt``, ``answer`` and ``extra_info``.
                May be empty.
            sampling: how to draw new ones.
            seed: the job's; samples depend on it, ``begun_at``, ``attempt``, ``prompt_id`` and their index.
            enough: how many complete groups are worth coming back for, if not all of them are.
            patience_s: seconds after which to come back in any case.

        Returns:
            A row for each of ``wanted``: ``prompt_id``, ``attempt``, ``begun_at``, ``begun``, ``complete`` (bool) and
            ``oldest`` (int64: the oldest weights that have drawn a token of it, -1 if none have).

        Raises:
            WeightSyncError: the actor's weights have not arrived, or not whole.
            EngineError: a prompt cannot be completed, or the engine cannot draw.
        """
        return self._loop.run(self._roller.draw(wanted, sampling, seed, enough, patience_s))

    @trainer_invocation(blocking=False)
    @on_device
    def take(self, groups: Batch) -> Batch:
        """The samples of these groups, of those that :meth:`draw` was last told of; waits until they are complete.

        Args:
            groups: the same columns.

        Returns:
            Rows in the order of ``groups``, samples by index, sequences of a sample adjacent; see
            :func:`~dlrover.python.rl.recipe.sample_rows.as_batch`.
        """
        return self._loop.run(self._roller.take(groups))

    def told(self, rollouts: Batch) -> Batch:
        """What the trainer needs to know of rows that :meth:`take` or :meth:`generate` gave; see
        :func:`~dlrover.python.rl.recipe.sample_rows.told_of`. Rewards are among it where an environment gives them."""
        return told_of(rollouts)

    @trainer_invocation(blocking=False)
    @on_device
    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete the prompts, before all that is under way.

        Args:
            prompts: ``prompt_id``, and as objects ``prompt`` (text or messages), ``answer`` and ``extra_info``.
            sampling: how to draw.
            seed: what the samples depend on besides prompt and index: the job's, the step and, if any, the attempt.

        Returns:
            Rows in the order of ``prompts``; see :func:`~dlrover.python.rl.recipe.sample_rows.as_batch`.

        Raises:
            WeightSyncError: the actor's weights have not arrived, or not whole.
            EngineError: a prompt cannot be completed, or the engine cannot draw.
        """
        return self._loop.run(self._roller.generate(prompts, sampling, seed))

    def close(self) -> None:
        """End all samples, the environment and the engine."""
        if hasattr(self, "_roller"):
            try:
                self._loop.run(self._roller.close())
            finally:
                self._loop.close()
        super().close()


def _environment(rollout: RolloutConfig) -> Environment:
    assert rollout.env_path is not None, "asked for"
    if rollout.env_isolated:
        return IsolatedEnvironment(rollout.env_path, rollout.env_options)
    return load_environment(rollout.env_path, rollout.env_options)
