"""Taking losses in: which events concern something that is there, and what all they take away."""

from dlrover.python.rl.control.budgets import backoff_s, blame, exclude, lengthen
from dlrover.python.rl.control.commands import Command, KillStandby
from dlrover.python.rl.control.events import Failed, MemberLost, NodeLost, Process, StandbyLost, Submitted, TrainerLost
from dlrover.python.rl.control.recovery import Loss, lose
from dlrover.python.rl.control.starting import (
    Result,
    add_standby,
    drop_standby,
    given_up,
    standby_subject,
)
from dlrover.python.rl.control.state import JobState, MemberPhase, Phase, StandbyPhase, member_key, ranks_of


def member_lost(state: JobState, terms: Submitted, event: MemberLost, at_s: float) -> Result:
    """A member is gone."""
    member = state.members.get(member_key(event.role, event.rank))
    if not state.phase.live or member is None or member.incarnation != event.incarnation:
        return state, ()
    if member.phase is MemberPhase.WAITING:
        return state, ()
    state = blame(state, terms, _node(event.node, member.process), event.cause, at_s)
    return lose(state, terms, Loss(event.cause, {event.role: (event.rank,)}), at_s)


def trainer_lost(state: JobState, terms: Submitted, event: TrainerLost, at_s: float) -> Result:
    """The trainer is gone, or its code raised. The code may have raised because of a member: that one is charged."""
    trainer = state.trainer
    if not state.phase.live or state.epoch != event.epoch or trainer.phase is MemberPhase.WAITING:
        return state, ()
    state = blame(state, terms, _node(event.node, trainer.process), event.cause, at_s)
    role = event.cause.role
    if role in terms.roles and not state.opened:
        return lose(state, terms, Loss(event.cause, {role: ()}), at_s)
    return lose(state, terms, Loss(event.cause, trainer=True), at_s)


def standby_lost(state: JobState, terms: Submitted, event: StandbyLost, at_s: float) -> Result:
    """A standby is gone; with it the member that it was becoming."""
    standby = state.standbys.get(event.role, {}).get(event.number)
    if not state.phase.live or standby is None or standby.phase is StandbyPhase.WAITING:
        return state, ()
    state = blame(state, terms, _node(event.node, standby.process), event.cause, at_s)
    if standby.phase is StandbyPhase.TAKING:
        return lose(state, terms, Loss(event.cause, {event.role: (_taken_by(state, event.role, event.number),)}), at_s)
    return _replace_standby(state, terms, event.role, event.number, at_s)


def node_lost(state: JobState, terms: Submitted, event: NodeLost, at_s: float) -> Result:
    """A node is gone, and everything on it at once: one loss."""
    if state.phase is Phase.ENDING:
        return state, ()
    state = exclude(state, event.node)
    if not state.phase.live:
        return state, ()
    members = _members_on(state, event.node)
    commands: tuple[Command, ...] = ()
    for role, number, phase in _standbys_on(state, event.node):
        if phase is StandbyPhase.TAKING:
            members.setdefault(role, []).append(_taken_by(state, role, number))
        else:
            state, more = _replace_standby(state, terms, role, number, at_s)
            commands += more
    process = state.trainer.process
    trainer = process is not None and process.node == event.node
    if not members and not trainer:
        return state, commands
    state, more = lose(state, terms, Loss(event.cause, members, trainer), at_s)
    return state, commands + more if state.phase.live else more


def failed(state: JobState, terms: Submitted, event: Failed, at_s: float) -> Result:
    """Something failed that the whole job stands on."""
    ending = state.phase is Phase.ENDING
    if ending or (state.phase is Phase.RESTARTING and event.cause.retryable):
        return state, ()
    return lose(state, terms, Loss(event.cause), at_s)


def _node(told: str, known: Process | None) -> str:
    return told or (known.node if known is not None else "")


def _members_on(state: JobState, node: str) -> dict[str, list[int]]:
    """Role to the ranks that are up on a node."""
    found: dict[str, list[int]] = {}
    for who, member in state.members.items():
        if member.process is not None and member.process.node == node:
            role, _, rank = who.partition("[")
            found.setdefault(role, []).append(int(rank[:-1]))
    return found


def _standbys_on(state: JobState, node: str) -> list[tuple[str, int, StandbyPhase]]:
    return [
        (role, number, standby.phase)
        for role, pool in state.standbys.items()
        for number, standby in pool.items()
        if standby.process is not None and standby.process.node == node
    ]


def _taken_by(state: JobState, role: str, number: int) -> int:
    """The rank that a standby is becoming."""
    return next(rank for rank in ranks_of(state, role) if state.members[member_key(role, rank)].standby == number)


def _replace_standby(state: JobState, terms: Submitted, role: str, number: int, at_s: float) -> Result:
    """Another standby after a back-off, unless too many were lost: the job does without them then."""
    subject = standby_subject(role)
    state = lengthen(drop_standby(state, role, number), terms, subject, at_s)
    gone = KillStandby(role, number)
    if given_up(state, role):
        return state, (gone,)
    state, commands = add_standby(state, role, backoff_s(state, terms, subject))
    return state, (gone, *commands)
