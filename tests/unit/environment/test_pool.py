# SPDX-License-Identifier: Apache-2.0
"""Verifiers side by side."""

import itertools
import time

import pytest

from dlrover.python.rl.common.errors import VerifierError, VerifierTimeout
from dlrover.python.rl.environment.core.scoring import Completed
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier, VerifierPool
from tests.support import verifiers


def judge(pool, *completions):
    """The rewards, or errors."""
    results = pool.score(map(Completed, completions))
    return [result if isinstance(result, VerifierError) else result.total for result in results]


@pytest.fixture
def pool():
    made = VerifierPool(2, lambda: DeadlineVerifier(verifiers.obedient, timeout_s=1.0))
    yield made
    made.close()


def test_rewards_come_in_the_order_asked():
    made = VerifierPool(3, lambda: DeadlineVerifier(verifiers.length, timeout_s=30))
    assert judge(made, *("x" * size for size in range(50))) == list(range(50))
    made.close()


@pytest.mark.slow
def test_two_endless_samples_neither_disable_the_pool_nor_touch_the_others(pool):
    judged = judge(pool, "fine", "loop", "loop", *["fine"] * 20)
    assert [type(reward) for reward in judged[1:3]] == [VerifierTimeout] * 2
    assert [judged[0], *judged[3:]] == [1.0] * 21


def quickest_s(pool, completions, expected):
    """Seconds that judging takes where no neighbour of this process gets in its way."""
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        judged = judge(pool, *completions)
        took_s.append(time.monotonic() - began_s)
        assert [reward for reward in judged if not isinstance(reward, VerifierTimeout)] == expected
        if took_s[-1] < 1.0 + 0.5:
            break
    return min(took_s)


@pytest.mark.slow
def test_the_pool_is_at_full_strength_within_half_a_second_of_the_kill(pool):
    assert quickest_s(pool, ["loop", "loop", "fine", "fine"], [1.0, 1.0]) < 1.0 + 0.5


def test_the_others_go_on_while_one_hangs(pool):
    assert quickest_s(pool, ["loop", *["fine"] * 50], [1.0] * 50) < 1.0 + 0.5


def test_every_bad_habit_at_once_costs_the_bad_samples_alone(pool):
    bad = ["abort", "raise", "exit", "segfault", "nan", "forge", "kill-group", "stop"]
    judged = judge(pool, *(word for habit in bad for word in (habit, "fine")))
    assert all(isinstance(reward, VerifierError) for reward in judged[::2])
    assert judged[1::2] == [1.0] * len(bad)


def test_what_cannot_be_loaded_is_refused_and_leaves_no_process():
    number, started = itertools.count(), []

    def start():
        if next(number) == 1:
            return DeadlineVerifier("tests.support.verifiers:missing", timeout_s=1)
        started.append(DeadlineVerifier(verifiers.length, timeout_s=1))
        return started[-1]

    with pytest.raises(VerifierError, match="could not be loaded"):
        VerifierPool(2, start)
    with pytest.raises(ValueError, match="is closed"):
        started[0]("x", None)
