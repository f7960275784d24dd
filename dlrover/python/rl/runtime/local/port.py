"""Calling members that live in this process: at once, one after the other, in the caller's thread.

A debugger therefore stops inside a workload as in any function. What a member gets is what it would get through Ray:
a copy, with large arrays shared read-only.
"""

import asyncio
import inspect
import os
import pickle
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from dlrover.python.rl.common.clock import Clock, SystemClock
from dlrover.python.rl.common.errors import InvocationError, WorkloadDied
from dlrover.python.rl.trainer.port import RAW_CALL, Call, Outcome, Port, Ref
from dlrover.python.rl.trainer.shard import Rows, row_count, take_rows


@dataclass
class LocalMember:
    """A workload in this process, and the environment it would have in a process of its own."""

    workload: Any
    env: Mapping[str, str]
    alive: bool = True


@dataclass(frozen=True)
class Stored:
    """A value as an object store keeps it: every reader gets a copy, large buffers are shared read-only."""

    data: bytes
    buffers: tuple[memoryview, ...]
    rows: int | None

    @classmethod
    def of(cls, value: Any) -> "Stored":
        """Serialise ``value``, once."""
        buffers: list[pickle.PickleBuffer] = []
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return cls(data, tuple(memoryview(buffer.raw()).toreadonly() for buffer in buffers), row_count(value))

    def load(self) -> Any:
        """A copy of the value."""
        return pickle.loads(self.data, buffers=self.buffers)


@dataclass(frozen=True)
class _Done:
    """What came of a call: its result or its error, and how long it took."""

    result: Stored | None
    error: InvocationError | None
    took_s: float = 0.0

    def outcome(self, timeout_s: float | None) -> Outcome:
        """As the trainer sees it, given the call's deadline."""
        if timeout_s is not None and self.took_s > timeout_s:
            return Outcome(late=True)
        return Outcome(self.result.load() if self.result else None, self.error)

    def value(self) -> Any:
        """As another member sees it."""
        if self.result is None or self.error is not None:
            raise _Upstream(self.error)
        return self.result.load()


@dataclass
class LocalPort:
    """The port over members of this process.

    Args:
        members: role to members, in rank order.
        enforce_deadlines: report a call that took longer than its timeout as late, as Ray would. Off while somebody
            may sit at a breakpoint.
    """

    members: Mapping[Any, Sequence[LocalMember]]
    enforce_deadlines: bool = True
    clock: Clock = field(default_factory=SystemClock)

    def put(self, value: Any) -> Ref:
        return Ref(self, _Done(Stored.of(value), None))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        started_s = self.clock.now_s()
        result, error = self._run(role, rank, call)
        done = _Done(result, error, self.clock.now_s() - started_s)
        return Ref(self, done, done, role, rank, call.method)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        deadline_s = timeout_s if self.enforce_deadlines else None
        return [ref.token.outcome(deadline_s) for ref in refs]

    def kill(self, role: str, rank: int) -> None:
        """End a member as a killed process would end: its state is gone, calls to it fail."""
        member = self.members[role][rank]
        member.alive, member.workload = False, None

    def _run(self, role: str, rank: int, call: Call) -> tuple[Stored | None, InvocationError | None]:
        member = self.members[role][rank]
        if not member.alive:
            return None, WorkloadDied("the member was killed", role=role, rank=rank, method=call.method)
        try:
            args = [self._resolve(value) for value in call.args]
            kwargs = {name: self._resolve(value) for name, value in call.kwargs.items()}
            with process_environment(member.env):
                return Stored.of(_finish(getattr(member.workload, call.method)(*args, **kwargs))), None
        except _Upstream as upstream:
            return None, upstream.error
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the boundary that a process would be
            failure = InvocationError(
                f"{type(error).__name__}: {error}",
                role=role,
                rank=rank,
                method=call.method,
                node=socket.gethostname(),
                remote_traceback=traceback.format_exc(),
            )
            failure.original = failure.__cause__ = error
            return None, failure

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return value.token.value()
        if isinstance(value, Rows):
            return take_rows(value, [_rows(part) for part in value.parts], lambda part: part.token.value())
        if isinstance(value, list) and any(isinstance(item, Ref) for item in value):
            return [self._resolve(item) for item in value]
        return Stored.of(value).load()


@dataclass(frozen=True)
class LocalHandle:
    """One member as an actor handle would show it: ``handle.method.remote(...)`` gives a ref with ``.result()``."""

    port: Port
    role: str
    rank: int

    def __getattr__(self, method: str) -> "LocalMethod":
        if method.startswith("_"):
            raise AttributeError(method)
        return LocalMethod(self, method)


@dataclass(frozen=True)
class LocalMethod:
    """A method of a :class:`LocalHandle`."""

    handle: LocalHandle
    name: str

    def remote(self, *args: Any, **kwargs: Any) -> Ref:
        """Call the method on that member alone."""
        handle = self.handle
        return handle.port.submit(handle.role, handle.rank, Call(RAW_CALL, self.name, args, kwargs))


class _Upstream(Exception):
    """The call that should have made an argument failed."""

    def __init__(self, error: InvocationError | None) -> None:
        super().__init__(str(error))
        self.error = error


def _rows(ref: Ref) -> int | None:
    done: _Done = ref.token
    if done.result is None:
        raise _Upstream(done.error)
    return done.result.rows


def _finish(result: Any) -> Any:
    """Run a coroutine to its end; anything else is the result already."""
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


@contextmanager
def process_environment(env: Mapping[str, str]) -> Iterator[None]:
    """Lend ``env`` to ``os.environ``."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
