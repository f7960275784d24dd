# SPDX-License-Identifier: Apache-2.0
"""Weights from a train engine to those that serve or follow it, whole or as adapters alone."""

import dataclasses
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from dlrover.python.rl.common.errors import WeightsLost, WeightSyncError
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, RolloutSettings, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.api.weights import DOWN, UP, Adapters, take_snapshot, verify_snapshot
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.weight_sync.buckets import BLOCK_BYTES
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.engine.weight_sync.transports import make_transport
from tests.support import sync_sides
from tests.support.processes import free_port
from tests.support.sync_sides import KINDS, LATEST_S, PATIENT, completions, hear, process, publish, step, transport


@pytest.fixture
def actor(model_path):
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
    assert sync_sides.stamp_by(kind, actor.named_weights(), actor.version) == stamp
    assert completions(rollout) == completions(fresh)
    assert completions(rollout)[1] == [1, 1, 1]
    fresh.receive(Fsdp2TrainEngine(model_path, None).publish(), rewind=True)
    assert completions(rollout)[0] != completions(fresh)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_rollouts_get_two_bytes_a_parameter(kind, connect, model_path):
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), TrainSettings(precision="bf16"))
    step(engine)
    stamps = []
    for dtype, width in ((torch.bfloat16, 2), (None, 4)):
        wire = connect(kind, settings=dataclasses.replace(PATIENT, dtype=dtype))
        stamp, (received,) = wire.sync(engine)
        assert received.nbytes == width * engine.parameter_count
        assert received.stamp == stamp
        rollout = TorchRolloutEngine(model_path, RolloutSettings(precision="bf16"))
        rollout.receive(received)
        stamps.append(completions(rollout))
    assert stamps[0] == stamps[1]


@pytest.mark.feature(17)
@pytest.mark.parametrize("kind", KINDS)
def test_engine_can_leave_its_device_after_a_sync(kind, wire, actor):
    """A CPU stands in for the device: numpy's hand on a tensor would keep it there for good."""
    wire.sync(actor)
    before = sync_sides.stamp_by(kind, actor.named_weights(), actor.version)
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
def test_sharded_weights_reach_tensor_parallel_ranks(kind, model_path):
    """Two ranks that shard the parameters send, two ranks that split each matrix receive: four processes."""
    stamp, splits = Fsdp2TrainEngine(model_path, None).publish().stamp, ParallelSizes(tensor_parallel_size=2)
    with ExitStack() as stack:
        model = str(model_path)
        senders, takers = (
            [stack.enter_context(process(side, kind, model, place, *more)) for place in two_places()]
            for side, more in (
                (sync_sides.rank_side, ("fsdp2", TrainSettings(), 2)),
                (sync_sides.taking_rank_side, (TrainSettings(parallel=splits),)),
            )
        )
        ticket = [hear(pipe) for _, pipe in senders][0]
        assert [hear(pipe) for _, pipe in takers] == ["up", "up"]
        for _, pipe in (*senders, *takers):
            pipe.send(ticket)
        assert [hear(pipe) for _, pipe in (*senders, *takers)] == [stamp, None, stamp, None]


def two_places():
    first = Rendezvous(0, 2, master_port=free_port(), timeout_s=60.0)
    return first, dataclasses.replace(first, rank=1)


def offering_ranks(stack, kind, model, engine, settings, optimizer):
    """Two ranks of an engine, as the pipes to them, that send what the first one offers; and its ticket."""
    arguments = engine, settings, 1, optimizer
    ranks = [
        stack.enter_context(process(sync_sides.rank_side, kind, model, place, *arguments))[1] for place in two_places()
    ]
    ticket, _ = [hear(rank) for rank in ranks]
    for rank in ranks:
        rank.send(ticket)
    return ranks, ticket


def two_ranks():
    tensors, stages = ParallelSizes(tensor_parallel_size=2), ParallelSizes(pipeline_parallel_size=2)
    zero = {stage: {"zero_stage": stage} for stage in (1, 3)}
    ways = {
        "fsdp2": [("shards", TrainSettings()), ("tensors", TrainSettings(parallel=tensors))],
        "deepspeed": [
            ("shards", TrainSettings(backend=zero[3])),
            *((f"masters{stage}", TrainSettings(precision="bf16", backend=zero[stage])) for stage in zero),
            *((f"adapters{stage}", TrainSettings(lora=LoraSettings(), backend=zero[stage])) for stage in zero),
        ],
        "megatron": [
            (name, TrainSettings(parallel=sizes, backend={"cpu_shim": True}))
            for name, sizes in (("tensors", tensors), ("stages", stages))
        ],
    }
    for engine, layouts in ways.items():
        marks = [pytest.mark.needs(engine)] if engine != "fsdp2" else []
        for layout, settings in layouts:
            yield pytest.param(engine, settings, id=f"{engine}-{layout}", marks=marks)


