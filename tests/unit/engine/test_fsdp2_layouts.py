# SPDX-License-Identifier: Apache-2.0
"""The fsdp2 engine over several processes, where the contract does not look: odd sizes, other settings, meeting.

The processes of a test group meet once and do everything in turn; each test looks at what came of one thing.
"""

import dataclasses
import math
import os
import socket
import time
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.algorithm.distillation import VocabularyDistillation
from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.common.sockets import interface_towards, machine_addresses
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.fsdp2 import shards
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.fsdp2.materialize import split_matrices
from dlrover.python.rl.engine.model.ranks import Ranks, resolve_device, serve_store, use_interface_towards
from dlrover.python.rl.recipe.base.updates import UpdatePlan, assign_updates, run_updates
from tests.support.fsdp2_toys import make_batch, share, step, token_loss
from tests.support.processes import free_port, run
from tests.support.torch_models import family_model
from tests.support.train_exercise import weights_of

CONFIG = OptimizerConfig(lr=1e-4, max_grad_norm=1.0)
COPIES, TENSOR = ParallelSizes(ddp_size=2), ParallelSizes(tensor_parallel_size=2)
CONTEXT = ParallelSizes(context_parallel_size=2)


def settings(sizes=None, **changes):
    return TrainSettings(parallel=sizes or ParallelSizes(), max_tokens_per_microbatch=20, **changes)


QUANTIZED = LoraSettings(rank=4, quantize_base="nf4")
SETTINGS = {
    "shards": settings(),
    "tensor": settings(TENSOR),
    "context": settings(CONTEXT),
}
IN_4_BITS = {
    "4 bits, copies": settings(COPIES, lora=QUANTIZED),
    "4 bits, context": settings(CONTEXT, lora=QUANTIZED),
    "4 bits, recomputed, bf16": settings(lora=QUANTIZED, gradient_checkpointing=True, precision="bf16"),
}
if find_spec("peft") and find_spec("bitsandbytes"):
    SETTINGS |= IN_4_BITS


def make_engine(rank, world_size, port, path, settings, config=CONFIG):
    rendezvous = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240)
    return Fsdp2TrainEngine(path, config, settings, rendezvous)


def alone(path, settings, config=CONFIG):
    return make_engine(0, 1, 0, path, settings, config)


def five_steps(rank, world_size, port, path, settings):
    engine = make_engine(rank, world_size, port, path, settings)
    reports = [step(engine, seed, rank) for seed in range(5)]
    result = {
        "steps": [(report.loss, report.grad_norm, report.metrics) for report in reports],
        "weights": weights_of(engine),
        "bytes": sum(engine.footprint().values()),
    }
    engine.close()
    return result


def assert_like_one_process(path, settings, ranks, tolerance=1e-5):
    """Compare with one process of the same settings but the layout; return its results."""
    whole = five_steps(0, 1, 0, path, dataclasses.replace(settings, parallel=ParallelSizes()))
    for rank in ranks:
        assert rank["steps"] == ranks[0]["steps"]
        for (loss, norm, metrics), (own_loss, own_norm, own_metrics) in zip(whole["steps"], rank["steps"], strict=True):
            assert (own_loss, own_norm) == pytest.approx((loss, norm), rel=10 * tolerance)
            assert own_metrics == metrics
        assert rank["weights"].keys() == whole["weights"].keys()
        for name, tensor in rank["weights"].items():
            if not name.endswith("k_proj.bias"):
                assert np.abs(tensor - whole["weights"][name]).max() < tolerance, name
    return whole


# -- two processes ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=[pytest.param(2, id="", marks=pytest.mark.slow)])
def two(request, model_path):
    ranks = run(request.param, on_two, model_path)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def on_two(rank, world_size, port, path):
    place = (rank, world_size, port, path)
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    results = {name: five_steps(*place, settings) for name, settings in SETTINGS.items()}
    results |= {f"overlapped, {precision}": overlapped(*place, precision) for precision in ("fp32", "bf16")}
    results |= {"uneven": uneven(*place), "dealt": dealt(*place)}
    ranks.close()
    return results


@pytest.mark.feature(31, 44, 47, 50, 52)
@pytest.mark.parametrize("name", ["shards", "tensor", "context", *IN_4_BITS])
def test_a_layout_takes_the_steps_of_one_process(name, two, model_path):
    """Two ranks hold half of the model each, but of copies; a vocabulary that cannot be shared is on both."""
    if name not in two:
        pytest.skip("the extra 'lora' or 'bitsandbytes' is not installed")
    # In bf16 a gradient's sign decides about a step of the whole rate.
    tolerance = 6 * CONFIG.lr if "bf16" in name else 1e-5
    whole = assert_like_one_process(model_path, SETTINGS[name], two[name], tolerance)
    if "copies" not in name and name != "tensor":
        assert all(rank["bytes"] <= 0.6 * whole["bytes"] for rank in two[name])


TWO_PASSES = (17, 6, 9, 14, 11, 12, 5, 18)
"""Lengths of rows that two ranks read in two passes or more."""


