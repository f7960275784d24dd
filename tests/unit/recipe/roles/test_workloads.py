# SPDX-License-Identifier: Apache-2.0
"""The ready workloads: what each promises to a run that replaces them, and how weights get to the rollouts."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig
from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.ranks import get_random_state
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.environment.sandbox.confinement import sandbox_level
from dlrover.python.rl.recipe.base.config import EngineConfig, RewardConfig, SenderConfig
from dlrover.python.rl.recipe.base.updates import UpdatePlan
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.roles.reward import name_parts
from dlrover.python.rl.recipe.workloads import (
    ActorWorkload,
    ReferenceWorkload,
    RewardWorkload,
    RolloutWorkload,
    ShardedReferenceWorkload,
    ShardedTeacherWorkload,
    TeacherWorkload,
)
from dlrover.python.rl.runtime.member.host import Stored
from dlrover.python.rl.trainer.port import Ref
from dlrover.python.rl.trainer.workload import MemberContext, member_context
from tests.chaos.job import tiny_job
from tests.support.processes import children, run
from tests.support.recipe_stage import Stage
from tests.support.rollout_member import ENGINE, SAMPLING, actor, member, wanted


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64))


def synced(model):
    """A rollout with the weights of an actor at its start."""
    first = actor(model)
    return member(model, first.publish_weights())


def train(actor, rollout, step):
    """One step of a run, as the trainer drives it."""
    rollout.receive_weights(actor.publish_weights())
    samples = rollout.generate(wanted(1, 2, 3), SAMPLING, (5, step))
    sign = np.where(np.arange(len(samples)) % 2, 1, -1).astype(np.float32)
    rows = Batch({"advantage": sign, "weight": np.full(len(samples), 1 / 64, dtype=np.float32)})
    return actor.update(samples, rows, UpdatePlan(1.0))


def bits(workload):
    skeleton, buffers = state_tree.dump(workload.state_dict())
    return skeleton, [bytes(buffer) for buffer in buffers]


def saved(workload):
    skeleton, buffers = bits(workload)
    return state_tree.load(skeleton, [memoryview(buffer) for buffer in buffers])


@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_replaced_actor_trains_on_bit_for_bit(model, correction):
    settings = {"optimizer": OptimizerConfig(lr=1e-3, warmup_steps=4, weight_decay=0.1)}
    settings["algorithm"] = GRPO(correction=correction)
    first, server = actor(model, **settings), member(model)
    for step in (1, 2, 3):
        train(first, server, step)
    state = saved(first)
    torch.rand(3)  # What comes after the commit does not come back.
    expected = [train(first, server, step) for step in (4, 5)]
    second, other = actor(model, **settings), member(model)
    second.load_state_dict(state)
    assert [train(second, other, step) for step in (4, 5)] == expected
    assert bits(second)[1][1:] == bits(first)[1][1:]


@pytest.mark.feature(146)
def test_random_states_of_an_actor_follow_from_seed_and_rank(model):
    def state(seed, role, rank):
        with member_context(MemberContext("a", RLRoleType(role), rank, 1)):
            workload = ActorWorkload(None, {})
        workload.init_model(model, ENGINE, OptimizerConfig(), GRPO(), seed)
        skeleton, buffers = state_tree.dump(workload.state_dict()["random"])
        return skeleton, *map(bytes, buffers), random.random(), np.random.random(), torch.rand(1).item()

    several = [state(seed, role, rank) for seed in (0, 1) for role in ("ACTOR", "CRITIC") for rank in (0, 1)]
    assert state(0, "ACTOR", 0) == several[0]
    assert all(len(set(values)) == len(several) for values in zip(*(each[-3:] for each in several), strict=True))


class Foreign(TorchRolloutEngine):
    """An engine that does not add adapters, and reads the bytes."""

    info = EngineInfo(masks_unknown_ids=True)

    def receive(self, weights, rewind=False):
        assert weights.adapters is None
        super().receive(weights, rewind)


@pytest.mark.feature(145)
@pytest.mark.parametrize("engine", ["torch", f"{__name__}:Foreign"])
def test_rollout_with_adapters_alone_has_the_merged_weights(model, engine):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    first = actor(model, replace(ENGINE, lora=LoraSettings(rank=2)))
    server = member(model, engine=replace(ENGINE, rollout=engine))
    train(first, server, 1)
    ticket = first.publish_weights()
    assert all(".lora_" in entry.name for entry in ticket.table.entries)
    assert server.receive_weights(ticket) == first.published_stamp()
    merged = member(model)
    merged._engine.receive(first._engine.publish())
    ours, plain = (each.generate(wanted(1, 2), SAMPLING, (1, 1)) for each in (server, merged))
    for name in ("tokens", "logprobs", "versions"):
        assert ours.ragged(name).values.tobytes() == plain.ragged(name).values.tobytes()


def test_broadcast_to_rollouts_of_the_same_process_is_refused(model):
    with member_context(MemberContext(shares_process=True)):
        sender = ActorWorkload(None, {})
    engine = SenderConfig(**{**vars(ENGINE), "weight_sync": "broadcast"}, receivers=2)
    with pytest.raises(EngineError, match="sends to 2 rollouts at once, .* leave out --local"):
        sender.init_model(model, engine, OptimizerConfig(), GRPO())
    sender.close()


# -- the reward --------------------------------------------------------------------------------------------------------


def make_judge(**config):
    judge = RewardWorkload(None, {})
    level = judge.init_verifier(RewardConfig(**config))
    return judge, level


def test_several_reward_functions_give_a_column_each(model):
    functions = {"tests.support.verifiers:obedient": 1.0, "tests.support.verifiers:length": 0.5}
    judge, level = make_judge(function=functions, timeout_s=5.0, workers=1)
    assert level == sandbox_level()
    with closing(judge):
        samples = synced(model).generate(wanted(1, 2), SAMPLING, (1, 1))
        scored = judge.score(samples.with_columns(completion=["four", "raise", *["fives"] * 6]))
    np.testing.assert_array_equal(scored.dense("reward/obedient"), [1.0, np.nan, *[1.0] * 6])
    np.testing.assert_array_equal(scored.dense("reward/length"), [4.0, np.nan, *[5.0] * 6])
    np.testing.assert_array_equal(scored.dense("reward"), [3.0, np.nan, *[3.5] * 6])


def test_reward_functions_with_one_label_keep_their_whole_names():
    assert name_parts("a:right") == {}
    assert name_parts({"a:right": 1.0}) == {"a:right": "reward/right"}
    whole = {"a:right": 1.0, "b:right": 1.0, "c:mean": 1.0}
    assert name_parts(whole) == {name: f"reward/{name}" for name in whole}


# -- those who wait for a death ----------------------------------------------------------------------------------------


def threads_and_children():
    return set(threading.enumerate()), children()


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
    for after, earlier in zip(threads_and_children(), running, strict=True):
        assert after <= earlier  # what earlier tests have left may end at any time
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
def test_warm_process_imports_nothing_more(model):
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
    pool = "dlrover.python.rl.recipe.roles.reward.VerifierPool"
    monkeypatch.setattr(pool, lambda workers, start: SimpleNamespace(close=lambda: None))
    judge, _ = make_judge(function=function)
    assert judge.is_deterministic() is expected


# -- weights on their way ----------------------------------------------------------------------------------------------


def size(value):
    """The bytes of a value on its way."""
    stored = value.token.result if isinstance(value, Ref) else Stored.of(value)
    return 0 if stored is None else len(stored.data) + sum(buffer.nbytes for buffer in stored.buffers)


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_actor_publishes_in_the_precision_of_the_rollouts(model, precision, width):
    with closing(actor(model, replace(ENGINE, precision=precision))) as sender:
        entries = sender.publish_weights().table.entries
        assert sum(entry.nbytes for entry in entries) == width * sender._engine.parameter_count


@pytest.mark.feature(101)
def test_no_byte_of_the_weights_passes_through_the_trainer(tmp_path):
    sizes = {"publish_weights": [], "receive_weights": [], "published_stamp": []}
    job = tiny_job(tmp_path, 2, rollout={"samples_per_prompt": 4, "max_new_tokens": 3}, prompts_per_step=4)
    roles = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (RolloutWorkload, 2), "REWARD": (RewardWorkload, 1)}
    run = Stage(tmp_path / "out", GRPOTrainer, roles, job.config)
    submit = run.port.submit

    def measured(role, rank, call):
        ref = submit(role, rank, call)
        if call.method in sizes:
            assert not call.kwargs
            sizes[call.method] += [size(ref), *map(size, call.args)]
        return ref

    run.port.submit = measured
    run.run()
    with closing(run.workload("ACTOR")) as sender:
        weights = sender._engine.publish()
        assert run.workload("ROLLOUT", 1).receive_weights(sender.publish_weights()) == weights.stamp
    passed = sum(sizes.values(), [])
    assert len(passed) == 3 * (1 + 2 * 2 + 1)
    assert max(passed) < 150 * len(weights.buffers) < weights.nbytes / 50


@pytest.mark.feature(104)
def test_rollout_without_weights_serves_nothing(model):
    replacement = member(model)
    assert replacement._engine.version == -1
    with pytest.raises(WeightSyncError, match="no weights yet"):
        replacement.generate(None, None, ())


@pytest.mark.feature(101)
@pytest.mark.parametrize("name", ["pull", "broadcast", "dlrover.python.rl.engine.weight_sync.pull:PullTransport"])
def test_weight_transport_of_the_job_is_used(model, name):
    """The rollouts receive while the actor sends, where the transport waits for them."""
    engine = SenderConfig(threads=1, weight_sync=name, receivers=2)
    sender, servers = actor(model, engine), [member(model, engine=engine) for _ in range(2)]
    for _ in range(2):
        ticket = sender.publish_weights()
        with ThreadPoolExecutor(2) as pool:
            received = list(pool.map(lambda server, ticket=ticket: server.receive_weights(ticket), servers))
        assert received == [sender.published_stamp()] * 2
    for workload in (sender, *servers):
        workload.close()


# -- a reference of which each worker holds a part ---------------------------------------------------------------------


def batch_of(rows):
    generator = np.random.default_rng(0)
    tokens = Ragged.from_rows([generator.integers(0, 256, 12) for _ in range(rows)])
    return Batch({"tokens": tokens, "action_mask": Ragged.from_rows([np.arange(12) >= 4] * rows)})


def make_reference(kind, model, rank=0, world_size=1, port=0):
    where = {"master_addr": "127.0.0.1", "master_port": port}
    with member_context(MemberContext("reference", RLRoleType.REFERENCE, rank, world_size, **where)):
        workload = kind(None, {})
    workload.init_model(model, EngineConfig(device="cpu", threads=1, shard_frozen=True))
    return workload


def _part(rank, world_size, port, model, shares):
    workload = make_reference(ShardedReferenceWorkload, model, rank, world_size, port)
    mine = batch_of(sum(shares)).take(list(range(sum(shares[:rank]), sum(shares[: rank + 1]))))
    logprobs = workload.logprobs(mine, 0.7).ragged("ref_logprobs").values
    size = sum(shard.master.numel() for shard in workload._engine._model.shards)
    workload.close()
    return logprobs, size


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(3, 2), (3, 0)], ids=["rows for both", "a rank without rows"])
def test_sharded_reference_computes_like_a_whole_one(model, shares):
    whole = make_reference(ReferenceWorkload, model)
    expected = whole.logprobs(batch_of(sum(shares)), 0.7).ragged("ref_logprobs").values
    parts, sizes = zip(*run(2, _part, model, shares), strict=True)
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=1e-5)
    assert sum(sizes) == whole._engine.parameter_count
    assert max(sizes) < 0.6 * whole._engine.parameter_count


@pytest.mark.parametrize(
    ("kind", "shards", "error"),
    [
        (ReferenceWorkload, False, ""),
        (ShardedTeacherWorkload, True, ""),
        (ReferenceWorkload, True, "needs the class ShardedReferenceWorkload"),
        (TeacherWorkload, True, "needs the class ShardedTeacherWorkload"),
        (ShardedReferenceWorkload, False, "has to be true for ShardedReferenceWorkload"),
    ],
)
def test_shard_frozen_needs_a_sharded_class(kind, shards, error):
    errors = list(kind.check_config({"engine": {"shard_frozen": shards}}))
    assert list(map(str, errors)) == ([f"config.engine.shard_frozen: {error}"] if error else [])
