"""The samples of a rollout member: which are wanted, which are under way, and what moves them on."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import DataError, EngineError, WeightSyncError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.conversation import encode_prompt
from dlrover.python.rl.engine.base import RolloutEngine, SamplingParams
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.environment.guard import Guard
from dlrover.python.rl.recipe.flight import Key
from dlrover.python.rl.recipe.playing import Player, Sample, Task
from dlrover.python.rl.recipe.sample_rows import Group, as_batch
from dlrover.python.rl.recipe.stream import Bell, EngineStream

_LOG = get_logger(__name__)

_CLOSING_S = 5.0
"""How long episodes may take to close when the member is ended."""


@dataclass(frozen=True)
class Limits:
    """How much goes on at a time.

    Attributes:
        room: samples that are drawn at a time; more groups are begun when fewer are.
        max_turns: actions of a sample at most.
    """

    room: int
    max_turns: int = 1


@dataclass(eq=False)
class _Group:
    """A group that is wanted.

    Attributes:
        left: samples that are not over.
        trouble: what ended one of them that should not have.
    """

    key: Key
    task: Task
    answer: Any
    samples: list[Sample] = field(default_factory=list)
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)
    left: int = 0
    trouble: BaseException | None = None

    @property
    def begun(self) -> bool:
        return bool(self.tasks)

    @property
    def complete(self) -> bool:
        return self.begun and not self.left and self.trouble is None

    def drawn(self) -> Group:
        """As the rows of it are made."""
        return Group(*self.key, self.answer, self.task.extra_info, self.samples)


class Roller:
    """Draws groups of samples with one engine, many samples at a time.

    ::

        wanted -> queue --room--> samples: reset -> ask -> step -> ask -> ... -> close -> complete
                                             |       ^
                                             v       |
        advance, as long as anyone asks -> engine ---'

    Every method is called in the event loop that the samples live in. Without :meth:`go_on` nothing moves but within
    ``_until``.

    Args:
        engine: used by nobody else meanwhile.
        guard: of the environment that answers; None: a sample is one completion.
        limits: on what goes on at a time.
    """

    def __init__(self, engine: RolloutEngine, guard: Guard | None, limits: Limits) -> None:
        self.engine, self.guard = engine, guard
        self._limits, self._bell = limits, Bell()
        self._stream = EngineStream(engine, self._bell)
        self._player = Player(self._stream, guard, limits.max_turns)
        self._groups: dict[Key, _Group] = {}
        self._queue: deque[_Group] = deque()
        self._ending: set[asyncio.Task[None]] = set()
        self._mover: asyncio.Task[None] | None = None
        self._terms: tuple[SamplingParams, int] | None = None
        self._stamps: dict[int, WeightStamp] = {}

    # -- what is wanted -----------------------------------------------------------------------------------------------

    async def draw(self, wanted: Batch, sampling: SamplingParams, seed: int, enough: int, patience_s: float) -> Batch:
        """Have just these groups under way; see :meth:`RolloutWorkload.draw`."""
        self._check_weights()
        self._terms = sampling, seed
        listed = self._want(wanted)
        needed = min(enough, len(listed))
        await self._until(listed, lambda: sum(group.complete for group in listed) >= needed, patience_s)
        return self._standing(listed)

    async def take(self, wanted: Batch) -> Batch:
        """The rows of these groups, once they are complete; see :meth:`RolloutWorkload.take`."""
        self._check_weights()
        groups = [self._known(row) for row in _rows_of(wanted)]
        for group in groups:
            self._begin(group)
        await self._until(groups, lambda: all(group.complete for group in groups))
        return as_batch([group.drawn() for group in groups], judged=self.guard is not None)

    async def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Samples of these prompts before all others; see :meth:`RolloutWorkload.generate`."""
        self._check_weights()
        told = (*seed, 0, 0, 0)
        groups = [
            _Group((row["prompt_id"], told[2], told[1]), _task(row, sampling, seed, first=True), row["answer"])
            for row in _rows_of(prompts)
        ]
        with self._first():
            try:
                for group in groups:
                    self._begin(group)
                await self._until(groups, lambda: all(group.complete for group in groups))
            finally:
                self._end(groups)
        return as_batch([group.drawn() for group in groups], judged=self.guard is not None)

    def _want(self, wanted: Batch) -> list[_Group]:
        """Make the groups those that are listed, in this order."""
        rows = [self._known(row) for row in _rows_of(wanted)]
        listed = {group.key: group for group in rows}
        self._end([group for key, group in self._groups.items() if key not in listed])
        self._groups = listed
        self._queue = deque(group for group in listed.values() if not group.begun)
        return rows

    def _known(self, row: dict[str, Any]) -> _Group:
        """The group of a row, which is new if there is none."""
        key = row["prompt_id"], row["attempt"], row["begun_at"]
        if key not in self._groups:
            self._groups[key] = self._fresh(key, row)
        return self._groups[key]

    def _fresh(self, key: Key, row: dict[str, Any]) -> _Group:
        if self._terms is None:
            raise EngineError("groups were asked for before anybody said how they are drawn")
        sampling, seed = self._terms
        _, attempt, begun_at = key
        return _Group(key, _task(row, sampling, (seed, begun_at, *([attempt] if attempt else []))), row["answer"])

    def _standing(self, groups: Sequence[_Group]) -> Batch:
        oldest = [min((old for old, _ in map(self._drawn, group.samples) if old >= 0), default=-1) for group in groups]
        keys = np.array([group.key for group in groups], dtype=np.int64).reshape(-1, 3)
        return Batch(
            {
                "prompt_id": keys[:, 0].copy(),
                "attempt": keys[:, 1].copy(),
                "begun_at": keys[:, 2].copy(),
                "begun": np.array([group.begun for group in groups], dtype=np.bool_),
                "complete": np.array([group.complete for group in groups], dtype=np.bool_),
                "oldest": np.array(oldest, dtype=np.int64),
            }
        )

    def _drawn(self, sample: Sample) -> tuple[int, int]:
        """Oldest and newest weights that have drawn of a sample."""
        return sample.saw(self._stream.versions(sample.asked) if sample.asked is not None else (-1, -1))

    # -- weights ------------------------------------------------------------------------------------------------------

    async def receive(self, weights: WeightSnapshot) -> None:
        """Go on with these weights. If they are older than those before, or others of the same number, samples that
        hold tokens which they cannot have followed are begun anew.

        Raises:
            WeightSyncError: they are not those that were sent; the old ones keep serving.
        """
        self._stream.set_aside()
        stamp = weights.stamp
        same = self._stamps.get(stamp.version, stamp) == stamp
        self._take_back(stamp.version if same else stamp.version - 1)
        self.engine.receive(weights, rewind=True)
        self._stamps = {number: known for number, known in self._stamps.items() if number < stamp.version}
        self._stamps[stamp.version] = stamp
        self._bell.ring()

    def _take_back(self, newest: int) -> None:
        """Begin groups anew that hold tokens of weights after these."""
        gone = [group for group in self._groups.values() if any(self._drawn(s)[1] > newest for s in group.samples)]
        if gone:
            _LOG.warning("%d groups hold tokens of later weights than version %d: begun anew", len(gone), newest)
        self._end(gone)
        for group in gone:
            self._groups[group.key] = _Group(group.key, group.task, group.answer)
        self._queue = deque(group for group in self._groups.values() if not group.begun)

    def _check_weights(self) -> None:
        if self.engine.version < 0:
            raise WeightSyncError("no weights yet: this rollout has not received the actor's, and serves no others")

    # -- moving on ----------------------------------------------------------------------------------------------------

    async def go_on(self) -> None:
        """Move between calls, too."""
        self._move_on()

    def _move_on(self) -> None:
        self._mover = asyncio.get_running_loop().create_task(self._move(lambda: False, math.inf))
        self._mover.add_done_callback(lambda _: self._bell.ring())

    async def _until(self, groups: Sequence[_Group], done: Callable[[], bool], patience_s: float = math.inf) -> None:
        """Move until ``done``, or for so many seconds.

        Raises:
            EngineError: the engine cannot draw; everything stays as it was.
            BaseException: what ended a sample of ``groups``, which is forgotten.
        """

        def over() -> bool:
            return done() or any(group.trouble is not None for group in groups)

        if self._mover is None:
            await self._move(over, patience_s)
        else:
            await self._watch(over, patience_s)
        troubled = [group for group in groups if group.trouble is not None]
        self._end(troubled)
        for group in troubled:
            if self._groups.get(group.key) is group:
                del self._groups[group.key]
        for group in troubled:
            if group.trouble is not None:
                raise group.trouble

    async def _move(self, done: Callable[[], bool], patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s
        while not done() and (left_s := until_s - loop.time()) > 0:
            if self._begin_more():
                await asyncio.sleep(0)  # They ask for what the next step draws.
            if self._stream.step():
                await asyncio.sleep(0)
            else:  # waits: for an environment, each of whose calls has a deadline; or for what a call brings
                await self._bell.wait(left_s if left_s < math.inf else None)

    async def _watch(self, done: Callable[[], bool], patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s
        self._bell.ring()
        while not done() and (left_s := until_s - loop.time()) > 0:
            if self._mover is not None and self._mover.done():
                failed = self._mover.exception()
                self._move_on()
                if failed is not None:
                    raise failed
            await self._bell.wait(left_s if left_s < math.inf else None)

    def _begin_more(self) -> bool:
        before = len(self._queue)
        while self._queue and self._player.busy < self._limits.room and not self._stream.is_alone:
            self._begin(self._queue.popleft())
        return len(self._queue) < before

    def _begin(self, group: _Group) -> None:
        if group.begun:
            return
        loop = asyncio.get_running_loop()
        try:
            tokens = [] if self.guard is not None else encode_prompt(self.engine.tokenizer, group.task.prompt)
        except DataError as error:
            group.trouble = error
            return
        group.samples = [Sample(index) for index in range(group.task.sampling.samples_per_prompt)]
        group.left = len(group.samples)
        self._player.busy += group.left
        for sample in group.samples:
            task = loop.create_task(self._play(group, sample, tokens))
            task.add_done_callback(partial(self._ended, group, sample))
            group.tasks.append(task)

    async def _play(self, group: _Group, sample: Sample, tokens: Sequence[int]) -> None:
        try:
            await self._player.play(sample, group.task, tokens)
        except BaseException as error:
            group.trouble = group.trouble or error
            raise
        finally:
            self._over(group, sample)

    def _over(self, group: _Group, sample: Sample) -> None:
        """A sample has ended, however; its place is free."""
        if not sample.over:
            sample.over = True
            self._player.busy -= 1
            group.left -= 1
            self._bell.ring()

    def _ended(self, group: _Group, sample: Sample, task: "asyncio.Task[None]") -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # It is the group's trouble.
        self._over(group, sample)

    def _end(self, groups: Sequence[_Group]) -> None:
        for group in groups:
            for task in group.tasks:
                if not task.done():
                    self._ending.add(task)
                    task.cancel()

    @contextmanager
    def _first(self) -> Iterator[None]:
        """Inside the block who goes first is drawn alone. Not where episodes wait for each other's places: then those
        before have to come to their end."""
        limited = self.guard is not None and self.guard.episodes is not None
        with nullcontext() if limited else self._stream.alone():
            yield

    async def close(self) -> None:
        """End all samples and their episodes, and the environment."""
        if self._mover is not None:
            self._mover.cancel()
            await asyncio.wait({self._mover}, timeout=_CLOSING_S)
        self._end(list(self._groups.values()))
        self._groups, self._queue = {}, deque()
        if self._ending:
            await asyncio.wait(set(self._ending), timeout=_CLOSING_S)
        if self.guard is not None:
            await self.guard.shutdown()


def _rows_of(wanted: Batch) -> Iterator[dict[str, Any]]:
    names = [name for name in ("prompt_id", "attempt", "begun_at") if name in wanted]
    numbers = zip(*(wanted.dense(name).tolist() for name in names), strict=True)
    objects = zip(*(wanted.objects(name) for name in ("prompt", "answer", "extra_info")), strict=True)
    for ids, told in zip(numbers, objects, strict=True):
        yield dict(zip((*names, "prompt", "answer", "extra_info"), (*ids, *told), strict=True))


def _task(row: dict[str, Any], sampling: SamplingParams, seed: tuple[int, ...], first: bool = False) -> Task:
    return Task(row["prompt_id"], row["prompt"], row["extra_info"], sampling, seed, first)
