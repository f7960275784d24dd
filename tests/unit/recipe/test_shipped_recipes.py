# SPDX-License-Identifier: Apache-2.0
"""The jobs under ``examples/recipes``: checked without weights, data, GPUs or network, as their pages say."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.common.hub import looking_up
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.runtime.member.inspection import inspect_job

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
