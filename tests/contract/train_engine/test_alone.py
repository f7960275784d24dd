# SPDX-License-Identifier: Apache-2.0
"""Contract of every train engine in a single process besides its steps: refusals, states, offloading."""

import dataclasses
import functools
import gc
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from dlrover.python.rl.common.errors import DLRoverRLError, EngineError
from dlrover.python.rl.data import state_tree
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
    write_model,
)
from tests.support.processes import run
from tests.support.train_cases import ENGINES, Case, named, parameters
from tests.support.train_exercise import digest, make_engine, share, train, weights_of

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


def saved(state):
    """Through bytes and back, as a commit goes."""
    skeleton, buffers = state_tree.dump(state)
    return state_tree.load(bytes(skeleton), [memoryview(bytes(buffer)) for buffer in buffers])


def live_bytes():
    """Count the bytes of all tensors of this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in map(whole_storage, tensors)}.values())


def whole_storage(tensor):
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def memory_of(engine, rank, before):
    """Bytes that it says it holds after a step, that it holds, and that are left of it when it is released."""
    train(engine, rank, [0])
    reported, measured = sum(engine.footprint().values()), live_bytes() - before
    engine.meta()
    return reported, measured, live_bytes() - before


def broken(outputs, columns):
    raise ZeroDivisionError


def alone(rank, world_size, port, case, path, folder):
    """All of it in one process."""

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
    result["option"] = refusal(lambda: make(backend={"zero_stge": 2, "cpu_shimm": True}))
    result["sizes"] = refusal(lambda: make(parallel=ParallelSizes(tensor_parallel_size=3)))
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
    result["released"] = engine.place(), engine.footprint(), refusal(engine.publish)
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
        "step": refusal(lambda: follower.step(make_batch(0), EntropyLoss())),
        "wrong state": refusal(lambda: follower.load_state_dict(engine.state_dict())),
    }


def checkpoints(engine, case, make, folder):
    engine.save_checkpoint(folder / "checkpoint")
    result = {
        "nowhere": refusal(lambda: engine.save_checkpoint(folder / "saved" / "config.json" / "checkpoint")),
        "nothing": refusal(lambda: engine.load_checkpoint(folder / "nothing")),
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


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("alone") / "T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def results_of(model_path, folder):
    @functools.cache
    def of(case_name):
        (result,) = run(1, alone, named(case_name), model_path, folder / case_name)
        return result

    return of


@pytest.mark.parametrize("case", cases())
def test_an_update_that_is_not_finite_is_refused_and_changes_nothing(case, results_of):
    result = results_of(case.name)
    for name, message in (("loss", "the loss is nan"), ("gradient", "the gradient norm is nan (first in: model.embed")):
        kind, text = result[name]
        assert kind == "NonFiniteUpdate"
        assert message in text
    assert result["before"] == result["after"]
    assert result["on"][0].grad_norm < math.inf


@pytest.mark.parametrize("case", cases())
def test_so_many_in_a_row_are_skipped_if_asked_and_change_nothing(case, results_of):
    *first, one, another, end = results_of(case.name)["skipped"]
    first, start = first[:-1], first[-1]
    for result in (*first, one, another):
        assert (result.skipped, math.isnan(result.loss), math.isnan(result.grad_norm)) == (True, True, True)
        assert result.lr > 0
    assert (start, end) == ((True, 0), (True, 1))


@pytest.mark.feature(20)
@pytest.mark.parametrize("case", cases())
def test_released_and_restored_it_goes_on_bit_for_bit(case, results_of):
    result = results_of(case.name)
    place, footprint, (kind, message) = result["released"]
    assert (place, footprint, kind) == ("meta", {}, "EngineError")
    assert "load_state_dict" in message
    assert result["again"] == result["on"]


@pytest.mark.parametrize("case", cases())
def test_what_is_saved_is_the_model_in_hugging_face_format(case, results_of, folder):
    weights = results_of(case.name)["weights"]
    model = AutoModelForCausalLM.from_pretrained(folder / case.name / "saved", dtype=torch.float32)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(np.array_equal(tensor.detach().numpy(), weights[name]) for name, tensor in loaded.items())


@pytest.mark.feature(107)
@pytest.mark.parametrize("case", cases())
def test_a_frozen_engine_takes_over_weights_and_holds_no_optimizer(case, results_of):
    result = results_of(case.name)
    assert result["frozen"] == (3, True, ["weights"])
    assert result["step"] == ("EngineError", "a frozen engine (no optimizer) cannot take a step")
    assert result["wrong state"][0] == "EngineError"


@pytest.mark.feature(54)
@pytest.mark.parametrize("case", cases())
def test_recomputed_activations_give_the_same_steps(case, results_of):
    steps = results_of(case.name)["steps"]
    (reports, weights, *_), (again, recomputed_weights, *_) = steps["plain"], steps["recomputed"]
    assert reports == again
    assert all(np.array_equal(weights[name], recomputed_weights[name]) for name in weights)


@pytest.mark.feature(53)
@pytest.mark.parametrize("case", cases())
def test_bf16_steps_are_near_and_the_weights_are_float32(case, results_of, model_path):
    steps = results_of(case.name)["steps"]
    (reports, weights, *_), (near, bf16_weights, types, _) = steps["plain"], steps["bf16"]
    assert types == {"torch.float32"}
    for exact, rough in zip(reports, near, strict=True):
        assert rough.loss == pytest.approx(exact.loss, rel=0.02)
        assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)
    # One step less, or the two in another order, are 0.5 apart.
    assert 1e-3 < apart(bf16_weights, weights, start_weights(model_path)) < 0.1


@pytest.mark.parametrize("case", cases())
def test_an_engine_that_does_not_fit_leaves_its_ranks_and_another_one_can_be_made(case, results_of):
    result = results_of(case.name)
    kind, message = result["no room"]
    assert kind == "OutOfDeviceMemory"
    assert "10,000 bytes are in use" in message
    assert not result["met"]


@pytest.mark.feature(20)
@pytest.mark.parametrize("case", cases())
def test_what_is_held_is_told_and_nothing_is_left_of_it(case, results_of):
    reported, measured, left = results_of(case.name)["memory"]
    assert abs(measured - reported) < 0.05 * reported
    assert left < 0.05 * reported


@pytest.mark.parametrize("case", cases())
def test_a_state_can_be_loaded_in_host_memory(case, results_of):
    assert all(same for *_, same in results_of(case.name)["steps"].values())


@pytest.mark.parametrize("case", cases())
def test_a_checkpoint_that_cannot_be_written_or_is_not_there_is_an_error(case, results_of, folder):
    result = results_of(case.name)
    for name, message in (("nowhere", "cannot be written: "), ("nothing", "no checkpoint at ")):
        kind, text = result[name]
        assert kind == "EngineError"
        assert message in text
    assert not [entry for entry in (folder / case.name).iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("case", cases(("deepspeed",)))
def test_a_checkpoint_of_another_stage_is_refused_with_both(case, results_of):
    kind, message = results_of(case.name)["stage"]
    stage = case.backend["zero_stage"]
    assert kind == "EngineError"
    assert f"is of layout [1, 1, 1, 1, 1, {stage}]" in message
    assert f"not [1, 1, 1, 1, 1, {1 + stage % 3}]" in message


@pytest.mark.parametrize("case", cases(ALIKE))
def test_fsdp2_goes_on_from_its_checkpoint(case, results_of):
    version, own, fsdp2_weights = results_of(case.name)["elsewhere"]
    assert version == 4
    assert_close(fsdp2_weights, own)


@pytest.mark.parametrize("case", cases())
def test_options_that_it_does_not_have_are_refused(case, results_of):
    kind, message = results_of(case.name)["option"]
    assert kind in ("EngineError", "InvalidJob")
    assert "zero_stge" in message
    if case.backend:
        assert f"did you mean '{next(iter(case.backend))}'?" in message


@pytest.mark.feature(51)
@pytest.mark.parametrize("case", cases())
def test_sizes_that_do_not_divide_the_ranks_are_refused_with_the_numbers(case, results_of):
    kind, message = results_of(case.name)["sizes"]
    assert kind == EngineError.__name__
    assert "3" in message
    assert "tensor_parallel_size" in message
