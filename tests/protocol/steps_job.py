# SPDX-License-Identifier: Apache-2.0
"""One simulated run of durable steps: the production steps, port, hosts and stores, on simulated processes and disks.

Faults first, then none; the run must come to its end with the results of an undisturbed one, each step committed once.
"""

import errno
import shutil
from dataclasses import dataclass
from functools import partial

from dlrover.python.rl.common.errors import JobFailed, StaleCall
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints, Stride
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import TAKE_OVER_S
from dlrover.python.rl.runtime.local import LocalHandle, LocalMember, LocalPort, LocalRecovery
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import Renewed, RestartInfo
from dlrover.python.rl.trainer.trainer import TrainerLink, run_trainer
from dlrover.python.rl.trainer.workload import MemberContext
from tests.protocol.steps_world import Violation, World
from tests.support.durable_toys import AlonePolicy, Judge, Pipelined, Policy, Sampler, Training, plain

STEPS = 4
WITHIN_S = 600.0
FAULTS = ("worker dies", "trainer dies", "two trainers", "trainer freezes", "node lost", "full", "falters", "slow")
ALWAYS = ("method", "commit", "where", "disk of commit", "disk of trainer", "disk of copy")
SITUATIONS = (*ALWAYS, "written", "restore", "disk of restore", "persist", "renew")
ON_SEVERAL_NODES = ("read", "store", "held", "disk of read", "disk of store", "disk of held")
PAIRS = [f"{where}/{fault}" for where in (*SITUATIONS, *ON_SEVERAL_NODES) for fault in FAULTS]
"""What the processes are at, and what happens then. Restores and the like come after another fault."""

AFTER_TAKE_OVER_S = TAKE_OVER_S + 0.1
"""A trainer that was frozen in a commit continues when the next one has just taken its lock."""

_ERRORS = {"full": (errno.ENOSPC, 20.0), "falters": (errno.EIO, 10.0)}

_FAILING = {"full": ("disk write",), "falters": ("disk write", "disk read", "disk replace", "disk fsync")}


class MemberGone(BaseException):
    """A worker died in the middle of a call."""


@dataclass(frozen=True)
class Terms:
    """The properties of a job that the seed decides about."""

    trainer: type
    classes: dict
    nodes: int
    shared: bool
    commit_every: int
    every: int
    sizes: dict
    at_once: bool


class SeenPort(LocalPort):
    """A trainer's calls, each to the processes that it knows."""

    def __init__(self, job, process):
        super().__init__({role: list(members) for role, members in job.members.items()}, enforce_deadlines=False)
        self.job, self.process = job, process

    def execute(self, member, role, rank, call):
        verb = call.method.removeprefix("!") if call.method.startswith("!") else "method"
        world = self.job.world
        world.trace(f"{role}[{rank}].{call.method}", member.incarnation, member.host._state.node)
        world.operation(verb)
        while member.alive and member.host in self.job.busy:
            world.wait(lambda: not member.alive or member.host not in self.job.busy)
        if not member.alive:
            return super().execute(member, role, rank, call)
        self.job.busy.add(member.host)
        self.process.inside.append((verb, member))
        try:
            result = super().execute(member, role, rank, call)
            if not isinstance(result.error, StaleCall):
                self.job.check_served(member.host, call.epoch)
            return result
        except MemberGone:
            world.is_broken = False
            return super().execute(member, role, rank, call)
        finally:
            self.process.inside.pop()
            self.job.busy.discard(member.host)


