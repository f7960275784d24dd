"""The SFT recipe through deaths of its actors and its trainer."""

import json

import pytest
from recipe_stage import Stage, kill, kill_trainer

from dlrover.python.rl.recipe.sft import SFTTrainer
from dlrover.python.rl.recipe.tiny import write_tiny_model
from dlrover.python.rl.recipe.workloads import ActorWorkload


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", hidden=32, layers=1, max_positions=32)
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl")},
        "batch_size": 4,
        "epochs": 2.0,
        "optimizer": {"lr": 1e-3, "warmup_steps": 3},
        "engine": {"threads": 1},
    }


def end_of(folder, config, faults=None):
    """Run it through the faults; the figures and the model at its end."""
    stage = Stage(folder, SFTTrainer, {"ACTOR": (ActorWorkload, 1)}, config)
    stage.run(faults)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]
    return figures, (folder / "model" / "model.safetensors").read_bytes(), stage.port.calls


def test_whatever_dies_the_end_is_the_same(tmp_path, config):
    figures, model, calls = end_of(tmp_path / "undisturbed", config)
    assert [row[0] for row in figures] == [1, 2, 3, 4, 5]
    at = [number for number, call in enumerate(calls) if call[2] == "train"]
    faults = {(at[1], "after"): kill("ACTOR", 0), (at[3], "before"): kill_trainer, (at[3] + 2, "after"): kill_trainer}
    assert end_of(tmp_path / "disturbed", config, faults)[:2] == (figures, model)
