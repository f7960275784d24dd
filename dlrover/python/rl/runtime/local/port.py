"""Calling members that live in this process: at once, one after the other, in the caller's thread.

A debugger therefore stops inside a workload as in any function. What a member gets is what it would get through Ray:
a copy, with large arrays shared read-only; what is put away, and what a member gives back, stays what it was.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dlrover.python.rl.common.clock import Clock, SystemClock
from dlrover.python.rl.common.errors import InvocationError, WorkloadDied
from dlrover.python.rl.runtime.host import Arguments, CallHeader, MemberHost
from dlrover.python.rl.runtime.stored import Stored
from dlrover.python.rl.trainer.port import RAW_CALL, Call, Outcome, Port, Ref
from dlrover.python.rl.trainer.shard import Rows, take_rows


@dataclass
class LocalMember:
    """A member in this process, and the environment it would have in a process of its own.

    Attributes:
        together: whether all members of the role restart when one is lost.
    """

    host: MemberHost
    env: Mapping[str, str]
    incarnation: int = 1
    together: bool = False
    alive: bool = True

    @property
    def workload(self) -> Any:
        """The workload, None once it was ended."""
        return self.host.workload


@dataclass(frozen=True)
class Done:
    """What came of a call: its result or its error, and how long it took."""

    result: Stored | None
    error: InvocationError | None
    took_s: float = 0.0

    def outcome(self, timeout_s: float | None) -> Outcome:
        """As the trainer sees it, given the call's deadline; 0 asks where it stands, and everything has ended."""
        if timeout_s and self.took_s > timeout_s:
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

    members: Mapping[Any, list[LocalMember]]
    enforce_deadlines: bool = True
    clock: Clock = field(default_factory=SystemClock)

    def put(self, value: Any) -> Ref:
        return Ref(self, Done(Stored.of(value, own=True), None))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        member = self.members[role][rank]
        done = self.execute(member, role, rank, call)
        return Ref(self, done, done, role, rank, call.method, member.incarnation)

    def execute(self, member: LocalMember, role: str, rank: int, call: Call) -> Done:
        """Run a call, here and now."""
        started_s = self.clock.now_s()
        result, error = self._run(member, call) if member.alive else (None, None)
        if not member.alive:  # from the beginning, or since the middle of the call
            result, error = None, _death(member, role, rank, call)
        return Done(result, error, self.clock.now_s() - started_s)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        deadline_s = timeout_s if self.enforce_deadlines else None
        return [ref.token.outcome(deadline_s) for ref in refs]

    def kill(self, role: str, rank: int) -> None:
        """End a member as a killed process would end: its state is gone, calls to it fail."""
        member = self.members[role][rank]
        member.alive = False
        member.host.end()

    def _run(self, member: LocalMember, call: Call) -> tuple[Stored | None, InvocationError | None]:
        def arguments() -> Arguments:
            args = [self._resolve(value) for value in call.args]
            return args, {name: self._resolve(value) for name, value in call.kwargs.items()}

        try:
            with process_environment(member.env):
                value = member.host.invoke(CallHeader.of(call, member.incarnation), arguments)
                result = _stored(value, member.host, call.method)
        except _Upstream as upstream:
            return None, upstream.error
        except InvocationError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 -- taking the arguments failed, as it would in another process
            return None, member.host.failure(call.method, error)
        return result, None

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
    done: Done = ref.token
    if done.result is None:
        raise _Upstream(done.error)
    return done.result.rows


def _stored(value: Any, host: MemberHost, method: str) -> Stored:
    """A result as it would travel; one that cannot is an error of the member's."""
    try:
        return Stored.of(value, own=True)
    except Exception as error:
        raise host.failure(method, error) from error


def _death(member: LocalMember, role: str, rank: int, call: Call) -> WorkloadDied:
    died = WorkloadDied("the member was killed", role=role, rank=rank, method=call.method)
    died.incarnation = member.incarnation
    return died


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
