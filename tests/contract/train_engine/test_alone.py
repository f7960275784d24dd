"""What every train engine does in a single process besides its steps: refusals, states, weights that come and go."""

import functools
import math

import numpy as np
import pytest
import torch
from cases import ENGINES, Case
from exercise import digest, make_engine, share, train, weights_of
from plain import CONFIG, NO_GRADIENT, TEMPERATURE, EntropyLoss, make_batch, write_model
from transformers import AutoModelForCausalLM

from dlrover.python.rl.common.errors import DLRoverRLError, EngineError
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.engine.layout import ParallelSizes
from tests.processes import run

BAD = {
    "loss": lambda outputs, columns: (outputs.sum() * math.nan, {}),
    # The square root's slope at zero is infinite: a finite loss with a gradient that is not.
    "gradient": lambda outputs, columns: ((outputs - outputs.detach()).abs().sqrt().sum(), {}),
}

ALIKE = ("fsdp2", "megatron")
"""Engines whose checkpoints have the same names and shapes."""


def cases(names=tuple(ENGINES)):
    for engine in (ENGINES[name] for name in names):
        marks = [pytest.mark.skip(reason=engine.missing)] if engine.missing else []
        for case in engine.cases:
            if case.world_size == 1:
                yield pytest.param(case, id=case.name, marks=marks)


def refusal(act):
    """What an engine says against it."""
    try:
        act()
    except DLRoverRLError as error:
        return type(error).__name__, str(error)
    return "", ""


def saved(state):
    """Through bytes and back, as a commit goes."""
    skeleton, buffers = state_tree.dump(state)
    return state_tree.load(bytes(skeleton), [memoryview(bytes(buffer)) for buffer in buffers])


def alone(rank, world_size, port, case, path, folder):
    """All of it in one process."""
    engine = make_engine(case, rank, port, path)
    train(engine, rank, range(2))
    result = {"before": digest(engine)}
    for name, loss in BAD.items():
        result[name] = refusal(lambda loss=loss: engine.step(share(engine, rank, 2), loss))
    result["after"] = digest(engine)

    state = saved(engine.state_dict())
    result["on"] = (engine.step(make_batch(2), EntropyLoss(), TEMPERATURE), digest(engine))
    engine.meta()
    result["released"] = (engine.place(), engine.footprint(), refusal(engine.publish))
    engine.load_state_dict(state)
    result["again"] = (engine.step(make_batch(2), EntropyLoss(), TEMPERATURE), digest(engine))

    engine.save(folder / "saved")
    published = engine.publish()
    result["weights"] = weights_of(engine)
    frozen = make_engine(case, rank, port, path, frozen=True)
    frozen.receive(published)
    result["frozen"] = (frozen.version, frozen.publish().stamp == published.stamp, sorted(frozen.footprint()))
    result["step"] = refusal(lambda: frozen.step(make_batch(0), EntropyLoss()))
    result["wrong state"] = refusal(lambda: frozen.load_state_dict(state))

    result["steps"] = {}
    ways = {"plain": {}, "recomputed": {"gradient_checkpointing": True}, "bf16": {"precision": "bf16"}}
    for name, changes in ways.items():
        other = make_engine(case, rank, port, path, **changes)
        told = train(other, rank, range(2))
        types = {tensor.dtype for _, tensor in other.named_weights()}
        result["steps"][name] = (told, weights_of(other), [str(kind) for kind in types])
        other.meta()
    result["option"] = refusal(lambda: make_engine(case, rank, port, path, backend={"zero_stge": 2, "cpu_shimm": True}))
    if case.engine in ALIKE:
        engine.save_checkpoint(folder / "checkpoint")
        other = make_engine(Case("fsdp2"), rank, port, path)
        other.load_checkpoint(folder / "checkpoint")
        for each in (engine, other):
            train(each, rank, [3])
        result["elsewhere"] = (other.version, weights_of(engine), weights_of(other))
    sizes = ParallelSizes(tensor_parallel_size=3)
    result["sizes"] = refusal(lambda: make_engine(case, rank, port, path, parallel=sizes))
    engine.close()
    return result


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("alone") / "T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def found(model_path, folder):
    @functools.cache
    def of(case_name):
        case = next(case for engine in ENGINES.values() for case in engine.cases if case.name == case_name)
        (result,) = run(1, alone, case, model_path, folder / case_name)
        return result

    return of


