# SPDX-License-Identifier: Apache-2.0
"""Contract of every train engine in a single process besides its steps: refusals, states, offloading."""

import dataclasses
import gc
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from dlrover.python.rl.common.errors import DLRoverRLError
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from tests.support.plain_engine import (
    CONFIG,
    TEMPERATURE,
    EntropyLoss,
    apart,
    assert_close,
    make_batch,
    start_weights,
)
from tests.support.train_cases import ENGINES, Case, parameters
from tests.support.train_exercise import digest, make_engine, saved, share, train, weights_of

BAD = {
    "loss": lambda outputs, columns: (outputs.sum() * math.nan, {}),
    # The square root's slope at zero is infinite: a finite loss with a gradient that is not.
    "gradient": lambda outputs, columns: ((outputs - outputs.detach()).abs().sqrt().sum(), {}),
}

ALIKE = ("fsdp2", "megatron")
"""Engines whose checkpoints have the same names and shapes."""


def cases(names=tuple(ENGINES)):
    return parameters(only=lambda case: case.world_size == 1 and case.engine in names)


def refusal(act):
    """Return the kind and the message of an engine's error."""
    try:
        act()
    except DLRoverRLError as error:
        return type(error).__name__, str(error)
    return "", ""


def live_bytes():
    """Count the bytes of all tensors of this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in map(whole_storage, tensors)}.values())


def whole_storage(tensor):
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def memory_of(engine, rank, before):
    """Count the bytes that it reports after a step, that it holds, and that are left when it is released."""
    train(engine, rank, [0])
    reported, measured = sum(engine.footprint().values()), live_bytes() - before
    engine.meta()
    return reported, measured, live_bytes() - before


def broken(outputs, columns):
    raise ZeroDivisionError


def alone(rank, world_size, port, case, path, folder):
    """Everything that the tests compare."""

    def make(**changes):
        return make_engine(case, rank, port, path, **changes)

    result = {"no room": refusal(lambda: make(memory=DeviceMemory(capacity=10_000))), "met": dist.is_initialized()}
    before = live_bytes()
    first = make()
    result["memory"] = memory_of(first, rank, before)
    engine = make()
    train(engine, rank, range(2))
    result |= refused_steps(engine, rank)
    result["skipped"] = skipped_steps(make(optimizer=dataclasses.replace(CONFIG, skip_nonfinite=2)), rank)
    result |= there_and_back(engine)
    result |= other_ways(make, rank)
    engine.save(folder / "saved")
    result["weights"] = weights_of(engine)
    result |= frozen(engine, make(frozen=True))
    result |= checkpoints(engine, case, make, folder)
    if case.engine in ALIKE:
        result["elsewhere"] = elsewhere(engine, make_engine(Case("fsdp2"), rank, port, path), rank, folder)
    result["an unknown option"] = refusal(lambda: make(backend={"zero_stge": 2, "cpu_shimm": True}))
    result["sizes of other ranks"] = refusal(lambda: make(parallel=ParallelSizes(tensor_parallel_size=3)))
    engine.close()
    first.close()
    return result


def refused_steps(engine, rank):
    before = digest(engine)
    result = {name: refusal(lambda loss=loss: engine.step(share(engine, rank, 2), loss)) for name, loss in BAD.items()}
    with pytest.raises(ZeroDivisionError):
        engine.step(share(engine, rank, 2), broken)
    return {**result, "before": before, "after": digest(engine)}


def skipped_steps(engine, rank):
    """Take as many updates as are skipped, one that is not, and again: the second time across a saved state."""
    before, results = weights_of(engine), []
    for _ in range(2):
        results += [engine.step(share(engine, rank, 2), loss) for loss in BAD.values()]
        engine.load_state_dict(saved(engine.state_dict()))
        kind, _ = refusal(lambda: engine.step(share(engine, rank, 2), BAD["loss"]))
        assert kind == "NonFiniteUpdate"
        same = all(np.array_equal(before[name], now) for name, now in weights_of(engine).items())
        results.append((same, engine.version))
        (good,) = train(engine, rank, [0])
        assert not good.skipped
        before = weights_of(engine)
    engine.close()
    return results


def there_and_back(engine):
    def step():
        return engine.step(make_batch(2), EntropyLoss(), TEMPERATURE), digest(engine)

    state = saved(engine.state_dict())
    result = {"on": step()}
    engine.meta()
    result["released"], result["a call after meta"] = (engine.place(), engine.footprint()), refusal(engine.publish)
    engine.load_state_dict(state)
    return {**result, "again": step()}


def other_ways(make, rank):
    """Return two steps and their weights for each way to run, and whether a state is loaded while in host memory."""
    ways = {"plain": {}, "recomputed": {"gradient_checkpointing": True}, "bf16": {"precision": "bf16"}}
    steps = {}
    for name, changes in ways.items():
        engine = make(**changes)
        reports = train(engine, rank, range(2))
        types = {str(tensor.dtype) for _, tensor in engine.named_weights()}
        weights, state = weights_of(engine), saved(engine.state_dict())
        on = train(engine, rank, [2]), digest(engine)
        engine.cpu()
        engine.load_state_dict(state)
        engine.cuda()
        again = train(engine, rank, [2]), digest(engine)
        steps[name] = reports, weights, types, on == again
        engine.meta()
    return {"steps": steps}


def frozen(engine, follower):
    published = engine.publish()
    follower.receive(published)
    return {
        "frozen": (follower.version, follower.publish().stamp == published.stamp, sorted(follower.footprint())),
        "a step of a frozen engine": refusal(lambda: follower.step(make_batch(0), EntropyLoss())),
        "a state of another kind": refusal(lambda: follower.load_state_dict(engine.state_dict())),
    }


def checkpoints(engine, case, make, folder):
    engine.save_checkpoint(folder / "checkpoint")
    result = {
        "a folder in a file": refusal(lambda: engine.save_checkpoint(folder / "saved" / "config.json" / "checkpoint")),
        "no checkpoint": refusal(lambda: engine.load_checkpoint(folder / "nothing")),
    }
    if case.engine == "deepspeed":
        other = make(backend={"zero_stage": 1 + case.backend["zero_stage"] % 3})
        result["stage"] = refusal(lambda: other.load_checkpoint(folder / "checkpoint"))
    return result


def elsewhere(engine, other, rank, folder):
    """Both engines continue from the checkpoint."""
    other.load_checkpoint(folder / "checkpoint")
    for each in (engine, other):
        train(each, rank, [3])
    return other.version, weights_of(engine), weights_of(other)


every_case = pytest.mark.parametrize("case", cases())


@pytest.fixture
def result(case, ranks_of):
    return ranks_of(alone, case)[0]


REFUSALS = {
    "loss": ("NonFiniteUpdate", "the loss is nan"),
    "gradient": ("NonFiniteUpdate", "the gradient norm is nan (first in: model.embed"),
    "no room": ("OutOfDeviceMemory", "10,000 bytes are in use"),
    "a call after meta": ("EngineError", "load_state_dict"),
    "a step of a frozen engine": ("EngineError", "a frozen engine (no optimizer) cannot take a step"),
    "a state of another kind": ("EngineError",),
    "a folder in a file": ("EngineError", "cannot be written: "),
    "no checkpoint": ("EngineError", "no checkpoint at "),
    "sizes of other ranks": ("EngineError", "tensor_parallel_size", "3"),
}


@pytest.mark.feature(51)
@pytest.mark.parametrize("refused", REFUSALS)
@every_case
def test_impossible_requests_are_refused(case, result, refused):
    (wanted, *words), (kind, message) = REFUSALS[refused], result[refused]
    assert kind == wanted
    assert all(word in message for word in words)


@every_case
def test_refused_updates_and_failed_writes_change_nothing(case, result, folder):
    assert result["before"] == result["after"]
    assert result["on"][0].grad_norm < math.inf
    assert not [entry for entry in (folder / case.name).iterdir() if entry.name.startswith(".")]
    assert not result["met"], "an engine that does not fit leaves its ranks, and another one can be made"


@every_case
def test_nonfinite_updates_are_skipped_up_to_a_limit(case, result):
    *first, one, another, end = result["skipped"]
    first, start = first[:-1], first[-1]
    for step in (*first, one, another):
        assert (step.skipped, math.isnan(step.loss), math.isnan(step.grad_norm)) == (True, True, True)
        assert step.lr > 0
    assert (start, end) == ((True, 0), (True, 1))


@pytest.mark.feature(20)
@every_case
def test_a_released_engine_continues_from_its_state_bit_for_bit(case, result):
    assert result["released"] == ("meta", {})
    assert result["again"] == result["on"]


@every_case
def test_the_saved_model_is_in_hugging_face_format(case, result, folder):
    weights = result["weights"]
    model = AutoModelForCausalLM.from_pretrained(folder / case.name / "saved", dtype=torch.float32)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(np.array_equal(tensor.detach().numpy(), weights[name]) for name, tensor in loaded.items())


@pytest.mark.feature(107)
@every_case
def test_a_frozen_engine_takes_weights_and_has_no_optimizer(case, result):
    assert result["frozen"] == (3, True, ["weights"])


@pytest.mark.feature(54)
@every_case
def test_recomputed_activations_give_the_same_steps(case, result):
    (reports, weights, *_), (again, recomputed_weights, *_) = (result["steps"][way] for way in ("plain", "recomputed"))
    assert reports == again
    assert all(np.array_equal(weights[name], recomputed_weights[name]) for name in weights)


@pytest.mark.feature(53)
@every_case
def test_bf16_steps_are_near_and_the_weights_are_float32(case, result, model_path):
    (reports, weights, *_), (near, bf16_weights, types, _) = (result["steps"][way] for way in ("plain", "bf16"))
    assert types == {"torch.float32"}
    for exact, rough in zip(reports, near, strict=True):
        assert rough.loss == pytest.approx(exact.loss, rel=0.02)
        assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)
    # One step less, or the two in another order, are 0.5 apart.
    assert 1e-3 < apart(bf16_weights, weights, start_weights(model_path)) < 0.1


@pytest.mark.feature(20)
@every_case
def test_the_footprint_is_the_bytes_held_and_meta_frees_them(case, result):
    reported, measured, left = result["memory"]
    assert abs(measured - reported) < 0.05 * reported
    assert left < 0.05 * reported


@every_case
def test_a_state_can_be_loaded_in_host_memory(case, result):
    assert all(same for *_, same in result["steps"].values())


@pytest.mark.parametrize("case", cases(("deepspeed",)))
def test_a_checkpoint_of_another_stage_is_refused_with_both(case, result):
    kind, message = result["stage"]
    stage = case.backend["zero_stage"]
    assert kind == "EngineError"
    assert f"is of layout [1, 1, 1, 1, 1, {stage}]" in message
    assert f"not [1, 1, 1, 1, 1, {1 + stage % 3}]" in message


@pytest.mark.parametrize("case", cases(ALIKE))
def test_fsdp2_continues_from_the_checkpoint(case, result):
    version, own, fsdp2_weights = result["elsewhere"]
    assert version == 4
    assert_close(fsdp2_weights, own)


@every_case
def test_an_unknown_option_is_refused_with_the_nearest(case, result):
    kind, message = result["an unknown option"]
    assert kind in ("EngineError", "InvalidJob")
    assert "zero_stge" in message
    if case.backend:
        assert f"did you mean '{next(iter(case.backend))}'?" in message
