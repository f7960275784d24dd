"""Carrying out the brain's commands in this process, each before ``execute`` returns."""

import os
import socket
import traceback
from dataclasses import dataclass, field

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import member_name
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    Command,
    Failed,
    MemberStarted,
    Place,
    Placed,
    Release,
    Released,
    RestartDue,
    StartMembers,
    StartTrainer,
    TrainerFinished,
    TrainerStarted,
)
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.runtime.executor import Emit, cause_of
from dlrover.python.rl.runtime.loading import load_class
from dlrover.python.rl.runtime.local.port import LocalHandle, LocalMember, LocalPort, process_environment
from dlrover.python.rl.runtime.ports import free_port
from dlrover.python.rl.trainer.trainer import BaseTrainer, Reporter, TrainerLink
from dlrover.python.rl.trainer.workload import MemberContext, member_context

_LOG = get_logger(__name__)


@dataclass
class LocalExecutor:
    """Runs a whole job in this process.

    Args:
        job: what to run.
        placement: the plan; only resources and collocation mean something here.
        report: where step reports go.
        enforce_deadlines: see :class:`~dlrover.python.rl.runtime.local.port.LocalPort`.
    """

    job: JobSpec
    placement: Placement
    report: Reporter
    enforce_deadlines: bool = False
    _members: dict[RLRoleType, list[LocalMember]] = field(default_factory=dict)

    def execute(self, command: Command, emit: Emit) -> None:
        number = command.incarnation
        if isinstance(command, Place):
            emit(Placed(number))
        elif isinstance(command, StartMembers):
            self._start_members(number, emit)
        elif isinstance(command, StartTrainer):
            self._run_trainer(number, emit)
        elif isinstance(command, Release):
            self._release()
            emit(Released(number))
        else:
            # Whatever failed here would fail again at once: there is no other process to wait for.
            emit(RestartDue(number))

    def _start_members(self, number: int, emit: Emit) -> None:
        ports = {role: free_port(self.job.preferred_ports(role)) for role in self.job.workloads}
        for role, rank in self.job.members():
            try:
                member = self._start_member(self._context(role, rank, number, ports[role]))
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- the boundary that a process would be
                message, detail = f"{type(error).__name__}: {error}", traceback.format_exc()
                emit(Failed(number, Cause(CauseKind.START_FAILED, f"{role}[{rank}]", message, detail)))
                return
            self._members.setdefault(role, []).append(member)
            emit(MemberStarted(number, role, rank, socket.gethostname(), os.getpid()))

    def _start_member(self, context: MemberContext) -> LocalMember:
        spec = self.job.workloads[context.role]
        env = {**self.job.env, **spec.env, **context.to_env()}
        with process_environment(env), member_context(context):
            workload_class = load_class(spec.module, spec.class_, self.job.search_path)
            return LocalMember(workload_class(None, self.job.config), env)

    def _context(self, role: RLRoleType, rank: int, number: int, port: int) -> MemberContext:
        return MemberContext(
            name=member_name(self.job.name, number, role, rank),
            role=role,
            rank=rank,
            world_size=self.job.workloads[role].num,
            local_rank=rank,
            local_world_size=self.job.workloads[role].num,
            master_addr="127.0.0.1",
            master_port=port,
            collocation=",".join(self.job.collocation_of(role)),
        )

    def _run_trainer(self, number: int, emit: Emit) -> None:
        spec = self.job.trainer
        try:
            trainer_class = load_class(spec.module, spec.class_, self.job.search_path)
            classes = {
                role: load_class(workload.module, workload.class_, self.job.search_path)
                for role, workload in self.job.workloads.items()
            }
            link = self._link()
            handles = {
                role: [LocalHandle(link.port, role, rank) for rank in range(len(members))]
                for role, members in self._members.items()
            }
            trainer: BaseTrainer = trainer_class(handles, classes, self.job.config)
            trainer.bind(link)
            emit(TrainerStarted(number, socket.gethostname(), os.getpid()))
            with process_environment(self.job.env):
                trainer.init()
                trainer.fit()
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the boundary that a process would be
            emit(Failed(number, cause_of(error, "trainer", traceback.format_exc())))
            return
        emit(TrainerFinished(number))

    def _link(self) -> TrainerLink:
        self.job.job_dir.mkdir(parents=True, exist_ok=True)
        return TrainerLink(
            port=LocalPort(self._members, self.enforce_deadlines),
            report=self.report,
            job=self.job.name,
            job_dir=self.job.job_dir,
            resources={role: slots[0].resources for role, slots in self.placement.slots.items()},
        )

    def _release(self) -> None:
        members, self._members = self._members, {}
        for member in (member for group in members.values() for member in group if member.alive):
            try:
                with process_environment(member.env):
                    member.workload.close()
            except Exception:  # noqa: BLE001 -- the boundary that a process would be; the others are closed too
                _LOG.exception("closing %s failed", member.env["NAME"])
