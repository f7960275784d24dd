# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, and how fast that is."""

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe import workloads
from dlrover.python.rl.recipe.base.engine_workload import Machine, peak_memory
from dlrover.python.rl.recipe.trainers.recipe_trainer import PHASES
from dlrover.python.rl.trainer.port import COMMIT, WRITTEN
from tests.support.example_jobs import EXAMPLES, metrics_of, stage, write_rows


def test_every_method_with_a_phase_is_a_method_of_a_workload():
    classes = [getattr(workloads, name) for name in workloads.__all__]
    missing = [name for name in PHASES if not any(callable(getattr(cls, name, None)) for cls in classes)]
    assert missing == [COMMIT, WRITTEN], "rename the method in PHASES as well: its time would be a phase of its own"


@pytest.mark.feature(140)
def test_the_phases_of_a_step_add_up_to_it(tmp_path):
    write_tiny_model(tmp_path / "model", hidden=32, layers=1, max_positions=32)
    data = {name: write_rows(tmp_path / "rows.jsonl", EXAMPLES) for name in ("train", "eval")}
    config = {"model": str(tmp_path / "model"), "data": data, "batch_size": 1, "engine": {"threads": 1}}
    stage("sft", tmp_path / "out", config | {"eval_every": 2}).run()
    rows = metrics_of(tmp_path / "out")
    assert len(rows) == 4
    for row in rows:
        phases = {name: value for name, value in row.items() if name.startswith("time/")}
        assert sum(phases.values()) - phases["time/step"] == pytest.approx(phases["time/step"], rel=0.05)
        assert phases["time/update"] > 0.0
        assert ("time/evaluation" in phases) == (row["step"] % 2 == 0)
        assert phases["time/commit"] > 0.0


def test_speed_by_hand():
    times = {"time/step": 4.0, "time/update": 2.0}
    found = Machine(1000, 1e9).metrics(tokens=500, trained=800, members=2, times=times)
    assert found == pytest.approx({"speed/tokens_per_s": 125.0, "speed/train_tflops": 2.4e-6, "speed/mfu": 2.4e6 / 2e9})
    assert Machine(1000).metrics(500, 500, 2, times).keys() == {"speed/tokens_per_s", "speed/train_tflops"}
    assert Machine(0).metrics(500, 500, 2, times).keys() == {"speed/tokens_per_s"}
    assert Machine(10).metrics(500, 500, 2, {"time/step": 1.0}).keys() == {"speed/tokens_per_s"}


def test_a_cpu_has_no_peak_of_its_memory():
    assert peak_memory("cpu") == {}


def test_a_machine_is_told_by_its_engine(tmp_path):
    write_tiny_model(tmp_path / "model", hidden=32, layers=1, max_positions=32)
    from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine

    engine = Fsdp2TrainEngine(tmp_path / "model", None)
    count = sum(tensor.numel() for _, tensor in engine.named_weights())
    assert Machine.of(engine, "cpu", "bf16") == Machine(count)
    assert Machine.of(object(), "cpu", "fp32") == Machine(0)
