# SPDX-License-Identifier: Apache-2.0
"""What must hold after every event, worked out apart from the machine's own bookkeeping."""

from typing import Any

from sim_world import Violation, World

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control.commands import Place, Release, StartMembers, StartStandby, StartTrainer, Wait
from dlrover.python.rl.control.events import (
    CauseKind,
    Event,
    MasterStarted,
    MemberLost,
    NodeLost,
    Progressed,
    RecoveryScope,
    StandbyLost,
    TrainerLost,
)


class Referee:
    """Watches every step of the machine.

    Args:
        modules: the production modules.
    """

    def __init__(self, world: World, modules: Any) -> None:
        self.world, self.modules = world, modules
        self.last = modules.state.JobState()
        self.next = self.last
        self.written: bool | None = False
        self.event: Event | None = None
        self.at_s = 0.0
        self.mourned: dict[tuple[str, int], bool] = {}
        self.recovered_at: dict[str, list[float]] = {}

    # -- the journal --------------------------------------------------------------------------------------------------

    def expect(self, before: Any, event: Event, at_s: float) -> None:
        """The machine is about to take ``event`` in; written down and read back it must say the same."""
        journal, machine = self.modules.journal, self.modules.machine
        ((read_s, read),) = journal.decode([journal.encode(at_s, event)])
        self.next, _ = machine.step(before, read, read_s)
        self.written, self.event, self.at_s = None, event, at_s

    def replayed(self, state: Any) -> None:
        """A master that came back must be where the last one was: an event that is written down has happened."""
        allowed = [self.last, self.next] if self.written is None else [self.next if self.written else self.last]
        if not any(state == known for known in allowed):
            raise Violation("the journal replays to another state than the master was in")
        if self.event is not None and state == self.next and state != self.last:
            self._check_recoveries(self.last, self.event, state)
            self._check_budgets(self.last, self.event, state)
        self.last, self.written = state, False

    # -- every step ---------------------------------------------------------------------------------------------------

    def stepped(self, before: Any, event: Event, after: Any, commands: tuple[Any, ...]) -> None:
        """The machine has taken an event in."""
        self.last, self.written = after, False
        if after is before:
            if commands:
                raise Violation(f"{event} changed nothing and ordered {commands}")
            return
        if after != self.next:
            raise Violation("the same event read back from the journal leads to another state")
        if before.phase.terminal:
            raise Violation(f"{event} changed a job that has ended")
        self._check_numbers(before, after)
        self._check_recoveries(before, event, after)
        self._check_commands(before, event, after, commands)
        self._check_budgets(before, event, after)

    def _check_numbers(self, before: Any, after: Any) -> None:
        if after.epoch < before.epoch or after.incarnation < before.incarnation:
            raise Violation("a number has fallen")
        for who, member in before.members.items():
            if after.members[who].incarnation < member.incarnation:
                raise Violation(f"{who}: its incarnation has fallen")
        for role, pool in after.standbys.items():
            if len(pool) > after.settings.roles[role].standby:
                raise Violation(f"{role} has more standbys than it asked for")
            seated = {m.standby for who, m in after.members.items() if m.phase == "starting" and m.standby >= 0}
            for number, standby in pool.items():
                if standby.phase == "taking" and number not in seated:
                    raise Violation(f"standby {number} of {role} becomes nobody")

    def _check_recoveries(self, before: Any, event: Event, after: Any) -> None:
        """One death, one recovery: nobody is mourned twice, nobody who has not been lost is mourned."""
        more = _total(after) - _total(before)
        if not more:
            return
        deaths = _deaths(before, event)
        restarted = after.restarts - before.restarts
        if restarted:
            if more != 1:
                raise Violation(f"{event}: one restart of the job counted {more} times")
        elif more != _expected(before, deaths):
            raise Violation(f"{event}: {more} recoveries for {deaths}")
        for death in deaths:
            if death in self.mourned:
                raise Violation(f"{death} was recovered before")
            self.mourned[death] = True
        if before.trainer.phase == "starting" and isinstance(event, MasterStarted):
            raise Violation("a master that comes back is no loss")

    def _check_commands(self, before: Any, event: Event, after: Any, commands: tuple[Any, ...]) -> None:
        for command in commands:
            self._check_command(after, command)
        if isinstance(event, MasterStarted):
            return
        under_way = {repr(command) for command in self.modules.machine.outstanding(after)}
        lasting = (Place, StartTrainer, StartStandby, Release, Wait)
        for command in commands:
            if isinstance(command, lasting) and repr(command) not in under_way:
                raise Violation(f"a master that comes back would not know of {command}")
        if after.phase.terminal and before.phase != "ending" and before.incarnation:
            raise Violation("a job ended without giving back what it had")

    def _check_command(self, after: Any, command: Any) -> None:
        excluded = getattr(command, "excluded", None)
        if excluded is not None and tuple(excluded) != tuple(after.excluded):
            raise Violation(f"{command} may use a node that is excluded")
        if isinstance(command, StartMembers):
            for rank, number in command.members:
                if after.members[ProcessId(command.role, rank)].incarnation != number:
                    raise Violation(f"{command} starts a number that is not the worker's")
            scope = after.settings.roles[command.role].scope
            if scope is RecoveryScope.GROUP and len(command.members) != after.settings.roles[command.role].num:
                raise Violation(f"{command} starts a part of a group")
        if isinstance(command, Wait) and not 0.0 < command.delay_s <= 60.0:
            raise Violation(f"{command} waits for nothing, or too long")

    def _check_budgets(self, before: Any, event: Event, after: Any) -> None:
        """A job that failed for its limit had reached it; one that goes on has not gone beyond."""
        settings = after.settings
        if settings is None:
            return
        if isinstance(event, Progressed) and after is not before:
            for subject, times in self.recovered_at.items():
                recent = [at for at in times if at > self.at_s - settings.window_s]
                self.recovered_at[subject] = recent[1:]  # one has helped
        for subject, count in _charged(before, event, after).items():
            self.recovered_at.setdefault(subject, []).extend([self.at_s] * count)
            recent = [at for at in self.recovered_at[subject] if at > self.at_s - settings.window_s]
            if len(recent) > _limit(settings, subject):
                raise Violation(f"{subject} was restarted {len(recent)} times within the window")
        if after.ended_by == "restart_limit" and before.ended_by is None:
            full = [
                subject
                for subject in ("job", "trainer", *settings.roles)
                if len([at for at in self.recovered_at.get(subject, []) if at > self.at_s - settings.window_s])
                >= _limit(settings, subject)
            ]
            if not full:
                raise Violation("the job was given up before its limit")
        if after.ended_by == "not_retryable" and before.ended_by is None and after.failure.retryable:
            raise Violation("a loss that can be recovered has ended the job")
        if after.phase == "ending" and after.outcome == "failed" and after.failure is None:
            raise Violation("a job failed without a cause")


