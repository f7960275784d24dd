# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the port and the executor of workers in this process are read together.
"""Jobs and scripts that run in this process: the port to their workers, the replacement of workers, and the executor.

:class:`LocalPort` runs each call at once in the caller's thread: a debugger stops inside a workload as in any function.
Arguments and results are copies that share large arrays read-only, as through Ray. :class:`LocalExecutor` executes each
command of the control machine before ``execute`` returns, but replaces workers without the control machine.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from dlrover.python.rl.common.errors import CallError, InvocationError, WorkloadDied, user_traceback
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, ProcessKind, RLRoleType, member_name
from dlrover.python.rl.common.sockets import HeldPort
from dlrover.python.rl.common.spans import SpanFile
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control import events
from dlrover.python.rl.control.commands import Command, Kill, Place, Release, StartMembers, StartTrainer, Wait
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.runtime.checkpoint.commits import checkpoints_of
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory
from dlrover.python.rl.runtime.checkpoint.runs import forget_commits, results_of, synced_files
from dlrover.python.rl.runtime.interrupts import insistent_interrupts
from dlrover.python.rl.runtime.member.arguments import CallHeader, Stored
from dlrover.python.rl.runtime.member.host import Arguments, MemberHost
from dlrover.python.rl.runtime.member.loading import (
    Device,
    Emit,
    cause_of,
    class_at,
    load_class,
    load_workload,
    restore_environment,
    starting,
)
from dlrover.python.rl.runtime.trainer_spans import RecordedPort
from dlrover.python.rl.trainer.port import (
    RAW_CALL,
    Call,
    Checkpoints,
    Outcome,
    Port,
    Recovery,
    Ref,
    Renewed,
    RestartInfo,
)
from dlrover.python.rl.trainer.shard import Rows, take_rows
from dlrover.python.rl.trainer.trainer import (
    Announcer,
    BaseTrainer,
    Reporter,
    TrainerLink,
    announce_nothing,
    run_trainer,
    tell_end,
)
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)


@dataclass
class LocalMember:
    """A worker in this process, with the environment that a separate process would have."""

    host: MemberHost
    env: Mapping[str, str] = field(repr=False)
    incarnation: int = 1
    together: bool = False  # all workers of the role restart when one fails
    alive: bool = True


@dataclass(frozen=True)
class CallResult:
    result: Stored | None
    error: InvocationError | None
    took_s: float = 0.0

    def outcome(self, timeout_s: float | None) -> Outcome:
        """Return the outcome for the trainer, late after the deadline; 0 is a poll, and every call has ended."""
        if timeout_s and self.took_s > timeout_s:
            return Outcome(late=True)
        return Outcome(self.result.load() if self.result else None, self.error)

    def stored(self) -> Stored:
        """Return the value for another worker; raises the error of this call."""
        if self.error is not None:
            raise self.error
        assert self.result is not None, "a call without an error has a result"
        return self.result


@dataclass(repr=False)
class LocalPort:
    """The port over workers of this process."""

    members: Mapping[Any, list[LocalMember]]  # by role, in rank order
    enforce_deadlines: bool = True  # a call beyond its timeout is late, as on Ray; off for debuggers
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
        if not member.alive:  # before the call, or killed during it
            died = WorkloadDied("the worker was killed", role=role, rank=rank, method=call.method)
            died.incarnation = member.incarnation
            result, error = None, died
        return CallResult(result, error, self.now_s() - started_s)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        deadline_s = timeout_s if self.enforce_deadlines else None
        return [ref.token.outcome(deadline_s) for ref in refs]

    def kill(self, role: str, rank: int) -> None:
        """End a worker like a killed process: its state is lost, calls to it fail."""
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
                return Stored.of(value, own=True), None
        except InvocationError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 -- decoding an argument or serializing the result may raise anything
            return None, member.host.failure(call.method, error)

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return value.token.stored().load()
        if isinstance(value, Rows):
            sizes = [part.token.stored().rows for part in value.parts]
            return take_rows(value, sizes, lambda part: part.token.stored().load())
        if isinstance(value, list) and any(isinstance(item, Ref) for item in value):
            return [self._resolve(item) for item in value]
        return Stored.of(value).load()


@dataclass(frozen=True)
class LocalHandle:
    """A worker's actor handle: ``handle.method.remote(...)`` returns a ref with ``.result()``."""

    port: Port
    role: str
    rank: int

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*args: Any, **kwargs: Any) -> Ref:
            return self.port.submit(self.role, self.rank, Call(RAW_CALL, method, args, kwargs))

        return SimpleNamespace(remote=remote)


