# SPDX-License-Identifier: Apache-2.0
"""ROLLOUT: generates completions with the policy."""

import asyncio
import math
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dlrover.python.rl.common.disk_space import retry_io
from dlrover.python.rl.common.errors import ConfigError, DataError, EngineError, ResultLost, WeightsLost
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import run_of
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import NO_KWARGS
from dlrover.python.rl.data.prompts import find_prompt_faults
from dlrover.python.rl.engine.api.base import BaseRolloutEngine, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class, engine_info
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.engine.model.loading import count_known_ids
from dlrover.python.rl.engine.model.ranks import use_device
from dlrover.python.rl.engine.weight_sync.base import Ticket, waits_for_receivers
from dlrover.python.rl.environment.core.agents import AgentEnvironment
from dlrover.python.rl.environment.core.base import Environment
from dlrover.python.rl.environment.core.functions import load_environment
from dlrover.python.rl.environment.core.turns import Guard
from dlrover.python.rl.environment.sandbox.environment_process import IsolatedEnvironment
from dlrover.python.rl.recipe.base.config import AgentConfig, EngineConfig, RolloutConfig
from dlrover.python.rl.recipe.base.engine_workload import EngineWorkload, device_of, on_device, use_threads
from dlrover.python.rl.recipe.reporting import sample_file
from dlrover.python.rl.recipe.rollout.agents import AgentGuard
from dlrover.python.rl.recipe.rollout.episodes import count_unknown_ids, summarize_rows
from dlrover.python.rl.recipe.rollout.kept_samples import KeptSamples
from dlrover.python.rl.recipe.rollout.scheduler import RolloutScheduler
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_root
from dlrover.python.rl.trainer.workload import trainer_invocation

T = TypeVar("T")

_LOG = get_logger(__name__)

_ONE_COMPLETION, _NO_AGENT = RolloutConfig(), AgentConfig()
_MOST_TOKENS = 1 << 16  # whose texts a worker remembers
_OF_TOKENS = ("action_mask", "tokens", "logprobs")  # columns of rows whose tokens are written
_JOIN_S, _CANCEL_S = 10.0, 1.0


