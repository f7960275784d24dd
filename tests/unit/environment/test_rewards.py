# SPDX-License-Identifier: Apache-2.0
"""Several reward functions as one."""

import asyncio
import time

import pytest
import verifiers

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.core.rewards import Reward, WeightedRewards
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier


def length(completion, answer, extra_info):
    return len(completion)


async def soon(completion, answer, extra_info):
    await asyncio.sleep(0.2)
    return extra_info.get("soon", 1)


def slowly(completion, answer, extra_info):
    time.sleep(0.2)
    return 1.0


FUNCTIONS = {"length": length, "soon": soon}


@pytest.mark.parametrize("way", ["now", "score"])
def test_the_weighted_sum_of_sync_and_async_functions(way):
    rewards = WeightedRewards(FUNCTIONS, {"length": 0.5, "soon": -2.0})
    found = rewards.now("four", None, {"soon": 3})
    if way == "score":
        found = asyncio.run(rewards.score("four", None, {"soon": 3}))
    assert found == Reward(0.5 * 4 - 2.0 * 3, {"length": 4.0, "soon": 3.0})


def test_functions_wait_side_by_side():
    functions = {f"{name}{at}": function for name, function in (("a", soon), ("b", slowly)) for at in range(3)}
    rewards = WeightedRewards(functions, dict.fromkeys(functions, 1.0))

    async def many():
        return await asyncio.gather(*(rewards.score("x", None, {}) for _ in range(1)))

    began = time.monotonic()
    (found,) = asyncio.run(many())
    assert found.total == 6.0
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_part_that_is_no_reward_leaves_none(bad):
    rewards = WeightedRewards(FUNCTIONS, {"length": 1.0, "soon": 0.0})
    with pytest.raises(VerifierError, match="which is not a reward: soon"):
        rewards.now("x", None, {"soon": bad})


@pytest.mark.parametrize("weights", [{}, {"length": 1.0}, {"length": 1.0, "soon": float("nan")}])
def test_every_function_needs_a_finite_weight(weights):
    with pytest.raises(ValueError, match="weight"):
        WeightedRewards(FUNCTIONS, weights)


def test_they_run_in_a_verifiers_process_by_name():
    weights = {"verifiers:length": 0.25, "verifiers:awaited": 2.0}
    with DeadlineVerifier(weights, timeout_s=20) as verifier:
        assert verifier.score("four", None, {"bonus": 4}) == Reward(
            0.25 * 8 + 2.0 * 5, {"verifiers:length": 8.0, "verifiers:awaited": 5.0}
        )
        assert verifier("four", None) == 1.0 + 10.0
    with pytest.raises(VerifierError, match="verifiers:length \\+ verifiers:lenth could not be loaded"):
        DeadlineVerifier({verifiers.length: 1.0, "verifiers:lenth": 1.0}, timeout_s=20)
