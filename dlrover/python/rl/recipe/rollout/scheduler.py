# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a rollout worker, which starts its groups and advances the running ones."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import DataError, EngineError, WeightSyncError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.conversation import NO_KWARGS, arguments_of_template, encode_prompt, prompt_text
from dlrover.python.rl.engine.api.base import BaseRolloutEngine, SamplingParams
from dlrover.python.rl.engine.api.rollout_server import RolloutServer, Wakeup
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.environment.core.turns import Guard
from dlrover.python.rl.recipe.rollout.agents import AgentGuard, AgentRunner
from dlrover.python.rl.recipe.rollout.episodes import EpisodeRunner, Group, GroupKey, Sample, make_batch
from dlrover.python.rl.recipe.rollout.kept_samples import KeptSamples

_LOG = get_logger(__name__)

_CLOSING_S = 5.0  # time for episodes to close when the worker ends
_PROMPT_COLUMNS = ("prompt", "answer", "extra_info")


class RolloutScheduler:
    """Generates groups of samples of at most ``max_turns`` actions with an engine without other users; without
    ``guard`` a sample is one completion. It starts groups while fewer than ``max_generating`` samples need the engine.

    ::

        wanted -> queue --capacity--> samples: reset -> submit -> step -> submit -> ... -> close -> complete
                                                  |       ^
                                                  v       |
        advance, while there are requests ----> engine ---'

    Every method is called in the samples' event loop. Before :meth:`start` samples advance only in ``_run_until``."""

    def __init__(
        self,
        engine: BaseRolloutEngine,
        guard: Guard | None,
        max_generating: int,
        max_turns: int = 1,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        copies: KeptSamples | None = None,
    ) -> None:
        self._copies = copies
        self.engine, self.guard = engine, guard
        declared = guard.traits.chat_template_kwargs if guard is not None else NO_KWARGS
        self._template_kwargs = {**declared, **template_kwargs}
        self._max_generating, self._wakeup = max_generating, Wakeup()
        self._server = RolloutServer(engine, self._wakeup)
        arguments = max_turns, self.arguments_of_template
        self._runner = EpisodeRunner(self._server, guard, *arguments)
        if isinstance(guard, AgentGuard):
            self._runner = AgentRunner(self._server, guard, *arguments, copies)
        self._groups: dict[GroupKey, Group] = {}
        self._queue: deque[Group] = deque()
        self._cancelled: set[asyncio.Task[None]] = set()
        self._driver: asyncio.Task[None] | None = None
        self._sampling: tuple[SamplingParams, int] | None = None
        self._stamps: dict[int, WeightStamp] = {}

    def arguments_of_template(self, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the chat template's arguments for a row: the job's override the environment's, the row's both."""
        return {**self._template_kwargs, **arguments_of_template(extra_info)}

    async def sample(self, wanted: Batch, sampling: SamplingParams, seed: int, enough: int, patience_s: float) -> Batch:
        self._check_weights()
        self._sampling = sampling, seed
        groups = [self._find_or_create(*row) for row in _read_rows(wanted)]
        by_key = {group.key: group for group in groups}
        self._cancel([group for key, group in self._groups.items() if key not in by_key])
        self._groups = by_key
        self._queue = deque(group for group in by_key.values() if not group.started)
        if self._copies is not None:
            self._copies.retain(by_key)
        needed = min(enough, len(groups))
        await self._run_until(groups, lambda: sum(group.complete for group in groups) >= needed, patience_s)
        keys = np.array([group.key for group in groups], dtype=np.int64).reshape(-1, 3)
        lowest = [[low for low, _ in map(self._version_range, group.samples) if low >= 0] for group in groups]
        return Batch(
            {
                **dict(zip(GroupKey._fields, keys.T.copy(), strict=True)),
                "started": np.array([group.started for group in groups], dtype=np.bool_),
                "complete": np.array([group.complete for group in groups], dtype=np.bool_),
                "min_version": np.array([min(versions, default=-1) for versions in lowest], dtype=np.int64),
            }
        )

    def are_complete(self, wanted: Batch) -> bool:
        """Return True if :meth:`fetch` would not wait for these. Any thread may call it."""
        groups = [self._groups.get(key) for key, _ in _read_rows(wanted)]
        return all(group is not None and group.complete for group in groups)

    async def fetch(self, wanted: Batch) -> Batch:
        self._check_weights()
        groups = [self._find_or_create(*row) for row in _read_rows(wanted)]
        return await self._complete(groups)

    async def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        self._check_weights()
        _, step, retry, *_ = (*seed, 0, 0, 0)
        groups = [
            Group(key.prompt_id, step, retry, **prompt, sampling=sampling, seed=seed, priority=True)
            for key, prompt in _read_rows(prompts)
        ]
        # Only priority requests run, unless the number of episodes is limited: running ones then have to end first.
        is_limited = self.guard is not None and self.guard.episodes is not None
        with nullcontext() if is_limited else self._server.exclusive():
            try:
                return await self._complete(groups)
            finally:
                self._cancel(groups)

    async def _complete(self, groups: Sequence[Group]) -> Batch:
        for group in groups:
            self._start_group(group)
        await self._run_until(groups, lambda: all(group.complete for group in groups))
        return make_batch(groups, self.guard is not None, self._runner.columns)

    def _find_or_create(self, key: GroupKey, prompt: Mapping[str, Any]) -> Group:
        if key not in self._groups:
            if self._sampling is None:
                raise EngineError("groups were requested before their sampling parameters were set")
            sampling, seed = self._sampling
            seeds = (seed, key.created_step, *([key.retry] if key.retry else []))
            group = Group(key.prompt_id, key.created_step, key.retry, **prompt, sampling=sampling, seed=seeds)
            self._groups[key] = group
        return self._groups[key]

    def _version_range(self, sample: Sample) -> tuple[int, int]:
        return sample.merge_versions(*map(self._server.version_range, sample.pending))

    async def receive(self, weights: WeightSnapshot) -> None:
        """Continue with these weights. Older weights, or others of the same version, restart groups with tokens of
        later ones. Weights that are not newer repeat a step: unless rollouts run ahead, all groups then restart if any
        is incomplete, since log-probs of a sample that is resumed, or runs in another batch, differ in the last bits.
        Raises WeightSyncError if the weights differ from the sent ones; the old ones keep serving."""
        stamp, groups = weights.stamp, self._groups.values()
        runs_on = self._driver is not None and stamp.version > self.engine.version >= 0
        if not runs_on:
            self._server.preempt()
        if self._copies is not None:
            self._copies.note(stamp)
        is_known = self._stamps.get(stamp.version, stamp) == stamp
        repeats = self._driver is None and stamp.version <= self.engine.version
        if repeats and any(group.started and not group.complete for group in groups):
            self._restart(list(groups))
        else:
            last = stamp.version if is_known else stamp.version - 1
            later = [group for group in groups if any(self._version_range(each)[1] > last for each in group.samples)]
            if later:
                cause = f"they have tokens of later weights than version {last}"
                _LOG.warning("restarting %d groups: %s", len(later), cause)
            self._restart(later)
        self._server.update(weights, "keep" if runs_on else "abort", rewind=True)
        self._stamps = {version: earlier for version, earlier in self._stamps.items() if version < stamp.version}
        self._stamps[stamp.version] = stamp

    def _restart(self, groups: Sequence[Group]) -> None:
        self._cancel(groups)
        for group in groups:
            self._groups[group.key] = replace(group, started=False, complete=False, samples=[], failure=None)
        self._queue = deque(group for group in self._groups.values() if not group.started)

    def _check_weights(self) -> None:
        if self.engine.version < 0:
            raise WeightSyncError("no weights yet: this rollout has not received the actor's")

    async def start(self) -> None:
        self._driver = asyncio.get_running_loop().create_task(self._drive(lambda: False, math.inf))
        self._driver.add_done_callback(lambda _: self._wakeup.notify())

    async def _run_until(
        self, groups: Sequence[Group], condition: Callable[[], bool], patience_s: float = math.inf
    ) -> None:
        """Advance until the condition is met, or for ``patience_s``. Raises the failure of one of ``groups``."""

        def should_stop() -> bool:
            return condition() or any(group.failure is not None for group in groups)

        if self._driver is None:
            await self._drive(should_stop, patience_s)
        else:
            await self._watch(should_stop, patience_s)
        failed = [group for group in groups if group.failure is not None]
        self._cancel(failed)
        for group in failed:
            if self._groups.get(group.key) is group:
                del self._groups[group.key]
        if failed and failed[0].failure is not None:
            raise failed[0].failure

    async def _drive(self, should_stop: Callable[[], bool], patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        while not should_stop() and (remaining_s := deadline_s - loop.time()) > 0:
            queued = len(self._queue)
            while self._queue and self._runner.generating < self._max_generating and not self._server.is_exclusive:
                self._start_group(self._queue.popleft())
            if len(self._queue) < queued:
                await asyncio.sleep(0)  # the new tasks submit the requests of the next step
                if should_stop():  # copies of earlier samples were enough
                    return
            if self._server.step():
                await asyncio.sleep(0)
            else:  # waits: for an environment, whose calls have deadlines, or for the next call
                await self._wakeup.wait(remaining_s if remaining_s < math.inf else None)

    async def _watch(self, should_stop: Callable[[], bool], patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        self._wakeup.notify()
        while not should_stop() and (remaining_s := deadline_s - loop.time()) > 0:
            if self._driver is not None and self._driver.done():
                error = self._driver.exception()
                await self.start()
                if error is not None:
                    raise error
            await self._wakeup.wait(remaining_s if remaining_s < math.inf else None)

    def _start_group(self, group: Group) -> None:
        if group.started:
            return
        tokenizer = self.engine.tokenizer
        try:
            arguments = self.arguments_of_template(group.extra_info)
            group.text = prompt_text(tokenizer, group.prompt, arguments)
            tokens = [] if self.guard is not None else encode_prompt(tokenizer, group.prompt, arguments)
        except DataError as error:
            group.failure = error
            return
        group.started = True
        group.samples = [Sample(index) for index in range(group.sampling.samples_per_prompt)]
        if self._copies is not None and not group.priority:
            columns = self._runner.columns
            group.samples = [self._copies.load(group, each.index, columns) or each for each in group.samples]
        missing = [sample for sample in group.samples if not sample.ended]
        if not missing:
            group.complete = True
            self._wakeup.notify()
        self._runner.generating += len(missing)
        for sample in missing:
            sample.task = asyncio.get_running_loop().create_task(self._run_sample(group, sample, tokens))
            sample.task.add_done_callback(partial(self._forget_task, group, sample))

    async def _run_sample(self, group: Group, sample: Sample, tokens: Sequence[int]) -> None:
        try:
            await self._runner.run(group, sample, tokens)
            if self._copies is not None and not group.priority:
                self._copies.save(group, sample)
        except BaseException as error:
            group.failure = group.failure or error
            raise
        finally:
            self._end_sample(group, sample)

    def _end_sample(self, group: Group, sample: Sample) -> None:
        if not sample.ended:
            sample.ended = True
            self._runner.generating -= 1
            group.complete = group.failure is None and all(other.ended for other in group.samples)
            self._wakeup.notify()

    def _forget_task(self, group: Group, sample: Sample, task: "asyncio.Task[None]") -> None:
        self._cancelled.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved; the group has it as its failure
        self._end_sample(group, sample)

    def _cancel(self, groups: Sequence[Group]) -> None:
        for task in [sample.task for group in groups for sample in group.samples]:
            if task is not None and not task.done():
                self._cancelled.add(task)
                task.cancel()

    async def close(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait({self._driver}, timeout=_CLOSING_S)
        self._cancel(list(self._groups.values()))
        self._groups, self._queue = {}, deque()
        if self._cancelled:
            await asyncio.wait(set(self._cancelled), timeout=_CLOSING_S)
        if self._copies is not None:
            self._copies.close()
        if self.guard is not None:
            await self.guard.shutdown()


def _read_rows(wanted: Batch) -> Iterator[tuple[GroupKey, dict[str, Any]]]:
    """Yield the key and the prompt of each row; prompts of :meth:`RolloutScheduler.generate` have no retry or step."""
    numbers = [wanted.dense(name).tolist() if name in wanted else [0] * len(wanted) for name in GroupKey._fields]
    objects = (wanted.objects(name) for name in _PROMPT_COLUMNS)
    for key, (prompt, answer, info) in zip(zip(*numbers, strict=True), zip(*objects, strict=True), strict=True):
        yield GroupKey(*key), {"prompt": prompt, "answer": answer, "extra_info": info or {}}