@pytest.mark.parametrize("kind", ["pull", "broadcast"])
@pytest.mark.parametrize(("engine", "settings"), two_ranks())
def test_divided_weights_arrive_whole(kind, engine, settings, model_path):
    """Engines with separate published weights: a frozen one, and a trained one whose passes compute in another type."""
    optimizer = OptimizerConfig() if settings.precision == "bf16" or settings.lora else None
    stamp = Fsdp2TrainEngine(model_path, None).publish().stamp
    with ExitStack() as stack:
        ranks, ticket = offering_ranks(stack, kind, str(model_path), engine, settings, optimizer)
        received = transport(kind, dataclasses.replace(PATIENT, name="ROLLOUT[0]")).receive(ticket)
        assert [hear(pipe) for pipe in ranks] == [stamp, None]
        assert received.stamp == stamp
        rollout = TorchRolloutEngine(model_path)
        rollout.receive(received)
        assert rollout.version == 0


ADAPTER_KINDS = ("pull", "cuda_ipc")
each_kind = pytest.mark.parametrize("kind", ADAPTER_KINDS)
pull_only = pytest.mark.parametrize("kind", ["pull"])
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="the extra 'lora' is not installed")
LAYERS = ("model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight")


def open_transport(kind, name="ACTOR[0]", **changes):
    return make_transport(kind, {}, replace(PATIENT, name=name, channel="ACTOR", **changes))


@pytest.fixture
def sender(kind):
    sender = open_transport(kind)
    yield sender
    sender.close()


@pytest.fixture
def receiver(kind):
    receiver = open_transport(kind, "ROLLOUT[0]")
    yield receiver
    receiver.close()


class Toy:
    """A model of which two matrices have adapters; ``rounds`` counts how often its base was gathered."""

    def __init__(self, ranks=1, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.version, self.base_version, self.adapter_scale, self.rounds = 1, 0, 0.5, 0
        self.base = {name: torch.randn(40, 30, generator=generator) for name in (*LAYERS, "embed")}
        self.factors = {}
        for name in LAYERS:
            self.factors[name + DOWN] = torch.randn(4, 30, generator=generator)
            self.factors[name + UP] = torch.randn(40, 4, generator=generator)
        self.together = threading.Barrier(ranks)
        self.flags = []

    def step(self):
        self.version += 1
        for name in self.factors:
            self.factors[name] = self.factors[name] * 1.25

    def merged(self):
        def weight(name):
            added = self.factors[name + UP] @ self.factors[name + DOWN] if name in LAYERS else 0.0
            return self.base[name] + self.adapter_scale * added

        return {name: weight(name) for name in self.base}

    def named_weights(self, dtype=None):
        raise AssertionError("the merged weights are not for receivers that add the adapters")

    def named_base_weights(self, dtype=None):
        self.rounds += 1
        yield from self._gathered(self.base)

    def named_adapters(self):
        yield from self._gathered(self.factors)

    def _gathered(self, tensors):
        for item in tensors.items():
            self.together.wait(LATEST_S)
            yield item

    def any_rank(self, flag):
        self.flags.append(flag)
        self.together.wait(LATEST_S)
        any_flag = any(self.flags)
        self.together.wait(LATEST_S)
        self.flags.clear()
        self.together.wait(LATEST_S)
        return any_flag


def equal(snapshot, source):
    expected = source.merged()
    assert list(snapshot.buffers) == list(expected)
    verify_snapshot(snapshot, {name: tuple(each.shape) for name, each in expected.items()}, -1)
    for name, each in expected.items():
        torch.testing.assert_close(snapshot.tensor(name), each, rtol=1e-6, atol=1e-6)


@pytest.mark.feature(145)
@each_kind
def test_model_is_sent_once_and_then_its_adapters(sender, receiver):
    source = Toy()
    for version in (1, 2, 3):
        ticket, stamp = publish(sender, source)
        received = receiver.receive(ticket)
        equal(received, source)
        assert (received.version, received.stamp) == (version, stamp)
        assert [entry.name for entry in ticket.table.entries] == list(source.factors)
        assert sum(entry.nbytes for entry in ticket.table.entries) == 4 * 4 * sum((40 + 30, 40 + 30))
        source.step()
    assert source.rounds == 2  # for the names and shapes, and to be sent


@each_kind
def test_late_receiver_has_the_model_and_earlier_versions_stay(kind, sender, receiver):
    source = Toy()
    first = receiver.receive(publish(sender, source)[0])
    before, stamp = {name: first.tensor(name).clone() for name in first.buffers}, first.stamp
    for _ in range(3):
        source.step()
        ticket, _ = publish(sender, source)
    equal(open_transport(kind, "ROLLOUT[1]").receive(ticket), source)
    assert all(torch.equal(first.tensor(name), each) for name, each in before.items())
    assert first.stamp == stamp


@each_kind
def test_replaced_sender_sends_the_model_again(kind, sender, receiver):
    source = Toy()
    ticket, stamp = publish(sender, source)
    receiver.receive(ticket)
    sender.close()
    another = open_transport(kind)
    ticket, again = publish(another, source)
    assert again == stamp
    equal(receiver.receive(ticket), source)
    another.close()
    if kind == "pull":
        with pytest.raises(WeightsLost):
            receiver.receive(ticket)


@each_kind
def test_changed_model_is_sent_again(sender, receiver):
    source = Toy()
    _, before = publish(sender, source)
    source.base, source.base_version = Toy(seed=1).base, 1
    ticket, stamp = publish(sender, source)
    equal(receiver.receive(ticket), source)
    assert stamp != before
    plain = sync_sides.ToySource({"norm": torch.ones(3)}, version=9)  # and one without any takes its place
    assert receiver.receive(publish(sender, plain)[0]).tensor("norm").tolist() == [1.0] * 3
    equal(receiver.receive(publish(sender, source)[0]), source)


@each_kind
@pytest.mark.parametrize(
    ("part", "failing"), [("", "_address"), ("-model", "_address"), ("-adapters", "_address"), ("-model", "_write")]
)
def test_ranks_stay_together_when_the_leader_fails(kind, part, failing, monkeypatch):
    """They are in the same collective after each publishing, of which the last one succeeds."""
    source = Toy(ranks=2)
    ranks = [open_transport(kind), open_transport(kind, "ACTOR[1]", is_leader=False)]
    if not part:
        source.adapter_scale = None
        source.named_weights = source.named_base_weights
    kind_of, true = type(ranks[0]._whole), getattr(type(ranks[0]._whole), failing)

    def attempt():
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(publish, rank, source) for rank in ranks]
            return [each.exception(LATEST_S) or each.result() for each in both]

    def broken(self, *arguments):
        if self.settings.is_leader and self.settings.channel == f"ACTOR{part}":
            raise WeightSyncError("the disk is full")
        return true(self, *arguments)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(kind_of, failing, broken)
            refused, other = attempt()
        assert "full" in str(refused)
        assert other[1] is None
    (ticket, stamp), _ = attempt()
    received = open_transport(kind, "ROLLOUT[0]").receive(ticket)
    assert received.stamp == stamp
    if part:
        equal(received, source)
    for rank in ranks:
        rank.close()


