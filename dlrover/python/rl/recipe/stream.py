"""A rollout engine as those see it who wait for completions: each for its own, while the engine draws them together.

::

    ask ---> waiting ---hand over---> running --advance--> answer
                ^                        |
                '-------set aside--------'   (for new weights, or others that come first; it goes on where it was)
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.base import Completion, Request, RolloutEngine, SamplingParams


@dataclass(eq=False)
class Asked:
    """A completion that someone waits for.

    Attributes:
        request: with what had been drawn of it when the engine last gave it back.
        first: it belongs to those that go first where some do, see :meth:`EngineStream.alone`.
        answer: the completion.
        handed: how many steps the engine had made when it took it in; None while it does not have it.
    """

    request: Request
    sampling: SamplingParams
    seed: tuple[int, ...]
    first: bool
    answer: "asyncio.Future[Completion]"
    handed: int | None = None


class Bell:
    """Wakes everybody who waits."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake them."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until it is rung, ``timeout_s`` at most."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout_s)
        finally:
            self._waiting.discard(waiter)


@dataclass(eq=False)
class EngineStream:
    """Many requests, one engine, one event loop.

    Args:
        engine: used by nobody else while requests run.
        bell: rung when there is something new to draw.
    """

    engine: RolloutEngine
    bell: Bell
    _waiting: list[Asked] = field(default_factory=list)
    _running: dict[tuple[int, int], Asked] = field(default_factory=dict)
    _steps: int = 0
    _alone: bool = False

    def ask(self, request: Request, sampling: SamplingParams, seed: tuple[int, ...], first: bool = False) -> Asked:
        """Have a completion drawn; nothing is before :meth:`step`."""
        asked = Asked(request, sampling, seed, first, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self.bell.ring()
        return asked

    async def answer(self, asked: Asked) -> Completion:
        """Wait for the completion; who is cancelled meanwhile takes the request back.

        Raises:
            EngineError: the engine refuses the request.
        """
        try:
            return await asked.answer
        finally:
            self._withdraw(asked)

    def step(self) -> bool:
        """Hand over what waits, and draw some more; False when there is nothing to be drawn.

        Raises:
            EngineError: the engine cannot draw; all requests stay.
        """
        if self.engine.version < 0:
            return False
        self._hand_over()
        if not self._running:
            return False
        ended = self.engine.advance()
        self._steps += 1
        for completion in ended:
            asked = self._running.pop(completion.request.key)
            if not asked.answer.done():
                asked.answer.set_result(completion)
        return True

    def set_aside(self) -> None:
        """Take everything back from the engine, as far as it has got; it is handed over again with the next step."""
        back = []
        for completion in self.engine.abort():
            asked = self._running.pop(completion.request.key)
            asked.request, asked.handed = completion.request, None
            back.append(asked)
        self._waiting[:0] = back

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block only those are drawn that go first."""
        self.set_aside()
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            self.bell.ring()

    @property
    def is_alone(self) -> bool:
        """Whether only those are drawn that go first."""
        return self._alone

    def versions(self, asked: Asked) -> tuple[int, int]:
        """The oldest and the newest weights that may have drawn of a request; -1 where none has.

        Weights change while the engine has no request, so what it has was handed over under those it serves.
        """
        drawn = asked.request.versions
        newest = self.engine.version if asked.handed is not None and self._steps > asked.handed else -1
        if len(drawn) == 0:
            return newest, newest
        return int(drawn.min()), max(newest, int(drawn.max()))

    # -- between those who wait and the engine ------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Give the engine what waits; one whose key runs already goes on waiting."""
        if not self._waiting:
            return
        together: dict[tuple[SamplingParams, tuple[int, ...]], list[Asked]] = {}
        staying, keys = [], set(self._running)
        for asked in self._waiting:
            if asked.request.key in keys or (self._alone and not asked.first):
                staying.append(asked)
            else:
                keys.add(asked.request.key)
                together.setdefault((asked.sampling, asked.seed), []).append(asked)
        self._waiting = staying
        for alike in together.values():
            self._add(alike)

    def _add(self, alike: Sequence[Asked]) -> None:
        """Add requests of the same sampling and seed; those that the engine refuses are answered with its error."""
        first = alike[0]
        try:
            self.engine.add([asked.request for asked in alike], first.sampling, first.seed)
        except EngineError as error:
            if len(alike) > 1:
                for asked in alike:
                    self._add([asked])
            elif not first.answer.done():
                first.answer.set_exception(error)
            return
        for asked in alike:
            asked.handed = self._steps
            self._running[asked.request.key] = asked

    def _withdraw(self, asked: Asked) -> None:
        key = asked.request.key
        if self._running.get(key) is asked:
            del self._running[key]
            self.engine.abort([key])
        elif asked in self._waiting:
            self._waiting.remove(asked)