def overlapped(rank, world_size, port, path, precision):
    """Note when the backward passes of a step begin and end, and the elements of each sum over copies, in order.

    Then take another step after two that fail: in the last pass, and on one copy.
    """
    events, all_reduce, backward, long = [], dist.all_reduce, torch.Tensor.backward, make_batch(0, TWO_PASSES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "LARGE", 1000)
        engine = make_engine(rank, world_size, port, path, settings(COPIES, precision=precision))
        copies = engine._grid.copies

        def noted_sum(tensor, *args, group=None, **kwargs):
            if group is copies:
                events.append(tensor.numel())
            return all_reduce(tensor, *args, group=group, **kwargs)

        def noted_pass(loss):
            events.append("begin")
            backward(loss)
            events.append("end")

        patched.setattr(dist, "all_reduce", noted_sum)
        patched.setattr(torch.Tensor, "backward", noted_pass)
        first = engine.step(share(engine, rank, long), token_loss)
    with pytest.raises(NonFiniteUpdate):
        engine.step(share(engine, rank, long), spoiled)
    fail_on_one_copy(engine, rank, share(engine, rank, long))
    second = step(engine, 1, rank)
    sizes = [shard.master.numel() for shard in engine._model.shards]
    engine.close()
    return {"events": events, "steps": (first, second), "sizes": sizes}