@contextmanager
def process_environment(env: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        restore_environment(before)


def close_members(members: Iterable[tuple[MemberHost, Mapping[str, str]]]) -> None:
    """Close hosts, each in its environment. Errors are logged, as errors of separate processes would be."""
    for host, env in members:
        try:
            with process_environment(env):
                host.close()
        except Exception:  # noqa: BLE001 -- a process boundary
            _LOG.exception("closing %s failed", env["NAME"])


@dataclass
class LocalRecovery(Recovery):
    """Replaces killed workers; ``make`` constructs a worker from role, rank, incarnation and reason."""

    port: LocalPort
    make: Callable[[str, int, int, str], LocalMember]
    epoch: int = 1
    fresh: bool = True
    restart_info: RestartInfo = field(default_factory=RestartInfo)
    opened: Callable[[], None] = lambda: None
    began: Callable[[int], None] = lambda step: None
    progressed: Callable[[int], None] = lambda step: None

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


@dataclass
class TrainerRun:
    """A job's trainer in this process, whose raw handles call through ``port``. Raises ClassNotFound."""

    job: JobSpec
    port: Port
    checkpoints: Checkpoints
    resources: Mapping[RLRoleType, Mapping[str, float]]
    report: Reporter
    announce: Announcer = announce_nothing
    recovery: Recovery | None = None
    attempt: int = 1  # without ``recovery``
    _trainer: BaseTrainer | None = None  # running or interrupted

    def __post_init__(self) -> None:
        job = self.job
        self._class = load_class(job.trainer.module, job.trainer.class_, job.search_path)
        self._classes = {role: load_workload(job, role) for role in job.workloads}

    def run(self) -> None:
        """Run the trainer; raises as ``run_trainer``."""
        job, resources = self.job, {str(role): amounts for role, amounts in self.resources.items()}
        attempt = self.recovery.epoch if self.recovery is not None else self.attempt
        port = RecordedPort(
            self.port,
            SpanFile(job.job_dir, TRAINER_ID, attempt, job.spans_mb),
            at_once=isinstance(self.port, LocalPort),
        )
        link = TrainerLink(port, self.report, job.name, job.job_dir, resources, self.recovery, self.checkpoints)
        link = replace(link, announce=self.announce, files=synced_files(job), results=results_of(job))
        link = replace(link, begin_step=port.begin_step)
        try:
            run_trainer(self._make, link)
            port.close(has_finished=True)
        except (Exception, SystemExit):
            self._trainer = None
            raise
        finally:
            port.close()
        self._trainer = None

    def stop(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            tell_end(trainer, "stopped")

    def _make(self) -> BaseTrainer:
        workloads = self.job.workloads.items()
        handles = {role: [LocalHandle(self.port, role, rank) for rank in range(spec.num)] for role, spec in workloads}
        trainer: BaseTrainer = self._class(handles, self._classes, self.job.config)
        self._trainer = trainer
        return trainer


@dataclass
class LocalExecutor:
    """Runs a whole job in this process; of ``placement`` it uses the resources, ``enforce_deadlines`` as the port."""

    job: JobSpec
    placement: Placement
    report: Reporter
    enforce_deadlines: bool = False
    run: str = field(default_factory=lambda: uuid4().hex[:8])
    announce: Announcer = announce_nothing
    _members: dict[RLRoleType, list[LocalMember]] = field(default_factory=dict)
    _ports: dict[RLRoleType, HeldPort] = field(default_factory=dict)
    _trainer: TrainerRun | None = None

    @insistent_interrupts()
    def execute(self, command: Command, emit: Emit) -> None:
        """Execute a command, in which Ctrl-C and SIGTERM raise KeyboardInterrupt."""
        if isinstance(command, Place):
            forget_memory(self.job.name)
            emit(events.Placed(command.incarnation))
        elif isinstance(command, StartMembers):
            self._start_members(command, emit)
        elif isinstance(command, Kill) and command.process_id.kind is ProcessKind.MEMBER:
            role, rank = command.process_id.role, command.process_id.rank
            for member in self._members.get(RLRoleType(role), [])[rank : rank + 1]:
                member.alive = member.alive and member.incarnation != command.number
        elif isinstance(command, StartTrainer):
            self._run_trainer(command, emit)
        elif isinstance(command, Release):
            self._release(command.final)
            emit(events.Released(command.incarnation))
        elif isinstance(command, Wait):
            emit(events.WaitOver(command.timer))

    def _start_members(self, command: StartMembers, emit: Emit) -> None:
        role = RLRoleType(command.role)
        self.announce(f"starting {role.lower()}")
        members = self._members.setdefault(role, [])
        self._ports.setdefault(role, HeldPort()).take(self.job.preferred_ports(role), "127.0.0.1")
        for rank, incarnation in command.members:
            try:
                members[rank : rank + 1] = [self._make(role, rank, incarnation)]
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- a process boundary
                message, detail = f"{type(error).__name__}: {error}", user_traceback(error)
                cause = events.Cause(events.CauseKind.START_FAILED, str(ProcessId(role, rank)), message, detail)
                emit(events.MemberLost(role, rank, incarnation, cause))
                return
            emit(events.MemberStarted(role, rank, incarnation, _here()))

    def _make(self, role: str, rank: int, incarnation: int, why: str = "") -> LocalMember:
        role = RLRoleType(role)
        num = self.job.workloads[role].num
        context = MemberContext(
            name=member_name(self.job.name, self.run, role, rank, incarnation),
            role=role,
            rank=rank,
            world_size=num,
            local_rank=rank,
            local_world_size=num,
            master_addr="127.0.0.1",
            master_port=self._ports[role].number,
            collocation=",".join(self.job.collocation_of(role)),
            restart=RestartInfo(incarnation - 1, why),
            shares_process=True,
        )
        env = {**self.job.env, **self.job.workloads[role].env, **context.to_env()}
        spans = SpanFile(self.job.job_dir, ProcessId(role, rank), incarnation, self.job.spans_mb)
        host = MemberHost(incarnation, spans=spans)
        with process_environment(env):
            workload = host.load(self.job, context)
        return LocalMember(host, env, incarnation, workload.needs_own_process)

    def _run_trainer(self, command: StartTrainer, emit: Emit) -> None:
        port = LocalPort(self._members, self.enforce_deadlines)
        recovery = LocalRecovery(
            port,
            self._make,
            epoch=command.epoch,
            fresh=command.fresh,
            restart_info=RestartInfo(command.restarts, command.reason),
            opened=lambda: emit(events.StepsOpened(command.epoch)),
            progressed=lambda step: emit(events.Progressed(command.epoch, step)),
        )
        resources = {role: slots[0].resources for role, slots in self.placement.slots.items()}
        try:
            with _no_ray():
                self.job.job_dir.mkdir(parents=True, exist_ok=True)
                checkpoints = checkpoints_of(self.job, self.run, command.epoch)
                trainer = TrainerRun(self.job, port, checkpoints, resources, self.report, self.announce, recovery)
                self._trainer = trainer
                emit(events.TrainerStarted(command.epoch, _here()))
                with process_environment(self.job.env):
                    trainer.run()
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- a process boundary
            cause = cause_of(error, "trainer", user_traceback(error), alone=True)
            emit(events.TrainerLost(command.epoch, cause))
            return
        emit(events.TrainerFinished(command.epoch))

    def _release(self, final: bool) -> None:
        run, self._trainer = self._trainer, None
        if run is not None:
            run.stop()
        members, self._members = self._members, {}
        for port in self._ports.values():
            port.give_back()
        close_members((member.host, member.env) for group in members.values() for member in group if member.alive)
        if final:
            forget_memory(self.job.name, self.run)
            forget_commits(self.job.job_dir, self.run)


@contextlib.contextmanager
def _no_ray() -> Iterator[None]:
    """Let ``ray.get`` and similar calls raise a CallError that names the alternative, instead of starting a cluster."""
    starts = set_ray_auto_start(False)
    try:
        with process_environment({"RAY_ENABLE_AUTO_CONNECT": "0"}):  # read when Ray is imported
            yield
    except Exception as error:
        if type(error).__name__ == "RaySystemError" and "ray.init" in str(error):
            raise CallError(
                "a run in one process has no Ray: call .result() on what role groups and handles return,"
                " which works on Ray as well"
            ) from error
        raise
    finally:
        set_ray_auto_start(starts)


def set_ray_auto_start(value: bool) -> bool:
    """Let Ray, if it is imported, start with its first use or not; returns the earlier value."""
    hook: Any = sys.modules.get("ray._private.auto_init_hook")
    if hook is None:
        return True
    earlier, hook.enable_auto_connect = bool(hook.enable_auto_connect), value
    return earlier


def _here() -> events.Process:
    return events.Process(host=socket.gethostname(), pid=os.getpid())


HERE = "here"


class LocalHosting:
    """Implements ``Hosting`` without processes; its ``count`` devices are one physical device."""

    separate = False

    def __init__(self, kind: str = "cpu", count: int = 1) -> None:
        self.devices = tuple(Device(HERE, "127.0.0.1", "cuda" if kind == "cuda" else "cpu") for _ in range(count))
        self._members: dict[str, list[LocalMember]] = {}
        self.port = LocalPort(self._members, enforce_deadlines=False)

    def start(self, name: str, slots: Sequence[Sequence[int]], where: str) -> list[events.Process]:
        cls, world = class_at(where), len(slots)
        members = []
        with contextlib.ExitStack() as started:  # closes the earlier ranks if a later one cannot start
            for rank in range(world):
                context = MemberContext(name=f"{name}[{rank}]", role=RLRoleType(name), rank=rank, world_size=world)
                host = MemberHost()
                with starting(context.name):
                    host.start(cls, context, None, None)
                started.callback(host.close)
                members.append(LocalMember(host, {}))
            started.pop_all()
        self._members[name] = members
        here = events.Process(HERE, os.getpid(), socket.gethostname(), "127.0.0.1")
        return [here] * world

    def end(self, name: str) -> None:
        with contextlib.ExitStack() as stack:
            for member in self._members.pop(name, []):
                member.alive = False
                stack.callback(member.host.close)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for name in self._members:
                stack.callback(self.end, name)
