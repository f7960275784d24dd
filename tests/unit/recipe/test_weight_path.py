# SPDX-License-Identifier: Apache-2.0
"""How weights get from the actor to the rollouts in a recipe: a ticket through the trainer, the bytes past it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.common.errors import EngineError, ResultLost, WeightSyncError
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.recipe.base.config import EngineConfig, SenderConfig
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.runtime.member.host import Stored
from dlrover.python.rl.trainer.port import Ref
from tests.chaos.job import tiny_job, write_inputs
from tests.support.recipe_stage import Stage

ENGINE = EngineConfig(threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return str(folder / "model")


@pytest.fixture
def actor(model):
    made = ActorWorkload(None, {})
    made.init_model(model, ENGINE, OptimizerConfig(lr=1e-3), GRPO())
    yield made
    made.close()


def rollout(model, maps_pages=True):
    made = RolloutWorkload(None, {})
    made.init_model(model, ENGINE)
    made._weights = PullTransport(made._weights.settings, maps_pages=maps_pages)
    return made


def size(value):
    """Bytes of a value on its way."""
    stored = value.token.result if isinstance(value, Ref) else Stored.of(value)
    return 0 if stored is None else len(stored.data) + sum(buffer.nbytes for buffer in stored.buffers)


def test_an_actor_whose_weights_cannot_be_written_to_its_folder_does_not_begin(model):
    engine = replace(ENGINE, weight_sync="disk", weight_sync_options={"folder": "/proc/nope"})
    made = ActorWorkload(None, {})
    with pytest.raises(EngineError, match="weight_sync_options.folder: weights cannot be written to /proc/nope"):
        made.init_model(model, engine, OptimizerConfig(), GRPO())
    made.close()


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_an_actor_publishes_in_the_precision_of_the_rollouts(model, precision, width):
    made = ActorWorkload(None, {})
    made.init_model(model, replace(ENGINE, precision=precision), OptimizerConfig(lr=1e-3), GRPO())
    entries = made.publish_weights().table.entries
    assert sum(entry.nbytes for entry in entries) == width * made._engine.parameter_count
    made.close()


@pytest.mark.feature(101)
def test_no_byte_of_the_weights_passes_through_the_trainer(tmp_path):
    sizes = {"publish_weights": [], "receive_weights": [], "published_stamp": []}
    small = {"samples_per_prompt": 4, "max_new_tokens": 3, "temperature": 1.0}
    job = tiny_job(tmp_path, 2, rollout=small, prompts_per_step=4)
    roles = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (RolloutWorkload, 2), "REWARD": (RewardWorkload, 1)}
    made = Stage(tmp_path / "out", GRPOTrainer, roles, job.config)
    submit = made.port.submit

    def measured(role, rank, call):
        ref = submit(role, rank, call)
        if call.method in sizes:
            assert not call.kwargs
            sizes[call.method] += [size(ref), *map(size, call.args)]
        return ref

    made.port.submit = measured
    made.run()
    weights = made.workload("ACTOR")._engine.publish()
    assert made.workload("ROLLOUT", 1).receive_weights(made.workload("ACTOR").publish_weights()) == weights.stamp
    passed = [each for found in sizes.values() for each in found]
    assert len(passed) == 3 * (1 + 2 * 2 + 1)
    assert max(passed) < 150 * len(weights.buffers) < weights.nbytes / 50
    made.workload("ACTOR").close()
    made.workload("REWARD").close()


@pytest.mark.feature(102)
@pytest.mark.parametrize("maps_pages", [True, False], ids=["same host", "another host"])
def test_a_rollout_of_this_host_or_another_gets_the_same_weights(model, actor, maps_pages):
    server = rollout(model, maps_pages)
    assert server.receive_weights(actor.publish_weights()) == actor.published_stamp()
    assert server._engine.version == 0


@pytest.mark.feature(104)
def test_a_rollout_that_takes_another_ones_place_serves_nothing_before_it_has_weights(model, actor):
    first = rollout(model)
    first.receive_weights(actor.publish_weights())
    replacement = rollout(model)
    assert replacement._engine.version == -1
    with pytest.raises(WeightSyncError, match="no weights yet"):
        replacement.generate(None, None, ())


@pytest.mark.feature(104)
def test_weights_that_are_gone_with_their_actor_leave_the_old_ones_serving(model, actor):
    server = rollout(model)
    server.receive_weights(actor.publish_weights())
    other = ActorWorkload(None, {})
    other.init_model(model, ENGINE, OptimizerConfig(lr=1e-3), GRPO())
    ticket = other.publish_weights()
    other.close()
    with pytest.raises(ResultLost, match=r"ACTOR\[0\]\.receive_weights: version 0 from ACTOR\[0\] cannot be fetched"):
        server.receive_weights(ticket)
    assert server._engine.version == 0


@pytest.mark.feature(101)
@pytest.mark.parametrize("name", ["disk", "broadcast", "dlrover.python.rl.engine.weight_sync.pull:PullTransport"])
def test_the_weight_transport_of_the_job_is_used(model, name, tmp_path):
    """The rollouts receive while the actor sends, where the transport waits for them."""
    options = {"folder": str(tmp_path)} if name == "disk" else {}
    engine = SenderConfig(threads=1, weight_sync=name, weight_sync_options=options, receivers=2)
    sender, servers = ActorWorkload(None, {}), [RolloutWorkload(None, {}) for _ in range(2)]
    sender.init_model(model, engine, OptimizerConfig(lr=1e-3), GRPO())
    for server in servers:
        server.init_model(model, engine)
    for _ in range(2):
        ticket = sender.publish_weights()
        with ThreadPoolExecutor(2) as pool:
            received = list(pool.map(lambda server, ticket=ticket: server.receive_weights(ticket), servers))
        assert received == [sender.published_stamp()] * 2
    for member in (sender, *servers):
        member.close()
