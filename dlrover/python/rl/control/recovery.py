"""What follows from a loss: a recovery by scope once steps are open, a restart of the whole job before, or the end.

A loss names the incarnation or epoch it concerns. The recovery raises that number at once, so whatever else is reported
of the same death, in whatever order and how often, concerns a number of the past and changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dlrover.python.rl.control.budgets import backoff_s, charge, lengthen, note
from dlrover.python.rl.control.commands import Command, KillMember, KillTrainer, Release
from dlrover.python.rl.control.events import Cause, CauseKind, RecoveryScope, Submitted
from dlrover.python.rl.control.starting import Result, drop_standby, renewed, start_members, start_trainer, wait
from dlrover.python.rl.control.state import (
    EndReason,
    JobState,
    MemberPhase,
    Phase,
    Trainer,
    member_key,
    ranks_of,
)


@dataclass(frozen=True)
class Loss:
    """What one event has taken away.

    Attributes:
        cause: why.
        members: role to its lost ranks.
        trainer: whether the trainer is lost.
    """

    cause: Cause
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)
    trainer: bool = False

    @property
    def subjects(self) -> tuple[str, ...]:
        """Who is charged."""
        return (*self.members, *(("trainer",) if self.trainer else ()))


def lose(state: JobState, terms: Submitted, loss: Loss, at_s: float) -> Result:
    """Answer a loss of the job's members, its trainer, or of what the whole job stands on."""
    if not loss.cause.retryable:
        return fail(state, loss.cause, EndReason.NOT_RETRYABLE, f"{loss.cause.kind.value} is not retried")
    if not state.opened or not loss.subjects:
        return _restart_job(state, terms, loss, at_s)
    state = note(state, loss.cause)
    state, refusal = _charged(state, terms, loss, loss.subjects, at_s)
    if refusal:
        return fail(state, state.first_cause or loss.cause, EndReason.RESTART_LIMIT, refusal)
    commands: tuple[Command, ...] = ()
    for role, ranks in loss.members.items():
        by_scope = _recover_group if terms.roles[role].scope is RecoveryScope.GROUP else _recover_members
        state, more = by_scope(state, terms, role, ranks, at_s)
        commands += more
    if loss.trainer:
        state, more = _recover_trainer(state, terms, loss.cause, at_s)
        commands += more
    return state, commands


def _charged(
    state: JobState, terms: Submitted, loss: Loss, subjects: Sequence[str], at_s: float
) -> tuple[JobState, str]:
    if loss.cause.kind is CauseKind.PREEMPTED:
        return state, ""
    return charge(state, terms, subjects, at_s)


def _count(counts: Mapping[str, int], subject: str, more: int = 1) -> dict[str, int]:
    return {**counts, subject: counts.get(subject, 0) + more}


# -- by scope ---------------------------------------------------------------------------------------------------------


def _recover_members(state: JobState, terms: Submitted, role: str, ranks: Sequence[int], at_s: float) -> Result:
    """Each lost member alone."""
    state = renew(state, role, ranks)
    state = replace(state, recoveries=_count(state.recoveries, role, len(ranks)))
    at_once, commands = [], ()  # type: list[int], tuple[Command, ...]
    for rank in ranks:
        who = member_key(role, rank)
        state = lengthen(state, terms, who, at_s)
        delay_s = backoff_s(state, terms, who)
        if delay_s:
            state, more = wait(state, f"{who}#{state.members[who].incarnation}", delay_s)
            commands += more
        else:
            at_once.append(rank)
    if at_once:
        state, more = start_members(state, role, at_once)
        commands += more
    return state, commands


def _recover_group(state: JobState, terms: Submitted, role: str, lost: Sequence[int], at_s: float) -> Result:
    """All members of the role; those that are left are ended first."""
    ranks = ranks_of(state, role)
    killed = kill_members(state, role, [rank for rank in ranks if rank not in set(lost)])
    state = renew(state, role, ranks)
    state = lengthen(replace(state, recoveries=_count(state.recoveries, role)), terms, role, at_s)
    delay_s = backoff_s(state, terms, role)
    if delay_s:
        number = state.members[member_key(role, 0)].incarnation
        state, commands = wait(state, f"{role}#{number}", delay_s)
    else:
        state, commands = start_members(state, role, ranks, spared=[rank for rank in ranks if rank not in set(lost)])
    return state, killed + commands


def _recover_trainer(state: JobState, terms: Submitted, cause: Cause, at_s: float) -> Result:
    """The trainer alone: the members hold what it has done."""
    killed = KillTrainer(state.epoch)
    state = lengthen(replace(state, recoveries=_count(state.recoveries, "trainer")), terms, "trainer", at_s)
    trainer = Trainer(fresh=False, reason=f"{cause.who}: {cause.message}")
    state = replace(state, epoch=state.epoch + 1, trainer=trainer)
    delay_s = backoff_s(state, terms, "trainer")
    state, commands = wait(state, f"trainer#{state.epoch}", delay_s) if delay_s else start_trainer(state)
    return state, (killed, *commands)


def kill_members(state: JobState, role: str, ranks: Sequence[int]) -> tuple[Command, ...]:
    """End what there is of these members."""
    members = ((rank, state.members[member_key(role, rank)]) for rank in ranks)
    return tuple(
        KillMember(role, rank, member.incarnation)
        for rank, member in members
        if member.phase is not MemberPhase.WAITING
    )


def renew(state: JobState, role: str, ranks: Sequence[int]) -> JobState:
    """Give these members their next incarnation; a standby that was becoming one of them goes with the old one."""
    old = {member_key(role, rank): state.members[member_key(role, rank)] for rank in ranks}
    for member in old.values():
        if member.standby >= 0:
            state = drop_standby(state, role, member.standby)
    return replace(state, members={**state.members, **{who: renewed(member) for who, member in old.items()}})


# -- all of it --------------------------------------------------------------------------------------------------------


def _restart_job(state: JobState, terms: Submitted, loss: Loss, at_s: float) -> Result:
    """Everything from the start: nothing of this incarnation counts any more from here on."""
    state = note(state, loss.cause)
    state, refusal = _charged(state, terms, loss, (*loss.subjects, "job"), at_s)
    if refusal:
        return fail(state, state.first_cause or loss.cause, EndReason.RESTART_LIMIT, refusal)
    state = lengthen(state, terms, "job", at_s)
    blamed = loss.subjects[0] if loss.subjects else "job"
    state = replace(
        state,
        phase=Phase.RESTARTING,
        epoch=state.epoch + 1,
        members={who: renewed(member) for who, member in state.members.items()},
        standbys={},
        trainer=Trainer(reason=f"{loss.cause.who}: {loss.cause.message}"),
        opened=False,
        waits={},
        restarts_by=_count(state.restarts_by, blamed),
    )
    return state, (Release(state.incarnation, final=False),)


def fail(state: JobState, cause: Cause, why: EndReason, words: str) -> Result:
    """Give up."""
    if cause not in state.causes:
        state = note(state, cause)
    state = replace(state, failure=cause)
    return end(state, Phase.FAILED, why, f"{cause.who}: {cause.message} ({words})")


def end(state: JobState, outcome: Phase, why: EndReason, reason: str) -> Result:
    """Decide how the job ends, and give everything back."""
    # A release that is under way already leaves the shared memory: its answer must not be taken for the last one's.
    number = state.incarnation + (state.phase is Phase.RESTARTING and not state.released)
    state = replace(
        state,
        phase=Phase.ENDING,
        incarnation=number,
        outcome=outcome,
        ended_by=why,
        reason=reason,
        waits={},
        released=False,
    )
    return state, (Release(number, final=True),)