@each_kind
def test_ticket_of_another_model_is_not_sent(sender):
    source = Toy()
    ticket, _ = publish(sender, source)
    source.base_version = 1
    with pytest.raises(WeightSyncError, match="another model under its adapters"):
        sender.send(ticket, source)


@each_kind
def test_sender_keeps_one_model_and_nothing_once_closed(kind):
    memory = DeviceMemory()
    source, sender = Toy(), open_transport(kind, memory=memory)
    for version in range(4):
        source.base_version = version
        publish(sender, source)
    if kind == "pull":
        assert len(sender._part("model")._versions._files) == 1
    else:
        assert set(memory.by_owner()) == {"weight sync of ACTOR[0]"} and memory.total() == 3 * BLOCK_BYTES
    sender.close()
    assert not memory.total()
    gone = weakref.ref(source)
    del source
    gc.collect()
    assert gone() is None


@pull_only
def test_adapters_and_model_reach_receivers_of_another_host(sender):
    source = Toy()
    receivers = [open_transport("pull", f"ROLLOUT[{rank}]") for rank in (0, 1)]
    for _ in range(3):
        ticket, stamp = publish(sender, source)
        far = {"address": {**ticket.address, "local_name": f"elsewhere-{ticket.id}"}}
        base = {**ticket.base.address, "local_name": f"elsewhere-{ticket.base.id}"}
        ticket = replace(ticket, **far, base=replace(ticket.base, address=base))
        with ThreadPoolExecutor(2) as pool:
            received = list(pool.map(lambda receiver: receiver.receive(ticket), receivers))  # noqa: B023 - done here
        assert [each.stamp for each in received] == [stamp, stamp]
        for each in received:
            equal(each, source)
        source.step()
    assert any(each._part("model")._stop_relay is not None for each in receivers), "the pages of this host were mapped"
    for each in receivers:
        each.close()


