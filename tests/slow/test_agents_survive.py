# SPDX-License-Identifier: Apache-2.0
"""Runs with agents end like undisturbed ones, to the bit, when something is killed while episodes are under way."""

import os
import random
import signal

import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload
from tests.support.commands import ROOT
from tests.support.durable_toys import FaultyPort, TrainerKilled
from tests.support.policy_jobs import SHAPE, policy_config, write_inputs
from tests.support.recipe_stage import Stage
from tests.support.run_files import untimed

pytestmark = [pytest.mark.slow, pytest.mark.needs("openai"), pytest.mark.timeout(600)]

VICTIMS = ("engine", "agents", "trainer")


class Strikes:
    """The victims by the turn of the engines, which have a turn only while episodes wait for an action."""

    def __init__(self):
        self.turns, self.plan, self.done = 0, {}, []

    def strike(self, workload):
        self.turns += 1
        victim = self.plan.pop(self.turns, None)
        if victim is None:
            return
        self.done.append(victim)
        if victim == "agents":
            os.kill(workload._scheduler.guard._environment._child.pid, signal.SIGKILL)
        elif victim == "engine":
            raise EngineError("the engine's process is killed")


STRIKES = Strikes()


class Rollout(RolloutWorkload):
    def init_model(self, *args, **kwargs):
        name = super().init_model(*args, **kwargs)
        advance = self._engine.advance

        def struck():
            STRIKES.strike(self)
            return advance()

        self._engine.advance = struck
        return name


class Port(FaultyPort):
    """Ends what a strike has hit, when its call returns: the call of a killed trainer is executed, its result lost."""

    def execute(self, member, role, rank, call):
        before = len(STRIKES.done)
        result = super().execute(member, role, rank, call)
        victims = STRIKES.done[before:]
        if "engine" in victims:
            member.alive = False
            member.host.end()
            result = super().execute(member, role, rank, call)
        if "trainer" in victims:
            raise TrainerKilled
        return result


def end_of(folder, inputs, plan):
    """Run a job through the strikes; everything that must not depend on them."""
    STRIKES.turns, STRIKES.plan, STRIKES.done = 0, dict(plan), []
    config = policy_config(inputs) | {"rollout": {"samples_per_prompt": 4, "max_new_tokens": 4, "max_turns": 8}}
    config |= {"environment": {"agent": f"{ROOT}/docs/guides/agents/letters.py:run"}, "prompts_per_step": 2}
    config |= {"engine": {"threads": 1, "max_batch": 1}}  # or the last bits depend on which requests meet in a batch
    del config["reward"]
    roles = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (Rollout, 2), "REWARD": (RewardWorkload, 1)}
    job = Stage(folder / "out", GRPOTrainer, roles, config)
    job.port = Port(job.port.members)
    try:
        job.run()
    finally:
        for member in job.port.members[RLRoleType.ROLLOUT]:
            member.host.end()
    files = sorted((job.folder / "model").rglob("*.safetensors"))
    end = {file.name: file.read_bytes() for file in files}
    return end | {"samples": (job.folder / "samples.jsonl").read_bytes(), "metrics": untimed(job.folder)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", **{**SHAPE, "max_positions": 256})
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    end = end_of(tmp_path_factory.mktemp("undisturbed"), inputs, {})
    return end, STRIKES.turns


@pytest.mark.feature(157)
@pytest.mark.parametrize("seed", range(10))
def test_run_with_kills_under_way_ends_in_the_same_bits(tmp_path, inputs, undisturbed, seed):
    expected, turns = undisturbed
    draw = random.Random(seed)
    victims = [VICTIMS[seed % 3], *(draw.choice(VICTIMS) for _ in range(2))]
    plan = dict(zip(draw.sample(range(2, turns), len(victims)), victims, strict=True))
    end = end_of(tmp_path, inputs, plan)
    assert sorted(STRIKES.done) == sorted(victims)
    assert [name for name, value in expected.items() if end[name] != value] == [], f"strikes at {plan}"
