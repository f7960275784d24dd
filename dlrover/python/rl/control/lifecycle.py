"""What is expected to happen, in the order in which it does: from the submission to the end."""

from dataclasses import replace

from dlrover.python.rl.control.budgets import backoff_s
from dlrover.python.rl.control.commands import Command, KillTrainer, Place
from dlrover.python.rl.control.events import (
    Event,
    MemberStarted,
    Placed,
    Progressed,
    RecoveryScope,
    Released,
    StandbyReady,
    StepsOpened,
    StopRequested,
    Submitted,
    TrainerFinished,
    TrainerStarted,
    WaitOver,
)
from dlrover.python.rl.control.recovery import end, kill_members, renew
from dlrover.python.rl.control.starting import (
    Result,
    drop_standby,
    fill_standbys,
    given_up,
    standby_subject,
    start_members,
    start_standby,
    start_trainer,
    wait,
)
from dlrover.python.rl.control.state import (
    EndReason,
    JobState,
    Member,
    MemberPhase,
    Phase,
    StandbyPhase,
    member_key,
    ranks_of,
)


def nothing(state: JobState, terms: Submitted, event: Event, at_s: float) -> Result:
    """What comes too late, or twice."""
    return state, ()


def before_submission(state: JobState, event: Event) -> Result:
    """Only a submission begins something; a stop that comes first has nothing to stop."""
    if isinstance(event, StopRequested):
        stopped = Phase.STOPPED
        return replace(state, phase=stopped, outcome=stopped, ended_by=EndReason.STOPPED, reason=event.reason), ()
    if not isinstance(event, Submitted):
        return state, ()
    members = {member_key(role, rank): Member(1) for role, terms in event.roles.items() for rank in range(terms.num)}
    return _begin(replace(state, terms=event, members=members, epoch=1))


def _begin(state: JobState) -> Result:
    number = state.incarnation + 1
    fresh = replace(state, phase=Phase.CREATED, incarnation=number, released=False, waits={})
    return fresh, (Place(number, state.excluded),)


def placed(state: JobState, terms: Submitted, event: Placed, at_s: float) -> Result:
    """There is a place for everything: the members start."""
    if state.phase is not Phase.CREATED:
        return state, ()
    state = replace(state, phase=Phase.PLACED)
    commands: tuple[Command, ...] = ()
    for role in terms.roles:
        state, more = start_members(state, role, ranks_of(state, role))
        commands += more
    state, more = _trainers_turn(state, terms)
    return state, commands + more


def member_started(state: JobState, terms: Submitted, event: MemberStarted, at_s: float) -> Result:
    """A member is up. With the last one of the first start the trainer's turn has come, and the standbys'."""
    who = member_key(event.role, event.rank)
    member = state.members.get(who)
    if not state.phase.live or member is None or member.incarnation != event.incarnation:
        return state, ()
    if member.phase is not MemberPhase.STARTING:
        return state, ()
    up = Member(event.incarnation, MemberPhase.UP, event.process, event.standby)
    state = replace(state, members={**state.members, who: up})
    if member.standby >= 0:
        state = drop_standby(state, event.role, member.standby)
    if state.phase is Phase.RUNNING:
        return fill_standbys(state, event.role)
    return _trainers_turn(state, terms)


def _trainers_turn(state: JobState, terms: Submitted) -> Result:
    """The trainer's first start, and the standbys', once all members are up."""
    if state.trainer.phase is not MemberPhase.WAITING:
        return state, ()
    if any(member.phase is not MemberPhase.UP for member in state.members.values()):
        return state, ()
    state, commands = start_trainer(state)
    for role in terms.roles:
        state, more = fill_standbys(state, role)
        commands += more
    return state, commands


def standby_ready(state: JobState, terms: Submitted, event: StandbyReady, at_s: float) -> Result:
    """A standby can take a member's place from now on."""
    pool = state.standbys.get(event.role, {})
    standby = pool.get(event.number)
    if not state.phase.live or standby is None or standby.phase is not StandbyPhase.STARTING:
        return state, ()
    ready = replace(standby, phase=StandbyPhase.READY, process=event.process)
    return replace(state, standbys={**state.standbys, event.role: {**pool, event.number: ready}}), ()


# -- the trainer ------------------------------------------------------------------------------------------------------


def _speaks(state: JobState, epoch: int) -> bool:
    """Whether the trainer of this epoch is one to be heard. It may be heard of before the news that it has started."""
    return state.phase.live and epoch == state.epoch and state.trainer.phase is not MemberPhase.WAITING


def trainer_started(state: JobState, terms: Submitted, event: TrainerStarted, at_s: float) -> Result:
    """The trainer is up."""
    if not _speaks(state, event.epoch) or state.trainer.phase is MemberPhase.UP:
        return state, ()
    trainer = replace(state.trainer, phase=MemberPhase.UP, process=event.process)
    return replace(state, phase=Phase.RUNNING, trainer=trainer), ()


