# SPDX-License-Identifier: Apache-2.0
"""The ready workloads: what each promises to a run that loses and replaces them."""

import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate, WeightSyncError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, SamplingParams
from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.ranks import get_random_state
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.environment.sandbox.confinement import sandbox_level
from dlrover.python.rl.recipe.base.config import EngineConfig, RewardConfig, SenderConfig
from dlrover.python.rl.recipe.base.updates import UpdatePlan
from dlrover.python.rl.recipe.roles.reward import name_parts
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.trainer.workload import MemberContext, member_context
from tests.support.recipe_stage import flip_a_bit

ENGINE = EngineConfig(threads=1)
SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0, samples_per_prompt=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64))


def actor(model):
    made = ActorWorkload(None, {})
    made.init_model(model, ENGINE, OptimizerConfig(lr=1e-3, warmup_steps=4, weight_decay=0.1), GRPO())
    return made


def rollout(model, ticket=None, engine=ENGINE):
    made = RolloutWorkload(None, {})
    made.init_model(model, engine)
    if ticket is not None:
        made.receive_weights(ticket)
    return made


def synced(model):
    """A rollout with the weights of an actor at its start."""
    first = actor(model)
    return rollout(model, first.publish_weights())


def prompts(*ids):
    count = len(ids)
    texts = [f"{number}+{number + 1}=" * (1 + number % 3) for number in ids]
    columns = {"prompt": texts, "answer": ["1"] * count, "extra_info": [{}] * count}
    return Batch({"prompt_id": np.array(ids, dtype=np.int64), **columns})


def train(actor, rollout, step):
    """One step of a run, as the trainer drives it."""
    rollout.receive_weights(actor.publish_weights())
    drawn = rollout.generate(prompts(1, 2, 3), SAMPLING, (5, step))
    sign = np.where(np.arange(len(drawn)) % 2, 1, -1).astype(np.float32)
    rows = Batch({"advantage": sign, "weight": np.full(len(drawn), 1 / 64, dtype=np.float32)})
    return actor.update(drawn, rows, UpdatePlan(1.0))


def bits(workload):
    skeleton, buffers = state_tree.dump(workload.state_dict())
    return skeleton, [bytes(buffer) for buffer in buffers]


def saved(workload):
    skeleton, buffers = bits(workload)
    return state_tree.load(skeleton, [memoryview(buffer) for buffer in buffers])


# -- the actor --------------------------------------------------------------------------------------------------------


def test_a_replaced_actor_goes_on_bit_for_bit(model):
    first, server = actor(model), rollout(model)
    for step in (1, 2, 3):
        train(first, server, step)
    state = saved(first)
    torch.rand(3)  # What comes after the commit does not come back.
    expected = [train(first, server, step) for step in (4, 5)]
    second, other = actor(model), rollout(model)
    second.load_state_dict(state)
    assert [train(second, other, step) for step in (4, 5)] == expected
    assert bits(second)[1][1:] == bits(first)[1][1:]


def test_two_runs_end_in_the_same_bits(model):
    """The random states among them, whatever the process has drawn before."""

    def run():
        torch.rand(3), np.random.random(2), random.random()
        first, server = actor(model), rollout(model)
        return [train(first, server, step) for step in (1, 2, 3)], bits(first)

    assert run() == run()


@pytest.mark.feature(146)
def test_the_random_states_of_an_actor_follow_from_the_seed_and_who_it_is(model):
    def state(seed, role, rank):
        with member_context(MemberContext("a", RLRoleType(role), rank, 1)):
            made = ActorWorkload(None, {})
        made.init_model(model, ENGINE, OptimizerConfig(), GRPO(), seed)
        return state_tree.dump(made.state_dict()["random"])

    def drawn(*who):
        skeleton, buffers = state(*who)
        return skeleton, *map(bytes, buffers), random.random(), np.random.random(), torch.rand(1).item()

    several = [drawn(seed, role, rank) for seed in (0, 1) for role in ("ACTOR", "CRITIC") for rank in (0, 1)]
    assert drawn(0, "ACTOR", 0) == several[0]
    assert all(len(set(values)) == len(several) for values in zip(*(made[-3:] for made in several), strict=True))


def test_an_update_that_is_not_finite_changes_nothing_and_is_worth_another_try(model):
    first, server = actor(model), rollout(model)
    train(first, server, 1)
    drawn = server.generate(prompts(1), SAMPLING, (5, 2))
    rows = Batch({"advantage": np.full(4, np.nan, dtype=np.float32), "weight": np.ones(4, dtype=np.float32)})
    before = bits(first)
    with pytest.raises(NonFiniteUpdate, match=r"first in: advantage.*the update of version 1") as caught:
        first.update(drawn, rows, UpdatePlan(1.0))
    assert caught.value.retryable
    assert bits(first) == before


def test_what_was_published_is_known_by_its_stamp(model):
    first = actor(model)
    ticket = first.publish_weights()
    assert first.published_stamp() == rollout(model).receive_weights(ticket) == first._engine.publish().stamp


