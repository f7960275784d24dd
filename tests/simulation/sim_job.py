# SPDX-License-Identifier: Apache-2.0
"""One simulated run of a job: faults first, then none, and then it must go on and come to its end."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from sim_cluster import Cluster, Proc
from sim_disk import SimDisk
from sim_faults import Faults, situation
from sim_master import SimMaster, died
from sim_referee import Referee
from sim_trainer import Checkpoints
from sim_world import Violation, World

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control.events import MemberLost, Progressed, RecoveryScope, RoleSettings, StepsOpened, Submitted

COMMIT_WITHIN_S = 240.0
END_WITHIN_S = 240.0
LEASE_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """How a run went: its trace's hash, what was reached how often, the lines of the trace where they were kept."""

    seed: int
    trace_hash: str
    sometimes: Counter[str]
    lines: list[str]


class SimJob:
    """A job on a cluster with a master, as the trainer's process sees them too.

    Args:
        seed: what decides everything.
        modules: the production modules.
    """

    def __init__(self, seed: int, modules: Any, keep_lines: bool = False) -> None:
        self.world = World(seed, keep_lines)
        rng = self.world.rng
        self.modules, self.disk = modules, SimDisk(rng)
        self.cluster = Cluster(self.world, rng.randint(2, 4))
        self.checkpoints = Checkpoints(self.world)
        self.referee = Referee(self.world, modules)
        self.durable = rng.random() < 0.85
        self.total_steps, self.healed = 10**9, False
        self.settings = self._terms()
        self.noise = (rng.choice([0.0, 0.1, 0.5]), rng.choice([0.0, 0.2, 2.0]))
        self.master: SimMaster | None = None
        self.where = "away"
        self.faults = Faults(self)
        if rng.random() < 0.15:  # the very first steps on the disk are taken once only
            self.disk.kill_in, self.faults.power_too = rng.randint(1, 10), rng.random() < 0.7
        self.world.after(0.1, self._start_master)
        self.world.after(5.0, self._leases)

    def _terms(self) -> Submitted:
        rng = self.world.rng
        limits = rng.choice([(2, 2, None), (10, 10, None), (10, 10, 3), (1000, 1000, None), (1000, 1000, None)])
        roles = {
            "ACTOR": RoleSettings(rng.randint(1, 3), RecoveryScope.GROUP, rng.choice([0, 0, 1]), limits[2]),
            "ROLLOUT": RoleSettings(rng.randint(1, 3), RecoveryScope.MEMBER, rng.choice([0, 1, 2]), limits[2]),
        }
        roles["ACTOR"] = replace(roles["ACTOR"], rejoins=self.world.seed % 2 == 1)
        if rng.random() < 0.3:
            roles["REWARD"] = RoleSettings(1)
        return Submitted(
            "job",
            roles,
            "0a1b2c3d",
            job_max_restart=limits[0],
            trainer_max_restart=limits[1],
            backoff_s=rng.choice([0.0, 0.2, 1.0]),
            window_s=rng.choice([30.0, 3600.0]),
            node_max_failures=rng.randint(2, 4),
        )

    # -- the master ---------------------------------------------------------------------------------------------------

    def _start_master(self) -> None:
        master = SimMaster(self.world, self.cluster, self.modules, self.disk, self.referee)
        master.noise, master.on_death, master.after_step = self.noise, self._master_died, self._look
        self.master = master
        master.begin(self.settings, self)
        self._look()

    def _master_died(self) -> None:
        if self.faults.power_too:
            self.faults.power_too = False
            self.disk.power_fails()
        self._look()
        self.world.after(self.world.within(0.3, 3.0), self._start_master)

    def _look(self) -> None:
        where = situation(self)
        if where != self.where:
            self.where = where
            self.faults.entered(where)

    @property
    def state(self) -> Any:
        return self.master.state if self.master is not None and self.master.brain is not None else None

    def _reached(self, proc: Proc) -> SimMaster | None:
        """The master, when a process can talk to it now."""
        master = self.master
        there = master is not None and master.alive and not master.blocked and proc.node.usable
        return master if there else None

    def _leases(self) -> None:
        """A process that hears that it is outdated, or hears of nobody for too long, ends itself."""
        for proc in self.cluster.alive():
            master = self._reached(proc)
            if master is not None and not self._known(proc):
                self.world.after(self.world.within(0.1, 1.0), self.cluster.kill, proc)
        if not self.faults.on and self.state is not None and self.state.phase.terminal:
            for proc in self.cluster.alive():
                self.world.after(LEASE_S, self.cluster.kill, proc)
            self.world.after(LEASE_S, self._forget_memory, bool(self.cluster.alive()))
            return
        self.world.after(5.0, self._leases)

    def _forget_memory(self, some: bool) -> None:
        """A process that ends itself for want of a master takes the memory with it that it shared."""
        self.cluster.memory = self.cluster.memory and not some

    def _known(self, proc: Proc) -> bool:
        state = self.state
        if proc.identity is None:
            return state.phase.live and proc.name[2] in state.standbys.get(proc.name[1], {})
        process_id, number = proc.identity
        if process_id == TRAINER_ID:
            return state.phase.live and number == state.epoch
        return state.phase.live and number == state.members[process_id].incarnation

    # -- what the trainer's process asks ------------------------------------------------------------------------------

    def opened(self, proc: Proc, epoch: int) -> bool:
        """Tell the master that steps begin; whether it has written that down."""
        return self._tell(proc, StepsOpened(epoch))

    def progressed(self, proc: Proc, epoch: int, step: int) -> bool:
        """Tell the master of a committed step; whether it has heard."""
        return self._tell(proc, Progressed(epoch, step))

    def _tell(self, proc: Proc, event: Any) -> bool:
        master = self._reached(proc)
        if master is None:
            return False
        if self.world.rng.random() < self.noise[0]:
            master.send(event)
        master.take(event)
        return master.alive and not master.blocked

    def renew(self, proc: Proc, process_id: ProcessId, number: int) -> dict[ProcessId, Proc]:
        """Who takes the place of a dead worker; nobody yet: ask again."""
        master = self._reached(proc)
        if master is None:
            return {}
        member = master.state.members[process_id]
        if member.incarnation == number and member.phase == "up":
            master.take(MemberLost(process_id.role, process_id.rank, number, died(process_id)))
            if not master.alive:
                return {}
        state = master.state
        group = [peer for peer in state.members if peer.role == process_id.role]
        names = group if self.settings.roles[process_id.role].scope is RecoveryScope.GROUP else [process_id]
        up = {name: state.members[name] for name in names if state.members[name].phase == "up"}
        if len(up) < len(names) or state.members[process_id].incarnation <= number:
            return {}
        return {name: self.cluster.procs[member.process.pid - 1] for name, member in up.items()}

    def check_groups(self, seats: dict[str, Proc]) -> None:
        """The ranks of a group have met each other."""
        for role, settings in self.settings.roles.items():
            met = {proc.batch for process_id, proc in seats.items() if process_id.role == role}
            if settings.scope is RecoveryScope.GROUP and len(met) > 1:
                raise Violation(f"ranks of {role} that were not started together work together")