class StepsJob:
    """A job on simulated nodes, with one trainer after the other, sometimes two."""

    def __init__(self, seed, folder):
        self.world, self.folder = World(seed), folder
        self.terms = terms_of(seed)
        self.busy, self.overtaken, self.progress, self.claimed = set(), set(), {}, {}
        self.results, self.logs, self.served = [], {}, {}
        self.epoch, self.trainer = 0, None
        self.nodes = {}
        self.lost_nodes = self.lost_before = self.allowed = 0
        self.refused = self.refused_before = False
        self.trouble, self.is_open = ("", 0.0), False
        rng = self.world.rng
        self.next_fault, self.faults_left = rng.randint(1, 120), rng.randint(1, 5)
        self.aim = PAIRS[(37 * seed + seed // 8) % len(PAIRS)]  # each pair meets all terms, which repeat with 64 seeds
        is_always = self.aim.partition("/")[0] in ALWAYS
        self.aimed_at, self.provoked = rng.randint(1, 6 if is_always else 2), is_always
        self.world.is_broken = False
        self.world.disturb = self.disturb
        self.faults_on = True
        self.members = {RLRoleType(role): [] for role in self.terms.classes}
        for role, size in self.terms.sizes.items():
            for rank in range(size):
                self.nodes[role, rank] = f"n{(rank + len(role)) % self.terms.nodes}"
                self.members[RLRoleType(role)].append(self.member(role, rank, 1))
        self.nodes["trainer"] = f"n{rng.randrange(self.terms.nodes)}"

    # -- processes ----------------------------------------------------------------------------------------------------

    def member(self, role, rank, incarnation, why=""):
        info = RestartInfo(incarnation - 1, why)
        context = MemberContext(f"{role}-{rank}", RLRoleType(role), rank, self.terms.sizes[str(role)], restart=info)
        host = MemberHost(incarnation, self.nodes[str(role), rank], now_s=lambda: self.world.now_s)
        host.start(self.terms.classes[str(role)], context, None, {"steps": STEPS, "end": []})
        return LocalMember(host, {}, incarnation, self.terms.classes[str(role)].needs_own_process)

    def start_trainer(self):
        """Start the next trainer; the one before may run for a while."""
        self.epoch += 1
        epoch = self.epoch
        self.trainer = process = self.world.start(f"trainer{epoch}", lambda: self.run_trainer(epoch))
        process.inside, process.node, process.pending = [], self.nodes["trainer"], ""

    def run_trainer(self, epoch):
        process, terms = self.world.current, self.terms
        port = SeenPort(self, process)
        recovery = LocalRecovery(
            port, self.member, epoch, epoch == 1, opened=self.opened, progressed=lambda step: self.took(epoch, step)
        )
        recovery.renew = partial(self.renew, recovery)  # which refuses trainers that are replaced
        commits = self.folder / "commits" if terms.shared else None
        roots = Roots("job", "run1", epoch, self.folder / "durable", commits, process.node, terms.shared)
        spread = not terms.shared and terms.nodes > 1
        checkpoints = StoreCheckpoints(roots, terms.every, stride=Stride(terms.commit_every), spread=spread)
        self.claimed[epoch] = max(self.progress.values(), default=0)
        self.world.trace("claimed", self.claimed[epoch])
        config = {"steps": STEPS, "end": []}

        def make():
            handles = {
                role: [LocalHandle(port, role, rank) for rank in range(len(members))]
                for role, members in port.members.items()
            }
            return terms.trainer(handles, terms.classes, config)

        def report(step):
            self.logs[step.step] = dict(step.metrics)

        run_trainer(make, TrainerLink(port, report, "job", self.folder, recovery=recovery, checkpoints=checkpoints))
        self.results.append(config["end"][-1])

    def renew(self, recovery, role, rank, incarnation, why):
        self.world.operation("renew")
        if recovery.epoch < self.epoch:
            raise JobFailed("the trainer has been replaced")
        members = self.members[RLRoleType(role)]
        if not members[rank].alive or members[rank].incarnation <= incarnation:
            for at, member in enumerate(members):
                if at == rank or member.together:
                    self.kill(member)
                    members[at] = self.member(role, at, member.incarnation + 1, why)
        recovery.port.members[RLRoleType(role)][:] = members
        numbers = {at: member.incarnation for at, member in enumerate(members)}
        return Renewed(role, numbers, {at: LocalHandle(recovery.port, role, at) for at in numbers})

    def kill(self, member):
        member.alive = False
        self.world.trace("dead", member.host._context.name)
        for process in self.world.processes:
            if getattr(process, "member", None) is member:
                process.kill()
        if member.host not in self.busy:
            member.host.end()

    def outcome(self):
        """All that must not depend on faults."""
        states = {
            f"{role}-{rank}": member.host.workload.state_dict()
            for role, members in self.members.items()
            for rank, member in enumerate(members)
            if member.alive
        }
        members = {name: state for name, state in states.items() if state}
        return plain({"end": self.results[-1], "logs": self.logs, "members": members})

    # -- what must hold -----------------------------------------------------------------------------------------------

    def opened(self):
        self.is_open = True

    def check_served(self, host, epoch):
        """A worker has answered a trainer of this epoch."""
        if epoch < self.served.get(host, 0):
            raise Violation(f"{host._context.name} serves epoch {epoch} after epoch {self.served[host]}")
        self.served[host] = epoch

    def took(self, epoch, step):
        """A trainer has committed a step."""
        self.world.trace("committed", step)
        later = [other for other in self.claimed if other > epoch]
        if later:
            self.world.reached["a commit of an earlier trainer"] += 1
            if epoch in self.overtaken:
                raise Violation(f"the trainer of epoch {epoch} commits after trainer {max(later)} began")
            self.overtaken.add(epoch)  # it may have been at that change when the other one took over
            return
        first = epoch not in self.progress
        lost = self.claimed[epoch] + 1 - step if first else 0
        if lost > 0 and not self.allowed:
            raise Violation(f"steps {step} to {self.claimed[epoch]} are lost, though they were committed")
        if not first and not 0 < step - self.progress[epoch] <= self.terms.commit_every and not self.allowed:
            raise Violation(f"step {step} follows step {self.progress[epoch]}")
        self.progress[epoch] = step
        self.lost_nodes, self.lost_before = 0, self.lost_nodes
        self.refused, self.refused_before = False, self.refused

    # -- faults -------------------------------------------------------------------------------------------------------

    def situation(self, operation):
        inside = self.world.current.inside if hasattr(self.world.current, "inside") else None
        if not operation.startswith("disk"):
            return operation
        if inside is None:
            return "disk of copy"
        return f"disk of {inside[-1][0]}" if inside else "disk of trainer"

    def disturb(self, operation):
        """An operation of the current process begins."""
        world, process = self.world, self.world.current
        if world.is_broken and operation.startswith("disk"):
            raise OSError(errno.ENODEV, "the process is gone")
        inside = getattr(process, "inside", None)
        self.end_if_pending(process, inside)
        self.fail_member(inside)
        self.trouble_disk(operation)
        if fault := self.due(self.situation(operation)):
            world.strikes = True
            try:
                self.strike(fault, self.situation(operation))
            finally:
                world.strikes = False
            self.fail_member(inside)

    def fail_member(self, inside):
        """The worker whose call this is may be dead."""
        if inside and not inside[-1][1].alive:
            self.world.is_broken = True
            raise MemberGone

    def end_if_pending(self, process, inside):
        if inside or not getattr(process, "pending", ""):
            return
        pending, process.pending = process.pending, ""
        if process is self.trainer:
            self.end_trainer(process, pending)
        elif pending == "trainer dies":
            process.kill()

    def trouble_disk(self, operation):
        kind, until_s = self.trouble
        if kind and self.world.now_s > until_s:
            self.trouble = kind, _ = "", 0.0
        if kind == "slow" and operation.startswith("disk"):
            self.world.sleep(0.2)
        elif operation in _FAILING.get(kind, ()) and self.world.rng.random() < 0.5:
            self.refused = True
            self.count_copies()
            raise OSError(_ERRORS[kind][0], "simulated")

    def due(self, situation):
        """The fault that happens now: the one that this seed is about, or any."""
        if not self.provoked and self.progress and self.faults_on:
            self.provoked = True  # restores and the like come after a loss
            return "actor dies"
        where, _, fault = self.aim.partition("/")
        if self.aimed_at and situation == where and self.is_open and self.faults_on:
            self.aimed_at -= 1
            if not self.aimed_at:
                return fault
        if self.faults_left and self.world.operations >= self.next_fault:
            self.faults_left -= 1
            self.next_fault = self.world.operations + int(self.world.rng.expovariate(1 / 60)) + 1
            return self.world.rng.choice(FAULTS)
        return ""

    def strike(self, fault, situation):
        world, rng = self.world, self.world.rng
        world.reached[f"{situation}/{fault}"] += 1
        world.trace("fault", fault, "in", situation)
        if fault in ("worker dies", "node lost") and not self.is_open:
            return  # before the first step the job begins again
        if fault == "actor dies":
            self.kill(self.members[RLRoleType.ACTOR][0])
        elif fault == "worker dies":
            inside = getattr(world.current, "inside", None)
            if inside and rng.random() < 0.7:
                self.kill(inside[-1][1])
            else:
                role = rng.choice(list(self.members))
                self.kill(rng.choice(self.members[role]))
        elif fault in ("trainer dies", "two trainers", "trainer freezes"):
            self.end_trainer(self.trainer, fault)
        elif fault == "node lost":
            lost = rng.choice(sorted(set(self.nodes.values())))
            world.trace("lost", lost)
            self.lose(lost)
        else:
            self.trouble = fault, world.now_s + _ERRORS.get(fault, (0, 5.0))[1] * rng.random()

    def end_trainer(self, process, how):
        if process is not self.trainer or process.is_done:
            return
        if process.inside:
            process.pending = how
            return
        if how == "trainer dies":
            process.kill()
        elif how == "trainer freezes":
            process.wake_s = self.world.now_s + self.world.rng.choice([1.0, *[AFTER_TAKE_OVER_S] * 4, 60.0])
        self.start_trainer()
        if how == "trainer freezes" and process is self.world.current:
            self.world.strikes = False
            self.world.hand_over()

    def count_copies(self):
        """Between two commits there may be one copy: the other one is lost, or was refused by its disk."""
        lost = self.lost_nodes + self.lost_before
        is_lost = lost > 1 or (lost > 0 and (self.refused or self.refused_before))
        self.allowed += is_lost and not self.terms.shared

    def lose(self, node):
        """A node goes with all that was on it, and another one takes its place."""
        if self.terms.nodes == 1:
            return
        self.lost_nodes += 1
        self.count_copies()
        shutil.rmtree(self.folder / node, ignore_errors=True)
        gone = [gone_process for gone_process, of in self.nodes.items() if of == node]
        self.nodes.update(dict.fromkeys(gone, f"{node}+"))
        for gone_process in gone:
            if gone_process != "trainer":
                self.kill(self.members[RLRoleType(gone_process[0])][gone_process[1]])
        for process in self.world.processes:
            is_there = node == getattr(process, "node", getattr(process, "origin", ""))
            if is_there and getattr(process, "inside", None):
                process.pending = "trainer dies"  # the worker that it calls is elsewhere, and continues
            elif is_there and process is not self.trainer:
                process.kill()
        if "trainer" in gone:
            self.end_trainer(self.trainer, "trainer dies")


def terms_of(seed):
    """Take no random number of the world: the reference takes the same ones."""
    trainer = (Training, Pipelined)[seed % 2]
    classes = {"ACTOR": (Policy, AlonePolicy)[seed // 2 % 2], "ROLLOUT": Sampler, "REWARD": Judge}
    nodes, shared = ((3, False), (1, False), (3, True), (3, False))[seed // 4 % 4]
    commit_every, every = ((1, 2), (3, 100), (2, 3), (1, 100))[seed // 16 % 4]
    sizes = {"ACTOR": 2, "ROLLOUT": 1, "REWARD": 1}
    return Terms(trainer, classes, nodes, shared, commit_every, every, sizes, at_once=seed // 64 % 2 == 0)
