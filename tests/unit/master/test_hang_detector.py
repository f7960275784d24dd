# SPDX-License-Identifier: Apache-2.0
"""Beats come in, hangs go out. A beat tells how long its call has taken, so nothing has to be waited for here."""

import asyncio
import threading
from dataclasses import replace

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.config.spec import LivenessSpec
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
from dlrover.python.rl.control.liveness import Work
from dlrover.python.rl.master.process.brain import Brain, submission
from dlrover.python.rl.master.process.hang_detector import HangDetector, has_lost_peer
from dlrover.python.rl.runtime.checkpoint.journal_store import StateStore
from dlrover.python.rl.runtime.member.heartbeat import CONSTRUCTING, Heartbeat
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.trainer.workload import MemberContext
from tests.support.manual_clock import ManualClock
from tests.support.toy_jobs import toy_job

LIMIT_S, BEATS = 60.0, LivenessSpec()


@pytest.fixture
def job(tmp_path):
    """Two actors and two rewards with one standby; a minute for each, and for the trainer."""
    job = toy_job(tmp_path)
    workloads = {
        role: replace(spec, hang_after_s=LIMIT_S, standby=int(role == "REWARD")) for role, spec in job.workloads.items()
    }
    return replace(job, workloads=workloads, trainer=replace(job.trainer, hang_after_s=LIMIT_S))


async def no_stacks(process):
    return ""


def running(job, *more, collectives=()):
    """The state of a job of which everything is up, after further events."""
    brain = Brain(StateStore())
    members = [MemberStarted(str(role), rank, 1, Process(f"node-{rank}", 7)) for role, rank in job.members()]
    begun = [submission(job, "run", Inspection(collectives=collectives), brain), Placed(1)]
    for event in (*begun, *members, TrainerStarted(1, Process("node-0", 8)), StepsOpened(1), *more):
        brain.handle(event)
    return brain.state


def hangs(detector, state):
    return asyncio.run(detector.hangs(state))


def detector_of(job):
    return HangDetector(job, BEATS, lambda process_id: None, no_stacks, ManualClock())


def beat(process, *status):
    return Heartbeat(ProcessId.parse(process), *status)


def test_who_has_been_replaced_is_told_so(job):
    dead = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
    state = running(job, MemberLost("ACTOR", 0, 1, dead), TrainerLost(1, replace(dead, who="trainer")))
    detector = detector_of(job)
    assert [detector.take(beat("ACTOR[0]", number), state) for number in (1, 2)] == [False, True]
    assert [detector.take(beat("trainer", number), state) for number in (1, 2)] == [False, True]
    assert detector.take(beat("ACTOR[1]", 1), state)


def test_a_standby_may_live_as_long_as_the_job_knows_of_it(job):
    state, detector = running(job, StandbyReady("REWARD", 0, Process("node-0", 9))), detector_of(job)
    assert [detector.take(beat("REWARD-standby[0]", number), state) for number in (0, 1)] == [True, False]
    assert not detector.take(beat("CRITIC-standby[0]", 0), state)


def test_a_call_that_takes_too_long_is_a_hang_of_its_member(job):
    state, detector = running(job), detector_of(job)
    detector.take(beat("ACTOR[0]", 1, "update", LIMIT_S - 1.0, 3), state)
    detector.take(beat("ACTOR[1]", 1, "update", LIMIT_S + 1.0, 3), state)
    (lost,) = hangs(detector, state)
    assert (type(lost), lost.role, lost.rank, lost.incarnation) == (MemberLost, "ACTOR", 1, 1)
    assert (lost.cause.kind, lost.cause.who) == (CauseKind.HUNG, "ACTOR[1]")
    assert lost.cause.message.startswith("in update without progress for 61.0 s")
    assert hangs(detector, state) == [], "told once"


class Waiting:
    """A workload that is in a call until it is told to leave it."""

    def __init__(self, master_handle, config):
        self.entered, self.over = threading.Event(), threading.Event()

    def generate(self):
        self.entered.set()
        assert self.over.wait(60)

    def close(self):
        pass


@pytest.fixture
def in_a_call():
    """A worker in a call, and the clock of its process."""
    clock = ManualClock()
    host = MemberHost(now_s=clock)
    host.start(Waiting, MemberContext(), None, None)
    thread = threading.Thread(target=lambda: host.run("generate", (), {}))
    thread.start()
    assert host.workload.entered.wait(30)
    yield host, clock
    host.workload.over.set()
    thread.join(30)


