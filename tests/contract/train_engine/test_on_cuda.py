# SPDX-License-Identifier: Apache-2.0
"""The contract on a GPU, where there is one: five steps near a plain loop's on the host, and a place to move to."""

import functools

import pytest
import torch
from cases import Case
from exercise import SAVED_AFTER, five_steps, go_on
from plain import apart, plain_run, reported, start_weights, write_model
from processes import run

LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (0.05, 0.05)}
"""How far what a step reports may be from the plain loop's, and the weights, as a share of the way that they went."""
CASES = {precision: Case("fsdp2", settings={"device": "cuda", "precision": precision}) for precision in LIMITS}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("cuda") / "T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def found(model_path, folder):
    @functools.cache
    def of(precision):
        (result,) = run(1, five_steps, CASES[precision], model_path, folder / precision)
        return result

    return of


@pytest.mark.feature(44)
@pytest.mark.parametrize("precision", LIMITS)
def test_five_steps_are_near_the_plain_loops(precision, found, model_path):
    of_reports, of_weights = LIMITS[precision]
    told, weights = plain_run(model_path)
    result = found(precision)
    assert apart(result["weights"], weights, start_weights(model_path)) < of_weights
    for step, plain in zip(result["told"], told, strict=True):
        assert reported(step) == pytest.approx(plain, rel=of_reports)


@pytest.mark.feature(17)
@pytest.mark.parametrize("precision", LIMITS)
def test_in_host_memory_nothing_is_on_the_device(precision, found):
    before, empty, after = found(precision)["footprints"]
    assert before == after
    assert {"weights", "optimizer"} <= before.keys()
    assert empty == {}
    assert found(precision)["places"] == ["cpu", "cuda"]


@pytest.mark.parametrize("precision", LIMITS)
def test_saved_loaded_and_continued_is_near_not_stopping(precision, found, model_path, folder):
    """Not to the bit: some sums of a GPU have no order."""
    undisturbed = found(precision)
    ((same, _),) = run(1, go_on, CASES[precision], model_path, folder / precision, folder / precision)
    assert apart(same["weights"], undisturbed["weights"], start_weights(model_path)) < LIMITS[precision][1]
    for step, other in zip(same["told"], undisturbed["told"][SAVED_AFTER:], strict=True):
        assert reported(step) == pytest.approx(reported(other), rel=LIMITS[precision][0])
