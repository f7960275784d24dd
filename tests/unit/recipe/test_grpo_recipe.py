"""The GRPO recipe in one process."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "ray"))

from recipe_jobs import grpo_job  # noqa: E402

from dlrover.python.rl.common.errors import InvalidJob  # noqa: E402
from dlrover.python.rl.control.state import Phase  # noqa: E402
from dlrover.python.rl.master.job import check_job, run_here  # noqa: E402


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of three steps, and the reports it gave."""
    folder = tmp_path_factory.mktemp("grpo")
    job = grpo_job(folder, f"job_dir={folder / 'out'}", "steps=3", "eval_every=2")
    reports = []
    status = run_here(check_job(job, local=True), reports.append)
    assert status.phase is Phase.FINISHED, status.cause
    return folder / "out", reports


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_step_is_reported_and_written(finished):
    out, reports = finished
    assert [(report.step, report.total_steps) for report in reports] == [(1, 3), (2, 3), (3, 3)]
    rows = lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"reward", "loss", "kl", "grad_norm", "tokens_per_s", "finished"} <= set(rows[0])
    assert ["accuracy" in row for row in rows] == [False, True, False]
    assert rows[0]["kl"] == 0.0, "the reference is the policy's own start"


def test_samples_carry_the_version_of_the_weights_that_drew_them(finished):
    rows = lines(finished[0] / "samples.jsonl")
    assert len(rows) == 3 * 4 * 8
    assert {(row["step"], row["version"]) for row in rows} == {(1, 0), (2, 1), (3, 2)}


def test_tensorboard_reads_the_events(finished):
    events = EventAccumulator(str(finished[0] / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("reward")] == [1, 2, 3]


def test_the_curve_is_a_png(finished):
    assert (finished[0] / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_loads_with_transformers_and_the_held_out_rows_were_never_trained_on(finished):
    out, _ = finished
    AutoTokenizer.from_pretrained(out / "model")
    AutoModelForCausalLM.from_pretrained(out / "model")
    held = {row["prompt_id"] for row in lines(out / "held_out.jsonl")}
    trained = {row["prompt_id"] for row in lines(out / "samples.jsonl")}
    assert len(held) == 8
    assert not held & trained
    summary = json.loads((out / "summary.json").read_text())
    assert summary["held-out problems"] == 8


def problems_of(folder, *overrides):
    with pytest.raises(InvalidJob) as caught:
        check_job(grpo_job(folder, *overrides), local=True)
    return {problem.where: problem.what for problem in caught.value.problems}


def test_all_problems_of_the_configuration_are_found_before_anything_starts(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1=", "answer": 2}\n' * 6 + '{"prompt": 1+1}\n')
    found = problems_of(
        tmp_path,
        f"data.train={bad}",
        f"model={tmp_path}/modell",
        "algorithm.name=grpo",
        "+algorithm.clip_hi=0.3",
        "workload.rollout.num=20",
        "trainer.device_per_node=64",
    )
    assert any(where.startswith(f"{bad}:7") for where in found)
    assert found["config.model"] == f"no such folder: {tmp_path}/modell"
    assert "did you mean 'clip_high'" in found["config.algorithm.clip_hi"]
    assert "20 rollout members cannot share 4 prompts" in found["workload.rollout.num"]


@pytest.mark.parametrize(
    ("override", "where", "what"),
    [
        ("rollout.samples_per_prompt=1", "config.rollout.samples_per_prompt", "at least 2"),
        ("algorithm.name=gpro", "config.algorithm.name", "did you mean 'grpo'"),
        ("optimizer.lr=-1", "config.optimizer.lr", "greater than 0"),
        ("+optimizer.lrr=1", "config.optimizer.lrr", "did you mean 'lr'"),
        ("data.eval_rows=4000", "config.data.eval_rows", "cannot be held out"),
        ("data.train=none.jsonl", "none.jsonl", "no such file"),
        ("steps=0", "config.steps", "greater than 0"),
    ],
)
def test_a_bad_value_is_named_with_its_place(tmp_path, override, where, what):
    found = problems_of(tmp_path, override)
    assert what in found[where].lower(), found


def test_a_kl_penalty_needs_the_reference_role(tmp_path):
    job = grpo_job(tmp_path)
    from dataclasses import replace

    without = replace(
        job, workloads={role: spec for role, spec in job.workloads.items() if role != "REFERENCE"}, groups=()
    )
    with pytest.raises(InvalidJob, match="needs the role 'reference'"):
        check_job(without, local=True)
