# SPDX-License-Identifier: Apache-2.0
"""Rules that hold after every event of a job, worked out apart from the machine's own bookkeeping."""

from collections import Counter

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control.commands import Place, Release, StartMembers, StartStandby, StartTrainer, Wait
from dlrover.python.rl.control.events import (
    CauseKind,
    MasterStarted,
    MemberLost,
    NodeLost,
    Progressed,
    RecoveryScope,
    StandbyLost,
    TrainerLost,
)
from dlrover.python.rl.control.journal import decode, encode
from dlrover.python.rl.control.machine import outstanding, step
from dlrover.python.rl.control.state import EndReason, JobState, MemberPhase, Phase, StandbyPhase
from tests.protocol.loops_world import Violation

_LASTING = (Place, StartTrainer, StartStandby, Release, Wait)


class Referee:
    """Watches each step of each master. ``last`` is the state of the journal; ``pending`` are the steps of which any
    first ones may be there as well, in one list for each attempt to write them."""

    def __init__(self, works) -> None:
        self.works = works  # returns True for a process that makes progress
        self.last = JobState()
        self.pending: list[list[tuple]] = []
        self._mourned: set[tuple[ProcessId, int]] = set()
        self._recovered_at: dict[str, list[float]] = {}

    # -- the journal --------------------------------------------------------------------------------------------------

    def expect(self, before, events, at_s):
        """Return the steps that ``events`` are, read back from their lines."""
        steps, state = [], before
        for event in events:
            ((read_s, read),) = decode([encode(at_s, event)])
            after, commands = step(state, read, read_s)
            steps.append((event, state, after, commands, at_s))
            state = after
        return steps

    def replayed(self, state):
        """A master that has replayed the journal is where the last one was: an event that is written has happened."""
        if state != self.last:
            for event, before, after, _, at_s in self._steps_to(state):
                self._check_counts(before, event, after, at_s)
        self.last, self.pending = state, []

    def _steps_to(self, state):
        for steps in self.pending:
            for count, (_, _, after, _, _) in enumerate(steps, 1):
                if state == after:
                    return steps[:count]
        raise Violation("the journal replays to another state than the master was in")

    # -- every step ---------------------------------------------------------------------------------------------------

    def handled(self, steps, handled):
        """A master has written events down, and has their commands."""
        for (event, before, expected, _, at_s), (_, _, after, commands) in zip(steps, handled, strict=True):
            if after is before:
                if commands:
                    raise Violation(f"{event} changed nothing and ordered {commands}")
                continue
            if after != expected:
                raise Violation("the same event read back from the journal leads to another state")
            if before.phase.terminal:
                raise Violation(f"{event} changed a job that has ended")
            _check_numbers(before, after)
            self._check_hang(event)
            self._check_counts(before, event, after, at_s)
            _check_commands(before, event, after, commands)
            self.last, self.pending = after, []

    def _check_hang(self, event):
        """Check that no process that works counts as hung."""
        cause = getattr(event, "cause", None)
        if cause is None or cause.kind is not CauseKind.HUNG or cause.message.startswith("not up"):
            return
        if isinstance(event, MemberLost) and self.works(ProcessId(event.role, event.rank), event.incarnation):
            raise Violation(f"{event} is of a process that works")
        if isinstance(event, TrainerLost) and event.cause.role == "trainer" and self.works(TRAINER_ID, event.epoch):
            raise Violation(f"{event} is of a process that works")

    def _check_counts(self, before, event, after, at_s):
        self._check_recoveries(before, event, after)
        self._check_limits(before, event, after, at_s)

    def _check_recoveries(self, before, event, after):
        """Each death is recovered once, and nothing else."""
        more = _recoveries(after) - _recoveries(before)
        if not more:
            return
        deaths = _deaths(before, event)
        if after.restarts > before.restarts and more != 1:
            raise Violation(f"{event}: one restart of the job counted {more} times")
        if after.restarts == before.restarts and more != _recoveries_for(before, deaths):
            raise Violation(f"{event}: {more} recoveries for {deaths}")
        if again := self._mourned.intersection(deaths):
            raise Violation(f"{again} were recovered before")
        self._mourned.update(deaths)
        if isinstance(event, MasterStarted):
            raise Violation("a master that comes back is no loss")

    def _check_limits(self, before, event, after, at_s):
        """A job that failed for its limit had reached it; one that continues has not exceeded it."""
        settings = after.settings
        if settings is None:
            return

        def recent(subject):
            return [time_s for time_s in self._recovered_at.get(subject, []) if time_s > at_s - settings.window_s]

        if isinstance(event, Progressed):
            self._recovered_at = {subject: recent(subject)[1:] for subject in self._recovered_at}  # one has helped
        for subject in _charged(before, event, after):
            self._recovered_at.setdefault(subject, []).append(at_s)
            if len(recent(subject)) > _limit(settings, subject):
                raise Violation(f"{subject} was restarted {len(recent(subject))} times within the window")
        if before.ended_by is None and after.ended_by is EndReason.RESTART_LIMIT:
            subjects = ("job", "trainer", *settings.roles)
            if not any(len(recent(subject)) >= _limit(settings, subject) for subject in subjects):
                raise Violation("the job was given up before its limit")
        if before.ended_by is None and after.ended_by is EndReason.NOT_RETRYABLE and after.failure.retryable:
            raise Violation("a loss that can be recovered has ended the job")
        if after.phase is Phase.ENDING and after.outcome is Phase.FAILED and after.failure is None:
            raise Violation("a job failed without a cause")


