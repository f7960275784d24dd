"""Calling members of other processes from rank 0. Results stay where they were made until somebody asks for them."""

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Condition, RLock
from typing import Any

from dlrover.python.rl.common.errors import InvocationError, WorkloadDied
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.host import CallHeader
from dlrover.python.rl.runtime.stored import Stored
from dlrover.python.rl.runtime.torchrun.links import Link, Place
from dlrover.python.rl.runtime.torchrun.worker import End, Ended, Key, Run, Start, Task, Worker
from dlrover.python.rl.runtime.wire import encode
from dlrover.python.rl.trainer.port import Call, Outcome, Ref
from dlrover.python.rl.trainer.shard import Rows
from dlrover.python.rl.trainer.workload import MemberContext

_FIRST = 1
"""The incarnation of every member: none is replaced."""


@dataclass(frozen=True)
class Fetch:
    """Send a result, or its row count."""

    key: Key


@dataclass(frozen=True)
class Fetched:
    """What was asked for by a :class:`Fetch`, or why it is not there."""

    key: Key
    value: Stored | None
    error: BaseException | None

    @classmethod
    def of(cls, key: Key, future: Future[Stored]) -> "Fetched":
        """The answer, once ``future`` is done."""
        error = future.exception(0)
        return cls(key, None, error) if error is not None else cls(key, future.result(0), None)

    def settle(self, future: Future[Stored]) -> None:
        """Let ``future`` have it."""
        if self.error is not None:
            future.set_exception(self.error)
        elif self.value is not None:
            future.set_result(self.value)


@dataclass(frozen=True)
class Drop:
    """These results are not needed any more."""

    numbers: tuple[int, ...]


@dataclass(eq=False)
class Held:
    """What is known at rank 0 of a result.

    Attributes:
        place: rank of the process that makes it.
        kept: whether it stays there until it is asked for.
        rows: its row count, as soon as it is there.
        value: itself, once it is here.
    """

    number: int
    place: int = 0
    role: str = ""
    method: str = ""
    kept: bool = False
    rows: Future[Stored] = field(default_factory=Future)
    value: Future[Stored] = field(default_factory=Future)
    asked: bool = False

    def __reduce__(self) -> Any:
        return Key, (self.number,)

    def settle(self, error: BaseException | None, value: Stored | None = None, rows: int | None = None) -> None:
        """It is there, or ``error`` says why it will never be; what was settled stays."""
        counted = Stored.of(rows if value is None else value.rows)
        for future, found in ((self.rows, counted), (self.value, value)):
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            elif found is not None:
                future.set_result(found)

    def death(self) -> WorkloadDied:
        """That the process which has it is gone."""
        what = f"the process of rank {self.place} is gone"
        died = WorkloadDied(what, role=self.role, rank=self.place, method=self.method)
        died.incarnation = _FIRST
        return died


@dataclass(frozen=True)
class RowsOf:
    """The row count of a result."""

    held: Held

    def __reduce__(self) -> Any:
        return Key, (self.held.number, True)


