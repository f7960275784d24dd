# SPDX-License-Identifier: Apache-2.0
"""Weights from a train engine to those that serve or follow it, over the transports."""

import dataclasses
import pickle
from contextlib import ExitStack

import pytest
import torch

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.api.base import (
    LoraSettings,
    OptimizerConfig,
    Rendezvous,
    RolloutSettings,
    TrainSettings,
)
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from tests.support.sync_sides import (
    KINDS,
    PATIENT,
    ToySource,
    Wire,
    completions,
    free_port,
    hear,
    process,
    rank_side,
    stamp_by,
    step,
    taking_rank_side,
    transport,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)


@pytest.fixture
def actor(model_path):
    """An actor that has taken a step."""
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2))
    step(engine)
    return engine


@pytest.mark.feature(100)
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_step_greedy_text_is_that_of_a_fresh_engine_on_the_saved_weights(kind, tmp_path, model_path, actor):
    rollout, wire = TorchRolloutEngine(model_path), Wire(kind, tmp_path / "wire")
    stamp, (received,) = wire.sync(actor)
    rollout.receive(received)
    actor.save(tmp_path / "saved")
    fresh = TorchRolloutEngine(tmp_path / "saved")
    fresh.receive(actor.publish())
    assert stamp_by(kind, actor.named_weights(), actor.version) == stamp
    assert completions(rollout) == completions(fresh)
    assert completions(rollout)[1] == [1, 1, 1]
    assert completions(rollout)[0] != completions(_untrained(model_path))[0]
    wire.close()


def _untrained(model_path):
    engine = TorchRolloutEngine(model_path)
    engine.receive(Fsdp2TrainEngine(model_path, None).publish())
    return engine


@pytest.mark.feature(101)
def test_what_passes_through_the_trainer_is_a_fraction_of_the_weights(tmp_path, actor):
    wire = Wire("pull", tmp_path)
    ticket = wire.source.offer(actor)
    through_the_trainer = len(pickle.dumps(ticket)) + len(pickle.dumps(wire.source.send(ticket, actor)))
    assert through_the_trainer < 100 * len(ticket.table.entries) + 1000
    assert wire.sinks[0].receive(ticket).nbytes > 20 * through_the_trainer
    wire.close()


@pytest.mark.feature(102)
def test_gloo_gives_what_shared_memory_gives(tmp_path, model_path, actor):
    rollouts = {}
    for kind in ("pull", "broadcast"):
        wire, rollouts[kind] = Wire(kind, tmp_path / kind), TorchRolloutEngine(model_path)
        rollouts[kind].receive(wire.sync(actor)[1][0])
        wire.close()
    assert completions(rollouts["pull"]) == completions(rollouts["broadcast"])


@pytest.mark.feature(103)
def test_weights_of_another_model_are_refused_by_name_and_the_old_ones_serve(tmp_path, model_path, actor):
    rollout, wire = TorchRolloutEngine(model_path), Wire("pull", tmp_path)
    rollout.receive(wire.sync(actor)[1][0])
    before = completions(rollout)
    weights = {name.replace("model.norm.weight", "model.norm.scale"): each for name, each in actor.named_weights()}
    with pytest.raises(WeightSyncError, match=r"'model.norm.weight' is missing.*'model.norm.scale' is unknown"):
        rollout.receive(wire.sync(ToySource(weights, version=2))[1][0])
    assert completions(rollout) == before
    wire.close()


@pytest.mark.feature(104)
def test_an_older_version_is_refused_unless_the_run_goes_back(tmp_path, model_path, actor):
    rollout, wire = TorchRolloutEngine(model_path), Wire("pull", tmp_path)
    _, (first,) = wire.sync(actor)
    step(actor, seed=1)
    rollout.receive(wire.sync(actor)[1][0])
    with pytest.raises(WeightSyncError, match="version 1 is older than 2"):
        rollout.receive(first)
    assert rollout.version == 2
    rollout.receive(first, rewind=True)
    assert rollout.version == 1
    wire.close()