def steps_opened(state: JobState, terms: Submitted, event: StepsOpened, at_s: float) -> Result:
    """From here on losses are recovered by scope."""
    if not _speaks(state, event.epoch) or state.opened:
        return state, ()
    return replace(state, phase=Phase.RUNNING, opened=True), ()


def progressed(state: JobState, terms: Submitted, event: Progressed, at_s: float) -> Result:
    """A step is committed: whatever was recovered before it has helped."""
    if not _speaks(state, event.epoch) or event.step == state.committed:
        return state, ()
    lost = [standby_subject(role) for role in terms.roles if given_up(state, role)]
    kept = {subject: state.streaks[subject] for subject in lost}
    quiet = state.first_cause is None and not state.node_losses and len(kept) == len(state.streaks)
    if state.committed and quiet:
        return state, ()
    # A node that lost processes is not to blame for what a restart on it has cured.
    return replace(state, committed=event.step, streaks=kept, first_cause=None, node_losses={}), ()


def trainer_finished(state: JobState, terms: Submitted, event: TrainerFinished, at_s: float) -> Result:
    """The job has done what it was for."""
    if not _speaks(state, event.epoch):
        return state, ()
    return end(state, Phase.FINISHED, EndReason.FINISHED, "the trainer returned")


# -- back-offs and the end --------------------------------------------------------------------------------------------


def wait_over(state: JobState, terms: Submitted, event: WaitOver, at_s: float) -> Result:
    """A back-off is over: what waited for it starts."""
    if event.timer not in state.waits:
        return state, ()
    state = replace(state, waits={timer: delay for timer, delay in state.waits.items() if timer != event.timer})
    subject, _, number = event.timer.rpartition("#")
    if subject == "job":
        return _begin(state)
    if subject == "trainer":
        return start_trainer(state)
    if subject in state.members:
        role, _, rank = subject.partition("[")
        return start_members(state, role, (int(rank[:-1]),))
    if subject in terms.roles:
        return start_members(state, subject, ranks_of(state, subject))
    return start_standby(state, subject.partition(" ")[0], int(number))


def released(state: JobState, terms: Submitted, event: Released, at_s: float) -> Result:
    """Nothing is left: the job has ended, or begins anew."""
    if state.phase is Phase.ENDING and state.outcome is not None:
        members = {who: Member(member.incarnation) for who, member in state.members.items()}
        trainer = replace(state.trainer, phase=MemberPhase.WAITING, process=None)
        return replace(state, phase=state.outcome, members=members, standbys={}, trainer=trainer, released=True), ()
    if state.phase is not Phase.RESTARTING or state.released:
        return state, ()
    state = replace(state, released=True)
    delay_s = backoff_s(state, terms, "job")
    return wait(state, f"job#{state.incarnation}", delay_s) if delay_s else _begin(state)


def stop_requested(state: JobState, terms: Submitted, event: StopRequested, at_s: float) -> Result:
    """Somebody wants the job to end. An outcome that is decided stays."""
    if state.phase is Phase.ENDING:
        return state, ()
    return end(state, Phase.STOPPED, EndReason.STOPPED, event.reason)


# -- the master -------------------------------------------------------------------------------------------------------


def master_started(state: JobState) -> Result:
    """The master has come back, and cannot know what its predecessor's last commands have begun.

    So members and a trainer that were starting start anew under the next number: no number is ever carried by two
    processes, not even when one of them is out of reach. A standby that was becoming a member goes. Nobody is charged.
    """
    state = replace(state, master_starts=state.master_starts + 1)
    if not state.phase.live or state.terms is None:
        return state, ()
    commands: tuple[Command, ...] = ()
    for role, terms in state.terms.roles.items():
        state, more = _start_anew(state, role, terms.scope)
        commands += more
    if state.trainer.phase is MemberPhase.STARTING:
        killed = KillTrainer(state.epoch)
        state = replace(state, epoch=state.epoch + 1, trainer=replace(state.trainer, fresh=False))
        state, more = start_trainer(state)
        commands += (killed, *more)
    return state, commands


def _start_anew(state: JobState, role: str, scope: RecoveryScope) -> Result:
    ranks = [
        rank for rank in ranks_of(state, role) if state.members[member_key(role, rank)].phase is MemberPhase.STARTING
    ]
    if not ranks:
        return state, ()
    if scope is RecoveryScope.GROUP:
        ranks = list(ranks_of(state, role))
    killed = kill_members(state, role, ranks)
    state, commands = start_members(renew(state, role, ranks), role, ranks)
    return state, killed + commands
