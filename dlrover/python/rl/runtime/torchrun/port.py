# SPDX-License-Identifier: Apache-2.0
"""Calling workers of other processes from rank 0. Large results stay where they were made until they are fetched."""

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
from dlrover.python.rl.runtime.member.arguments import CallHeader, Stored, encode
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv, Link
from dlrover.python.rl.runtime.torchrun.worker import (
    End,
    Result,
    ResultKey,
    Run,
    Start,
    Task,
    Worker,
    send_when_done,
)
from dlrover.python.rl.trainer.port import Call, Outcome, Ref
from dlrover.python.rl.trainer.shard import Rows
from dlrover.python.rl.trainer.workload import MemberContext

_FIRST = 1  # the incarnation of every worker: none is replaced


@dataclass(eq=False)
class RemoteResult:
    """Rank 0's record of a result."""

    number: int
    owner: int = 0  # rank of the process that computes it
    role: str = ""
    method: str = ""
    retained: bool = False  # it stays in that process until it is fetched
    rows: Future[Stored] = field(default_factory=Future)  # its row count, as soon as the call has ended
    value: Future[Stored] = field(default_factory=Future)  # once it is in this process
    requested: bool = False

    def __reduce__(self) -> Any:
        return ResultKey, (self.number,)

    def settle(self, error: BaseException | None, value: Stored | None = None, rows: int | None = None) -> None:
        """Set the futures whose values are known, unless they are set already."""
        row_count = Stored.of(rows if value is None else value.rows)
        for future, stored in ((self.rows, row_count), (self.value, value)):
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            elif stored is not None:
                future.set_result(stored)

    def death(self) -> WorkloadDied:
        message = f"the process of rank {self.owner} is gone"
        died = WorkloadDied(message, role=self.role, rank=self.owner, method=self.method)
        died.incarnation = _FIRST
        return died


@dataclass(frozen=True)
class RowsOf:
    result: RemoteResult

    def __reduce__(self) -> Any:
        return ResultKey, (self.result.number, True)


class TorchrunPort:
    """The port over the processes of a launch: rank ``r`` of every role is in process ``r``. Thread safe. The caller
    runs ``worker``, which has rank 0's own workers; ``lost`` lists the ranks of lost processes in order."""

    def __init__(self, launch: LaunchEnv, links: Mapping[int, Link]) -> None:
        self.worker = Worker(launch, self._settle, self._fetch)
        self.lost: list[int] = []
        self._links = links
        self._lock = RLock()
        self._loss = Condition(self._lock)
        self._numbers = count()
        self._results: weakref.WeakValueDictionary[int, RemoteResult] = weakref.WeakValueDictionary()
        self._running: dict[int, tuple[RemoteResult, Call | None]] = {}
        self._unneeded: deque[tuple[int, int]] = deque()
        for rank, link in links.items():
            link.start(partial(self._handle, rank), partial(self._lose, rank))

    def put(self, value: Any) -> Ref:
        result = self._add_result(0, "", "")
        result.settle(None, Stored.of(value, own=True))
        return Ref(self, result, RowsOf(result))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        values = Stored.of([encode(value) for value in (*call.args, *call.kwargs.values())], own=True)
        retain = call.sized and rank > 0
        with self._lock:
            unneeded: dict[int, list[int]] = {}
            while self._unneeded:
                owner, number = self._unneeded.popleft()
                unneeded.setdefault(owner, []).append(number)
            for owner, numbers in unneeded.items():
                self._links[owner].send(tuple(numbers))
            result = self._add_result(rank, role, call.method, retain)
            self._send(result, Run(result.number, role, CallHeader.of(call, _FIRST), values, retain), call)
        return Ref(self, result, RowsOf(result), role, rank, call.method, _FIRST)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        futures = [self._future(ref.token) for ref in refs]
        wait_for(futures, timeout_s, FIRST_EXCEPTION)
        return [_outcome(future) for future in futures]

    def start(self, job: JobSpec, run: str, context: MemberContext) -> Future[Stored]:
        """Construct a worker. The future raises WorkloadStartError if that fails, WorkloadDied without its process."""
        with self._lock:
            result = self._add_result(context.rank, context.role, "__init__")
            self._send(result, Start(result.number, job, run, context), None)
        return result.rows

    def end(self, clean: bool) -> None:
        for link in self._links.values():
            link.send(End(clean))
        self.worker.handle(End(clean))

    def wait_for_loss(self, timeout_s: float) -> int | None:
        with self._loss:
            self._loss.wait_for(lambda: bool(self.lost), timeout_s)
            return self.lost[0] if self.lost else None

    def _add_result(self, owner: int, role: str, method: str, retained: bool = False) -> RemoteResult:
        with self._lock:
            result = RemoteResult(next(self._numbers), owner, role, method, retained)
            self._results[result.number] = result
        if retained:
            # The next call reports it: the garbage collector may run this in any thread, under any lock.
            weakref.finalize(result, self._unneeded.append, (owner, result.number)).atexit = False
        return result

    def _send(self, result: RemoteResult, task: Task, call: Call | None) -> None:
        """Send a task. Its call's arguments stay alive until it has ended."""
        if result.owner in self.lost:
            inputs = (self._future(ref.token) for ref in _refs(call) if isinstance(ref.token, RemoteResult))
            errors = (future.exception(0) for future in inputs if future.done())
            result.settle(next((error for error in errors if error is not None), result.death()))
            return
        self._running[result.number] = result, call
        if result.owner == 0:
            self.worker.handle(task)
        else:
            self._links[result.owner].send(task)

    def _future(self, token: Any) -> Future[Stored]:
        """Return the future of a result, or of its row count, and fetch a result from its process."""
        if isinstance(token, RowsOf):
            return token.result.rows
        result: RemoteResult = token
        with self._lock:
            if result.retained and not result.requested and result.owner not in self.lost:
                result.requested = True
                self._links[result.owner].send(ResultKey(result.number))
        return result.value

    def _fetch(self, key: ResultKey) -> Future[Stored]:
        result = self._results[key.number]  # alive: the call that needs it is running
        return self._future(RowsOf(result) if key.rows else result)

    def _handle(self, rank: int, message: ResultKey | Result) -> None:
        if isinstance(message, ResultKey):
            send_when_done(message, self._fetch(message), self._links[rank].send)
        else:
            self._settle(message)

    def _settle(self, message: Result) -> None:
        with self._lock:
            result = self._results.get(message.key.number)
            self._running.pop(message.key.number, None)
            if result is not None:
                result.settle(message.error, message.value, message.rows)

    def _lose(self, rank: int) -> None:
        with self._loss:
            self.lost.append(rank)
            self._loss.notify_all()
            results = [result for result in self._results.values() if result.owner == rank]
            self._running = {number: item for number, item in self._running.items() if item[0].owner != rank}
            for result in results:
                result.settle(result.death())


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