def test_a_healthy_call_of_twenty_minutes_lives_and_a_stuck_one_is_found_by_its_last_progress(job, in_a_call):
    """On a simulated clock: progress each half of the limit, then none."""
    host, clock = in_a_call
    state, detector = running(job), HangDetector(job, BEATS, lambda process_id: None, no_stacks, clock)

    def beat_until(end_s, progress_s):
        while clock.now_s < end_s:
            clock.advance(BEATS.beat_s)
            if clock.now_s % progress_s == 0.0:
                note_progress()
            for process_id in ("ACTOR[1]", "REWARD[0]", "REWARD[1]", "trainer"):
                detector.take(beat(process_id, 1), state)
            method, _, age_s = host.current_call()
            detector.take(beat("ACTOR[0]", 1, method, age_s), state)
            if found := hangs(detector, state):
                return found
        return []

    assert beat_until(1200.0, LIMIT_S / 2) == []
    (lost,) = beat_until(1400.0, 1e9)
    assert lost.cause.who == "ACTOR[0]"
    assert lost.cause.message.startswith("in generate without progress for 60.")
    assert 1200.0 + LIMIT_S < clock.now_s <= 1200.0 + LIMIT_S + 3.0


def test_the_trainer_hangs_too(job):
    state, detector = running(job), detector_of(job)
    detector.take(beat("trainer", 1, "fit", LIMIT_S + 1.0, 3), state)
    (lost,) = hangs(detector, state)
    assert (type(lost), lost.epoch, lost.cause.who) == (TrainerLost, 1, "trainer")


def test_nobody_hangs_who_has_just_come(job):
    """One that has not been heard yet is taken as heard now: by a master that has just come itself as well."""
    assert hangs(detector_of(job), running(job)) == []


def test_what_a_process_does_before_it_is_up_has_a_limit_of_its_own(job):
    dead = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
    starting, detector = running(job, MemberLost("ACTOR", 0, 1, dead)), detector_of(job)
    assert detector.take(beat("ACTOR[0]", 2, CONSTRUCTING, LIMIT_S + 1.0), starting)
    up = running(job, MemberLost("ACTOR", 0, 1, dead), MemberStarted("ACTOR", 0, 2, Process("node-0", 10)))
    assert hangs(detector, up) == []


def test_a_beat_of_the_start_that_comes_after_the_news_of_its_end_is_no_hang(job):
    state, detector = running(job), detector_of(job)
    assert detector.take(beat("ACTOR[0]", 1, CONSTRUCTING, LIMIT_S + 1.0), state)
    assert hangs(detector, state) == []


def test_a_standby_that_hangs_is_lost_too(job):
    state, detector = running(job, StandbyReady("REWARD", 0, Process("node-0", 9))), detector_of(job)
    detector.take(beat("REWARD-standby[0]", 0, "warm_up", LIMIT_S + 1.0), state)
    (lost,) = hangs(detector, state)
    assert (type(lost), lost.role, lost.number, lost.cause.kind) == (StandbyLost, "REWARD", 0, CauseKind.HUNG)


def test_what_a_replaced_process_last_said_is_not_held_against_the_new_one(job):
    state, detector = running(job), detector_of(job)
    detector.take(beat("ACTOR[0]", 1, "update", LIMIT_S + 1.0, 3), state)
    dead = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
    renewed = running(job, MemberLost("ACTOR", 0, 1, dead), MemberStarted("ACTOR", 0, 2, Process("node-0", 10)))
    assert hangs(detector, renewed) == []


def test_what_a_lost_process_last_said_is_not_held_against_it_while_it_is_replaced(job):
    detector = detector_of(job)
    detector.take(beat("ACTOR[0]", 1, "update", LIMIT_S + 1.0, 3), running(job))
    dead = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
    assert hangs(detector, running(job, MemberLost("ACTOR", 0, 1, dead))) == []


