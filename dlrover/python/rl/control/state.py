# SPDX-License-Identifier: Apache-2.0
"""The state of a job, its members, standbys and trainer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import Cause, Process, Submitted


class Phase(StrEnum):
    """The phase of a job. Members, standbys and the trainer are recovered one by one inside RUNNING.

    ::

        CREATED -> PLACED -> RUNNING -> ENDING -> FINISHED
           ^         |          |         |----> FAILED
           |         v          v         '----> STOPPED
           '------ RESTARTING <-'
    """

    CREATED = "created"  # resources are being reserved
    PLACED = "placed"  # members and trainer are being started
    RUNNING = "running"  # the trainer runs or is being recovered
    RESTARTING = "restarting"  # a failed incarnation is being released, or the back-off runs
    ENDING = "ending"  # the outcome is decided; processes and resources are being released

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def terminal(self) -> bool:
        return self in (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)

    @property
    def live(self) -> bool:
        """Return True if processes of the current incarnation may exist."""
        return self in (Phase.PLACED, Phase.RUNNING)


class MemberPhase(StrEnum):
    WAITING = "waiting"  # no process: it is not due yet, or a back-off runs
    STARTING = "starting"
    UP = "up"


class StandbyPhase(StrEnum):
    WAITING = "waiting"  # no process: a back-off runs
    STARTING = "starting"
    READY = "ready"
    TAKING = "taking"  # it is becoming a member


class EndReason(StrEnum):
    FINISHED = "finished"  # the trainer returned
    STOPPED = "stopped"  # on request
    NOT_RETRYABLE = "not_retryable"
    RESTART_LIMIT = "restart_limit"  # more restarts within the window than allowed


@dataclass(frozen=True)
class Member:
    incarnation: int  # of its process, or of the next one
    phase: MemberPhase = MemberPhase.WAITING
    process: Process | None = None  # while it is up
    standby: int = -1  # the standby that it is or was, -1 for none


@dataclass(frozen=True)
class Standby:
    phase: StandbyPhase
    process: Process | None = None  # once it is ready


@dataclass(frozen=True)
class Trainer:
    phase: MemberPhase = MemberPhase.WAITING
    process: Process | None = None  # while it is up
    fresh: bool = True  # False: the members hold the results of an earlier epoch
    reason: str = ""  # why it restarts


@dataclass(frozen=True)
class Streak:
    """Recoveries of one thing without progress in between."""

    count: int
    at_s: float


@dataclass(frozen=True)
class JobState:
    """The state of one job; only :func:`~dlrover.python.rl.control.machine.step` makes new ones.

    Subjects are ``"job"``, ``"trainer"``, a role, one member (``"ROLLOUT[1]"``) or a role's standbys.
    """

    phase: Phase = Phase.CREATED
    incarnation: int = 0  # 0 before it is submitted, then 1, one more for each restart of the job
    epoch: int = 0  # of the trainer's process, or of the next one
    settings: Submitted | None = None
    members: Mapping[ProcessId, Member] = field(default_factory=dict)
    standbys: Mapping[str, Mapping[int, Standby]] = field(default_factory=dict)  # by role and number
    next_standby: Mapping[str, int] = field(default_factory=dict)  # role to number
    trainer: Trainer = field(default_factory=Trainer)
    opened: bool = False  # the trainer has entered steps() in this incarnation
    released: bool = False  # nothing of this incarnation is left: the next one may start
    waits: Mapping[str, float] = field(default_factory=dict)  # back-offs that run: timer to seconds
    excluded: tuple[str, ...] = ()  # nodes that are no longer used, oldest first
    node_losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # node to the times of lost processes
    causes: tuple[Cause, ...] = ()  # of the recoveries, oldest first: the very first and the newest ones
    first_cause: Cause | None = None  # since the last progress
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # subject to its restarts within the window
    streaks: Mapping[str, Streak] = field(default_factory=dict)  # by subject
    recoveries: Mapping[str, int] = field(default_factory=dict)  # subject to recoveries while the job went on
    restarts_by: Mapping[str, int] = field(default_factory=dict)  # subject to restarts of the job that it caused
    committed: int = 0  # the last reported step
    master_starts: int = 0
    outcome: Phase | None = None  # the terminal phase that ENDING leads to
    ended_by: EndReason | None = None
    reason: str = ""  # for people
    failure: Cause | None = None  # the first cause since the last progress, once the job has failed

    @property
    def restarts(self) -> int:
        """Restarts of the whole job."""
        return sum(self.restarts_by.values())

    @property
    def cause(self) -> Cause | None:
        return self.failure


def ranks_of(state: JobState, role: str) -> range:
    return range(state.settings.roles[role].num) if state.settings is not None else range(0)