def fail_on_one_copy(engine, rank, rows):
    """A step of which one copy has began all sums when the other fails in its first pass."""
    backend = engine._model
    micros = engine._pack(rows, backend, needs_actions=True)
    if engine.layout.coordinates(rank).ddp:
        next(backend.copy_sums.begin_at_last(micros))
    else:
        backend.add_gradients(micros, rows, token_loss, 1.0)
    backend.drop_gradients()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_copies_are_summed_during_the_last_pass(precision, two, model_path):
    ranks, whole = two[f"overlapped, {precision}"], alone(model_path, settings(precision=precision))
    norms = [whole.step(rows, token_loss).grad_norm for rows in (make_batch(0, TWO_PASSES), make_batch(1))]
    tolerance = 1e-4 if precision == "fp32" else 1e-2
    for rank in ranks:
        assert rank["steps"] == ranks[0]["steps"]
        assert [report.grad_norm for report in rank["steps"]] == pytest.approx(norms, rel=tolerance)
        last_begun = len(rank["events"]) - rank["events"][::-1].index("begin")
        earlier, sums = rank["events"][:last_begun], rank["events"][last_begun:]
        assert earlier == ["begin", "end"] * (len(earlier) // 2) + ["begin"]
        assert len(earlier) > 1
        assert sums.pop() == "end"
        assert len(sums) > 3
        assert sum(sums) == sum(rank["sizes"])


# -- ranks that differ ------------------------------------------------------------------------------------------------
def uneven(rank, world_size, port, path):
    """Rank 1 has no action token, then a row that does not fit; then rank 0 has losses that are not finite."""
    skipping = dataclasses.replace(CONFIG, skip_nonfinite=1)
    engine = make_engine(rank, world_size, port, path, TrainSettings(max_tokens_per_microbatch=10), skipping)
    batch, long = make_batch(), make_batch(lengths=(9, 129))
    if rank == 1:
        batch = batch.with_columns(action_mask=batch.ragged("tokens").like(np.zeros(36, dtype=bool)))
    results = [engine.step(batch, token_loss)]
    has_logprobs = bool(engine.evaluate(batch).ragged("logprobs").values.any())
    loss = spoiled if rank == 0 else token_loss
    before = weights_of(engine)
    for rows, loss_of_rank in ((long if rank == 1 else batch, token_loss), (batch, loss), (batch, loss)):
        try:
            results.append(engine.step(rows, loss_of_rank).skipped)
        except EngineError as error:
            results.append((type(error), str(error)))
        assert all(np.array_equal(before[name], tensor) for name, tensor in weights_of(engine).items())
    results.append(engine.step(make_batch(1), token_loss))
    engine.close()
    return has_logprobs, results


def spoiled(outputs, columns):
    return outputs.sum() * math.nan, {}


@pytest.mark.feature(29, 59)
def test_faults_and_empty_rows_of_one_rank_are_known_to_all(two):
    (some, results), (none, other_results) = two["uneven"]
    assert (some, none) == (True, False)
    assert results == other_results
    first, (kind, message), skipped, (refusal, reason), _ = results
    assert first.metrics == {"tokens": 28.0}
    assert kind is EngineError
    assert message == "rank 1: row 1 of the batch has 129 tokens and does not fit the model's 128 positions"
    assert (skipped, refusal) == (True, NonFiniteUpdate)
    assert "the loss is nan (first in:" in reason


def dealt(rank, world_size, port, path):
    """Two updates of a row each: two ranks both take part in one without a row, whose columns are wide."""
    engine, batch = make_engine(rank, world_size, port, path, settings()), make_batch(lengths=(9, 6))
    tokens = batch.ragged("tokens")
    batch = batch.with_columns(
        weight=np.full(2, 1 / 11, dtype=np.float32),
        candidates=tokens.like(np.tile(np.arange(3), (15, 1))),
        teacher_logprobs=tokens.like(np.full((15, 3), -2.0, dtype=np.float32)),
    )
    rows, updates = assign_updates(batch, 2)
    loss = EngineLoss(VocabularyDistillation())
    steps = run_updates(share(engine, rank, rows), UpdatePlan(1.0, updates), lambda part: engine.step(part, loss))
    result = [(report.loss, report.grad_norm) for report in steps], weights_of(engine)
    engine.close()
    return result


@pytest.mark.feature(63)
def test_a_rank_without_a_row_takes_part_in_vocabulary_updates(two, model_path):
    reports, ends = dealt(0, 1, 0, model_path)
    for rank_reports, rank_ends in two["dealt"]:
        assert np.allclose(rank_reports, reports, rtol=1e-5)
        assert all(np.abs(rank_ends[name] - ends[name]).max() < 1e-5 for name in ends if "k_proj.bias" not in name)


# -- three and four processes -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_shards_may_divide_unevenly(model_path):
    assert_like_one_process(model_path, TrainSettings(), run(3, five_steps, model_path, TrainSettings()))


@pytest.mark.feature(47)
def test_too_few_heads_for_the_ranks_are_refused():
    with pytest.raises(EngineError, match="4 tensor-parallel ranks cannot share 2 key-value heads"):
        split_matrices(family_model("qwen2"), SimpleNamespace(size=lambda: 4))


# -- the grid of ranks ------------------------------------------------------------------------------------------------
def test_ranks_left_over_shard_the_parameters():
    layout = Layout.of(16, ParallelSizes(ddp_size=2, tensor_parallel_size=2))
    assert layout == Layout(ddp=2, shard=4, tensor=2)
    assert (layout.world_size, layout.data_parallel_size) == (16, 8)


@pytest.mark.feature(51)
def test_sizes_of_other_numbers_of_ranks_are_refused():
    with pytest.raises(EngineError, match="6 ranks cannot be divided by ddp_size 2 x tensor_parallel_size 2 = 4"):
        Layout.of(6, ParallelSizes(ddp_size=2, tensor_parallel_size=2))


def test_consecutive_ranks_form_a_replica_at_different_places():
    sizes = ParallelSizes(ddp_size=2, tensor_parallel_size=2, context_parallel_size=3, pipeline_parallel_size=2)
    layout = Layout.of(48, sizes)
    places = [layout.coordinates(rank) for rank in range(48)]
    assert len({place.shape for place in places}) == 48
    replicas = [(place.ddp, place.shard) for place in places]
    assert replicas == sorted(replicas)
    assert places[1] == Layout(0, 0, 0, 0, 1)
    assert [replicas.count(replica) for replica in set(replicas)] == [sizes.replica_size] * 4


# -- meeting ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_rank_alone_at_the_meeting_place_is_an_error():
    port = free_port()
    with pytest.raises(EngineError, match=f"rank 0 of 2 could not connect to the other ranks at 127.0.0.1:{port}"):
        Ranks.connect(Rendezvous(0, 2, "127.0.0.1", port, timeout_s=1))


@pytest.mark.slow
def test_ranks_of_a_refused_engine_can_meet_in_another(model_path):
    assert run(2, second_try, model_path) == [2, 2]


def second_try(rank, world_size, port, model):
    if rank == 0:  # the store of the first try is still there when the other rank comes again
        close = Ranks.close
        Ranks.close = lambda ranks: (time.sleep(1.0), close(ranks))
    rendezvous = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=60)
    with pytest.raises(EngineError, match="2 ranks cannot be divided"):
        Fsdp2TrainEngine(model, None, TrainSettings(parallel=ParallelSizes(tensor_parallel_size=4)), rendezvous)
    assert not dist.is_initialized()
    engine = Fsdp2TrainEngine(model, None, TrainSettings(), rendezvous)
    engine.close()
    return engine.layout.world_size


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert [resolve_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]


needs_address = pytest.mark.skipif(not machine_addresses(), reason="this machine has loopback only")


@pytest.fixture
def interfaces(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda: (os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))


@pytest.mark.parametrize(("chosen", "used"), [((), ("lo", "lo")), (("eth7", "eth8"), ("eth7", "eth8"))])
def test_loopback_is_listened_at_unless_another_is_chosen(interfaces, monkeypatch, chosen, used):
    for name, interface in zip(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), chosen, strict=False):
        monkeypatch.setenv(name, interface)
    use_interface_towards("127.0.0.1")
    assert interfaces() == used


@needs_address
def test_ranks_meeting_elsewhere_use_its_interface(interfaces):
    address = machine_addresses()[0]
    use_interface_towards(address)
    assert interfaces() == (interface_towards(address), None) and interfaces()[0] != "lo"


@needs_address
def test_a_store_is_at_one_address_alone():
    """Torch's own would be at all of them."""
    store = serve_store("127.0.0.1", 0, timeout_s=10.0)
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"
    for address in machine_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=10)
