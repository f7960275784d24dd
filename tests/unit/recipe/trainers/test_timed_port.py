# SPDX-License-Identifier: Apache-2.0
"""The time of calls is booked by phase."""

import threading

import pytest

from dlrover.python.rl.recipe.trainers.recipe_trainer import TimedPort
from dlrover.python.rl.trainer.port import Call, Outcome, Ref
from dlrover.python.rl.trainer.shard import Rows
from tests.support.manual_clock import ManualClock

PHASES = {"generate": "generation", "score": "reward", "CRITIC.update": "critic"}


class SlowPort:
    """A call begins when its arguments are complete, and takes the seconds of its method."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.ready_s = clock, seconds, {}

    def put(self, value):
        return Ref(self, value)

    def submit(self, role, rank, call):
        token, size = object(), object()
        arguments = [ref for value in call.args for ref in (value.parts if isinstance(value, Rows) else [value])]
        begins_s = max([self.clock.now_s, *(self.ready_s[ref.token] for ref in arguments if isinstance(ref, Ref))])
        self.ready_s[token] = self.ready_s[size] = begins_s + self.seconds[call.method]
        return Ref(self, token, size, role, rank, call.method)

    def wait(self, refs, timeout_s):
        end_s = max(self.ready_s[ref.token] for ref in refs)
        most_s = end_s if timeout_s is None else self.clock.now_s + timeout_s
        self.clock.now_s = max(self.clock.now_s, min(end_s, most_s))
        return [Outcome(late=self.ready_s[ref.token] > self.clock.now_s) for ref in refs]


def call(method, *args):
    return Call((1, 0), method, args, {}, sized=True)


@pytest.fixture
def timed():
    clock = ManualClock()
    return clock, TimedPort(SlowPort(clock, {"generate": 5.0, "score": 2.0, "update": 3.0}), PHASES, clock)


@pytest.mark.feature(140)
def test_each_phase_has_its_own_time_when_one_waits_for_another(timed):
    clock, port = timed
    completions = port.submit("ROLLOUT", 0, call("generate"))
    clock.now_s += 1.0  # the trainer's own work
    rewards = port.submit("REWARD", 0, call("score", Rows((completions,), 0, 1)))
    assert port.wait([rewards], None) == [Outcome()]
    port.wait([port.submit("ACTOR", 0, call("update", completions))], None)
    whole, spent = port.lap()
    assert spent == {"generation": 4.0, "reward": 2.0, "update": 3.0, "trainer": 1.0}
    assert whole == 10.0
    assert port.lap() == (0.0, {"trainer": 0.0})


def test_a_method_of_one_role_can_have_a_phase_of_its_own(timed):
    _, port = timed
    for role in ("CRITIC", "ACTOR"):
        port.wait([port.submit(role, 0, call("update"))], None)
    assert port.lap() == (6.0, {"critic": 3.0, "update": 3.0, "trainer": 0.0})


def test_a_deadline_is_for_the_whole_wait(timed):
    clock, port = timed
    completions = port.submit("ROLLOUT", 0, call("generate"))
    rewards = port.submit("REWARD", 0, call("score", completions))
    assert port.wait([rewards], 6.0) == [Outcome(late=True)]
    assert clock.now_s == 6.0
    assert port.wait([rewards], 6.0) == [Outcome()]
    assert clock.now_s == 7.0


def test_waits_of_other_threads_are_not_booked(timed):
    _, port = timed
    waiting = threading.Thread(target=lambda: port.wait([port.submit("ROLLOUT", 0, call("generate"))], None))
    waiting.start()
    waiting.join(10)
    assert port.lap() == (5.0, {"trainer": 5.0})