class TorchrunPort:
    """The port over the processes of a launch: rank ``r`` of every role is in process ``r``. Thread safe.

    Args:
        place: this process, rank 0.
        links: with the processes from rank 1 on; the port begins to listen to them.

    Attributes:
        worker: of rank 0's own members; somebody has to let it run.
        lost: the ranks of the processes that are gone, in the order in which they went.
    """

    def __init__(self, place: Place, links: Mapping[int, Link]) -> None:
        self.worker = Worker(place, self._ended, self._obtain)
        self.lost: list[int] = []
        self._links = links
        self._lock = RLock()
        self._news = Condition(self._lock)
        self._numbers = count()
        self._held: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()
        self._under_way: dict[int, tuple[Held, Call | None]] = {}
        self._unneeded: deque[tuple[int, int]] = deque()
        for rank, link in links.items():
            link.begin(partial(self._take, rank), partial(self._lose, rank))

    # -- the port -----------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Ref:
        held = self._hold(0, "", "")
        stored = Stored.of(value, own=True)
        held.settle(None, stored)
        return Ref(self, held, RowsOf(held))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        values = Stored.of([encode(value) for value in (*call.args, *call.kwargs.values())], own=True)
        kept = call.sized and rank > 0
        with self._lock:
            self._tell_unneeded()
            held = self._hold(rank, role, call.method, kept)
            self._send(held, Run(held.number, role, CallHeader.of(call, _FIRST), values, kept), call)
        return Ref(self, held, RowsOf(held), role, rank, call.method, _FIRST)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        futures = [self._future(ref.token) for ref in refs]
        wait_for(futures, timeout_s, FIRST_EXCEPTION)
        return [_outcome(future) for future in futures]

    # -- beside it ----------------------------------------------------------------------------------------------------

    def start(self, job: JobSpec, run: str, context: MemberContext) -> Future[Stored]:
        """Construct a member; the future ends when that has.

        Raises:
            WorkloadStartError: through the future: its constructor failed.
            WorkloadDied: through the future: the process is gone.
        """
        with self._lock:
            held = self._hold(context.rank, context.role, "__init__")
            self._send(held, Start(held.number, job, run, context), None)
        return held.rows

    def end(self, clean: bool) -> None:
        """Let all members close, and all processes end."""
        for link in self._links.values():
            link.send(End(clean))
        self.worker.assign(End(clean))

    def loses(self, within_s: float) -> int | None:
        """The first process that is lost, if one is within so many seconds."""
        with self._news:
            self._news.wait_for(lambda: bool(self.lost), within_s)
            return self.lost[0] if self.lost else None

    # -- the processes ------------------------------------------------------------------------------------------------

    def _hold(self, place: int, role: str, method: str, kept: bool = False) -> Held:
        with self._lock:
            held = Held(next(self._numbers), place, role, method, kept)
            self._held[held.number] = held
        if kept:
            # Told with the next call: the collector may strike anywhere.
            weakref.finalize(held, self._unneeded.append, (place, held.number)).atexit = False
        return held

    def _send(self, held: Held, task: Task, call: Call | None) -> None:
        """Pass a task on. What its call takes is held until it has ended."""
        if held.place in self.lost:
            failed = (self._future(ref.token) for ref in _refs(call) if isinstance(ref.token, Held))
            upstream = (future.exception(0) for future in failed if future.done())
            held.settle(next((error for error in upstream if error is not None), held.death()))
            return
        self._under_way[held.number] = held, call
        if held.place == 0:
            self.worker.assign(task)
        else:
            self._links[held.place].send(task)

    def _tell_unneeded(self) -> None:
        gone: dict[int, list[int]] = {}
        while self._unneeded:
            place, number = self._unneeded.popleft()
            gone.setdefault(place, []).append(number)
        for place, numbers in gone.items():
            self._links[place].send(Drop(tuple(numbers)))

    def _future(self, token: Any) -> Future[Stored]:
        """Where a result, or its row count, arrives; it is sent for when it is elsewhere."""
        if isinstance(token, RowsOf):
            return token.held.rows
        held: Held = token
        with self._lock:
            if held.kept and not held.asked and held.place not in self.lost:
                held.asked = True
                self._links[held.place].send(Fetch(Key(held.number)))
        return held.value

    def _obtain(self, key: Key) -> Future[Stored]:
        held = self._held[key.number]  # there: whoever takes it is under way
        return self._future(RowsOf(held) if key.rows else held)

    def _take(self, rank: int, message: Any) -> None:
        """A message of another process."""
        if isinstance(message, Ended):
            self._ended(message)
        elif isinstance(message, Fetched):
            with self._lock:
                held = self._held.get(message.key.number)
                if held is not None:
                    held.settle(message.error, message.value)
        elif isinstance(message, Fetch):
            link, key = self._links[rank], message.key
            self._obtain(key).add_done_callback(lambda future: link.send(Fetched.of(key, future)))

    def _ended(self, ended: Ended) -> None:
        with self._lock:
            held, _ = self._under_way.pop(ended.number, (None, None))
            if held is not None:
                held.settle(ended.error, ended.value, ended.rows)

    def _lose(self, rank: int) -> None:
        with self._news:
            self.lost.append(rank)
            self._news.notify_all()
            there = [held for held in self._held.values() if held.place == rank]
            self._under_way = {number: item for number, item in self._under_way.items() if item[0].place != rank}
            for held in there:
                held.settle(held.death())


def _refs(call: Call | None) -> Iterator[Ref]:
    for value in (*call.args, *call.kwargs.values()) if call is not None else ():
        items = value.parts if isinstance(value, Rows) else value if isinstance(value, list) else [value]
        yield from (item for item in items if isinstance(item, Ref))


def _outcome(future: Future[Stored]) -> Outcome:
    if not future.done():
        return Outcome(late=True)
    error = future.exception(0)
    if error is None:
        return Outcome(future.result(0).load())
    if not isinstance(error, InvocationError):
        raise error
    if error.original is not None and error.__cause__ is None:
        error.__cause__ = error.original  # which does not travel
    return Outcome(error=error)
