"""Beats come in, hangs go out. A beat tells how long its call has taken, so nothing has to be waited for here."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from toy_jobs import toy_job

from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    MemberLost,
    MemberStarted,
    Placed,
    Process,
    RecoveryScope,
    StandbyLost,
    StandbyReady,
    StepsOpened,
    TrainerLost,
    TrainerStarted,
)
from dlrover.python.rl.master import pulse as pulse_module
from dlrover.python.rl.master.brain import Brain, submission
from dlrover.python.rl.master.pulse import Pulse
from dlrover.python.rl.runtime.beats import CONSTRUCTING, Beat, BeatTerms
from dlrover.python.rl.runtime.inspection import Inspection
from dlrover.python.rl.runtime.state_store import MemoryStateStore

LIMIT_S, BEATS = 60.0, BeatTerms()


@pytest.fixture
def job(tmp_path):
    """Two actors and two rewards with one standby; a minute for each, and for the trainer."""
    job = toy_job(tmp_path)
    workloads = {
        role: replace(spec, hang_after_s=LIMIT_S, standby=int(role == "REWARD")) for role, spec in job.workloads.items()
    }
    return replace(job, workloads=workloads, trainer=replace(job.trainer, hang_after_s=LIMIT_S))


def running(job, *more, collectives=()):
    """The state of a job of which everything is up, after further events."""
    brain = Brain(MemoryStateStore())
    members = [MemberStarted(str(role), rank, 1, Process(f"node-{rank}", 7)) for role, rank in job.members()]
    begun = [submission(job, "run", Inspection(collectives=collectives), brain), Placed(1)]
    for event in (*begun, *members, TrainerStarted(1, Process("node-0", 8)), StepsOpened(1), *more):
        brain.handle(event)
    return brain.state


def hangs(pulse, state):
    return [condemned.event for condemned in asyncio.run(pulse.hangs(state))]


def nowhere(who):
    return None


def test_who_has_been_replaced_is_told_so(job):
    dead = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
    state = running(job, MemberLost("ACTOR", 0, 1, dead), TrainerLost(1, replace(dead, who="trainer")))
    pulse = Pulse(job, BEATS, nowhere)
    assert [pulse.take(Beat("ACTOR[0]", number), state) for number in (1, 2)] == [False, True]
    assert [pulse.take(Beat("trainer", number), state) for number in (1, 2)] == [False, True]
    assert pulse.take(Beat("ACTOR[1]", 1), state)


def test_a_standby_may_live_as_long_as_the_job_knows_of_it(job):
    state, pulse = running(job, StandbyReady("REWARD", 0, Process("node-0", 9))), Pulse(job, BEATS, nowhere)
    assert [pulse.take(Beat("REWARD-standby[0]", number), state) for number in (0, 1)] == [True, False]
    assert not pulse.take(Beat("CRITIC-standby[0]", 0), state)


def test_a_call_that_takes_too_long_is_a_hang_of_its_member(job):
    state, pulse = running(job), Pulse(job, BEATS, nowhere)
    pulse.take(Beat("ACTOR[0]", 1, "update", LIMIT_S - 1.0, 3), state)
    pulse.take(Beat("ACTOR[1]", 1, "update", LIMIT_S + 1.0, 3), state)
    (lost,) = hangs(pulse, state)
    assert (type(lost), lost.role, lost.rank, lost.incarnation) == (MemberLost, "ACTOR", 1, 1)
    assert (lost.cause.kind, lost.cause.who) == (CauseKind.HUNG, "ACTOR[1]")
    assert lost.cause.message.startswith("in update for 61.0 s")
    assert hangs(pulse, state) == [], "told once"


def test_the_trainer_hangs_too(job):
    state, pulse = running(job), Pulse(job, BEATS, nowhere)
    pulse.take(Beat("trainer", 1, "fit", LIMIT_S + 1.0, 3), state)
    (lost,) = hangs(pulse, state)
    assert (type(lost), lost.epoch, lost.cause.who) == (TrainerLost, 1, "trainer")


def test_nobody_hangs_who_has_just_come(job):
    """One that has not been heard yet is taken as heard now: by a master that has just come itself as well."""
    assert hangs(Pulse(job, BEATS, nowhere), running(job)) == []


def test_what_a_process_does_before_it_is_up_has_a_limit_of_its_own(job):
    dead = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
    starting, pulse = running(job, MemberLost("ACTOR", 0, 1, dead)), Pulse(job, BEATS, nowhere)
    assert pulse.take(Beat("ACTOR[0]", 2, CONSTRUCTING, LIMIT_S + 1.0), starting)
    up = running(job, MemberLost("ACTOR", 0, 1, dead), MemberStarted("ACTOR", 0, 2, Process("node-0", 10)))
    assert hangs(pulse, up) == []


def test_a_beat_of_the_start_that_comes_after_the_news_of_its_end_is_no_hang(job):
    state, pulse = running(job), Pulse(job, BEATS, nowhere)
    assert pulse.take(Beat("ACTOR[0]", 1, CONSTRUCTING, LIMIT_S + 1.0), state)
    assert hangs(pulse, state) == []


def test_a_standby_that_hangs_is_lost_too(job):
    state, pulse = running(job, StandbyReady("REWARD", 0, Process("node-0", 9))), Pulse(job, BEATS, nowhere)
    pulse.take(Beat("REWARD-standby[0]", 0, "warm_up", LIMIT_S + 1.0), state)
    (lost,) = hangs(pulse, state)
    assert (type(lost), lost.role, lost.number, lost.cause.kind) == (StandbyLost, "REWARD", 0, CauseKind.HUNG)


def test_what_a_replaced_process_last_said_is_not_held_against_the_new_one(job):
    state, pulse = running(job), Pulse(job, BEATS, nowhere)
    pulse.take(Beat("ACTOR[0]", 1, "update", LIMIT_S + 1.0, 3), state)
    dead = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
    renewed = running(job, MemberLost("ACTOR", 0, 1, dead), MemberStarted("ACTOR", 0, 2, Process("node-0", 10)))
    assert hangs(pulse, renewed) == []


def test_taking_stacks_is_not_taken_for_having_been_stopped(job, monkeypatch):
    """Who has been silent meanwhile is found as soon as without."""
    clock = [1000.0]

    async def slow(process):
        clock[0] += 5.0
        return "stacks"

    monkeypatch.setattr(pulse_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(pulse_module, "stacks_there", slow)
    state, pulse = running(job), Pulse(job, BEATS, lambda who: Process("node-0", 7))
    lost = {}
    for beat in range(200):
        clock[0] += BEATS.beat_s
        for who in ("ACTOR[1]", "REWARD[1]", "trainer"):
            pulse.take(Beat(who, 1), state)
        if beat == 60:
            pulse.take(Beat("ACTOR[0]", 1, "update", LIMIT_S + 1.0, 3), state)
        elif beat < 60:
            pulse.take(Beat("ACTOR[0]", 1), state)
        lost |= {event.cause.who: clock[0] for event in hangs(pulse, state) if event.cause.who not in lost}
    assert list(lost) == ["ACTOR[0]", "REWARD[0]"]
    assert lost["REWARD[0]"] <= 1000.0 + LIMIT_S + 2 * 5.0 + 3 * BEATS.beat_s


def test_of_ranks_that_wait_for_each_other_the_one_that_is_waited_for_is_lost(job):
    """All of a group are in their calls for too long; the one that began first is where the others wait for it."""
    state, pulse = running(job, collectives=("ACTOR",)), Pulse(job, BEATS, nowhere)
    assert state.terms.roles["ACTOR"].scope is RecoveryScope.GROUP
    pulse.take(Beat("ACTOR[0]", 1, "update", LIMIT_S + 1.0, 3), state)
    pulse.take(Beat("ACTOR[1]", 1, "update", LIMIT_S + 9.0, 3), state)
    (lost,) = hangs(pulse, state)
    assert lost.rank == 1
    assert "odd one out: ACTOR[1], in update" in lost.cause.message


def test_members_that_do_not_wait_for_each_other_hang_each_for_itself(job):
    state, pulse = running(job), Pulse(job, BEATS, nowhere)
    for rank in (0, 1):
        pulse.take(Beat(f"REWARD[{rank}]", 1, "score", LIMIT_S + 1.0, 3), state)
    assert [lost.rank for lost in hangs(pulse, state)] == [0, 1]
