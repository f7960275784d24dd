# SPDX-License-Identifier: Apache-2.0
"""Places of deepspeed's tensors, in bf16 and with its optimizer on the host; neither changes a step's result."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from tests.support.plain_engine import apart, start_weights
from tests.support.train_cases import Case
from tests.support.train_exercise import digest, make_engine, saved, share, train, weights_of

pytestmark = [
    pytest.mark.needs("deepspeed"),
    pytest.mark.parametrize("stage", [1, 2, 3]),
]
one_and_two_ranks = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
PLACES = (False, True)


def refused(engine, rank):
    passes = []

    def infinite(logprobs, columns):
        passes.append(None)
        return -logprobs.sum() / (50 if len(passes) < 2 else 0.0), {}

    before = digest(engine)
    with pytest.raises(NonFiniteUpdate):
        engine.step(share(engine, rank, 1), infinite)
    with pytest.raises(ZeroDivisionError):
        engine.step(share(engine, rank, 1), lambda logprobs, columns: (1 / 0, {}))
    return len(passes) > 1, digest(engine) == before, train(engine, rank, [2]), weights_of(engine)


def in_bf16(rank, world_size, port, on_device, path, folder):
    """Return bytes held and sent after two steps, and later steps, with the optimizer on the device and on the host."""
    result, states = {}, {}
    for on_host in PLACES:
        case = replace(on_device, backend=on_device.backend | {"optimizer_on_host": on_host})
        engine = make_engine(case, rank, port, path, precision="bf16", max_tokens_per_microbatch=10)
        start = {name: tensor.tobytes() for name, tensor in weights_of(engine).items()}
        steps = train(engine, rank, range(2))
        sent = {name: (tensor.dtype, tensor.float().numpy()) for name, tensor in engine.named_weights(torch.bfloat16)}
        states[on_host] = saved(engine.state_dict())
        buffers = sum(buffer.nbytes for buffer in engine._model.module.buffers())
        footprint = engine.footprint()
        result[on_host] = {
            "start": start,
            "steps": steps,
            "sent": sent,
            "weights": weights_of(engine),
            "held": footprint | {"weights": footprint["weights"] - buffers},
            "parameters": engine.parameter_count,
        }
        twin = make_engine(case, rank, port, path, precision="bf16", max_tokens_per_microbatch=10)
        twin.load_state_dict(states[on_host])
        result[on_host]["twin"] = train(twin, rank, [2]), weights_of(twin)
        result[on_host]["refused"] = refused(engine, rank)
        engine.load_state_dict(states[on_host])
        if on_host:  # what was on the device
            engine.load_state_dict(states[False])
            result["moved"] = train(engine, rank, [2]), weights_of(engine)
        twin.meta()
        engine.meta()
    exact = make_engine(case, rank, port, path)
    with pytest.raises(EngineError) as error:
        exact.load_state_dict(states[True])
    frozen = make_engine(case, rank, port, path, frozen=True, precision="bf16")
    result["frozen"] = sum(frozen.footprint().values()) - buffers, list(frozen.footprint())
    result["another precision"] = str(error.value)
    frozen.close()
    exact.close()
    return result


@pytest.fixture
def results_of(ranks_of):
    return lambda world_size, stage: ranks_of(in_bf16, Case("deepspeed", world_size, backend={"zero_stage": stage}))


def near(actual, expected, path):
    return apart(actual, expected, start_weights(path)) < 1e-4


@pytest.mark.feature(53)
@one_and_two_ranks
def test_passes_hold_two_bytes_a_parameter_and_masters_four(stage, world_size, results_of):
    for rank in results_of(world_size, stage):
        parameters, divided = rank[False]["parameters"], world_size if stage == 3 else 1
        footprint = rank[False]["held"]
        assert footprint["weights"] == 2 * parameters // divided + 4 * parameters // world_size
        assert footprint["optimizer"] == pytest.approx(8 * parameters / world_size, abs=8)
        assert rank[True]["held"]["weights"] == 2 * parameters // divided
        assert "optimizer" not in rank[True]["held"]
        assert rank["frozen"] == (2 * parameters // divided, ["weights"])


@one_and_two_ranks
def test_weights_start_as_in_the_files_and_are_sent_in_bf16(stage, world_size, results_of, model_path):
    wanted = {name: tensor.tobytes() for name, tensor in start_weights(model_path).items()}
    for rank in results_of(world_size, stage):
        for on_host in PLACES:
            assert rank[on_host]["start"] == wanted
            for name, (dtype, sent) in rank[on_host]["sent"].items():
                assert dtype == torch.bfloat16
                rounded = torch.from_numpy(rank[on_host]["weights"][name]).bfloat16().float().numpy()
                assert np.array_equal(sent, rounded), name


@one_and_two_ranks
def test_steps_on_the_host_equal_steps_on_the_device(stage, world_size, results_of, model_path):
    for rank in results_of(world_size, stage):
        for step, other in zip(rank[True]["steps"], rank[False]["steps"], strict=True):
            assert (step.loss, step.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-5)
        assert near(rank[True]["weights"], rank[False]["weights"], model_path)
        (step,), weights = rank["moved"]
        (other,), twin_weights = rank[False]["twin"]
        assert (step.loss, step.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-5)
        assert near(weights, twin_weights, model_path)


@one_and_two_ranks
def test_a_refused_update_changes_nothing(stage, world_size, results_of):
    for rank in results_of(world_size, stage):
        for on_host in PLACES:
            several, unchanged, steps, weights = rank[on_host]["refused"]
            again, twin_weights = rank[on_host]["twin"]
            assert several and unchanged
            assert steps == again, "nothing was added to a gradient that is left"
            assert all(np.array_equal(tensor, twin_weights[name]) for name, tensor in weights.items())


def test_a_state_of_another_precision_is_refused_with_both(stage, results_of):
    (rank,) = results_of(1, stage)
    assert "the state has weights of torch.bfloat16, but the engine's precision is fp32" in rank["another precision"]
