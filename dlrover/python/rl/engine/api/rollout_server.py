# SPDX-License-Identifier: Apache-2.0
"""One rollout engine behind a port for many coroutines, each of which waits for its own completion.

::

    submit ---> waiting ---_hand_over---> running --advance--> result
                  ^                          |
                  '---------preempt----------'   (new weights, or priority requests; it resumes where it stopped)
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import ColumnSpec
from dlrover.python.rl.engine.api.base import BaseRolloutEngine, Completion, Request, SamplingParams
from dlrover.python.rl.engine.api.weights import Part, WeightSnapshot

UpdateMode: TypeAlias = Literal["keep", "abort"]
"""What new weights do to running requests. ``keep``: they continue where they are. ``abort``: they are taken back from
the engine and handed over again, as if they began with their tokens so far."""


class Wakeup:
    """Wakes all coroutines that wait at that moment. (``asyncio.Event`` keeps its state and has no timeout.)"""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)


@dataclass(eq=False)
class PendingRequest:
    request: Request  # with its tokens when the engine last returned it
    sampling: SamplingParams
    seed: tuple[int, ...]
    priority: bool
    result: "asyncio.Future[Completion]"
    added_at: int | None = None  # the server's step count when the engine took it
    added_version: int = -1  # of the engine's weights then


@dataclass(eq=False)
class RolloutServer:
    """The interface of schedulers, sessions and endpoints to an engine that nothing else uses. It generates while
    :meth:`step` is called; ``wakeup`` is notified of new requests."""

    engine: BaseRolloutEngine
    wakeup: Wakeup = field(default_factory=Wakeup)
    _waiting: list[PendingRequest] = field(default_factory=list)
    _running: dict[tuple[int, int], PendingRequest] = field(default_factory=dict)
    is_exclusive: bool = False
    is_paused: bool = False
    _steps: int = 0

    @property
    def version(self) -> int:
        """Version of the weights; -1 before the first update."""
        return self.engine.version

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        """The columns that the engine declares."""
        declared: Mapping[str, ColumnSpec] = getattr(getattr(self.engine, "info", None), "columns", {})
        return declared

    def check(self, tokens: Any, sampling: SamplingParams) -> None:
        """Raise an ``EngineError`` if the engine would refuse these prompts (ragged)."""
        self.engine.check(tokens, sampling)

    async def generate(
        self, request: Request, sampling: SamplingParams, seed: tuple[int, ...], priority: bool = False
    ) -> Completion:
        """Complete one request; see :meth:`wait`."""
        return await self.wait(self.submit(request, sampling, seed, priority))

    def submit(
        self, request: Request, sampling: SamplingParams, seed: tuple[int, ...], priority: bool = False
    ) -> PendingRequest:
        pending = PendingRequest(request, sampling, seed, priority, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        self.wakeup.notify()
        return pending

    async def wait(self, pending: PendingRequest) -> Completion:
        """Wait for a completion; cancelling withdraws the request. Raises EngineError if the engine refuses it."""
        try:
            return await pending.result
        finally:
            key = pending.request.key
            if self._running.get(key) is pending:
                del self._running[key]
                self.engine.abort([key])
            elif pending in self._waiting:
                self._waiting.remove(pending)

    def step(self) -> bool:
        """Advance the engine; return False if there is nothing to generate. Requests survive an EngineError."""
        if self.engine.version < 0 or self.is_paused:
            return False
        self._hand_over()
        if not self._running:
            return False
        completions = self.engine.advance()
        self._steps += 1
        for completion in completions:
            pending = self._running.pop(completion.request.key)
            if not pending.result.done():
                pending.result.set_result(completion)
        return True

    def update(self, weights: WeightSnapshot, mode: UpdateMode = "abort", rewind: bool = False) -> None:
        """Continue with new weights. Raises as :meth:`BaseRolloutEngine.receive`."""
        if mode == "abort":
            self.preempt()
        try:
            self.engine.receive(weights, rewind)
        except BaseException:
            self.preempt()  # so that each request knows the versions of its tokens
            raise
        self.wakeup.notify()

    def pause(self) -> None:
        """Generate nothing until :meth:`resume`. Requests keep their tokens, and may be submitted."""
        self.preempt()
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self.wakeup.notify()

    def sleep(self) -> None:
        """Give the device's memory away until :meth:`wake`; requests wait."""
        self.preempt()
        self.engine.cpu()

    def wake(self, part: Part = "all") -> None:
        self.engine.cuda(part)
        self.wakeup.notify()

    def close(self) -> None:
        self.engine.close()

    def preempt(self) -> None:
        """Take all requests back from the engine with their tokens; the next step hands them over again."""
        preempted = []
        for completion in self.engine.abort():
            pending = self._running.pop(completion.request.key)
            pending.request, pending.added_at = completion.request, None
            preempted.append(pending)
        self._waiting[:0] = preempted

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.preempt()
        self.is_exclusive = True
        try:
            yield
        finally:
            self.is_exclusive = False
            self.wakeup.notify()

    def version_range(self, pending: PendingRequest) -> tuple[int, int]:
        """Return the lowest and highest weight version that may have generated a token of a request; -1 for none."""
        versions = pending.request.versions.tolist()
        if pending.added_at is not None and self._steps > pending.added_at:
            versions += [pending.added_version, self.engine.version]
        return min(versions, default=-1), max(versions, default=-1)

    def _hand_over(self) -> None:
        """Add waiting requests to the engine, except those whose key is already running."""
        if not self._waiting:
            return
        batches: dict[tuple[SamplingParams, tuple[int, ...]], list[PendingRequest]] = {}
        waiting, keys = [], set(self._running)
        for pending in self._waiting:
            if pending.request.key in keys or (self.is_exclusive and not pending.priority):
                waiting.append(pending)
            else:
                keys.add(pending.request.key)
                batches.setdefault((pending.sampling, pending.seed), []).append(pending)
        self._waiting = waiting
        for batch in batches.values():
            self._add(batch)

    def _add(self, batch: Sequence[PendingRequest]) -> None:
        first = batch[0]
        try:
            self.engine.add([pending.request for pending in batch], first.sampling, first.seed)
        except EngineError as error:
            if len(batch) > 1:
                for pending in batch:
                    self._add([pending])
            elif not first.result.done():
                first.result.set_exception(error)
            return
        for pending in batch:
            pending.added_at, pending.added_version = self._steps, self.engine.version
            self._running[pending.request.key] = pending
