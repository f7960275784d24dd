# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: told to the master from a thread; without an answer, or once outdated, the process ends itself."""

import threading
import time

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.spec import LivenessSpec
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat, HeartbeatSender, count_oom_kills
from tests.support.manual_clock import ManualClock

QUICK = LivenessSpec(beat_s=0.001, lease_s=10.0)
DEADLINE_S = 10.0


class Master:
    """Takes beats in, and answers what it is told to, in turns; a beat takes 4 s of the clock's."""

    def __init__(self, *answers, clock=None):
        self.beats, self.several = [], threading.Event()
        self._answers, self._clock = answers, clock

    def __call__(self, beat):
        self.beats.append(beat)
        if self._clock:
            self._clock.advance(4.0)
        if len(self.beats) >= 5:
            self.several.set()
        answer = self._answers[(len(self.beats) - 1) % len(self._answers)]
        if isinstance(answer, Exception):
            raise answer
        return answer


def beating(master, now_s=time.monotonic):
    ended, why = threading.Event(), []

    def end(reason):
        why.append(reason)
        ended.set()

    beater = HeartbeatSender(lambda: Heartbeat(ProcessId("ROLLOUT", 1), 3), master, QUICK, end, now_s)
    beater.start()
    return beater, ended, why


def test_a_process_beats_again_and_again_with_what_it_does():
    master = Master(True)
    beater, ended, _ = beating(master)
    assert master.several.wait(DEADLINE_S)
    beater.stop()
    assert set(master.beats) == {Heartbeat(ProcessId("ROLLOUT", 1), 3)}
    assert {beat.oom_kills for beat in master.beats} == {count_oom_kills()}
    assert not ended.is_set()


def test_a_process_whose_place_is_taken_ends_itself_at_once():
    master = Master(False)
    _, ended, why = beating(master)
    assert ended.wait(DEADLINE_S)
    assert len(master.beats) == 1
    assert "taken its place" in why[0]


def test_a_master_that_is_away_is_waited_for_until_the_lease_is_over():
    clock = ManualClock()
    master = Master(ConnectionError("away"), clock=clock)
    _, ended, why = beating(master, clock)
    assert ended.wait(DEADLINE_S)
    assert len(master.beats) == 3, "the lease of 10 s is over at the third beat of 4 s"
    assert "no master for 12 s (ConnectionError)" in why[0]


def test_an_answer_renews_the_lease():
    clock = ManualClock()
    master = Master(ConnectionError("away"), True, clock=clock)
    beater, ended, _ = beating(master, clock)
    assert master.several.wait(DEADLINE_S), "it is 8 s from one answer to the next, and the lease is 10 s"
    beater.stop()
    assert not ended.is_set()
