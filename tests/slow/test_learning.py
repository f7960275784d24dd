# SPDX-License-Identifier: Apache-2.0
"""The examples that learn do so on any seed and engine, and the benchmarks of engines leave their tables."""

import json
import os
import sys

import pytest

from tests.support import commands
from tests.support.commands import ROOT
from tests.support.manual_clock import within

REAL_MODEL = ROOT / ".venv-real_model" / "bin" / "python"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def run(folder, *command, timeout_s=1400):
    """Run a command, which must end well, and return its output."""
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    return commands.run(folder, *command, within_s=timeout_s, OMP_NUM_THREADS=threads).stdout


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def assert_demo_learnt(folder, output):
    """The gain that the README promises, and the model has it with ``transformers`` alone, too."""
    summary = read(folder / "summary.json")
    after = summary["eval/accuracy"]
    assert after - summary["before/eval/accuracy"] >= 0.25
    assert f"by transformers alone: {after:.4f} (reported: {after:.4f})" in output
    return summary


@pytest.mark.ray
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_gains_25_points_in_five_minutes(tmp_path, seed):
    with within(300):
        output = run(tmp_path, sys.executable, ROOT / "examples/arithmetic/demo.py", "--seed", seed)
    folder = tmp_path / "build" / "demo" / "grpo"
    assert_demo_learnt(folder, output)
    for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl", "reward.png", "model/model.safetensors"):
        assert (folder / name).stat().st_size > 0, name


ENGINES = {
    "TRAIN=deepspeed": ("DeepSpeedTrainEngine", "TorchRolloutEngine"),
    "TRAIN=megatron": ("MegatronTrainEngine", "TorchRolloutEngine"),
    "ROLLOUT=vllm": ("Fsdp2TrainEngine", "VllmRolloutEngine"),
}
"""The classes of the engines that then run, as the processes that they run in have reported."""


@pytest.mark.ray
@pytest.mark.parametrize("engine", ENGINES)
def test_demo_learns_on_any_engine(engine):
    summary = assert_demo_learnt(ROOT / "build/demo/grpo", run(ROOT, "make", "demo", engine, timeout_s=3500))
    assert (summary["train_engine"], summary["rollout_engine"]) == ENGINES[engine]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_word_problems_gain_ten_points_in_a_hundred_steps(tmp_path, seed):
    """The model has learnt the format; rewards are by the rule of GSM8K."""
    output = run(tmp_path, sys.executable, ROOT / "examples/word_problems/train.py", seed)
    folder = tmp_path / "runs/word-problems-grpo/latest"
    summary = read(folder / "summary.json")
    assert summary["eval/accuracy"] - summary["before/eval/accuracy"] >= 0.10
    assert f"\neval/accuracy: {summary['eval/accuracy']}" in output
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 101


@pytest.mark.skipif(not REAL_MODEL.exists(), reason="make example NAME=real_model makes its environment")
def test_real_model_trains_three_steps(tmp_path):
    run(tmp_path, REAL_MODEL, ROOT / "examples/real_model/run.py", "steps=3", "data.eval_rows=40")
    summary = read(tmp_path / "build/real_model/seed-0.json")
    assert list(summary["accuracy"]) == ["0", "3"]
    assert len(summary["rewards"]) == 3
    assert abs(summary["accuracy by transformers alone"] - summary["accuracy"]["3"]) <= 0.1  # of 40 answers
    assert len(summary["samples"]) == 20


@pytest.mark.parametrize(
    ("target", "name"),
    [("rollout", "rollout"), ("training", "training"), ("weight-sync", "weight_sync"), ("async", "running_ahead")],
)
def test_benchmark_leaves_its_table(tmp_path, target, name):
    output = run(ROOT, "make", "bench", f"NAME={target}", f"ARGS=--quick --out {tmp_path}")
    (results,) = tmp_path.glob(f"{name}*.json")
    assert read(results)
    assert results.with_suffix(".md").read_text(encoding="utf-8").strip() in output


def test_run_ahead_ends_sooner_and_learns_as_well(tmp_path):
    run(ROOT, "make", "bench", "NAME=async", f"ARGS=--seeds 0 --staleness 0 2 --out {tmp_path}")
    runs = read(tmp_path / "running_ahead.json")["runs"]
    (in_turns,), (ahead,) = runs["0"], runs["2"]
    assert in_turns["seconds"] / ahead["seconds"] > 1.5
    assert ahead["held_out"] > in_turns["held_out"] - 0.1


def test_grpo_step_crosses_100_modules_at_most():
    output = run(ROOT, "make", "--silent", "trace-step", "ARGS=--count")
    assert 30 < int(output.split()[-1]) <= 100