@pytest.mark.feature(104)
def test_a_sync_that_breaks_off_leaves_the_old_version_serving(tmp_path, model_path, actor):
    rollout, wire = TorchRolloutEngine(model_path), Wire("pull", tmp_path)
    rollout.receive(wire.sync(actor)[1][0])
    before = completions(rollout)
    step(actor, seed=1)
    ticket = wire.source.offer(actor)
    broken = ToySource({**dict(actor.named_weights()), "model.norm.weight": torch.zeros(1)}, version=2)
    with pytest.raises(WeightSyncError):
        wire.source.send(ticket, broken)
    with pytest.raises(WeightSyncError, match=r"version 2 from ACTOR\[0\] is not there"):
        rollout.receive(wire.sinks[0].receive(ticket))
    assert completions(rollout) == before
    assert rollout.version == 1
    wire.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_in_bf16_get_two_bytes_a_parameter_and_serve_the_same_bits(kind, tmp_path, model_path):
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), TrainSettings(precision="bf16"))
    step(engine)
    stamps = []
    for dtype, width in ((torch.bfloat16, 2), (None, 4)):
        wire = Wire(kind, tmp_path / str(width), settings=dataclasses.replace(PATIENT, dtype=dtype))
        stamp, (received,) = wire.sync(engine)
        assert received.nbytes == width * engine.parameter_count
        assert received.stamp == stamp
        rollout = TorchRolloutEngine(model_path, RolloutSettings(precision="bf16"))
        rollout.receive(received)
        stamps.append(completions(rollout))
        wire.close()
    assert stamps[0] == stamps[1]