def _check_numbers(before, after):
    if after.epoch < before.epoch or after.incarnation < before.incarnation:
        raise Violation("a number has fallen")
    for process_id, member in before.members.items():
        if after.members[process_id].incarnation < member.incarnation:
            raise Violation(f"{process_id}: its incarnation has fallen")
    for role, pool in after.standbys.items():
        if len(pool) > after.settings.roles[role].standby:
            raise Violation(f"{role} has more standbys than it asked for")
        seated = {member.standby for member in after.members.values() if member.phase is MemberPhase.STARTING}
        for number, standby in pool.items():
            if standby.phase is StandbyPhase.TAKING and number not in seated:
                raise Violation(f"standby {number} of {role} takes no place")


def _check_commands(before, event, after, commands):
    for command in commands:
        _check_command(after, command)
    if isinstance(event, MasterStarted):
        return
    orders = outstanding(after)
    for command in commands:
        if isinstance(command, _LASTING) and command not in orders:
            raise Violation(f"a master that comes back would not know of {command}")
    if after.phase.terminal and before.phase is not Phase.ENDING and before.incarnation:
        raise Violation("a job ended without a release of what it had")


def _check_command(after, command):
    excluded = getattr(command, "excluded", None)
    if excluded is not None and tuple(excluded) != tuple(after.excluded):
        raise Violation(f"{command} may use a node that is excluded")
    if isinstance(command, StartMembers):
        role = after.settings.roles[command.role]
        for rank, number in command.members:
            if after.members[ProcessId(command.role, rank)].incarnation != number:
                raise Violation(f"{command} starts a number that is not the worker's")
        if role.scope is RecoveryScope.GROUP and len(command.members) != role.num:
            raise Violation(f"{command} starts a part of a group")
    if isinstance(command, Wait) and not 0.0 < command.delay_s <= 60.0:
        raise Violation(f"{command} waits for nothing, or too long")


def _limit(settings, subject):
    if subject == "trainer":
        return settings.trainer_max_restart
    role = settings.roles.get(subject)
    if role is None:
        return settings.job_max_restart
    if role.max_restart is not None:
        return role.max_restart
    return settings.job_max_restart * (1 if role.scope is RecoveryScope.GROUP else role.num)


def _recoveries(state):
    return state.restarts + sum(state.recoveries.values())


def _charged(before, event, after):
    """Return the subjects that are restarted by this step."""
    cause = getattr(event, "cause", None)
    if cause is not None and cause.kind is CauseKind.PREEMPTED:
        return set()
    subjects = {subject for subject, count in after.recoveries.items() if count > before.recoveries.get(subject, 0)}
    if after.restarts > before.restarts:
        at_fault = cause.role if isinstance(event, TrainerLost) else ""
        is_of_role = at_fault in before.settings.roles
        subjects |= {"job"} | ({at_fault} if is_of_role else {each.role for each, _ in _deaths(before, event)})
    return subjects


def _deaths(before, event):
    """Return the processes that the machine counts on and that are dead, as this event says."""
    if isinstance(event, MemberLost):
        return [(ProcessId(event.role, event.rank), event.incarnation)]
    if isinstance(event, TrainerLost):
        return [(TRAINER_ID, event.epoch)]
    members = before.members.items()
    if isinstance(event, StandbyLost):
        starting = [(each, member) for each, member in members if member.phase is MemberPhase.STARTING]
        taken = (event.role, event.number)
        return [(each, member.incarnation) for each, member in starting if (each.role, member.standby) == taken]
    if not isinstance(event, NodeLost):
        return []

    def is_there(process):
        return process is not None and process.node == event.node

    deaths = [(each, member.incarnation) for each, member in members if is_there(member.process)]
    for role, pool in before.standbys.items():
        for number, standby in pool.items():
            if standby.phase is StandbyPhase.TAKING and is_there(standby.process):
                deaths += _deaths(before, StandbyLost(role, number, event.cause))
    return deaths + ([(TRAINER_ID, before.epoch)] if is_there(before.trainer.process) else [])


def _recoveries_for(before, deaths):
    """Return how many recoveries these deaths need while the job continues: a group is recovered as one."""
    counts = Counter(process_id.role for process_id, _ in deaths)
    roles = before.settings.roles
    groups = {role for role in counts if role in roles and roles[role].scope is RecoveryScope.GROUP}
    return sum(1 if role in groups else count for role, count in counts.items())