@pull_only
def test_receiver_of_whole_models_refuses_adapters_alone(sender):
    ticket, _ = publish(sender, Toy())
    with pytest.raises(WeightSyncError, match="adapters alone"):
        PullTransport(PATIENT).receive(ticket)


def test_merged_snapshot_has_the_same_weights():
    source = Toy()
    adapters = Adapters(take_snapshot(source.factors.items(), 1), source.adapter_scale)
    apart = replace(take_snapshot(source.base.items(), 1), adapters=adapters)
    merged = apart.merged()
    assert merged.adapters is None
    verify_snapshot(merged, apart.shapes, -1)
    assert all(torch.equal(merged.tensor(name), apart.tensor(name)) for name in apart.buffers)
    assert apart.nbytes == merged.nbytes + adapters.factors.nbytes


def test_misfitting_adapters_are_named():
    source = Toy()
    whole = take_snapshot(source.base.items(), 1)

    def refused(factors):
        adapters = Adapters(take_snapshot(factors.items(), 1), 0.5)
        with pytest.raises(WeightSyncError) as caught:
            verify_snapshot(replace(whole, adapters=adapters), whole.shapes, -1)
        return str(caught.value)

    one, up = LAYERS[0], LAYERS[0] + UP
    cut = {**source.factors, up: torch.zeros(40, 3)}
    assert f"the adapter of '{one}' has shapes (40, 3) and (4, 30), which do not give (40, 30)" in refused(cut)
    assert f"'{one}' has shapes None" in refused({name: each for name, each in source.factors.items() if name != up})
    assert "the adapter of 'norm'" in refused({"norm" + DOWN: torch.zeros(4, 3), "norm" + UP: torch.zeros(5, 4)})


# -- from an engine to an engine --------------------------------------------------------------------------------------
def actor_on(model_path, base=None, **changes):
    settings = TrainSettings(lora=LoraSettings(rank=2, alpha=8.0, quantize_base=base), **changes)
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), settings)
    step(engine)
    return engine


@pytest.mark.feature(145)
@pytest.mark.parametrize(("kind", "base"), [("pull", None), ("pull", "nf4")])
@needs_peft
def test_rollout_serves_the_bits_of_the_merged_weights(base, sender, receiver, tmp_path, model_path):
    if base is not None:
        pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    actor, rollout = actor_on(model_path, base), TorchRolloutEngine(model_path)
    for seed in (1, 2):
        received = receiver.receive(publish(sender, actor)[0])
        rollout.receive(received)
        for name, tensor in actor.named_weights():
            assert torch.equal(received.tensor(name), tensor)
        merged = TorchRolloutEngine(model_path)
        merged.receive(actor.publish())
        assert completions(rollout) == completions(merged)
        step(actor, seed)
    actor.save_checkpoint(tmp_path / "checkpoint")
    ticket, stamp = publish(sender, actor)
    actor.load_checkpoint(tmp_path / "checkpoint")  # which has the model that the adapters are added to
    again, same = publish(sender, actor)
    assert again.base.id != ticket.base.id
    assert same == stamp


@needs_peft
def test_bf16_rollouts_get_float32_adapters(model_path):
    actor = actor_on(model_path, precision="bf16")
    sender = open_transport("pull", dtype=torch.bfloat16)
    ticket, _ = publish(sender, actor)
    received = open_transport("pull", "ROLLOUT[0]").receive(ticket)
    assert {entry.dtype for entry in ticket.base.table.entries} == {"bfloat16"}
    assert {entry.dtype for entry in ticket.table.entries} == {"float32"}
    for name, tensor in actor.named_weights(torch.bfloat16):
        assert torch.equal(received.tensor(name), tensor)
    sender.close()


@needs_peft
def test_sharded_model_and_its_adapters_arrive_whole(model_path):
    trained = "fsdp2", TrainSettings(lora=LoraSettings(rank=2)), OptimizerConfig()
    with ExitStack() as stack:
        ranks, ticket = offering_ranks(stack, "adapters", str(model_path), *trained)
        received = open_transport("pull", "ROLLOUT[0]").receive(ticket)
        assert [hear(rank) for rank in ranks] == [received.stamp, None]
    for name, tensor in Fsdp2TrainEngine(model_path, None).named_weights():
        assert torch.equal(received.tensor(name), tensor)


@needs_peft
@pull_only
def test_engine_with_changed_export_sends_merged_weights(sender, receiver, model_path):
    class Doubling(Fsdp2TrainEngine):
        def named_weights(self, dtype=None):
            return ((name, 2.0 * tensor) for name, tensor in super().named_weights(dtype))

    engine = Doubling(model_path, OptimizerConfig(), TrainSettings(lora=LoraSettings(rank=2)))
    assert receiver.receive(publish(sender, engine)[0]).stamp == engine.publish().stamp
