# SPDX-License-Identifier: Apache-2.0
"""The brain: from the submission to the end, and what holds whatever happens in whatever order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.commands import Place, Release, StartMembers, StartStandby, StartTrainer
from dlrover.python.rl.control.events import (
    RETRYABLE,
    CauseKind,
    Failed,
    MasterStarted,
    Placed,
    Process,
    Progressed,
    Released,
    StepsOpened,
    StopRequested,
    TrainerFinished,
    TrainerStarted,
    WaitOver,
)
from dlrover.python.rl.control.machine import outstanding, replay, step
from dlrover.python.rl.control.state import EndReason, JobState, MemberPhase, Phase
from tests.support.control_runs import (
    OPEN,
    TERMS,
    Run,
    cause,
    lost,
    members_up,
    node_lost,
    ready,
    started,
    trainer_lost,
    up,
)

# -- a run that nothing disturbs --------------------------------------------------------------------------------------


def test_job_is_placed_then_its_members_then_its_trainer_start():
    run = Run()
    assert (run.state.phase, run.state.incarnation, run.commands) == (Phase.CREATED, 1, (Place(1),))
    run(Placed(1))
    assert run.state.phase is Phase.PLACED
    assert run.commands == (StartMembers("ACTOR", ((0, 1), (1, 1))), StartMembers("ROLLOUT", ((0, 1), (1, 1))))
    for event in members_up()[:-1]:
        assert run(event).commands == ()
    assert run(members_up()[-1]).commands == (StartTrainer(1, fresh=True), StartStandby("ROLLOUT", 0))
    assert run.state.members[ProcessId("ROLLOUT", 1)].process == Process("b", 1)
    run(TrainerStarted(1, Process("c", 1)))
    assert (run.state.phase, run.state.trainer.process, run.state.opened) == (Phase.RUNNING, Process("c", 1), False)


def test_a_job_without_members_starts_its_trainer_at_once():
    assert Run(Placed(1), terms=replace(TERMS, roles={})).commands == (StartTrainer(1, fresh=True),)


def test_finished_trainer_releases_all_and_ends_job():
    run = Run(*OPEN, TrainerFinished(1))
    assert (run.state.phase, run.state.outcome, run.commands) == (Phase.ENDING, Phase.FINISHED, (Release(1, True),))
    run(Released(1))
    assert (run.state.phase, run.state.reason, run.commands) == (Phase.FINISHED, "the trainer returned", ())
    assert (run.state.ended_by, run.state.failure, run.state.standbys) == (EndReason.FINISHED, None, {})
    assert all(member.process is None for member in run.state.members.values())


def test_trainer_heard_before_its_start_is_running():
    run = Run(Placed(1), *members_up(), StepsOpened(1))
    assert (run.state.phase, run.state.opened, run.state.trainer.phase) == (Phase.RUNNING, True, MemberPhase.STARTING)
    run(TrainerStarted(1, Process("c", 1)))
    assert run.state.trainer.phase is MemberPhase.UP
    assert Run(Placed(1), *members_up(), TrainerFinished(1)).state.outcome is Phase.FINISHED


def test_progress_is_noted_once_and_not_for_every_step():
    run = Run(*up(), StepsOpened(1))
    assert run(Progressed(1, 1)).state.committed == 1
    assert run.ignores(Progressed(1, 2))
    assert run.ignores(Progressed(1, 1))
    run(lost("ROLLOUT", 0), Progressed(1, 9))
    assert (run.state.committed, run.state.streaks, run.state.first_cause) == (9, {}, None)


@pytest.mark.parametrize(
    "event",
    [
        *(Placed(1), Placed(2), Released(1), StepsOpened(0), StepsOpened(1), WaitOver("trainer#1"), TERMS),
        *(started("ROLLOUT", 0), started("ROLLOUT", 0, 2), started("ROLLOUT", 0, node="elsewhere")),
        *(lost("ROLLOUT", 0, 0), lost("ROLLOUT", 0, 2), lost("ROLLOUT", 7), lost("CRITIC", 0), started("CRITIC", 0)),
        *(ready(0, "elsewhere"), ready(5), ready(0, role="CRITIC")),
        *(TrainerStarted(1, Process("elsewhere", 1)), TrainerStarted(2), trainer_lost(0), trainer_lost(2)),
        *(Progressed(0, 99), TrainerFinished(0), Failed(0, cause("job"))),
    ],
    ids=repr,
)
def test_repeated_late_or_strange_event_changes_nothing(event):
    assert Run(*OPEN).ignores(event)


# -- before steps are open, a loss restarts the whole job -------------------------------------------------------------


@pytest.mark.parametrize("so_far", range(1, 7))
@pytest.mark.parametrize("kind", sorted(RETRYABLE))
def test_a_loss_before_steps_restarts_the_job(so_far, kind):
    run = Run(*up()[:so_far], lost("ACTOR", 0, kind=kind))
    assert (run.state.phase, run.commands) == (Phase.RESTARTING, (Release(1, final=False),))
    assert (run.state.restarts_by, run.state.restarts, run.state.failure) == ({"ACTOR": 1}, 1, None)
    run(Released(1))
    assert (run.state.phase, run.state.incarnation, run.commands) == (Phase.CREATED, 2, (Place(2),))


def test_a_restarted_job_has_new_numbers_throughout():
    run = Run(*up(), lost("ACTOR", 0), Released(1), *up(2, 2, 2, 1)[:5])
    assert run.commands == (
        StartTrainer(2, fresh=True, restarts=1, reason="ACTOR[0]: it is gone"),
        StartStandby("ROLLOUT", 1),
    )
    assert run.ignores(started("ACTOR", 0, 1))
    assert run.ignores(TrainerStarted(1))


def test_death_reported_often_restarts_job_once():
    run = Run(*up(), lost("ROLLOUT", 0))
    failed = Failed(1, cause("job"))
    run(lost("ROLLOUT", 0), trainer_lost(1, who="ROLLOUT[0]"), node_lost("a"), lost("ACTOR", 0), failed)
    run(Released(1), Released(1), lost("ROLLOUT", 0), trainer_lost(1), failed)
    assert (run.state.restarts, run.state.incarnation, run.state.phase) == (1, 2, Phase.CREATED)


@pytest.mark.parametrize(("process", "role"), [("trainer", "trainer"), ("ROLLOUT[0]", "ROLLOUT")])
def test_death_in_trainers_report_is_charged_to_its_role(process, role):
    run = Run(*up(), trainer_lost(1, who=process))
    assert (run.state.restarts_by, set(run.state.history)) == ({role: 1}, {role, "job"})


def test_failed_job_after_steps_restarts_as_a_whole():
    run = Run(*OPEN, Failed(1, cause("job")))
    assert (run.state.phase, run.state.restarts_by, run.state.opened) == (Phase.RESTARTING, {"job": 1}, False)


def test_the_second_restart_waits_and_the_wait_doubles():
    run = Run(terms=replace(TERMS, job_max_restart=99))
    waits = []
    for number in range(1, 12):
        run(Failed(number, cause("job")), Released(number))
        waits.append(sum(wait.delay_s for wait in run.commands if hasattr(wait, "delay_s")))
        run(WaitOver(f"job#{number}"))
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]


def test_next_incarnation_waits_for_release_and_back_off():
    run = Run(Failed(1, cause("job")), Released(1), Failed(2, cause("job")))
    assert run.ignores(WaitOver("job#2"))
    run(Released(2))
    assert run.ignores(Released(2))
    assert run(WaitOver("job#2")).commands == (Place(3),)
    assert run.ignores(WaitOver("job#2"))


# -- what a restart cannot help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(set(CauseKind) - RETRYABLE - {CauseKind.UNKNOWN_ERROR}))
@pytest.mark.parametrize("events", [up(), OPEN])
def test_loss_not_retryable_ends_job(kind, events):
    run = Run(*events, lost("ACTOR", 0, kind=kind))
    assert (run.state.phase, run.state.outcome, run.commands) == (Phase.ENDING, Phase.FAILED, (Release(1, True),))
    assert run.state.reason == f"ACTOR[0]: it is gone ({kind.value} is not retried)"
    assert (run.state.ended_by, run.state.failure.kind) == (EndReason.NOT_RETRYABLE, kind)


def test_failure_while_restarting_ends_job_if_not_retryable():
    run = Run(*up(), lost("ACTOR", 0))
    assert run.ignores(Failed(1, cause("job")))
    assert run(Failed(1, cause("job", CauseKind.INTERNAL))).state.outcome is Phase.FAILED


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("so_far", range(len(OPEN) + 1))
def test_a_stop_gives_everything_back_at_any_point(so_far):
    run = Run(*OPEN[:so_far], StopRequested("enough"))
    assert run.commands == (Release(1, final=True),)
    run(Released(1))
    assert (run.state.phase, run.state.reason, run.state.ended_by) == (Phase.STOPPED, "enough", EndReason.STOPPED)


def test_stop_in_restart_waits_for_its_own_release():
    run = Run(*up(), lost("ACTOR", 0), StopRequested("enough"))
    assert run.commands == (Release(2, final=True),)
    assert run.ignores(Released(1))
    assert run(Released(2)).state.phase is Phase.STOPPED


def test_a_stop_ends_a_back_off():
    run = Run(Failed(1, cause("job")), Released(1), Failed(2, cause("job")), Released(2), StopRequested("enough"))
    assert run.commands == (Release(2, final=True),)
    assert run.ignores(WaitOver("job#2"))


def test_a_stop_before_anything_needs_no_release():
    state, commands = step(JobState(), StopRequested("enough"), 0.0)
    assert (state.phase, commands) == (Phase.STOPPED, ())
    assert step(state, TERMS, 1.0) == (state, ())


def test_nothing_happens_before_the_submission():
    for event in (Placed(1), lost("ACTOR", 0), node_lost("a"), TrainerFinished(1), WaitOver("job#0")):
        state = JobState()
        assert step(state, event, 0.0) == (state, ())


@pytest.mark.parametrize(
    "event", [*OPEN, StopRequested("x"), MasterStarted(), node_lost("a"), lost("ACTOR", 0)], ids=repr
)
def test_ended_job_ignores_all_events(event):
    assert Run(*OPEN, TrainerFinished(1), Released(1)).ignores(event)


@pytest.mark.parametrize(
    "event",
    [lost("ACTOR", 0), trainer_lost(1), node_lost("a"), Failed(1, cause("job")), StopRequested("enough")],
    ids=repr,
)
def test_ending_job_ignores_losses_and_stops(event):
    assert Run(*OPEN, TrainerFinished(1)).ignores(event)


# -- whatever happens -------------------------------------------------------------------------------------------------

SMALL = st.integers(0, 4)
ROLE = st.sampled_from(["ACTOR", "ROLLOUT"])
KIND = st.sampled_from([*RETRYABLE, CauseKind.USER_ERROR, CauseKind.UNKNOWN_ERROR])
NODE = st.sampled_from(["a", "b", "c", "d", ""])
EVENTS = st.one_of(
    st.builds(Placed, SMALL),
    st.builds(started, ROLE, st.integers(0, 1), SMALL, NODE, st.integers(-1, 2)),
    st.builds(lost, ROLE, st.integers(0, 1), SMALL, KIND, NODE),
    st.builds(ready, SMALL, NODE),
    st.builds(node_lost, NODE),
    st.builds(TrainerStarted, SMALL),
    st.builds(StepsOpened, SMALL),
    st.builds(Progressed, SMALL, st.integers(0, 9)),
    st.builds(trainer_lost, SMALL, KIND),
    st.builds(TrainerFinished, st.just(9)),
    st.builds(Released, SMALL),
    st.just(MasterStarted()),
    st.just(Failed(1, cause("job"))),
)
LOOSE = replace(TERMS, job_max_restart=99, trainer_max_restart=99, node_max_failures=99)


def likely(state, seed):
    """An event that is due, so that random sequences get somewhere."""
    due = [Placed(state.incarnation), Released(state.incarnation)]
    due += [WaitOver(timer) for timer in state.waits]
    for process_id, member in state.members.items():
        role, rank = process_id.role, process_id.rank
        due += [started(role, rank, member.incarnation, "ab"[rank], member.standby)]
    due += [TrainerStarted(state.epoch, Process("c", 1)), StepsOpened(state.epoch)]
    due += [ready(number, "d", role) for role, pool in state.standbys.items() for number in pool]
    if seed % 7 == 0:
        due = [
            lost(process_id.role, process_id.rank, member.incarnation) for process_id, member in state.members.items()
        ]
        due += [trainer_lost(state.epoch), node_lost("a"), Progressed(state.epoch, state.committed + 1)]
    return due[seed % len(due)]


@settings(deadline=None, max_examples=150)
@given(st.lists(EVENTS | st.integers(0, 999), max_size=60))
def test_machine_after_any_events_keeps_invariants(sequence):
    state, _ = step(JobState(), LOOSE, 0.0)
    journal = [(0.0, LOOSE)]
    for number, item in enumerate(sequence, 1):
        event = likely(state, item) if isinstance(item, int) else item
        before = state
        state, commands = step(before, event, float(number))
        assert (state, commands) == step(before, event, float(number)), "the same again"
        if state is before:
            assert commands == (), "what is not journalled orders nothing"
        else:
            assert state != before, "what is journalled changes something"
            journal.append((float(number), event))
        assert all(state.members[each].incarnation >= before.members[each].incarnation for each in before.members)
        assert state.epoch >= before.epoch
        assert state.restarts - before.restarts + sum(state.recoveries.values()) - sum(before.recoveries.values()) <= 5
        outstanding(state)
        for role, pool in state.standbys.items():
            assert len(pool) <= LOOSE.roles[role].standby
    assert replay(journal) == state
