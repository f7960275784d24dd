# SPDX-License-Identifier: Apache-2.0
"""A recipe's job in one process, with its workers and its trainer killed at chosen calls."""

from contextlib import suppress
from dataclasses import dataclass, field

from dlrover.python.rl.common.names import RLRoleType, member_name
from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints, Stride
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.local import LocalHandle, LocalMember, LocalPort, LocalRecovery
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.trainer import TrainerLink, run_trainer
from dlrover.python.rl.trainer.workload import MemberContext


class TrainerKilled(BaseException):
    """The trainer's process is gone."""


@dataclass
class FaultyPort(LocalPort):
    """Lets something happen before or after one of the calls.

    Attributes:
        faults: number of the call, and "before" or "after" it, to what happens then.
        calls: role, rank and method of what was submitted.
    """

    faults: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)

    def submit(self, role, rank, call):
        number = len(self.calls)
        self.calls.append((str(role), rank, call.method))
        self.faults.pop((number, "before"), lambda port: None)(self)
        ref = super().submit(role, rank, call)
        self.faults.pop((number, "after"), lambda port: None)(self)
        return ref


def kill(role, rank):
    """A fault: a worker dies."""
    return lambda port: port.kill(role, rank)


def kill_trainer(port):
    """A fault: the trainer's process dies."""
    raise TrainerKilled


def both(first, second):
    """Two faults at once."""
    return lambda port: (first(port), second(port))


def flip_a_bit(actor, ticket, name):
    """Damage a tensor that an actor has published."""
    names = [entry.name for entry in ticket.table.entries]
    start, _ = ticket.table.spans()[names.index(name)]
    actor._weights._whole._versions._files[ticket.id]._data[start + 5] ^= 1


class Stage:
    """A job that is run to its end through faults.

    Args:
        folder: the job's directory.
        trainer: the trainer's class.
        roles: role to its workload class and its size.
        config: of the job.
        collocation: the roles that share a device, as workers are told of it.
    """

    def __init__(self, folder, trainer, roles, config, collocation=""):
        self.folder, self.trainer, self.roles, self.config, self.epoch = folder, trainer, roles, config, 0
        self.collocation, self.commit_every, self._judges = collocation, 1, []
        self.port = FaultyPort({RLRoleType(role): [] for role in roles})
        for role, (_, size) in roles.items():
            self.port.members[RLRoleType(role)].extend(self.member(role, rank, 1) for rank in range(size))

    def member(self, role, rank, incarnation, why=""):
        workload, size = self.roles[role]
        host = MemberHost(incarnation)
        name = member_name("job", "run1", role, rank, incarnation)
        context = MemberContext(name, RLRoleType(role), rank, size, collocation=self.collocation)
        host.start(workload, context, None, self.config)
        if role == "REWARD":
            self._judges.append(host.workload)
        return LocalMember(host, {}, incarnation, workload.needs_own_process)

    def run(self, faults=None):
        """Run it; a trainer that was killed is started again.

        Verifiers end here: a killed worker's process would have taken its own along.
        """
        self.port.faults = dict(faults or {})
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for _ in range(12):
                with suppress(TrainerKilled):
                    return run_trainer(self._make, self._link())
        finally:
            for judge in self._judges:
                judge.close()
        raise AssertionError("the trainer never came to its end")

    def _link(self):
        self.epoch += 1
        recovery = LocalRecovery(self.port, self.member, epoch=self.epoch, fresh=self.epoch == 1)
        roots = Roots("job", "run1", self.epoch, self.folder / "durable", self.folder / "memory")
        checkpoints = StoreCheckpoints(roots, 4, stride=Stride(self.commit_every))
        return TrainerLink(
            self.port, lambda report: None, "job", self.folder, recovery=recovery, checkpoints=checkpoints
        )

    def _make(self):
        handles = {
            role: [LocalHandle(self.port, role, rank) for rank in range(len(members))]
            for role, members in self.port.members.items()
        }
        return self.trainer(handles, {role: workload for role, (workload, _) in self.roles.items()}, self.config)

    def workload(self, role, rank=0):
        """The workload that is there now."""
        return self.port.members[RLRoleType(role)][rank].host.workload
