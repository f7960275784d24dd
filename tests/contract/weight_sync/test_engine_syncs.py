# SPDX-License-Identifier: Apache-2.0
"""Weights from a train engine to those that serve or follow it, over the transports."""

import dataclasses
from contextlib import ExitStack

import pytest
import torch

from dlrover.python.rl.engine.api.base import (
    LoraSettings,
    OptimizerConfig,
    Rendezvous,
    RolloutSettings,
    TrainSettings,
)
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from tests.support.sync_sides import (
    KINDS,
    PATIENT,
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


@pytest.fixture
def actor(model_path):
    """An actor that has taken a step."""
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2))
    step(engine)
    return engine


@pytest.mark.feature(100)
@pytest.mark.parametrize("kind", KINDS)
def test_rollout_after_a_step_is_one_on_the_saved_weights(kind, wire, tmp_path, model_path, actor):
    rollout = TorchRolloutEngine(model_path)
    stamp, (received,) = wire.sync(actor)
    rollout.receive(received)
    actor.save(tmp_path / "saved")
    fresh = TorchRolloutEngine(tmp_path / "saved")
    fresh.receive(actor.publish())
    assert stamp_by(kind, actor.named_weights(), actor.version) == stamp
    assert completions(rollout) == completions(fresh)
    assert completions(rollout)[1] == [1, 1, 1]
    fresh.receive(Fsdp2TrainEngine(model_path, None).publish(), rewind=True)
    assert completions(rollout)[0] != completions(fresh)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_rollouts_get_two_bytes_a_parameter(kind, connect, tmp_path, model_path):
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), TrainSettings(precision="bf16"))
    step(engine)
    stamps = []
    for dtype, width in ((torch.bfloat16, 2), (None, 4)):
        wire = connect(kind, tmp_path / str(width), settings=dataclasses.replace(PATIENT, dtype=dtype))
        stamp, (received,) = wire.sync(engine)
        assert received.nbytes == width * engine.parameter_count
        assert received.stamp == stamp
        rollout = TorchRolloutEngine(model_path, RolloutSettings(precision="bf16"))
        rollout.receive(received)
        stamps.append(completions(rollout))
    assert stamps[0] == stamps[1]


@pytest.mark.feature(107)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_updated_from_its_actor_equals_it(kind, wire, model_path, actor):
    reference = Fsdp2TrainEngine(model_path, None)
    for seed in (1, 2):
        reference.receive(wire.sync(actor)[1][0])
        assert reference.publish().stamp == actor.publish().stamp
        step(actor, seed)


@pytest.mark.feature(17)
@pytest.mark.parametrize("kind", KINDS)
def test_engine_can_leave_its_device_after_a_sync(kind, wire, actor):
    """A CPU stands in for the device: numpy's hand on a tensor would keep it there for good."""
    wire.sync(actor)
    before = stamp_by(kind, actor.named_weights(), actor.version)
    actor.cpu()
    assert actor.footprint() == {}
    assert wire.sync(actor)[1][0].stamp == before
    actor.cuda()
    step(actor, seed=1)


@pytest.mark.feature(38)
@pytest.mark.parametrize("base", [None, "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_arrive_merged(kind, base, wire, model_path):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    if base is not None:
        pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    adapters = TrainSettings(lora=LoraSettings(rank=4, alpha=8.0, quantize_base=base))
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), adapters)
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


@pytest.mark.parametrize("kind", ["pull", "broadcast"])
def test_sharded_weights_reach_tensor_parallel_ranks(kind, tmp_path, model_path):
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
def test_divided_weights_arrive_whole(kind, engine, settings, tmp_path, model_path):
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
