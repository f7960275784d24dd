"""The brain: every transition, and what holds whatever happens in whatever order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.control.events import (
    RETRYABLE,
    Cause,
    CauseKind,
    Failed,
    MemberStarted,
    Place,
    Placed,
    Release,
    Released,
    RestartDue,
    StartMembers,
    StartTrainer,
    StopRequested,
    Submitted,
    TrainerFinished,
    TrainerStarted,
    WaitThenRestart,
)
from dlrover.python.rl.control.machine import MAX_BACKOFF_S, replay, step
from dlrover.python.rl.control.state import JobState, Phase, Process

TERMS = Submitted("job", {"ACTOR": 2, "ROLLOUT": 1}, job_max_restart=3, trainer_max_restart=1, backoff_s=1.0)


def failed(number, who="ACTOR[0]", kind=CauseKind.PROCESS_DIED):
    return Failed(number, Cause(kind, who, "it is gone"))


def run(*events, terms=TERMS):
    """The state after ``terms`` and ``events``, and the commands of the last one."""
    state, commands = step(JobState(), terms)
    for event in events:
        state, commands = step(state, event)
    return state, commands


def up_to_running(number):
    return [
        Placed(number),
        MemberStarted(number, "ACTOR", 0, "n", 1),
        MemberStarted(number, "ACTOR", 1, "n", 2),
        MemberStarted(number, "ROLLOUT", 0, "n", 3),
        TrainerStarted(number, "n", 4),
    ]


def restart(number, **cause):
    return [failed(number, **cause), Released(number), RestartDue(number)]


# -- a run that nothing disturbs --------------------------------------------------------------------------------------


def test_submitting_places_the_first_incarnation():
    state, commands = run()
    assert (state.phase, state.incarnation, commands) == (Phase.CREATED, 1, (Place(1),))


def test_placed_resources_let_the_members_start():
    state, commands = run(Placed(1))
    assert (state.phase, commands) == (Phase.PLACED, (StartMembers(1),))


def test_the_trainer_starts_when_the_last_member_is_up():
    events = up_to_running(1)
    for count in (2, 3):
        assert run(*events[:count])[1] == ()
    state, commands = run(*events[:4])
    assert commands == (StartTrainer(1),)
    assert state.members == {"ACTOR[0]": Process("n", 1), "ACTOR[1]": Process("n", 2), "ROLLOUT[0]": Process("n", 3)}


def test_the_job_runs_once_the_trainer_is_up():
    state, commands = run(*up_to_running(1))
    assert (state.phase, state.trainer, commands) == (Phase.RUNNING, Process("n", 4), ())


def test_a_finished_trainer_ends_the_job_and_everything_is_given_back_first():
    state, commands = run(*up_to_running(1), TrainerFinished(1))
    assert (state.phase, state.outcome, commands) == (Phase.ENDING, Phase.FINISHED, (Release(1),))
    state, commands = run(*up_to_running(1), TrainerFinished(1), Released(1))
    assert (state.phase, state.reason, commands) == (Phase.FINISHED, "the trainer returned", ())
    assert (state.members, state.trainer, state.cause) == ({}, None, None)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("so_far", range(6))
@pytest.mark.parametrize("kind", sorted(RETRYABLE))
def test_a_lost_process_restarts_the_job_in_any_phase(so_far, kind):
    events = [*up_to_running(1)[:so_far], failed(1, kind=kind)]
    state, commands = run(*events)
    assert (state.phase, state.members, state.trainer, commands) == (Phase.RESTARTING, {}, None, (Release(1),))
    state, commands = run(*events, Released(1))
    assert (state.phase, commands) == (Phase.RESTARTING, (WaitThenRestart(1, 1.0),))
    state, commands = run(*events, Released(1), RestartDue(1))
    assert (state.phase, state.incarnation, commands) == (Phase.CREATED, 2, (Place(2),))
    assert (state.restarts, state.cause) == (1, None)


@pytest.mark.parametrize("so_far", range(6))
@pytest.mark.parametrize("kind", sorted(set(CauseKind) - RETRYABLE))
def test_what_a_restart_cannot_help_ends_the_job(so_far, kind):
    state, commands = run(*up_to_running(1)[:so_far], failed(1, kind=kind))
    assert (state.phase, state.outcome, commands) == (Phase.ENDING, Phase.FAILED, (Release(1),))
    assert state.reason == f"ACTOR[0]: it is gone ({kind.value} is not retried)"


def test_the_next_incarnation_waits_for_the_release_of_the_last():
    waiting = [*up_to_running(1), failed(1)]
    assert run(*waiting, RestartDue(1)) == (run(*waiting)[0], ())


def test_a_release_told_twice_starts_one_wait():
    state, commands = run(failed(1), Released(1), Released(1))
    assert (state, commands) == (run(failed(1), Released(1))[0], ())


def test_the_first_cause_of_an_incarnation_is_kept():
    state, _ = run(*up_to_running(1), failed(1, "ROLLOUT[0]"), failed(1, "ACTOR[0]"), failed(1, "trainer"))
    assert [cause.who for cause in state.causes] == ["ROLLOUT[0]"]
    assert state.restarts == 1


def test_the_cause_of_a_failed_job_is_its_last_incarnations():
    events = [*restart(1, who="ROLLOUT[0]"), failed(2, "trainer", CauseKind.USER_ERROR), Released(2)]
    state, _ = run(*events)
    assert (state.phase, state.cause.who) == (Phase.FAILED, "trainer")
    assert [cause.who for cause in state.causes] == ["ROLLOUT[0]", "trainer"]


@pytest.mark.parametrize(
    ("who", "limits", "restarts", "said"),
    [
        ("trainer", {"trainer_max_restart": 2}, 2, "the limit of 2 restarts for trainer is reached"),
        ("ACTOR[1]", {"workload_max_restart": {"ACTOR": 1}}, 1, "the limit of 1 restarts for ACTOR is reached"),
        ("ACTOR[1]", {"workload_max_restart": {"ROLLOUT": 0}}, 3, "the limit of 3 restarts for ACTOR is reached"),
        ("ACTOR[1]", {"workload_max_restart": {"ACTOR": 9}}, 3, "the limit of 3 restarts of the job is reached"),
        ("job", {}, 3, "the limit of 3 restarts for job is reached"),
        ("trainer", {"trainer_max_restart": 0}, 0, "the limit of 0 restarts for trainer is reached"),
    ],
)
def test_restart_limits(who, limits, restarts, said):
    terms = replace(TERMS, **limits)
    events = [event for number in range(1, restarts + 1) for event in restart(number, who=who)]
    state, commands = run(*events, failed(restarts + 1, who), terms=terms)
    assert (state.outcome, state.restarts, commands) == (Phase.FAILED, restarts, (Release(restarts + 1),))
    assert state.reason == f"{who}: it is gone ({said})"


def test_the_limit_of_the_job_counts_all_causes_together():
    events = [*restart(1, who="ACTOR[0]"), *restart(2, who="ROLLOUT[0]"), *restart(3, who="trainer")]
    state, _ = run(*events, failed(4, "ACTOR[0]"))
    assert "the limit of 3 restarts of the job is reached" in state.reason
    assert state.restarts_by == {"ACTOR": 1, "ROLLOUT": 1, "trainer": 1}


def test_members_of_a_role_share_its_limit():
    terms = replace(TERMS, workload_max_restart={"ACTOR": 1})
    state, _ = run(*restart(1, who="ACTOR[0]"), failed(2, "ACTOR[1]"), terms=terms)
    assert state.outcome is Phase.FAILED


@pytest.mark.parametrize("backoff_s", [0.0, 0.5, 1.0, 100.0])
def test_the_wait_doubles_up_to_a_minute_however_often(backoff_s):
    state, _ = run(terms=replace(TERMS, job_max_restart=3000, backoff_s=backoff_s))
    waits = []
    for number in range(1, 1200):
        state, _ = step(state, failed(number))
        state, (wait,) = step(state, Released(number))
        waits.append(wait.delay_s)
        state, _ = step(state, RestartDue(number))
    assert waits[:4] == [min(backoff_s * factor, MAX_BACKOFF_S) for factor in (1, 2, 4, 8)]
    assert waits[-1] == (MAX_BACKOFF_S if backoff_s else 0.0)
    assert waits == sorted(waits)


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("so_far", range(6))
def test_a_stop_gives_everything_back_in_any_phase(so_far):
    events = [*up_to_running(1)[:so_far], StopRequested("enough")]
    assert run(*events)[1] == (Release(1),)
    state, _ = run(*events, Released(1))
    assert (state.phase, state.reason) == (Phase.STOPPED, "enough")


@pytest.mark.parametrize("events", [[failed(1)], [failed(1), Released(1)]])
def test_a_stop_ends_a_restart(events):
    state, commands = run(*events, StopRequested("enough"))
    assert (state.phase, commands) == (Phase.ENDING, (Release(1),))
    assert run(*events, StopRequested("enough"), RestartDue(1))[0] == state
    assert run(*events, StopRequested("enough"), Released(1))[0].phase is Phase.STOPPED


def test_a_stop_does_not_change_an_outcome():
    state, commands = run(*up_to_running(1), TrainerFinished(1), StopRequested("enough"))
    assert (state.outcome, commands) == (Phase.FINISHED, ())


def test_a_stop_before_anything_needs_no_release():
    state, commands = step(JobState(), StopRequested("enough"))
    assert (state.phase, commands) == (Phase.STOPPED, ())
    assert step(state, TERMS) == (state, ())


def test_a_second_submission_changes_nothing():
    state, _ = run()
    assert step(state, replace(TERMS, job="other")) == (state, ())


# -- whatever happens -------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 4)
EVENTS = st.one_of(
    st.builds(Placed, NUMBERS),
    st.builds(MemberStarted, NUMBERS, st.sampled_from(["ACTOR", "ROLLOUT"]), st.integers(0, 1)),
    st.builds(TrainerStarted, NUMBERS),
    st.builds(TrainerFinished, NUMBERS),
    st.builds(failed, NUMBERS, st.sampled_from(["ACTOR[0]", "ROLLOUT[0]", "trainer"]), st.sampled_from(CauseKind)),
    st.builds(Released, NUMBERS),
    st.builds(RestartDue, NUMBERS),
    st.just(StopRequested("enough")),
    st.just(TERMS),
)


def likely(state, seed):
    """An event of the current incarnation, so that random sequences get somewhere."""
    number = state.incarnation
    expected = {
        Phase.CREATED: [Placed(number)],
        Phase.PLACED: [*up_to_running(number)[1:]],
        Phase.RUNNING: [TrainerFinished(number)],
        Phase.RESTARTING: [Released(number), RestartDue(number)],
        Phase.ENDING: [Released(number)],
    }.get(state.phase, [TERMS])
    expected = [TERMS] if number == 0 else [*expected, failed(number), failed(number, "trainer")]
    return expected[seed % len(expected)]


@settings(deadline=None, max_examples=300)
@given(st.lists(EVENTS | st.integers(0, 99), max_size=40))
def test_what_holds_after_any_events(sequence):
    state, journal, owed = JobState(), [], set()
    placed, released, restarts = [], set(), 0
    for item in sequence:
        event = likely(state, item) if isinstance(item, int) else item
        before = state
        state, commands = step(before, event)
        journal.append(event)
        if isinstance(event, Released) and event.incarnation in owed:
            released.add(event.incarnation)
        if before.phase.terminal or getattr(event, "incarnation", before.incarnation) != before.incarnation:
            assert state is before, "a terminal state absorbs, a stale incarnation changes nothing"
        if state is before:
            assert commands == (), "what is not journaled orders nothing"
        for command in commands:
            assert command.incarnation == state.incarnation
            if isinstance(command, Place):
                assert command.incarnation == len(placed) + 1
                assert command.incarnation == 1 or command.incarnation - 1 in released, "released before placed anew"
                placed.append(command.incarnation)
            if isinstance(command, Release):
                owed.add(command.incarnation)
            restarts += isinstance(command, WaitThenRestart)
        assert state.incarnation == len(placed)
        assert state.restarts <= TERMS.job_max_restart
        assert restarts <= state.restarts <= state.incarnation
        assert len(state.causes) <= state.incarnation, "the first cause of each incarnation alone"
        assert state.phase not in (Phase.FINISHED, Phase.FAILED) or state.incarnation in released
    assert replay(journal) == state
    assert step(state, StopRequested("x")) == step(state, StopRequested("x"))
