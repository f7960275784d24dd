# SPDX-License-Identifier: Apache-2.0
"""The recipes that learn from examples, through deaths of their workers and their trainer."""

import json

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.example_jobs import metrics_of, stage, write_rows
from tests.support.recipe_stage import both, kill, kill_trainer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", hidden=32, layers=1, max_positions=32)
    numbers = range(10)
    write_rows(folder / "sft.jsonl", [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in numbers])
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in numbers]
    for kind in ("rm", "dpo"):
        write_rows(folder / f"{kind}.jsonl", pairs)
    return folder


def config_of(inputs, kind):
    return {
        "model": str(inputs / "model"),
        "data": {"train": str(inputs / f"{kind}.jsonl")},
        "batch_size": 4,
        "epochs": 2.0,
        "eval_every": 2,
        "optimizer": {"lr": 1e-3, "warmup_steps": 3},
        "engine": {"threads": 1},
        "keep": {"best": "eval/loss", "save_every": 2},
    }


TIMES = ("time/", "speed/", "memory/")


def end_of(folder, inputs, kind, faults=None):
    """Run it through the faults; the metrics and the models at its end."""
    job = stage(kind, folder, config_of(inputs, kind))
    job.run(faults)
    assert not job.port.faults, "not all of them have happened"
    metrics = [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in metrics_of(folder)]
    models = {
        str(file.relative_to(folder)): file.read_bytes()
        for name in ("model", "best", "steps")
        for file in sorted((folder / name).rglob("*.safetensors"))
    }
    told = json.loads((folder / "summary.json").read_text())
    return metrics, models, {name: value for name, value in told.items() if "model" not in name}, job.port.calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_whatever_dies_the_end_is_the_same(tmp_path, inputs, kind):
    *undisturbed, calls = end_of(tmp_path / "undisturbed", inputs, kind)
    assert [row["step"] for row in undisturbed[0]] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in undisturbed[0] if "eval/loss" in row] == [2, 4, 5]
    assert [name.split("/")[-2] for name in undisturbed[1]] == ["model", "best", "step-2", "step-4"]
    at = {
        name: [number for number, call in enumerate(calls) if call[2] == name] for name in ("train", "measure", "save")
    }
    other = kill("REFERENCE", 0) if kind == "dpo" else kill("ACTOR", 0)
    faults = {
        (at["train"][1], "after"): kill("ACTOR", 0),
        (at["train"][3], "before"): kill_trainer,
        (at["train"][3] + 2, "after"): kill_trainer,
        (at["measure"][1] + 9, "before"): both(other, kill_trainer),
        (at["save"][-1] + 12, "before"): kill_trainer,
    }
    *disturbed, _ = end_of(tmp_path / "disturbed", inputs, kind, faults)
    assert disturbed == undisturbed