def _limit(settings: Any, subject: str) -> int:
    if subject == "trainer":
        return settings.trainer_max_restart
    if subject == "job":
        return settings.job_max_restart
    role = settings.roles[subject]
    if role.max_restart is not None:
        return role.max_restart
    return settings.job_max_restart * (1 if role.scope is RecoveryScope.GROUP else role.num)


def _total(state: Any) -> int:
    return state.restarts + sum(state.recoveries.values())


def _charged(before: Any, event: Event, after: Any) -> dict[str, int]:
    """Who is restarted by this step."""
    more: dict[str, int] = {}
    if getattr(getattr(event, "cause", None), "kind", None) is CauseKind.PREEMPTED:
        return more
    for subject in after.recoveries:
        if after.recoveries[subject] > before.recoveries.get(subject, 0):
            more[subject] = 1
    if after.restarts > before.restarts:
        more["job"] = 1
        at_fault = event.cause.role if isinstance(event, TrainerLost) else ""
        roles = [process_id.role for process_id, _ in _deaths(before, event)]
        more |= dict.fromkeys([at_fault] if at_fault in before.settings.roles else roles, 1)
    return more


def _deaths(before: Any, event: Event) -> list[tuple[ProcessId, int]]:
    """Who, of those that the machine counts on, this event says is dead."""
    if isinstance(event, MemberLost):
        return [(ProcessId(event.role, event.rank), event.incarnation)]
    if isinstance(event, TrainerLost):
        return [(TRAINER_ID, event.epoch)]
    if isinstance(event, StandbyLost):
        return [
            (who, m.incarnation)
            for who, m in before.members.items()
            if who.role == event.role and m.phase == "starting" and m.standby == event.number
        ]
    if not isinstance(event, NodeLost):
        return []
    found = [(who, m.incarnation) for who, m in before.members.items() if m.process and m.process.node == event.node]
    for role, pool in before.standbys.items():
        for number, standby in pool.items():
            if standby.phase == "taking" and standby.process.node == event.node:
                found += _deaths(before, StandbyLost(role, number, event.cause))
    if before.trainer.process and before.trainer.process.node == event.node:
        found.append((TRAINER_ID, before.epoch))
    return found


def _expected(before: Any, deaths: list[tuple[ProcessId, int]]) -> int:
    """How many recoveries these deaths need while the job goes on."""
    groups, single = set(), 0
    for who, _ in deaths:
        role = who.role
        if role in before.settings.roles and before.settings.roles[role].scope is RecoveryScope.GROUP:
            groups.add(role)
        else:
            single += 1
    return len(groups) + single
