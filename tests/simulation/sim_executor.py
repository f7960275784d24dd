# SPDX-License-Identifier: Apache-2.0
"""Carrying out the machine's commands on the simulated cluster, as the executor on Ray does: each after a while, each
once more when it is asked for again, everything found again by name."""

from collections.abc import Callable
from typing import Any

from sim_cluster import Cluster, Node, Proc
from sim_trainer import SimTrainer
from sim_world import World

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, ProcessKind
from dlrover.python.rl.control.commands import (
    Kill,
    Place,
    Release,
    StartMembers,
    StartStandby,
    StartTrainer,
    Wait,
)
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    Event,
    Failed,
    MemberLost,
    MemberStarted,
    NodeLost,
    Placed,
    Process,
    Released,
    StandbyLost,
    StandbyReady,
    TrainerFinished,
    TrainerLost,
    TrainerStarted,
    WaitOver,
)

Emit = Callable[[Event], None]


def died(process_id: ProcessId, kind: CauseKind = CauseKind.PROCESS_DIED) -> Cause:
    return Cause(kind, str(process_id), "it is gone")


class SimExecutor:
    """One master's hands. They are gone with it; the processes are not.

    Args:
        emit: where reports go.
        here: whether the master that these hands belong to is still there.
        talk: what the trainer's process asks of whatever master there is.
    """

    def __init__(self, world: World, cluster: Cluster, emit: Emit, here: Callable[[], bool], talk: Any) -> None:
        self.world, self.cluster, self.emit, self.here, self.talk = world, cluster, emit, here, talk
        self.members: dict[ProcessId, Proc] = {}
        self.standbys: dict[tuple[str, int], Proc] = {}
        self.origins: dict[int, tuple[int, int]] = {}  # pid to the standby and the incarnation that it began as
        self.trainer: Proc | None = None
        self.generation = 0
        self.wanted: dict[ProcessId, int] = {}
        cluster.node_watchers.append(self._node_lost)

    def _later(self, low_s: float, high_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Go on later, unless a release has come in between or the master is gone."""
        generation = self.generation

        def go_on() -> None:
            if self.here() and self.generation == generation:
                call(*arguments)

        self.world.after(self.world.within(low_s, high_s), go_on)

    def execute(self, command: Any) -> None:
        """Begin a command."""
        self.world.trace("command", command)
        if isinstance(command, Release):
            self.generation += 1
            self._later(0.1, 1.0, self._release, command)
        elif isinstance(command, Place):
            self._later(0.1, 1.0, self._place, command, self.world.now_s)
        elif isinstance(command, StartMembers):
            self.wanted |= {ProcessId(command.role, rank): incarnation for rank, incarnation in command.members}
            self._later(0.0, 0.1, self._start_members, command)
        elif isinstance(command, StartStandby):
            self._later(0.0, 0.1, self._start_standby, command)
        elif isinstance(command, StartTrainer):
            self._later(0.0, 0.1, self._start_trainer, command)
        elif isinstance(command, Kill):
            self._kill(command)
        elif isinstance(command, Wait):
            self._later(command.delay_s, command.delay_s + 0.01, self.emit, WaitOver(command.timer))

    def _kill(self, command: Kill) -> None:
        process_id = command.process_id
        if process_id.kind is ProcessKind.MEMBER:
            proc = self.members.get(process_id)
            if proc is not None and proc.identity == (process_id, command.number):
                self._end(proc)
        elif process_id.kind is ProcessKind.STANDBY:
            proc = self.standbys.pop((process_id.role, process_id.rank), None)
            if proc is not None:
                self._end(proc)
        elif self.trainer is not None and self.trainer.name[2] == command.number:
            self.cluster.end(self.trainer)

    def _end(self, proc: Proc) -> None:
        proc.watchers = []
        self.cluster.end(proc)

    # -- placing and releasing ----------------------------------------------------------------------------------------

    def _place(self, command: Place, since_s: float) -> None:
        if self.cluster.usable(command.excluded):
            self.cluster.reserved[command.incarnation] = True
            self.emit(Placed(command.incarnation))
        elif self.world.now_s - since_s > 60.0:
            self.emit(Failed(command.incarnation, Cause(CauseKind.NO_RESOURCES, "job", "there is no place")))
        else:
            self._later(0.5, 1.0, self._place, command, since_s)

    def _release(self, command: Release) -> None:
        for proc in self.cluster.alive():
            self.cluster.end(proc)
        # Only what nobody can reach may outlive a release; its lease ends it.
        self.cluster.spared = {proc.pid: proc for proc in self.cluster.alive()}
        self.members, self.standbys, self.trainer = {}, {}, None
        self.cluster.reserved.clear()
        if command.final:
            self.cluster.memory = False
        self.emit(Released(command.incarnation))

    def _node_for(self, excluded: tuple[str, ...]) -> Node | None:
        nodes = self.cluster.usable(excluded)
        if not nodes:
            return None
        return nodes[0] if self.cluster.packed else self.world.rng.choice(nodes)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start_members(self, command: StartMembers) -> None:
        batch = len(self.cluster.procs) + 1
        ready = self.standbys
        # A later command may have overtaken this one: what it has begun is not to be undone.
        members = [(rank, at) for rank, at in command.members if self.wanted[ProcessId(command.role, rank)] == at]
        new = [rank for rank, _ in members if (command.role, command.standbys.get(rank, -1)) not in ready]
        if new and not self.cluster.usable(command.excluded):
            self._later(0.5, 1.0, self._start_members, command)
            return
        for rank, incarnation in members:
            who, number = ProcessId(command.role, rank), command.standbys.get(rank, -1)
            proc = self._kept(who) if rank in command.rejoining else None
            born = 0
            if proc is not None:
                number, born = self.origins[proc.pid]
                proc.up, proc.watchers = False, []
                self.cluster.become(proc, (who, incarnation), batch)
                took_s = (0.02, 0.2)
            elif (proc := self.standbys.pop((command.role, number), None)) is not None:
                self.origins[proc.pid] = number, incarnation
                proc.up, proc.watchers = False, []
                self.cluster.become(proc, (who, incarnation), batch)
                took_s = (0.02, 0.2)
            else:
                node = self._node_for(command.excluded)
                assert node is not None
                proc = self.cluster.start(("member", str(who), incarnation), node, (who, incarnation), batch)
                number, took_s = -1, (0.3, 3.0)
                self.origins[proc.pid] = number, incarnation
            self.members[who] = proc
            self._watch_member(command.role, rank, incarnation, proc)
            self._later(*took_s, self._member_up, command.role, rank, incarnation, proc, number, born)

    def _kept(self, who: ProcessId) -> Proc | None:
        """The process of a worker that is up; one that does not answer is ended."""
        proc = self.members[who]
        if self._hears(proc):
            return proc
        proc.watchers = []
        self.cluster.end(proc)
        return None

    def _member_up(self, role: str, rank: int, incarnation: int, proc: Proc, standby: int, born: int) -> None:  # noqa: PLR0913
        if self.members.get(ProcessId(role, rank)) is not proc:
            return
        if not self._hears(proc):
            late = MemberLost(role, rank, incarnation, died(ProcessId(role, rank), CauseKind.HUNG), proc.node.name)
            self._later(4.0, 5.0, self._too_late, proc, late)
            return
        proc.up = True
        self.emit(MemberStarted(role, rank, incarnation, self._process(proc), standby, born))

    def _watch_member(self, role: str, rank: int, incarnation: int, proc: Proc) -> None:
        lost = MemberLost(role, rank, incarnation, died(ProcessId(role, rank)), proc.node.name)
        self._watch(proc, lambda: self.emit(lost))

    # -- standbys -----------------------------------------------------------------------------------------------------

    def _start_standby(self, command: StartStandby) -> None:
        node = self._node_for(command.excluded)
        if node is None:
            self._later(0.5, 1.0, self._start_standby, command)
            return
        proc = self.cluster.start(("standby", command.role, command.number), node, None, 0)
        self._watch_standby(command.role, command.number, proc)
        self._later(0.3, 3.0, self._standby_up, command.role, command.number, proc)

    def _standby_up(self, role: str, number: int, proc: Proc) -> None:
        if self._hears(proc):
            proc.up = True
            self.standbys[role, number] = proc
            self.emit(StandbyReady(role, number, self._process(proc)))
        else:
            late = StandbyLost(role, number, died(ProcessId.standby(role, number), CauseKind.HUNG), proc.node.name)
            self._later(4.0, 5.0, self._too_late, proc, late)

    def _watch_standby(self, role: str, number: int, proc: Proc) -> None:
        lost = StandbyLost(role, number, died(ProcessId.standby(role, number)), proc.node.name)

        def gone() -> None:
            if self.standbys.get((role, number)) is proc:
                del self.standbys[role, number]
            self.emit(lost)

        self._watch(proc, gone)

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _start_trainer(self, command: StartTrainer) -> None:
        node = self._node_for(command.excluded)
        if node is None:
            self._later(0.5, 1.0, self._start_trainer, command)
            return
        name = ("trainer", "trainer", command.epoch)
        proc = self.trainer = self.cluster.start(name, node, (TRAINER_ID, command.epoch), 0)
        self._watch_trainer(proc)
        self._later(0.2, 2.0, self._trainer_up, command, proc)

    def _trainer_up(self, command: StartTrainer, proc: Proc) -> None:
        if self._hears(proc):
            proc.up = True
            self.emit(TrainerStarted(command.epoch, self._process(proc)))
            seats = {who: member for who, member in self.members.items()}
            SimTrainer(self.world, self.cluster, self.talk, proc, command.fresh, seats).begin()
            self._follow(proc)
        else:
            late = TrainerLost(command.epoch, died(TRAINER_ID, CauseKind.HUNG), proc.node.name)
            self._later(4.0, 5.0, self._too_late, proc, late)

    def _watch_trainer(self, proc: Proc) -> None:
        lost = TrainerLost(proc.name[2], died(TRAINER_ID), proc.node.name)
        self._watch(proc, lambda: self.emit(lost))

    def _follow(self, proc: Proc) -> None:
        """Wait for what the trainer's main function returns."""
        if proc.result is None:
            if proc.alive:
                self._later(0.2, 0.3, self._follow, proc)
        elif proc.alive and not self._hears(proc):
            self._later(0.2, 0.3, self._follow, proc)
        elif proc.alive:
            epoch, cause = proc.name[2], proc.result
            self.emit(TrainerLost(epoch, cause) if isinstance(cause, Cause) else TrainerFinished(epoch))

    def _too_late(self, proc: Proc, lost: Event) -> None:
        """A start that took too long is a loss."""
        if proc.alive:
            proc.watchers = []
            self.cluster.end(proc)
            self.emit(lost)

    # -- watching -----------------------------------------------------------------------------------------------------

    def _hears(self, proc: Proc) -> bool:
        return proc.alive and proc.stopped_s is None and proc.node.usable

    def _process(self, proc: Proc) -> Process:
        return Process(proc.node.name, proc.pid)

    def _watch(self, proc: Proc, gone: Callable[[], None]) -> None:
        if not proc.alive and not proc.node.cut:
            self._later(0.02, 0.5, gone)
        else:
            proc.watchers.append(lambda _: self._later(0.02, 0.5, gone))

    def _node_lost(self, node: Node) -> None:
        if self.here():
            lost = NodeLost(node.name, Cause(CauseKind.NODE_LOST, "job", f"{node.name} is lost"))
            self._later(0.0, 3.0, self.emit, lost)

    # -- after the master's own restart -------------------------------------------------------------------------------

    def adopt(self, state: Any, up: dict[ProcessId, Process]) -> None:
        """Watch what is up, tell of what is not, end what nobody knows."""
        found = {proc.pid: proc for proc in self.cluster.names.values()}
        for proc in list(found.values()):
            if proc.pid not in {process.pid for process in up.values()}:
                self.cluster.end(proc)
        for who, process in up.items():
            proc = found.get(process.pid, self.cluster.procs[process.pid - 1])
            there = process.pid in found
            if who.kind is ProcessKind.TRAINER:
                self.trainer = proc
                self._watch_trainer(proc) if there else self.emit(TrainerLost(state.epoch, died(who)))
                self._follow(proc)
            elif who.kind is ProcessKind.STANDBY:
                role, number = who.role, who.rank
                if there:
                    self.standbys[role, number] = proc
                    self._watch_standby(role, number, proc)
                else:
                    self.emit(StandbyLost(role, number, died(who)))
            else:
                member = state.members[who]
                self.members[who] = proc
                self.origins[proc.pid] = member.standby, member.first
                if there:
                    self._watch_member(who.role, who.rank, member.incarnation, proc)
                else:
                    self.emit(MemberLost(who.role, who.rank, member.incarnation, died(who)))
