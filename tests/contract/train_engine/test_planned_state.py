# SPDX-License-Identifier: Apache-2.0
"""The bytes that deepspeed and megatron hold beside their passes equal the arithmetic's."""

import pytest

from dlrover.python.rl.engine.model.model_shape import shape_of
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse, bytes_of
from tests.support.plain_engine import write_model
from tests.support.processes import run
from tests.support.train_cases import Case, as_parameter, sizes
from tests.support.train_exercise import make_engine, train

SHIM = {"cpu_shim": True}
CASES = [
    *(Case("deepspeed", 1, backend={"zero_stage": stage}) for stage in (1, 2, 3)),
    *(Case("deepspeed", 2, backend={"zero_stage": stage, "optimizer_on_host": stage == 2}) for stage in (1, 2, 3)),
    *(Case("megatron", *layout, SHIM) for layout in ((1, sizes(1, 1)), (2, sizes(1, 1)), (2, sizes(2, 1)))),
    Case("megatron", 4, sizes(1, 2), SHIM),
]


def held(rank, world_size, port, case, path, precision):
    """The bytes after a step, and the gradients of which it was taken."""
    engine = make_engine(case, rank, port, path, precision=precision)
    backend, reduced = engine._model, []
    reduce = backend.reduce_gradients
    backend.reduce_gradients = lambda: reduced.extend(reduce()) or reduced
    train(engine, rank, [0])
    result = engine.footprint(), sum(gradient.nbytes for gradient in reduced)
    engine.close()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", map(as_parameter, CASES))
def test_a_device_holds_what_was_planned(tmp_path, case, precision):
    path = write_model(tmp_path / "model")
    engine = EngineConfig(
        train=case.engine, device="cuda", precision=precision, train_options=case.backend, parallel=case.sizes
    )
    planned = bytes_of(shape_of(str(path)), ModelUse("trained", str(path), case.world_size), engine)
    for footprint, reduced in run(case.world_size, held, case, path, precision):
        assert planned.weights == pytest.approx(footprint["weights"], rel=0.03)
        assert planned.optimizer == pytest.approx(footprint.get("optimizer", 0), rel=0.03)
        if not case.backend.get("optimizer_on_host"):
            gradients = footprint.get("gradients", 0) if case.backend.get("zero_stage") not in (1, 2) else reduced
            assert planned.gradients == pytest.approx(gradients, rel=0.03)
