# SPDX-License-Identifier: Apache-2.0
"""The contract on a GPU, where there is one: five steps near a plain loop's on the host, and a place to move to."""

import dataclasses

import pytest

from dlrover.python.rl.engine.api.base import LoraSettings
from tests.support.plain_engine import CONFIG, STEPS, apart, reported, start_weights
from tests.support.processes import run
from tests.support.train_cases import Case
from tests.support.train_exercise import SAVED_AFTER, five_steps, go_on, make_engine, train, weights_of

LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (0.05, 0.05), "bf16 on the host": (0.05, 0.05)}
"""How far what a step reports may be from the plain loop's, and the weights, as a share of the way that they went."""
CASES = {
    name: Case(
        "fsdp2",
        backend={"optimizer_on_host": "host" in name},
        settings={"device": "cuda", "precision": name.partition(" ")[0]},
    )
    for name in LIMITS
}

pytestmark = pytest.mark.needs("cuda")


@pytest.mark.feature(44)
@pytest.mark.parametrize("name", LIMITS)
def test_five_steps_are_near_the_plain_loops(name, ranks_of, expected, model_path):
    of_reports, of_weights = LIMITS[name]
    reports, weights = expected
    (result,) = ranks_of(five_steps, CASES[name])
    assert apart(result["weights"], weights, start_weights(model_path)) < of_weights
    for step, plain in zip(result["steps"], reports, strict=True):
        assert reported(step) == pytest.approx(plain, rel=of_reports)


@pytest.mark.feature(17)
@pytest.mark.parametrize("name", LIMITS)
def test_in_host_memory_nothing_is_on_the_device(name, ranks_of):
    (result,) = ranks_of(five_steps, CASES[name])
    before, empty, after = result["footprints"]
    assert before == after
    assert "weights" in before and ("optimizer" in before) != ("host" in name)
    assert (empty, result["places"]) == ({}, ["cpu", "cuda"])


@pytest.mark.parametrize("name", LIMITS)
def test_a_loaded_checkpoint_continues_near_the_same_steps(name, ranks_of, model_path, folder):
    """Compare with a tolerance: some sums of a GPU have no order."""
    case = CASES[name]
    (undisturbed,) = ranks_of(five_steps, case)
    saved = folder / five_steps.__name__ / case.name
    ((same, _),) = run(1, go_on, case, model_path, saved, saved)
    assert apart(same["weights"], undisturbed["weights"], start_weights(model_path)) < LIMITS[name][1]
    for step, other in zip(same["steps"], undisturbed["steps"][SAVED_AFTER:], strict=True):
        assert reported(step) == pytest.approx(reported(other), rel=LIMITS[name][0])


def in_few_bits(path, device, optimizer, lora):
    config = dataclasses.replace(CONFIG, name=optimizer)
    engine = make_engine(Case("fsdp2", settings={"device": device, "lora": lora}), 0, 0, path, optimizer=config)
    start, reports = weights_of(engine), [reported(step) for step in train(engine, 0, range(STEPS - 1))]
    engine.cpu()
    assert engine.footprint() == {}
    engine.cuda()
    reports += [reported(step) for step in train(engine, 0, [STEPS - 1])]
    outcome = start, reports, weights_of(engine)
    engine.close()
    return outcome


@pytest.mark.parametrize(
    ("optimizer", "base"),
    [("adamw_8bit", None), ("adamw", "nf4"), ("adamw_8bit", "nf4")],
    ids=["moments in 8 bits", "adapters over 4 bits", "both"],
)
@pytest.mark.filterwarnings("ignore:inner dimension")  # of a model as small as this
def test_4_bit_weights_and_8_bit_moments_train_as_on_a_cpu(optimizer, base, model_path):
    pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    if base is not None:
        pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    lora = LoraSettings(rank=4, quantize_base=base) if base is not None else None
    start, wanted, weights = in_few_bits(model_path, "cpu", optimizer, lora)
    _, reports, weights_on_cuda = in_few_bits(model_path, "cuda", optimizer, lora)
    for step, other in zip(reports, wanted, strict=True):
        assert step == pytest.approx(other, rel=0.01)
    assert apart(weights_on_cuda, weights, start) < 0.1
