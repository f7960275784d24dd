# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl eval``: the model of a run is evaluated by another run, which trains nothing."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common.hub import looking_up
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.trainers.recipe_trainer import RecipeTrainer
from dlrover.python.rl.runtime.member.inspection import inspect_job
from dlrover.python.rl.trainer.port import RestartInfo
from tests.support.example_jobs import EXAMPLES, PAIRS
from tests.support.policy_jobs import policy_job, write_inputs
from tests.support.run_files import read_json, write_rows

CLI = [sys.executable, "-m", "dlrover.python.rl.cli"]


FIRST_TRAINER = Path(__file__).parents[3] / "examples/first_trainer"


def cli(folder, *arguments, code=0):
    """What the command line says."""
    search = os.pathsep.join([str(Path(__file__).parents[3]), str(Path(__file__).parent)])
    done = subprocess.run(
        [*CLI, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def summary(folder, name):
    return read_json(folder / "runs" / name / "latest/summary.json")


@pytest.mark.slow
def test_a_model_that_learned_from_samples_scores_as_at_the_end_of_its_training(tmp_path):
    job = policy_job(tmp_path, "grpo", rollout={"max_new_tokens": 8}, steps=2)
    text = job_to_yaml(job).replace(f"job_dir: {job.job_dir}\n", "")
    (tmp_path / "job.yaml").write_text(text)
    cli(tmp_path, "run", "job.yaml", "--local")
    trained = summary(tmp_path, "grpo")
    cli(tmp_path, "eval", "grpo")
    (tmp_path / "runs/grpo/latest/model").rename(tmp_path / "moved")
    told = summary(tmp_path, "grpo-eval")
    assert told["eval/accuracy"] == trained["eval/accuracy"]
    folder = tmp_path / "runs/grpo-eval/latest"
    assert (folder / "held_out.jsonl").read_text().count("\n") == 4
    assert not (folder / "model").exists() and told["model"] == trained["model"]
    said = cli(tmp_path, "eval", "grpo", code=2)
    assert "has no model yet: pass config.model=FOLDER for another one" in said


@pytest.mark.slow
def test_a_model_that_learned_from_examples_is_measured_on_the_held_out_ones(tmp_path):
    write_inputs(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", EXAMPLES)
    data = f"{{train: {rows}, eval: {rows}}}"
    (tmp_path / "job.yaml").write_text(f"""
name: sft
trainer: {{module: dlrover.python.rl.recipe.sft, class: SFTTrainer, device_type: CPU, device_per_node: 4}}
workload:
  actor: {{module: dlrover.python.rl.recipe.workloads, class: ActorWorkload}}
config: {{model: {tmp_path / "model"}, data: {data}, steps: 3, batch_size: 2, eval_every: 3}}
""")
    cli(tmp_path, "run", "job.yaml", "--local")
    last = json.loads((tmp_path / "runs/sft/latest/metrics.jsonl").read_text().splitlines()[-1])
    cli(tmp_path, "eval", "sft", "config.eval_every=0")
    assert summary(tmp_path, "sft-eval")["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)


@pytest.mark.slow
def test_a_policy_is_compared_with_the_model_that_its_training_began_with(tmp_path):
    write_inputs(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", PAIRS)
    (tmp_path / "job.yaml").write_text(f"""
name: dpo
trainer: {{module: dlrover.python.rl.recipe.dpo, class: DPOTrainer, device_type: CPU, device_per_node: 4}}
workload:
  actor: {{module: dlrover.python.rl.recipe.workloads, class: ActorWorkload}}
  reference: {{module: dlrover.python.rl.recipe.workloads, class: ReferenceWorkload}}
config: {{model: {tmp_path / "model"}, data: {{train: {rows}, eval: {rows}}}, steps: 3, batch_size: 2, eval_every: 3}}
""")
    cli(tmp_path, "run", "job.yaml", "--local")
    last = json.loads((tmp_path / "runs/dpo/latest/metrics.jsonl").read_text().splitlines()[-1])
    cli(tmp_path, "eval", "dpo")
    assert summary(tmp_path, "dpo-eval")["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)
    assert last["eval/loss"] != pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.slow
def test_a_trainer_of_ones_own_is_refused(tmp_path):
    shutil.copytree(FIRST_TRAINER, tmp_path / "own")
    cli(tmp_path / "own", "run", "job.yaml", "--local")
    said = cli(tmp_path / "own", "eval", "first-trainer", "+config.model=x", code=2)
    assert "first-trainer: its trainer cannot evaluate without training" in said


REPOSITORY = Path(__file__).parents[3]


RECIPES = sorted((REPOSITORY / "examples/recipes").glob("*.yaml"))


PAGES = {"qwen2.5-7b-math-apart": "qwen2.5-7b-math"}


def page_of(recipe):
    return recipe.with_name(f"{PAGES.get(recipe.stem, recipe.stem)}.md").read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_no_error_and_its_page_has_the_memory_that_it_takes(recipe, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    found, table = checked(recipe)
    assert "\n".join(table) in page_of(recipe)
    rows = [line for line in table[2:] if "passes of" not in line]
    assert rows and all(float(line.split()[-1]) < 80 for line in rows)
    assert all(nbytes is not None for nbytes in found.state_bytes.values())


def checked(recipe, changes=()):
    """What `check` says of it, and the part about memory."""
    with looking_up("none"):
        found = inspect_job(load_job(recipe, changes))
    assert found.errors == ()
    return found, found.about[found.about.index("memory of each device, GB of 80:") :]


def test_seven_billion_parameters_fit_on_one_gpu_as_the_page_says(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    recipe = REPOSITORY / "examples/recipes/qwen2.5-7b-sft.yaml"
    changes = ["workload.actor.num=1", "engine.train_options.optimizer_on_host=true", "engine.threads=16"]
    assert "\n".join(checked(recipe, changes)[1]) in page_of(recipe)
    assert all(change in page_of(recipe) for change in changes)


def test_a_configuration_that_is_not_there_is_named(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with looking_up("none"):
        found = inspect_job(load_job(RECIPES[0], ["config.model_config=models/none.json"]))
    what = f"no such file or folder: models/none.json in {REPOSITORY}"
    assert [str(error) for error in found.errors] == [f"config.model_config: {what}"]


def test_there_are_recipes_of_every_size_and_kind():
    names = {recipe.stem for recipe in RECIPES}
    assert {"qwen2.5-0.5b-gsm8k", "qwen2.5-7b-math", "qwen2.5-7b-math-apart", "qwen2.5-72b-math"} <= names
    assert {"qwen2.5-7b-sft", "qwen2.5-7b-dpo"} <= names


@pytest.mark.slow
def test_the_largest_is_checked_in_ten_seconds_by_the_command():
    command = [sys.executable, "-m", "dlrover.python.rl.cli", "check", "examples/recipes/qwen2.5-72b-math.yaml"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found.returncode == 0, found.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10, "of processor time"
    assert "ACTOR x48" in found.stdout and "commits: ACTOR 48 x 18.2 GB" in found.stdout


@pytest.mark.parametrize(("taken", "total", "begun"), [(6, 3, 7), (3, 3, 4), (0, 3, 4)])
def test_the_log_goes_on_after_the_last_step_that_was_taken(taken, total, begun):
    log, said = [], []
    trainer = SimpleNamespace(
        time_metrics=dict,
        steps=lambda total: iter(()),
        restart_info=RestartInfo(step=taken),
        announce=said.append,
        begin_log=log.append,
    )
    assert list(RecipeTrainer.logged_steps(trainer, total)) == []
    assert (log, trainer.last_step, len(said)) == ([begun], begun - 1, taken > total)


@pytest.mark.slow
def test_no_row_is_lost(tmp_path):
    write_tiny_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 8)

    def run(*arguments):
        done = subprocess.run([*CLI, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    job = {
        "trainer": {"module": "dlrover.python.rl.recipe.sft", "class": "SFTTrainer", "device_type": "CPU"},
        "workload": {"actor": {"module": "dlrover.python.rl.recipe.workloads", "class": "ActorWorkload"}},
        "config": {"model": "model", "data": {"train": "data.jsonl"}, "batch_size": 2, "steps": 4},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    run("run", "job.yaml", "--local", "job_dir=out")
    rows = (tmp_path / "out/metrics.jsonl").read_text()
    assert "adds none" in run("resume", "out", "--local", "steps=2")
    assert (tmp_path / "out/metrics.jsonl").read_text() == rows
