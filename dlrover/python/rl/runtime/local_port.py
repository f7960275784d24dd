# SPDX-License-Identifier: Apache-2.0
"""The port to members in this process, which runs each call at once in the caller's thread, and their replacement.

A debugger stops inside a workload as in any function. Arguments and results are copies with large arrays shared
read-only, as through Ray.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from dlrover.python.rl.common.errors import InvocationError, WorkloadDied
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.process.arguments import CallHeader, Stored
from dlrover.python.rl.runtime.process.executor import load_class, restore_environment
from dlrover.python.rl.runtime.process.host import Arguments, MemberHost
from dlrover.python.rl.trainer.port import RAW_CALL, Call, Outcome, Port, Ref, Renewed, RestartInfo
from dlrover.python.rl.trainer.shard import Rows, take_rows
from dlrover.python.rl.trainer.trainer import BaseTrainer, TrainerLink


@dataclass
class LocalMember:
    """A member in this process, and the environment that its process would have."""

    host: MemberHost
    env: Mapping[str, str] = field(repr=False)
    incarnation: int = 1
    together: bool = False  # all members of the role restart when one fails
    alive: bool = True


@dataclass(frozen=True)
class CallResult:
    result: Stored | None
    error: InvocationError | None
    took_s: float = 0.0

    def outcome(self, timeout_s: float | None) -> Outcome:
        """The trainer's view, with the call's deadline; 0 is a poll, and every call has ended."""
        if timeout_s and self.took_s > timeout_s:
            return Outcome(late=True)
        return Outcome(self.result.load() if self.result else None, self.error)

    def value(self) -> Any:
        """Another member's view."""
        if self.result is None or self.error is not None:
            raise _Upstream(self.error)
        return self.result.load()


@dataclass(repr=False)
class LocalPort:
    """The port over members of this process."""

    members: Mapping[Any, list[LocalMember]]  # by role, in rank order
    enforce_deadlines: bool = True  # a call that took longer than its timeout is late, as on Ray; off for debuggers
    now_s: Callable[[], float] = time.monotonic

    def put(self, value: Any) -> Ref:
        return Ref(self, CallResult(Stored.of(value, own=True), None))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        member = self.members[role][rank]
        result = self.execute(member, role, rank, call)
        return Ref(self, result, result, role, rank, call.method, member.incarnation)

    def execute(self, member: LocalMember, role: str, rank: int, call: Call) -> CallResult:
        started_s = self.now_s()
        result, error = self._run(member, call) if member.alive else (None, None)
        if not member.alive:  # from the beginning, or since the middle of the call
            result, error = None, _death(member, role, rank, call)
        return CallResult(result, error, self.now_s() - started_s)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        deadline_s = timeout_s if self.enforce_deadlines else None
        return [ref.token.outcome(deadline_s) for ref in refs]

    def kill(self, role: str, rank: int) -> None:
        """End a member like a killed process: its state is lost, calls to it fail."""
        member = self.members[role][rank]
        member.alive = False
        member.host.end()

    def _run(self, member: LocalMember, call: Call) -> tuple[Stored | None, InvocationError | None]:
        def arguments() -> Arguments:
            kwargs = {name: self._resolve(value) for name, value in call.kwargs.items()}
            return [self._resolve(value) for value in call.args], kwargs

        try:
            with process_environment(member.env):
                value = member.host.invoke(CallHeader.of(call, member.incarnation), arguments)
                result = _stored(value, member.host, call.method)
        except _Upstream as upstream:
            return None, upstream.error
        except InvocationError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 -- decoding the arguments failed, as it may in another process
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
    """One member as an actor handle: ``handle.method.remote(...)`` returns a ref with ``.result()``."""

    port: Port
    role: str
    rank: int

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*args: Any, **kwargs: Any) -> Ref:
            return self.port.submit(self.role, self.rank, Call(RAW_CALL, method, args, kwargs))

        return SimpleNamespace(remote=remote)


class _Upstream(Exception):
    """The call whose result is an argument failed."""

    def __init__(self, error: InvocationError | None) -> None:
        super().__init__(str(error))
        self.error = error


def _rows(ref: Ref) -> int | None:
    call_result: CallResult = ref.token
    if call_result.result is None:
        raise _Upstream(call_result.error)
    return call_result.result.rows


def _stored(value: Any, host: MemberHost, method: str) -> Stored:
    """Serialize a result; one that cannot be is an error of the member."""
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
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        restore_environment(before)


def _ignore(*_: int) -> None:
    pass


@dataclass
class LocalRecovery:
    """Replaces killed members; ``make`` constructs one from role, rank, incarnation and reason."""

    port: LocalPort
    make: Callable[[str, int, int, str], LocalMember]
    epoch: int = 1
    fresh: bool = True
    restart_info: RestartInfo = field(default_factory=RestartInfo)
    on_opened: Callable[[], None] = _ignore
    on_progress: Callable[[int], None] = _ignore

    def incarnations(self) -> Mapping[ProcessId, int]:
        return {
            ProcessId(str(role), rank): member.incarnation
            for role, members in self.port.members.items()
            for rank, member in enumerate(members)
        }

    def renew(self, role: str, rank: int, incarnation: int, why: str) -> Renewed:
        members = self.port.members[role]
        if not members[rank].alive or members[rank].incarnation == incarnation:
            replaced = [at for at in range(len(members)) if at == rank or members[rank].together]
            for at in replaced:
                self.port.kill(role, at)
            for at in replaced:
                members[at] = self.make(role, at, members[at].incarnation + 1, why)
        numbers = {at: member.incarnation for at, member in enumerate(members)}
        return Renewed(role, numbers, {at: LocalHandle(self.port, role, at) for at in numbers})

    def opened(self) -> None:
        self.on_opened()

    def began(self, step: int) -> None:
        pass

    def progressed(self, step: int) -> None:
        self.on_progress(step)


def trainer_maker(job: JobSpec) -> Callable[[TrainerLink], BaseTrainer]:
    """A function that constructs a trainer, whose raw handles call through the link's port.

    Raises:
        ClassNotFound: a class of the job cannot be loaded.
    """
    spec = job.trainer
    trainer_class = load_class(spec.module, spec.class_, job.search_path)
    classes = {
        role: load_class(workload.module, workload.class_, job.search_path) for role, workload in job.workloads.items()
    }

    def make(link: TrainerLink) -> BaseTrainer:
        handles = {
            role: [LocalHandle(link.port, role, rank) for rank in range(workload.num)]
            for role, workload in job.workloads.items()
        }
        trainer: BaseTrainer = trainer_class(handles, classes, job.config)
        return trainer

    return make