# -- the rollout ------------------------------------------------------------------------------------------------------


def test_a_rollout_without_weights_serves_nothing(model):
    with pytest.raises(WeightSyncError, match="no weights yet"):
        rollout(model).generate(prompts(1), SAMPLING, (1, 1))


def test_a_rollout_whose_sync_was_refused_serves_the_old_weights(model):
    first = actor(model)
    server = rollout(model, first.publish_weights())
    before = server.generate(prompts(1, 2), SAMPLING, (1, 1))
    train(first, rollout(model), 1)
    torn = first.publish_weights()
    flip_a_bit(first, torn, "model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' came with other bytes than were sent"):
        server.receive_weights(torn)
    assert same(before, server.generate(prompts(1, 2), SAMPLING, (1, 1)))


class Foreign(TorchRolloutEngine):
    """It does not say that it adds adapters, and reads the bytes."""

    info = EngineInfo(masks_unknown_ids=True)

    def receive(self, weights, rewind=False):
        assert weights.adapters is None
        super().receive(weights, rewind)


@pytest.mark.feature(145)
@pytest.mark.parametrize("engine", ["torch", f"{__name__}:Foreign"])
def test_a_rollout_that_gets_adapters_alone_is_as_one_with_the_merged_weights(model, engine):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    first = ActorWorkload(None, {})
    first.init_model(model, replace(ENGINE, lora=LoraSettings(rank=2)), OptimizerConfig(lr=1e-2), GRPO())
    server = rollout(model, engine=replace(ENGINE, rollout=engine))
    train(first, server, 1)
    ticket = first.publish_weights()
    assert all(".lora_" in entry.name for entry in ticket.table.entries)
    assert server.receive_weights(ticket) == first.published_stamp()
    merged = rollout(model)
    merged._engine.receive(first._engine.publish())
    ours, plain = (each.generate(prompts(1, 2), SAMPLING, (1, 1)) for each in (server, merged))
    assert same(ours, plain)


def test_rollouts_of_the_same_process_are_not_waited_for(model):
    with member_context(MemberContext(shares_process=True)):
        made = ActorWorkload(None, {})
    engine = SenderConfig(**{**vars(ENGINE), "weight_sync": "broadcast"}, receivers=2)
    with pytest.raises(EngineError, match="sends to 2 rollouts at once, .* leave out --local"):
        made.init_model(model, engine, OptimizerConfig(), GRPO())
    made.close()


def test_a_run_that_has_gone_back_takes_its_rollouts_with_it(model, caplog):
    first, gone_back = actor(model), actor(model)
    older = gone_back.publish_weights()
    server = rollout(model, older)
    before = server.generate(prompts(1, 2), SAMPLING, (1, 1))
    train(first, server, 1)
    server.receive_weights(first.publish_weights())
    with caplog.at_level("WARNING"):
        server.receive_weights(older)
    assert "weights go back from version 1 to 0" in caplog.text
    assert same(before, server.generate(prompts(1, 2), SAMPLING, (1, 1)))


def same(first, second):
    """Equal to the bit, log-probs and versions included."""
    assert first.columns.keys() == second.columns.keys()
    return state_of(first) == state_of(second)


def state_of(batch):
    return [
        column.tobytes() if isinstance(column, np.ndarray) else column if isinstance(column, list) else
        (column.values.tobytes(), column.offsets.tobytes())
        for column in batch.columns.values()
    ]  # fmt: skip


def test_a_repeated_call_gives_the_same_bits_whatever_was_asked_in_between(model):
    server = synced(model)
    first = server.generate(prompts(1, 2), SAMPLING, (1, 1))
    server.generate(prompts(7, 8, 9), SAMPLING, (1, 2))
    torch.rand(5), np.random.random(5)
    assert same(first, server.generate(prompts(1, 2), SAMPLING, (1, 1)))


def test_another_rollout_gives_the_same_bits(model):
    publisher = actor(model)
    weights = publisher.publish_weights()
    draws = [rollout(model, weights).generate(prompts(1, 2, 3), SAMPLING, (1, 1)) for _ in range(2)]
    assert same(*draws)


@pytest.mark.feature(146)
def test_a_sample_depends_on_its_seed_prompt_and_index_alone(model):
    """Not on which worker drew it, nor on what was drawn beside it."""
    publisher = actor(model)
    weights = publisher.publish_weights()
    whole = rollout(model, weights).generate(prompts(1, 2, 3, 4), SAMPLING, (1, 1))
    parts = [rollout(model, weights, EngineConfig(threads=1, max_batch=3)) for _ in range(2)]
    cut = Batch.concat(
        [
            part.generate(chosen, SAMPLING, (1, 1))
            for part, chosen in zip(parts, (prompts(4), prompts(1, 2, 3)), strict=True)
        ]
    )
    order = np.lexsort((cut.dense("sample_index"), cut.dense("prompt_id")))
    assert [cut.objects("completion")[row] for row in order] == whole.objects("completion")


# -- the reward -------------------------------------------------------------------------------------------------------