def test_a_pause_of_the_master_is_not_held_against_the_processes_and_who_stays_silent_then_is_found(job):
    clock = ManualClock(1000.0)
    state, detector = running(job), HangDetector(job, BEATS, lambda process_id: None, no_stacks, clock)
    processes = ("ACTOR[0]", "ACTOR[1]", "REWARD[0]", "REWARD[1]", "trainer")

    def beat_until(end_s, processes):
        while clock() < end_s:
            clock.advance(BEATS.beat_s)
            for process in processes:
                detector.take(beat(process, 1), state)
            if found := hangs(detector, state):
                return found
        return []

    assert beat_until(1005.0, processes) == []
    clock.advance(10 * LIMIT_S)
    assert hangs(detector, state) == []
    (lost,) = beat_until(clock() + 2 * LIMIT_S, processes[1:])
    assert lost.cause.who == "ACTOR[0]"
    assert LIMIT_S < clock() - 1005.0 - 10 * LIMIT_S <= LIMIT_S + 2 * BEATS.beat_s


def test_taking_stacks_is_not_mistaken_for_a_pause_of_the_master(job):
    """A process that went silent meanwhile is found as soon as without."""
    clock = ManualClock(1000.0)

    async def read_stacks(process):
        clock.advance(5.0)
        return "stacks"

    state = running(job)
    detector = HangDetector(job, BEATS, lambda process_id: Process("node-0", 7), read_stacks, clock)
    found_s = {}
    for number in range(200):
        clock.advance(BEATS.beat_s)
        for process in ("ACTOR[1]", "REWARD[1]", "trainer"):
            detector.take(beat(process, 1), state)
        if number == 60:
            detector.take(beat("ACTOR[0]", 1, "update", LIMIT_S + 1.0, 3), state)
        elif number < 60:
            detector.take(beat("ACTOR[0]", 1), state)
        found_s |= {event.cause.who: clock() for event in hangs(detector, state) if event.cause.who not in found_s}
    assert list(found_s) == ["ACTOR[0]", "REWARD[0]"]
    assert found_s["REWARD[0]"] <= 1000.0 + LIMIT_S + 2 * 5.0 + 3 * BEATS.beat_s


def test_of_ranks_that_wait_for_each_other_the_one_that_is_waited_for_is_lost(job):
    """All of a group are in their calls for too long; the one that began first is where the others wait for it."""
    state, detector = running(job, collectives=("ACTOR",)), detector_of(job)
    assert state.settings.roles["ACTOR"].scope is RecoveryScope.GROUP
    detector.take(beat("ACTOR[0]", 1, "update", LIMIT_S + 1.0, 3), state)
    detector.take(beat("ACTOR[1]", 1, "update", LIMIT_S + 9.0, 3), state)
    (lost,) = hangs(detector, state)
    assert lost.rank == 1
    assert "odd one out: ACTOR[1], in update" in lost.cause.message


def test_members_that_do_not_wait_for_each_other_hang_each_for_itself(job):
    state, detector = running(job), detector_of(job)
    for rank in (0, 1):
        detector.take(beat(f"REWARD[{rank}]", 1, "score", LIMIT_S + 1.0, 3), state)
    assert [lost.rank for lost in hangs(detector, state)] == [0, 1]


@pytest.mark.parametrize("replaces", [True, False])
def test_a_slow_member_is_named_and_replaced_if_the_job_wants_that(job, caplog, replaces):
    job = replace(job, liveness=replace(job.liveness, replace_slow=replaces))
    state, detector, lost = running(job), detector_of(job), []
    for turn in range(1, 8):
        for rank, busy_s in ((0, 10.0), (1, 35.0)):
            detector.take(Heartbeat(ProcessId("ACTOR", rank), 1, work=Work(10 * turn, busy_s * turn)), state)
        lost += hangs(detector, state)
    words = "ACTOR[1] works 3.5 times slower than the others of its role"
    assert words in caplog.text
    assert [(event.role, event.rank, event.cause.message) for event in lost] == [("ACTOR", 1, words)] * replaces


@pytest.mark.parametrize(
    ("in_its_process", "number", "lost"), [(True, 1, True), (True, 2, False), (False, 1, False), (False, 2, False)]
)
def test_has_lost_peer_is_true_until_a_kept_rank_starts(job, in_its_process, number, lost):
    """A rank that gets another process is replaced instead."""
    state, rank = running(job), ProcessId("ACTOR", 0)
    again = state.members[rank].next(in_its_process)
    state = replace(state, members=state.members.replacing({rank: again}))
    assert has_lost_peer(Heartbeat(rank, number), state) is lost
    assert not has_lost_peer(Heartbeat(ProcessId("ACTOR", 1), 1), state)