class RolloutWorkload(EngineWorkload):
    """ROLLOUT: generates completions; each worker serves a whole copy of the policy.

    No step depends on its state: each step first sends it the weights and its list of groups. Samples depend on these,
    the seed, the prompt's id and the sample's index."""

    recipe_class = "RolloutWorkload"
    warmup, lingers = "warm_rollout", True

    def _computes_here(self, engine: EngineConfig) -> bool:
        name = engine.resolve(torch.cuda.is_available()).rollout
        return not engine_info(ROLLOUT_ENGINES, name).package

    def init_model(
        self,
        model: str,
        engine: EngineConfig,
        rollout: RolloutConfig = _ONE_COMPLETION,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        agent: AgentConfig = _NO_AGENT,
    ) -> str:
        """Load the policy and its environment or agent; returns the engine's class. Generation needs the actor's
        weights."""
        engine = engine.resolve(torch.cuda.is_available())
        use_threads(engine.threads)
        device = device_of(self, engine)
        settings = RolloutSettings(
            device,
            engine.dtype,
            engine.max_batch,
            engine.rollout_tensor_parallel_size,
            engine.gpu_memory_utilization,
            engine.rollout_options,
            self.devices if engine.device == "cuda" else (),  # a numbered device is not reserved
            engine.mask_unknown_ids,
        )
        make = engine_class(ROLLOUT_ENGINES, engine.rollout)
        info = engine_info(ROLLOUT_ENGINES, engine.rollout)
        self._adds_adapters = info.adds_adapters
        scores = bool(rollout.env_path or agent.agent)
        self._is_deterministic = torch.device(device).type in info.deterministic_on and not scores
        own = device if self._computes_here(engine) else "cpu"
        use_device(own)
        with self._first_turn(device, engine) as memory:
            if rollout.max_staleness and self._device_locks:
                raise EngineError("a rollout on a shared device cannot run ahead: rollout.max_staleness has to be 0")
            self._engine: BaseRolloutEngine = make(model, settings, memory)
        # If the engine may sample ids without a text, they are counted.
        self._known_ids = None if engine.mask_unknown_ids else count_known_ids(self._engine.tokenizer)
        self._weights = self._make_weight_transport(engine, device)
        guard = self._make_guard(rollout, agent)
        self._loop: InlineLoop | ThreadLoop = ThreadLoop(engine.threads, own) if rollout.max_staleness else InlineLoop()
        copies = None
        if rollout.max_staleness and "/" in self.name:
            copies = KeptSamples(memory_root(*run_of(self.name)) / "samples" / self.role.lower(), self.rank)
        limits = engine.max_batch, rollout.max_turns
        self._scheduler = RolloutScheduler(self._engine, guard, *limits, template_kwargs, copies)
        if self._loop.runs_between_calls:
            self._loop.run(self._scheduler.start())
        return type(self._engine).__name__

    def _make_guard(self, rollout: RolloutConfig, agent: AgentConfig) -> Guard | None:
        failure_reward = rollout.env_failure_reward
        if agent.agent is not None:
            from dlrover.python.rl.recipe.rollout.endpoint import AgentEndpoint  # most jobs need no HTTP server

            where = f"{AgentEnvironment.__module__}:{AgentEnvironment.__name__}"
            runs = IsolatedEnvironment(where, {"agent": agent.agent, "options": dict(agent.options)})
            self._endpoint = AgentEndpoint(agent.host)
            return AgentGuard(runs, self._endpoint, agent, failure_reward)
        if rollout.env_path is None:
            return None
        open_environment = IsolatedEnvironment if rollout.env_isolated else load_environment
        environment: Environment = open_environment(rollout.env_path, rollout.env_options)
        return Guard(environment, rollout.env_timeout_s, None, rollout.env_missing_state, failure_reward)

    def receive_weights(self, ticket: Ticket) -> WeightStamp:
        """Fetch, verify and serve the actor's weights, which may be older if a run repeats a step. Raises ResultLost if
        a replaced actor no longer has them, WeightSyncError if they differ from the sent ones."""
        # The device compares weights and adds adapters, unless a sender that waits for this receiver has locked it.
        with nullcontext() if waits_for_receivers(self._weights) else self._bare_turn():
            try:
                weights = self._weights.receive(ticket)
            except WeightsLost as error:
                raise ResultLost(str(error), role=self.role, rank=self.rank, method="receive_weights") from error
            stamp = weights.stamp
            weights = weights if self._adds_adapters else weights.merged()
            if weights.version < self._engine.version:
                _LOG.warning("weights go back from version %d to %d", self._engine.version, weights.version)
            self._loop.run(self._scheduler.receive(weights))
        return stamp

    def check_prompts(
        self, prompts: Batch, sampling: SamplingParams, max_prompt_tokens: int | None = None
    ) -> tuple[list[ConfigError], list[ConfigError]]:
        """Return errors of prompts that this model cannot complete, and of prompts with more than
        ``max_prompt_tokens``; rows have ``place``, their name, ``prompt`` and ``extra_info``."""

        def check(tokens: list[int]) -> None:
            self._engine.check(Ragged.from_rows([tokens], dtype=np.int64), sampling)

        rows = zip(*(prompts.objects(name) for name in ("place", "prompt", "extra_info")), strict=True)
        has_states, arguments = self._scheduler.guard is not None, self._scheduler.arguments_of_template
        written = ((*row[:2], arguments(row[2])) for row in rows if row[1] or not has_states)
        return find_prompt_faults(self._engine.tokenizer, written, max_prompt_tokens, check)

    @on_device
    def sample(self, wanted: Batch, sampling: SamplingParams, seed: int, enough: int, patience_s: float) -> Batch:
        """Generate exactly the wanted groups, and wait until ``enough`` are complete, or all, or for ``patience_s``.

        New groups start in this order as capacity permits; unlisted ones are cancelled. ``wanted`` has ``prompt_id``,
        ``retry`` and ``created_step`` (int64; the step that requested the group), which together identify it, and the
        objects ``prompt``, ``answer`` and ``extra_info``. Samples depend on ``seed``, these numbers and their index.

        Returns the status of each group: the three numbers, ``started``, ``complete`` (bool) and ``min_version``
        (int64: lowest weight version of its tokens, -1 for none). Raises WeightSyncError without weights, EngineError
        if a prompt cannot be completed or the engine cannot generate."""
        if self._device_locks:  # the step needs all groups, and they take one turn of the device
            enough, patience_s = len(wanted), math.inf
        return self._loop.run(self._scheduler.sample(wanted, sampling, seed, enough, patience_s))

    @trainer_invocation(blocking=False)
    def fetch(self, groups: Batch) -> Batch:
        """Wait for some groups of the last :meth:`sample` and return their rows, in this order."""
        with nullcontext() if self._scheduler.are_complete(groups) else self._turn():
            rollouts = self._loop.run(self._scheduler.fetch(groups))
            return rollouts if self._known_ids is None else count_unknown_ids(rollouts, self._known_ids)

    def summarize(self, rollouts: Batch) -> Batch:
        """Return the trainer's numbers of the rows, with an environment's rewards."""
        return summarize_rows(rollouts)

    @trainer_invocation(blocking=False)
    def texts(self, rollouts: Batch) -> Batch:
        """Return ``prompt``, ``completion``, ``answer`` and ``digest`` of the rows."""
        return rollouts.select(*sample_file.TEXTS, *(("digest",) if "digest" in rollouts else ()))

    @trainer_invocation(target="RANK0")
    def cut_samples(self, file: Path, step: int, expected: int | None) -> int:
        """Remove the lines of ``step`` and later steps, expected from byte ``expected`` on; returns the size."""
        _require_file(file)
        return retry_io(lambda: sample_file.cut_at_step(file, step, expected), file)

    @trainer_invocation(target="RANK0")
    def write_samples(self, packed: bytes, rollouts: Sequence[Batch]) -> sample_file.Written:
        """Write the lines of a step; the earlier lines of it and of later steps are superseded. ``packed`` is a
        :class:`~dlrover.python.rl.recipe.reporting.sample_file.WriteRequest`."""
        file, step, expected, places, numbers, excerpt = sample_file.WriteRequest.unpack(packed)
        detailed = [places[row] for row in sample_file.find_detailed(numbers)]
        tokens = self.token_columns(_take_tokens(rollouts, detailed)) if detailed else None
        texts = Batch.concat([*map(self.texts, rollouts)]).take(places)
        rows = sample_file.format_rows(numbers, texts, tokens)
        return sample_file.write_step(file, step, rows, excerpt, self.cut_samples(file, step, expected))

    @trainer_invocation(target="RANK0")
    def write_held_out(self, file: Path, step: int, numbers: Batch, texts: Batch) -> None:
        """Replace the content of the file. Raises as :meth:`write_samples`."""
        _require_file(file)
        sample_file.write_evaluation(file, step, sample_file.format_rows(numbers, texts))

    @cached_property
    def _text_of_token(self) -> Callable[[int], str]:
        decode = self._engine.tokenizer.decode
        return lru_cache(_MOST_TOKENS)(lambda token: decode([token]))

    @trainer_invocation(target="RANK0", blocking=False)
    def token_columns(self, rollouts: Batch) -> Batch:
        """Return the completions' tokens, one list a row: ``tokens`` (texts), ``token_logprobs`` (when sampled), and
        ``action_mask`` of the whole row."""
        masks, tokens, logprobs = (rollouts[name] for name in _OF_TOKENS)
        decode = self._text_of_token
        return Batch(
            {
                "tokens": [[*map(decode, row[mask].tolist())] for row, mask in zip(tokens, masks, strict=True)],
                "token_logprobs": [row[mask].tolist() for row, mask in zip(logprobs, masks, strict=True)],
                "action_mask": [mask.tolist() for mask in masks],
            }
        )

    @trainer_invocation(blocking=False)
    @on_device
    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete prompts before all running groups; see
        :func:`~dlrover.python.rl.recipe.rollout.episodes.make_batch`.

        ``prompts`` has ``prompt_id`` and the objects ``prompt`` (text or messages), ``answer`` and ``extra_info``;
        ``seed`` is the job's seed, the step and, if any, the retry. Raises EngineError if a prompt cannot be completed
        or the engine cannot generate."""
        rollouts = self._loop.run(self._scheduler.generate(prompts, sampling, seed))
        return rollouts if self._known_ids is None else count_unknown_ids(rollouts, self._known_ids)

    def close(self) -> None:
        if hasattr(self, "_scheduler"):
            try:
                self._loop.run(self._scheduler.close())
            finally:
                self._loop.close()
        if hasattr(self, "_endpoint"):
            self._endpoint.close()
        super().close()


def _take_tokens(parts: Sequence[Batch], rows: Sequence[int]) -> Batch:
    """Return the columns for :meth:`RolloutWorkload.token_columns` of these rows, without joining all parts."""
    joined = [(part, row) for part in parts for row in range(len(part))]
    wanted = [joined[row] for row in rows]
    return Batch({name: [part[name][row] for part, row in wanted] for name in _OF_TOKENS})


def _require_file(file: Path) -> None:
    if not file.is_file():
        message = f"{file} is not on {socket.gethostname()}, the node of a rollout: all nodes need to see job_dir"
        raise DataError([ConfigError("job_dir", message)])


class InlineLoop:
    """Runs in the caller's thread, within calls only. Unfinished tasks continue in the next call."""

    runs_between_calls = False

    def __init__(self) -> None:
        self._loop = _PausableLoop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(coroutine)
        pool = ThreadPoolExecutor(1, "rollouts")  # A notebook's cell has a running loop; a thread has one at most.
        try:
            return pool.submit(self._loop.run_until_complete, coroutine).result()  # waits: the trainer bounds the call
        finally:
            pool.shutdown(wait=False)

    def close(self) -> None:
        self.run(_cancel_all())
        self._loop.close()


class ThreadLoop:
    """Runs in a background thread, also between calls, with its own ``threads`` of torch and current ``device``."""

    runs_between_calls = True

    def __init__(self, threads: int | None = None, device: str = "cpu") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(threads, device), name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()  # waits: the trainer bounds the call

    def close(self) -> None:
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _serve(self, threads: int | None, device: str) -> None:
        use_threads(threads)
        use_device(device)
        self._loop.run_forever()


class _PausableLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stops between calls, so that no timeout expires there."""

    def __init__(self) -> None:
        self._paused_s = 0.0
        self._paused_at: float | None = None
        super().__init__()

    def time(self) -> float:
        return (super().time() if self._paused_at is None else self._paused_at) - self._paused_s

    def run_forever(self) -> None:
        if self._paused_at is not None:
            self._paused_s += super().time() - self._paused_at
            self._paused_at = None
        try:
            super().run_forever()
        finally:
            self._paused_at = super().time()

    def __del__(self) -> None:  # no ResourceWarning for a workload that was not closed
        if not self.is_closed():
            self.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_S)
