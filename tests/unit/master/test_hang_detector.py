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
DIED = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
LOST = MemberLost("ACTOR", 0, 1, DIED)
STARTED_AGAIN = MemberStarted("ACTOR", 0, 2, Process("node-0", 10))
STANDBY_READY = StandbyReady("REWARD", 0, Process("node-0", 9))
PROCESSES = ("ACTOR[0]", "ACTOR[1]", "REWARD[0]", "REWARD[1]", "trainer")


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
    events = [submission(job, "run", Inspection(collectives=collectives), brain), Placed(1)]
    for event in (*events, *members, TrainerStarted(1, Process("node-0", 8)), StepsOpened(1), *more):
        brain.handle(event)
    return brain.state


def hangs(detector, state):
    return asyncio.run(detector.hangs(state))


def detector_of(job, clock=None, read_stacks=no_stacks):
    return HangDetector(job, BEATS, lambda process_id: Process("node-0", 7), read_stacks, clock or ManualClock())


def beat(process, *status):
    return Heartbeat(ProcessId.parse(process), *status)


def test_beats_of_replaced_processes_are_not_taken(job):
    state = running(job, LOST, TrainerLost(1, replace(DIED, who="trainer")))
    detector = detector_of(job)
    for process in ("ACTOR[0]", "trainer"):
        assert [detector.take(beat(process, number), state) for number in (1, 2)] == [False, True]
    assert detector.take(beat("ACTOR[1]", 1), state)


def test_a_standby_may_live_as_long_as_the_job_knows_of_it(job):
    state, detector = running(job, STANDBY_READY), detector_of(job)
    assert [detector.take(beat("REWARD-standby[0]", number), state) for number in (0, 1)] == [True, False]
    assert not detector.take(beat("CRITIC-standby[0]", 0), state)


@pytest.mark.parametrize(
    ("process", "number", "event"),
    [
        ("ACTOR[1]", 1, MemberLost("ACTOR", 1, 1, DIED, node="node-0")),
        ("trainer", 1, TrainerLost(1, DIED, node="node-0")),
        ("REWARD-standby[0]", 0, StandbyLost("REWARD", 0, DIED, node="node-0")),
    ],
)
def test_process_in_a_long_call_hangs_once(job, process, number, event):
    state, detector = running(job, STANDBY_READY), detector_of(job)
    detector.take(beat("ACTOR[0]", 1, "update", LIMIT_S - 1.0, 3), state)
    detector.take(beat(process, number, "update", LIMIT_S + 1.0, 3), state)
    (lost,) = hangs(detector, state)
    assert replace(lost, cause=DIED) == event
    assert (lost.cause.kind, lost.cause.who) == (CauseKind.HUNG, process)
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


def beat_until(end_s, clock, detector, state, beats):
    """Take all ``beats()`` again and again; gives the first hangs."""
    while clock() < end_s:
        clock.advance(BEATS.beat_s)
        for each in beats():
            detector.take(each, state)
        if lost := hangs(detector, state):
            return lost
    return []


def test_long_call_is_a_hang_once_it_makes_no_progress(job, in_a_call):
    """Progress comes each half of the limit for twenty minutes, then none."""
    host, clock = in_a_call
    at = (clock, detector_of(job, clock), running(job))

    def beats(progress_s):
        if clock.now_s % progress_s == 0.0:
            note_progress()
        method, _, age_s = host.current_call()
        return [*(beat(process, 1) for process in PROCESSES[1:]), beat("ACTOR[0]", 1, method, age_s)]

    assert beat_until(1200.0, *at, lambda: beats(LIMIT_S / 2)) == []
    (lost,) = beat_until(1400.0, *at, lambda: beats(1e9))
    assert lost.cause.who == "ACTOR[0]"
    assert lost.cause.message.startswith("in generate without progress for 60.")
    assert 1200.0 + LIMIT_S < clock.now_s <= 1200.0 + LIMIT_S + 3.0


@pytest.mark.parametrize(
    ("before", "status", "after"),
    [
        ((), None, ()),
        ((), (1, "update", LIMIT_S + 1.0, 3), (LOST,)),
        ((), (1, "update", LIMIT_S + 1.0, 3), (LOST, STARTED_AGAIN)),
        ((LOST,), (2, CONSTRUCTING, LIMIT_S + 1.0), (LOST, STARTED_AGAIN)),
        ((), (1, CONSTRUCTING, LIMIT_S + 1.0), ()),
    ],
    ids=["just here", "lost", "replaced", "constructed", "late beat of its start"],
)
def test_process_without_a_current_call_does_not_hang(job, before, status, after):
    detector = detector_of(job)
    assert status is None or detector.take(beat("ACTOR[0]", *status), running(job, *before))
    assert hangs(detector, running(job, *after)) == []


def test_pause_of_the_master_is_no_silence_of_the_processes(job):
    clock = ManualClock(1000.0)
    state, detector = running(job), detector_of(job, clock)
    assert beat_until(1005.0, clock, detector, state, lambda: [beat(process, 1) for process in PROCESSES]) == []
    clock.advance(10 * LIMIT_S)
    assert hangs(detector, state) == []
    awake, end_s = [beat(process, 1) for process in PROCESSES[1:]], clock() + 2 * LIMIT_S
    (lost,) = beat_until(end_s, clock, detector, state, lambda: awake)
    assert lost.cause.who == "ACTOR[0]"
    assert LIMIT_S < clock() - 1005.0 - 10 * LIMIT_S <= LIMIT_S + 2 * BEATS.beat_s


def test_taking_stacks_is_no_pause_of_the_master(job):
    clock = ManualClock(1000.0)

    async def read_stacks(process):
        clock.advance(5.0)
        return "stacks"

    state, detector, hung_at_s = running(job), detector_of(job, clock, read_stacks), {}
    for number in range(200):
        clock.advance(BEATS.beat_s)
        for process in ("ACTOR[1]", "REWARD[1]", "trainer"):
            detector.take(beat(process, 1), state)
        if number <= 60:
            detector.take(beat("ACTOR[0]", 1, *(("update", LIMIT_S + 1.0, 3) if number == 60 else ())), state)
        for event in hangs(detector, state):
            hung_at_s.setdefault(event.cause.who, clock())
    assert list(hung_at_s) == ["ACTOR[0]", "REWARD[0]"]
    assert hung_at_s["REWARD[0]"] <= 1000.0 + LIMIT_S + 2 * 5.0 + 3 * BEATS.beat_s


def test_hang_of_a_group_is_blamed_on_its_odd_rank(job):
    """All are in their calls for too long; the others wait for the one that began first."""
    state, detector = running(job, collectives=("ACTOR",)), detector_of(job)
    assert state.settings.roles["ACTOR"].scope is RecoveryScope.GROUP
    for rank, more_s in ((0, 1.0), (1, 9.0)):
        detector.take(beat(f"ACTOR[{rank}]", 1, "update", LIMIT_S + more_s, 3), state)
    (lost,) = hangs(detector, state)
    assert lost.rank == 1
    assert "odd one out: ACTOR[1], in update" in lost.cause.message


def test_members_without_collectives_hang_one_by_one(job):
    state, detector = running(job), detector_of(job)
    for rank in (0, 1):
        detector.take(beat(f"REWARD[{rank}]", 1, "score", LIMIT_S + 1.0, 3), state)
    assert [lost.rank for lost in hangs(detector, state)] == [0, 1]


@pytest.mark.parametrize("replaces", [True, False])
def test_slow_member_is_named_and_replaced_on_request(job, caplog, replaces):
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