@pytest.mark.parametrize("case", cases())
def test_an_update_that_is_not_finite_is_refused_and_changes_nothing(case, found):
    result = found(case.name)
    for name, message in (("loss", "the loss is nan"), ("gradient", "the gradient norm is nan (first in: model.embed")):
        kind, told = result[name]
        assert kind == "NonFiniteUpdate"
        assert message in told
    assert result["before"] == result["after"]
    assert result["on"][0].grad_norm < math.inf


@pytest.mark.parametrize("case", cases())
def test_row_020_released_and_restored_it_goes_on_bit_for_bit(case, found):
    result = found(case.name)
    place, footprint, (kind, told) = result["released"]
    assert (place, footprint, kind) == ("meta", {}, "EngineError")
    assert "load_state_dict" in told
    assert result["again"] == result["on"]


@pytest.mark.parametrize("case", cases())
def test_what_is_saved_is_the_model_in_hugging_face_format(case, found, folder):
    weights = found(case.name)["weights"]
    model = AutoModelForCausalLM.from_pretrained(folder / case.name / "saved", dtype=torch.float32)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(np.array_equal(tensor.detach().numpy(), weights[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("case", cases())
def test_row_107_a_frozen_engine_takes_over_weights_and_holds_no_optimizer(case, found):
    result = found(case.name)
    assert result["frozen"] == (3, True, ["weights"])
    assert result["step"] == ("EngineError", "a frozen engine (no optimizer) cannot take a step")
    assert result["wrong state"][0] == "EngineError"


@pytest.mark.parametrize("case", cases())
def test_row_054_recomputed_activations_give_the_same_steps(case, found):
    steps = found(case.name)["steps"]
    (told, weights, _), (again, others, _) = steps["plain"], steps["recomputed"]
    assert told == again
    assert all(np.array_equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("case", cases())
def test_row_053_bf16_steps_are_near_and_the_weights_are_float32(case, found):
    steps = found(case.name)["steps"]
    (told, weights, _), (near, others, types) = steps["plain"], steps["bf16"]
    assert types == ["torch.float32"]
    for exact, rough in zip(told, near, strict=True):
        assert rough.loss == pytest.approx(exact.loss, rel=0.02)
        assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)
    assert near != told
    assert all(np.abs(weights[name] - others[name]).max() < 2e-3 for name in weights)


@pytest.mark.parametrize("case", cases(ALIKE))
def test_fsdp2_goes_on_from_its_checkpoint(case, found):
    version, own, others = found(case.name)["elsewhere"]
    assert version == 4
    assert own.keys() == others.keys()
    for name in own:
        allowed = 3 * CONFIG.lr if name.endswith(NO_GRADIENT) else 1e-5
        assert np.abs(own[name] - others[name]).max() < allowed, name


@pytest.mark.parametrize("case", cases())
def test_options_that_it_does_not_have_are_refused(case, found):
    kind, told = found(case.name)["option"]
    assert kind in ("EngineError", "InvalidJob")
    assert "zero_stge" in told
    if case.backend:
        assert f"did you mean '{next(iter(case.backend))}'?" in told


@pytest.mark.parametrize("case", cases())
def test_row_051_sizes_that_do_not_divide_the_ranks_are_refused_with_the_numbers(case, found):
    kind, told = found(case.name)["sizes"]
    assert kind == EngineError.__name__
    assert "3" in told
    assert "tensor_parallel_size" in told
