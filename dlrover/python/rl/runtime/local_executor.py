# SPDX-License-Identifier: Apache-2.0
"""Processes of a job or a script that are this process.

:class:`LocalExecutor` executes each of the control machine's commands before ``execute`` returns. Nothing else runs
beside the trainer, so members that are killed meanwhile are replaced without the control machine.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from dlrover.python.rl.common.errors import CallError, user_traceback
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId, RLRoleType, member_name
from dlrover.python.rl.common.sockets import HeldPort
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.commands import Command, KillMember, Place, Release, StartMembers, StartTrainer, Wait
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    MemberLost,
    MemberStarted,
    Placed,
    Process,
    Progressed,
    Released,
    StepsOpened,
    TrainerFinished,
    TrainerLost,
    TrainerStarted,
    WaitOver,
)
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.runtime.checkpoint.commits import checkpoints_of
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory
from dlrover.python.rl.runtime.checkpoint.run_files import files_of, results_of
from dlrover.python.rl.runtime.checkpoint.runs import forget_commits
from dlrover.python.rl.runtime.local_port import (
    LocalMember,
    LocalPort,
    LocalRecovery,
    process_environment,
    trainer_maker,
)
from dlrover.python.rl.runtime.process.executor import Device, Emit, cause_of, class_at, load_class, starting
from dlrover.python.rl.runtime.process.host import MemberHost
from dlrover.python.rl.trainer.port import RestartInfo
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
class LocalExecutor:
    """Runs a whole job in this process; of ``placement`` only resources matter here. ``enforce_deadlines``: see
    :class:`~dlrover.python.rl.runtime.local_port.LocalPort`."""

    job: JobSpec
    placement: Placement
    report: Reporter
    enforce_deadlines: bool = False
    run: str = field(default_factory=lambda: uuid4().hex[:8])
    announce: Announcer = announce_nothing
    _members: dict[RLRoleType, list[LocalMember]] = field(default_factory=dict)
    _ports: dict[RLRoleType, HeldPort] = field(default_factory=dict)
    _trainer: BaseTrainer | None = None  # one that runs, or was interrupted

    def execute(self, command: Command, emit: Emit) -> None:
        if isinstance(command, Place):
            forget_memory(self.job.name)
            emit(Placed(command.incarnation))
        elif isinstance(command, StartMembers):
            self._start_members(command, emit)
        elif isinstance(command, KillMember):
            self._kill(command)
        elif isinstance(command, StartTrainer):
            self._run_trainer(command, emit)
        elif isinstance(command, Release):
            self._release(command.final)
            emit(Released(command.incarnation))
        elif isinstance(command, Wait):
            # No waiting: there is no other process that could recover meanwhile.
            emit(WaitOver(command.timer))

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
                cause = Cause(CauseKind.START_FAILED, str(ProcessId(role, rank)), message, detail)
                emit(MemberLost(role, rank, incarnation, cause))
                return
            emit(MemberStarted(role, rank, incarnation, _here()))

    def _make(self, role: str, rank: int, incarnation: int, why: str = "") -> LocalMember:
        context = self._context(RLRoleType(role), rank, incarnation, why)
        spec = self.job.workloads[context.role]
        env = {**self.job.env, **spec.env, **context.to_env()}
        host = MemberHost(incarnation)
        with process_environment(env):
            workload_class = load_class(spec.module, spec.class_, self.job.search_path)
            host.start(workload_class, context, None, self.job.config)
        return LocalMember(host, env, incarnation, workload_class.needs_own_process)

    def _context(self, role: RLRoleType, rank: int, incarnation: int, why: str) -> MemberContext:
        return MemberContext(
            name=member_name(self.job.name, self.run, role, rank, incarnation),
            role=role,
            rank=rank,
            world_size=self.job.workloads[role].num,
            local_rank=rank,
            local_world_size=self.job.workloads[role].num,
            master_addr="127.0.0.1",
            master_port=self._ports[role].number,
            collocation=",".join(self.job.collocation_of(role)),
            restart=RestartInfo(incarnation - 1, why),
            shares_process=True,
        )

    def _kill(self, command: KillMember) -> None:
        for member in self._members.get(RLRoleType(command.role), [])[command.rank : command.rank + 1]:
            member.alive = member.alive and member.incarnation != command.incarnation

    def _run_trainer(self, command: StartTrainer, emit: Emit) -> None:
        try:
            with _no_ray():
                link, make = self._link(command, emit), trainer_maker(self.job)
                emit(TrainerStarted(command.epoch, _here()))

                def make_trainer() -> BaseTrainer:
                    self._trainer = make(link)
                    return self._trainer

                with process_environment(self.job.env):
                    run_trainer(make_trainer, link)
            self._trainer = None
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- a process boundary
            self._trainer = None
            cause = cause_of(error, "trainer", user_traceback(error), alone=True)
            emit(TrainerLost(command.epoch, cause))
            return
        emit(TrainerFinished(command.epoch))

    def _link(self, command: StartTrainer, emit: Emit) -> TrainerLink:
        self.job.job_dir.mkdir(parents=True, exist_ok=True)
        port = LocalPort(self._members, self.enforce_deadlines)
        recovery = LocalRecovery(
            port,
            self._make,
            epoch=command.epoch,
            fresh=command.fresh,
            restart_info=RestartInfo(command.restarts, command.reason),
            on_opened=lambda: emit(StepsOpened(command.epoch)),
            on_progress=lambda step: emit(Progressed(command.epoch, step)),
        )
        return TrainerLink(
            port=port,
            report=self.report,
            job=self.job.name,
            job_dir=self.job.job_dir,
            resources={role: slots[0].resources for role, slots in self.placement.slots.items()},
            recovery=recovery,
            checkpoints=checkpoints_of(self.job, self.run, command.epoch),
            announce=self.announce,
            files=files_of(self.job),
            results=results_of(self.job),
        )

    def _release(self, final: bool) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            tell_end(trainer, "stopped")
        members, self._members = self._members, {}
        for port in self._ports.values():
            port.give_back()
        for member in (member for group in members.values() for member in group if member.alive):
            try:
                with process_environment(member.env):
                    member.host.close()
            except Exception:  # noqa: BLE001 -- a process boundary; the others are closed too
                _LOG.exception("closing %s failed", member.env["NAME"])
        if final:
            forget_memory(self.job.name, self.run)
            forget_commits(self.job.job_dir, self.run)


@contextlib.contextmanager
def _no_ray() -> Iterator[None]:
    """Inside, ``ray.get`` and its like start no cluster but raise a CallError that names the way without Ray."""
    starts = set_ray_auto_start(False)
    try:
        with process_environment({"RAY_ENABLE_AUTO_CONNECT": "0"}):  # read when Ray is imported
            yield
    except Exception as error:
        if type(error).__name__ == "RaySystemError" and "ray.init" in str(error):
            raise CallError(
                "there is no Ray in one process: resolve what role groups and handles return with .result(),"
                " which works on Ray as well"
            ) from error
        raise
    finally:
        set_ray_auto_start(starts)


def set_ray_auto_start(value: bool) -> bool:
    """Set whether Ray, if it is imported, starts with its first use; returns the earlier value."""
    hook: Any = sys.modules.get("ray._private.auto_init_hook")
    if hook is None:
        return True
    earlier, hook.enable_auto_connect = bool(hook.enable_auto_connect), value
    return earlier


def _here() -> Process:
    return Process(host=socket.gethostname(), pid=os.getpid())


HERE = "here"


class LocalHosting:
    """Implements :class:`~dlrover.python.rl.runtime.process.executor.Hosting` without processes; its ``count`` devices
    are all the same physical one."""

    separate = False

    def __init__(self, kind: str = "cpu", count: int = 1) -> None:
        self.devices = tuple(Device(HERE, "127.0.0.1", "cuda" if kind == "cuda" else "cpu") for _ in range(count))
        self._members: dict[str, list[LocalMember]] = {}
        self.port = LocalPort(self._members, enforce_deadlines=False)

    def start(self, name: str, slots: Sequence[Sequence[int]], where: str) -> list[Process]:
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
        here = Process(HERE, os.getpid(), socket.gethostname(), "127.0.0.1")
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
