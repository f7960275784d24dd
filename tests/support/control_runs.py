# SPDX-License-Identifier: Apache-2.0
"""A job for the tests of the machine: two ranks of a group, two workers with a standby."""

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, CauseKind, Process, RecoveryScope, RoleSettings
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState

ROLES = {"ACTOR": RoleSettings(2, RecoveryScope.GROUP), "ROLLOUT": RoleSettings(2, RecoveryScope.MEMBER, standby=1)}
TERMS = events.Submitted("job", ROLES, "0a1b", job_max_restart=3, trainer_max_restart=2, backoff_s=1.0, window_s=100.0)


def cause(who="ROLLOUT[0]", kind=CauseKind.PROCESS_DIED):
    return Cause(kind, who, "it is gone")


def lost(role, rank, incarnation=1, kind=CauseKind.PROCESS_DIED, node=""):
    return events.MemberLost(role, rank, incarnation, cause(str(ProcessId(role, rank)), kind), node)


def trainer_lost(epoch=1, kind=CauseKind.PROCESS_DIED, who="trainer"):
    return events.TrainerLost(epoch, cause(who, kind))


def standby_lost(number, role="ROLLOUT"):
    return events.StandbyLost(role, number, cause(str(ProcessId.standby(role, number))))


def node_lost(node):
    return events.NodeLost(node, cause("job", CauseKind.NODE_LOST))


def started(role, rank, incarnation=1, node="n", standby=-1, born=0):
    return events.MemberStarted(role, rank, incarnation, Process(node, 1), standby, born)


def ready(number, node="n", role="ROLLOUT"):
    return events.StandbyReady(role, number, Process(node, 1))


def members_up(incarnation=1, nodes=("a", "b", "a", "b")):
    whos = [("ACTOR", 0), ("ACTOR", 1), ("ROLLOUT", 0), ("ROLLOUT", 1)]
    return [started(role, rank, incarnation, node) for (role, rank), node in zip(whos, nodes, strict=True)]


def up(job=1, incarnation=1, epoch=1, number=0):
    """Everything that happens until the trainer runs; its first standby is ready."""
    started_trainer = events.TrainerStarted(epoch, Process("c", 1))
    return [events.Placed(job), *members_up(incarnation), started_trainer, ready(number, "d")]


OPEN = [*up(), events.StepsOpened(1), events.Progressed(1, 1)]
"""... until it does steps."""


class Run:
    """A job, its events at one second each, and what the last one ordered."""

    def __init__(self, *events, terms=TERMS):
        self.state, self.commands, self.now_s = JobState(), (), 0.0
        self(terms, *events)

    def __call__(self, *events, at_s=None):
        for event in events:
            self.now_s = self.now_s + 1.0 if at_s is None else at_s
            self.state, self.commands = step(self.state, event, self.now_s)
        return self

    def ignores(self, event):
        """Whether an event changes nothing and orders nothing."""
        state, commands = step(self.state, event, self.now_s + 1.0)
        return state is self.state and commands == ()

    def number(self, process):
        return self.state.members[ProcessId.parse(str(process))].incarnation

    def phase(self, process):
        return str(self.state.members[ProcessId.parse(process)].phase)