def run(seed: int, modules: Any, keep_lines: bool = False) -> Outcome:
    """Simulate one job from its submission to its end.

    Raises:
        Violation: something happened that must never happen, or something that must happen did not in time.
    """
    job = SimJob(seed, modules, keep_lines)
    world = job.world
    try:
        _play(job)
    except Exception as error:
        error.add_note(f"seed {seed}, at {world.now_s:.3f} s; python tests/simulation/replay.py {seed}")
        error.lines = world.lines  # type: ignore[attr-defined]
        raise
    return Outcome(seed, world.trace_hash(), world.sometimes, world.lines)


def _play(job: SimJob) -> None:
    world = job.world

    def ended() -> bool:
        return job.state is not None and job.master is not None and job.master.alive and job.state.phase.terminal

    world.run_until(world.within(15.0, 60.0), ended)
    job.faults.heal()
    job.healed = True
    before = job.checkpoints.committed
    if job.durable and not world.run_until(
        world.now_s + COMMIT_WITHIN_S, lambda: ended() or job.checkpoints.committed > before
    ):
        raise Violation(f"nothing was committed within {COMMIT_WITHIN_S:g} s of the last fault: {job.state}")
    job.total_steps = job.checkpoints.committed + 2
    if not world.run_until(world.now_s + END_WITHIN_S, ended):
        raise Violation(f"the job did not end within {END_WITHIN_S:g} s: {job.state}")
    world.sometimes[f"ended {job.state.ended_by}"] += 1
    _check_end(job)


def _check_end(job: SimJob) -> None:
    """Nothing is left, and nothing is lost."""
    world, state = job.world, job.state
    final = state
    for proc in job.cluster.alive():
        if proc.pid not in job.cluster.spared:
            raise Violation(f"{proc.name} outlives the job")
    world.run_until(world.now_s + 3 * LEASE_S)
    left = [proc.name for proc in job.cluster.alive()]
    if left or job.cluster.reserved or job.cluster.memory:
        raise Violation(f"left behind: {left} {job.cluster.reserved} memory={job.cluster.memory}")
    if job.state != final:
        raise Violation("a job that has ended has changed")
    journal = job.modules.journal.decode(job.modules.journal_store.FileStateStore(job.disk.path("journal")).read())
    if job.modules.machine.replay(journal) != final:
        raise Violation("the journal does not replay to the state that the job ended in")
    if state.committed > job.checkpoints.committed:
        raise Violation("a committed step was lost")