@pytest.fixture
def judge(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "environment"))
    made = RewardWorkload(None, {})
    made.init_verifier(RewardConfig(function="tests.support.verifiers:obedient", timeout_s=1.0, workers=2))
    yield made
    made.close()


@pytest.mark.slow
def test_failed_samples_have_a_reason_and_no_reward_and_the_others_are_untouched(judge, model):
    drawn = synced(model).generate(prompts(1, 2), SAMPLING, (1, 1))
    words = ["fine", "loop", "abort", "loop", "raise", "fine", "kill-parent", "fine"]
    scored = judge.score(drawn.with_columns(completion=words))
    assert np.isnan(scored.dense("reward")).tolist() == [word in ("loop", "abort", "raise") for word in words]
    reasons = [error for error in scored.objects("error") if error]
    assert ["within 1 s" in reasons[0], "SIGABRT" in reasons[1], "KeyError" in reasons[3]] == [True] * 3
    again = judge.score(drawn.with_columns(completion=["fine"] * 8))
    assert again.dense("reward").tolist() == [1.0] * 8


def test_several_functions_give_a_column_each(monkeypatch, model):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "environment"))
    functions = {"tests.support.verifiers:obedient": 1.0, "tests.support.verifiers:length": 0.5}
    judge = RewardWorkload(None, {})
    level = judge.init_verifier(RewardConfig(function=functions, timeout_s=5.0, workers=1))
    assert level == sandbox_level()
    try:
        drawn = synced(model).generate(prompts(1, 2), SAMPLING, (1, 1))
        scored = judge.score(drawn.with_columns(completion=["four", "raise", *["fives"] * 6]))
    finally:
        judge.close()
    np.testing.assert_array_equal(scored.dense("reward/obedient"), [1.0, np.nan, *[1.0] * 6])
    np.testing.assert_array_equal(scored.dense("reward/length"), [4.0, np.nan, *[5.0] * 6])
    np.testing.assert_array_equal(scored.dense("reward"), [3.0, np.nan, *[3.5] * 6])


def test_functions_with_one_label_or_that_of_another_figure_keep_their_whole_names():
    assert name_parts("a:right") == {}
    assert name_parts({"a:right": 1.0}) == {"a:right": "reward/right"}
    whole = {"a:right": 1.0, "b:right": 1.0, "c:mean": 1.0}
    assert name_parts(whole) == {name: f"reward/{name}" for name in whole}


# -- those who wait for a death ---------------------------------------------------------------------------------------


def threads_and_children():
    files = [Path("/proc/self/task", task, "children") for task in os.listdir("/proc/self/task")]
    return set(threading.enumerate()), {pid for file in files if file.exists() for pid in file.read_text().split()}


@pytest.mark.slow
@pytest.mark.parametrize("workload", [ActorWorkload, ReferenceWorkload, RolloutWorkload, RewardWorkload])
def test_warming_up_leaves_nothing_behind(workload, tmp_path, monkeypatch):
    workload.warm_up()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before, running = state_of_process(), threads_and_children()
    workload.warm_up()
    assert state_of_process() == before
    for after, those_before in zip(threads_and_children(), running, strict=True):
        assert after <= those_before  # what earlier tests have left may end at any time
    assert os.listdir(tmp_path) == []


def state_of_process():
    skeleton, buffers = state_tree.dump(get_random_state())
    return skeleton, [bytes(buffer) for buffer in buffers], torch.get_num_threads()


LATE = """
import sys
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.engine.api.base import OptimizerConfig, SamplingParams
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.workloads import ActorWorkload, RolloutWorkload

ActorWorkload.warm_up()
RolloutWorkload.warm_up()
before = set(sys.modules)
actor, rollout = ActorWorkload(None, {}), RolloutWorkload(None, {})
actor.init_model(sys.argv[1], EngineConfig(threads=1), OptimizerConfig(), GRPO(), 0)
rollout.init_model(sys.argv[1], EngineConfig(threads=1))
rollout.receive_weights(actor.publish_weights())
actor.load_state_dict(actor.state_dict())
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_who_is_warm_imports_nothing_more_when_it_takes_over(model):
    ran = subprocess.run([sys.executable, "-c", LATE, model], capture_output=True, text=True, timeout=240, check=True)
    family = "transformers.models."  # what is looked up by the name in a model's own files
    assert [name for name in ran.stdout.split() if not name.startswith(family)] == []


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("exact", True),
        ("dlrover.python.rl.environment.verifiers:unjudged", True),
        ({"exact": 0.5, "math": 0.5}, True),
        ("tests.support.verifiers:obedient", False),
        ({"exact": 0.5, "tests.support.verifiers:obedient": 0.5}, False),
    ],
)
def test_is_deterministic_is_false_with_a_users_reward(function, expected, monkeypatch):
    monkeypatch.setattr(
        "dlrover.python.rl.recipe.roles.reward.VerifierPool", lambda workers, start: SimpleNamespace(close=lambda: None)
    )
    judge = RewardWorkload(None, {})
    judge.init_verifier(RewardConfig(function=function))
    assert judge.is_deterministic() is expected