@pytest.mark.feature(105)
@pytest.mark.parametrize("bucket_bytes", [1 << 10, 10_000, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_buckets_of_any_size_give_the_same_weights(kind, bucket_bytes, tmp_path, actor):
    wire = Wire(kind, tmp_path, settings=dataclasses.replace(PATIENT, bucket_bytes=bucket_bytes))
    _, (received,) = wire.sync(actor)
    assert received.stamp == stamp_by(kind, actor.named_weights(), actor.version)
    assert max(tensor.nbytes for tensor in received.buffers.values()) > 1 << 10  # at least one spans small buckets
    wire.close()


@pytest.mark.feature(106)
def test_tied_embeddings_travel_once_and_both_ends_see_them(tmp_path, model_path, actor):
    rollout, wire = TorchRolloutEngine(model_path), Wire("pull", tmp_path)
    _, (received,) = wire.sync(actor)
    assert "model.embed_tokens.weight" in received.buffers
    assert "lm_head.weight" not in received.buffers
    rollout.receive(received)
    actor.save(tmp_path / "saved")
    fresh = _untrained(tmp_path / "saved")
    assert completions(rollout)[0] == completions(fresh)[0]
    wire.close()


@pytest.mark.feature(107)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_updated_from_its_actor_equals_it(kind, tmp_path, model_path, actor):
    reference, wire = Fsdp2TrainEngine(model_path, None), Wire(kind, tmp_path)
    reference.receive(wire.sync(actor)[1][0])
    assert reference.publish().stamp == actor.publish().stamp
    step(actor, seed=1)
    reference.receive(wire.sync(actor)[1][0])
    assert reference.publish().stamp == actor.publish().stamp
    wire.close()


@pytest.mark.feature(17)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_whose_weights_were_sent_can_still_leave_its_device(kind, tmp_path, actor):
    """A CPU stands in for the device: numpy's hand on a tensor would keep it there for good."""
    wire = Wire(kind, tmp_path)
    wire.sync(actor)
    before = stamp_by(kind, actor.named_weights(), actor.version)
    actor.cpu()
    assert actor.footprint() == {}
    assert wire.sync(actor)[1][0].stamp == before
    actor.cuda()
    step(actor, seed=1)
    wire.close()


@pytest.mark.feature(38)
@pytest.mark.parametrize("base", [None, "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_arrive_merged_whatever_way_they_take(kind, base, tmp_path, model_path):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    if base is not None:
        pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    adapters = TrainSettings(lora=LoraSettings(rank=4, alpha=8.0, quantize_base=base))
    engine, wire = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), adapters), Wire(kind, tmp_path / "wire")
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    step(engine)
    step(engine, seed=1)
    stamp, (received,) = wire.sync(engine)
    assert (stamp, list(received.buffers)) == (received.stamp, list(before))
    state = engine.state_dict()["model"]
    for name, tensor in before.items():
        up, down = (state.get(name.replace(".weight", f".lora_{side}.default.weight")) for side in "BA")
        merged = tensor if up is None else tensor + 2.0 * up @ down
        assert torch.allclose(received.tensor(name), merged, atol=1e-6), name
    trained = [name for name, tensor in before.items() if not torch.equal(received.tensor(name), tensor)]
    assert len(trained) == 7 * 2
    rollout = TorchRolloutEngine(model_path)
    rollout.receive(received)
    assert completions(rollout)[1] == [2, 2, 2]
    wire.close()


@pytest.mark.parametrize("kind", ["pull", "broadcast"])
def test_weights_of_ranks_that_shard_them_reach_ranks_that_split_each_matrix(kind, tmp_path, model_path):
    """Two ranks that shard the parameters send, two ranks that split each matrix receive: four processes."""
    stamp, splits = Fsdp2TrainEngine(model_path, None).publish().stamp, ParallelSizes(tensor_parallel_size=2)
    with ExitStack() as stack:
        model = str(model_path)
        senders, takers = (
            [stack.enter_context(process(side, kind, tmp_path, model, place, *more)) for place in two_places()]
            for side, more in (
                (rank_side, ("fsdp2", TrainSettings(), 2)),
                (taking_rank_side, (TrainSettings(parallel=splits),)),
            )
        )
        ticket = [hear(pipe) for _, pipe in senders][0]
        assert [hear(pipe) for _, pipe in takers] == ["up", "up"]
        for _, pipe in (*senders, *takers):
            pipe.send(ticket)
        assert [hear(pipe) for _, pipe in (*senders, *takers)] == [stamp, None, stamp, None]


def test_a_source_and_its_sinks_agree_on_what_was_sent_without_looking_at_a_byte(tmp_path, actor):
    sender = transport("pull", tmp_path)
    ticket = sender.offer(actor)
    stamp = sender.send(ticket, actor)
    assert stamp == transport("pull", tmp_path).receive(ticket).stamp
    sender.close()


def two_places():
    """Return the address where two ranks meet."""
    first = Rendezvous(0, 2, master_port=free_port(), timeout_s=60.0)
    return first, dataclasses.replace(first, rank=1)


def two_ranks():
    """Train engines and how two ranks of each divide a model."""
    tensors, stages = ParallelSizes(tensor_parallel_size=2), ParallelSizes(pipeline_parallel_size=2)
    shim, stages_of_zero = {"cpu_shim": True}, [{"zero_stage": stage} for stage in (1, 3)]
    ways = {
        "fsdp2": [("shards", TrainSettings()), ("tensors", TrainSettings(parallel=tensors))],
        "deepspeed": [
            ("shards", TrainSettings(backend={"zero_stage": 3})),
            *(
                (f"masters{zero['zero_stage']}", TrainSettings(precision="bf16", backend=zero))
                for zero in stages_of_zero
            ),
            *(
                (f"adapters{zero['zero_stage']}", TrainSettings(lora=LoraSettings(), backend=zero))
                for zero in stages_of_zero
            ),
        ],
        "megatron": [
            ("tensors", TrainSettings(parallel=tensors, backend=shim)),
            ("stages", TrainSettings(parallel=stages, backend=shim)),
        ],
    }
    for engine, layouts in ways.items():
        marks = [pytest.mark.needs(engine)] if engine != "fsdp2" else []
        for layout, settings in layouts:
            yield pytest.param(engine, settings, id=f"{engine}-{layout}", marks=marks)


@pytest.mark.parametrize("kind", ["pull", "broadcast"])
@pytest.mark.parametrize(("engine", "settings"), two_ranks())
def test_weights_divided_among_ranks_arrive_whole(kind, engine, settings, tmp_path, model_path):
    """Engines with separate published weights: a frozen one, and a trained one whose passes compute in another type."""
    optimizer = OptimizerConfig() if settings.precision == "bf16" or settings.lora else None
    stamp = Fsdp2TrainEngine(model_path, None).publish().stamp
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                process(rank_side, kind, tmp_path, str(model_path), place, engine, settings, 1, optimizer)
            )
            for place in two_places()
        ]
        ticket = [hear(pipe) for _, pipe in ranks][0]
        for _, pipe in ranks:
            pipe.send(ticket)
        received = transport(kind, tmp_path, dataclasses.replace(PATIENT, name="ROLLOUT[0]")).receive(ticket)
        assert [hear(pipe) for _, pipe in ranks] == [stamp, None]
        assert received.stamp == stamp
        rollout = TorchRolloutEngine(model_path)
        rollout.receive(received)
        assert rollout.version == 0
