# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl eval``, and ``check`` of the jobs under ``examples/recipes`` without weights, data, GPUs or network."""

import math
import resource
import shutil

import pytest

from dlrover.python.rl.common.hub import looking_up
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.runtime.member.inspection import inspect_job
from tests.support import commands
from tests.support.commands import ROOT
from tests.support.example_jobs import EXAMPLES, PAIRS
from tests.support.policy_jobs import policy_job, write_inputs
from tests.support.run_files import read_json, read_lines, write_rows

RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
PAGES = {"qwen2.5-7b-math-apart": "qwen2.5-7b-math"}


def cli(folder, *arguments, code=0):
    """The output of the command line."""
    done = commands.run(folder, *commands.CLI, *arguments, code=code, within_s=120)
    return done.stdout + done.stderr


def summary(folder, name):
    return read_json(folder / "runs" / name / "latest/summary.json")


@pytest.mark.slow
def test_eval_of_a_policy_scores_as_its_training_did(tmp_path):
    job = policy_job(tmp_path, "grpo", rollout={"max_new_tokens": 8}, steps=2)
    (tmp_path / "job.yaml").write_text(job_to_yaml(job).replace(f"job_dir: {job.job_dir}\n", ""))
    cli(tmp_path, "run", "job.yaml", "--local")
    trained = summary(tmp_path, "grpo")
    cli(tmp_path, "eval", "grpo")
    (tmp_path / "runs/grpo/latest/model").rename(tmp_path / "moved")
    evaluated, folder = summary(tmp_path, "grpo-eval"), tmp_path / "runs/grpo-eval/latest"
    assert evaluated["eval/accuracy"] == trained["eval/accuracy"]
    assert len(read_lines(folder / "held_out.jsonl")) == 4
    assert not (folder / "model").exists() and evaluated["model"] == trained["model"]
    output = cli(tmp_path, "eval", "grpo", code=2)
    assert "has no model yet: pass config.model=FOLDER for another one" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "trainer", "rows", "override"),
    [("sft", "SFTTrainer", EXAMPLES, "config.eval_every=0"), ("dpo", "DPOTrainer", PAIRS, "config.eval_every=3")],
)
def test_eval_of_a_recipe_on_examples_has_its_last_loss(tmp_path, recipe, trainer, rows, override):
    """A policy of DPO is compared with the model that its training began with."""
    write_inputs(tmp_path)
    workloads = "module: dlrover.python.rl.recipe.workloads"
    reference = f", reference: {{{workloads}, class: ReferenceWorkload}}" if recipe == "dpo" else ""
    file = write_rows(tmp_path / "rows.jsonl", rows)
    config = f"data: {{train: {file}, eval: {file}}}, steps: 3, batch_size: 2, eval_every: 3"
    (tmp_path / "job.yaml").write_text(f"""
name: {recipe}
trainer: {{module: dlrover.python.rl.recipe.{recipe}, class: {trainer}, device_type: CPU, device_per_node: 4}}
workload: {{actor: {{{workloads}, class: ActorWorkload}}{reference}}}
config: {{model: {tmp_path / "model"}, {config}}}
""")
    cli(tmp_path, "run", "job.yaml", "--local")
    last = read_lines(tmp_path / "runs" / recipe / "latest/metrics.jsonl")[-1]
    cli(tmp_path, "eval", recipe, override)
    assert summary(tmp_path, f"{recipe}-eval")["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)
    assert last["eval/loss"] != pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.slow
def test_eval_of_a_users_trainer_is_refused(tmp_path):
    shutil.copytree(ROOT / "examples/first_trainer", tmp_path / "own")
    cli(tmp_path / "own", "run", "job.yaml", "--local")
    output = cli(tmp_path / "own", "eval", "first-trainer", "+config.model=x", code=2)
    assert "first-trainer: its trainer cannot evaluate without training" in output


def page_of(recipe):
    return recipe.with_name(f"{PAGES.get(recipe.stem, recipe.stem)}.md").read_text()


def checked(recipe, changes=()):
    """The inspection of a recipe, and its part about memory."""
    with looking_up("none"):
        inspection = inspect_job(load_job(recipe, changes))
    assert inspection.errors == ()
    return inspection, inspection.about[inspection.about.index("memory of each device, GB of 80:") :]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_has_no_error_and_its_page_shows_its_memory(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    inspection, table = checked(recipe)
    assert "\n".join(table) in page_of(recipe)
    rows = [line for line in table[2:] if "passes of" not in line]
    assert rows and all(float(line.split()[-1]) < 80 for line in rows)
    assert all(nbytes is not None for nbytes in inspection.state_bytes.values())


def test_recipe_of_7_billion_fits_on_one_gpu_as_its_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = ROOT / "examples/recipes/qwen2.5-7b-sft.yaml"
    changes = ["workload.actor.num=1", "engine.train_options.optimizer_on_host=true", "engine.threads=16"]
    assert "\n".join(checked(recipe, changes)[1]) in page_of(recipe)
    assert all(change in page_of(recipe) for change in changes)


def test_recipes_have_every_size_and_kind():
    sizes = {"0.5b-gsm8k", "7b-math", "7b-math-apart", "72b-math", "7b-sft", "7b-dpo"}
    assert {f"qwen2.5-{size}" for size in sizes} <= {recipe.stem for recipe in RECIPES}


@pytest.mark.slow
def test_largest_recipe_is_checked_in_ten_seconds():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = cli(ROOT, "check", "examples/recipes/qwen2.5-72b-math.yaml")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10, "of processor time"
    assert "ACTOR x48" in output and "commits: ACTOR 48 x 18.2 GB" in output
