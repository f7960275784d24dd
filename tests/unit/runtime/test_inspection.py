# SPDX-License-Identifier: Apache-2.0
"""Loading the user's classes, looking at them before a job starts, and digests of their code."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import ClassNotFound, ConfigError
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.events import RecoveryScope
from dlrover.python.rl.runtime.checkpoint.code import describe_changes, digest_code
from dlrover.python.rl.runtime.member.inspection import inspect_in_child, inspect_job
from dlrover.python.rl.runtime.member.loading import load_class
from tests.support import toy_jobs
from tests.support.toy_jobs import toy_job

TESTS = str(Path(toy_jobs.__file__).parent)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to import from, forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_load_class_finds_nested_ones_in_the_search_path(folder):
    (folder / "my_models.py").write_text("class Outer:\n    class Inner:\n        pass\n")
    assert load_class("my_models", "Outer.Inner", (str(folder),)).__name__ == "Inner"
    assert load_class("tests.support.toy_jobs", "Adder") is toy_jobs.Adder


TOYS = "tests.support.toy_jobs"


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (TOYS, "Addder", f"module '{TOYS}' has no class 'Addder'; did you mean 'Adder'?"),
        (TOYS, "Adder.Inner", f"module '{TOYS}' has no class 'Adder.Inner'"),
        (TOYS, "NOT_A_CLASS", f"'{TOYS}.NOT_A_CLASS' is a int, not a class"),
        ("no_such_module", "A", "module 'no_such_module' cannot be imported: no module named 'no_such_module'"),
        ("", "A", "module '' cannot be imported: ValueError"),
    ],
)
def test_load_class_without_the_class_has_a_hint(module, name, message):
    with pytest.raises(ClassNotFound) as caught:
        load_class(module, name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [("import missing", "no module named 'missing'"), ("1 / 0", "ZeroDivisionError"), ("exit(0)", "SystemExit: 0")],
)
def test_load_class_of_a_failing_module_has_its_error(folder, source, message):
    (folder / "failing_module.py").write_text(source)
    with pytest.raises(ClassNotFound, match=f"module 'failing_module' cannot be imported: {message}") as caught:
        load_class("failing_module", "A", (str(folder),))
    assert caught.value.__cause__ is not None


def test_good_job_has_no_errors_and_known_methods(tmp_path):
    inspection = inspect_job(toy_job(tmp_path))
    assert (inspection.errors, inspection.single_process_refusals) == ((), ())
    assert {"add", "who", "close"} <= set(inspection.methods["ACTOR"])
    assert not any(name.startswith("_") for name in inspection.methods["ACTOR"])


NO_CLASS = f"module '{TOYS}' has no class 'Addder'; did you mean 'Adder'?"


@pytest.mark.parametrize(
    ("terms", "errors"),
    [
        (
            {"trainer": "Picky", "actor": "Addder", "members": 4, "steps": 0},
            {"config.steps": "is below 1", "workload.actor.num": "4 is more than 3", "workload.actor.class": NO_CLASS},
        ),
        ({"trainer": "Adder"}, {"trainer.class": "Adder does not extend BaseTrainer"}),
        ({"actor": "Loop"}, {"workload.actor.class": "Loop does not extend BaseWorkload"}),
        ({"trainer": "NoFit"}, {"trainer.class": "NoFit does not define fit"}),
        ({"trainer": "Picky", "broken": True}, {"trainer": "check_config raised RuntimeError: the check itself broke"}),
        ({"trainer": "Planned", "steps": 0}, {"config.steps": "is 0, says the plan of Planned"}),
    ],
    ids=["several", "no trainer", "no workload", "no fit", "failed check", "plan"],
)
def test_inspect_job_finds_every_error(tmp_path, terms, errors):
    job = toy_job(tmp_path, **terms)
    assert inspect_job(job).errors == tuple(ConfigError(*error) for error in errors.items())


def test_inspect_job_takes_the_config_of_a_plan(tmp_path):
    inspection = inspect_job(toy_job(tmp_path, "Planned", steps=1))
    assert (inspection.errors, inspection.about) == ((), ("1 step",))
    assert dict(inspection.config) == {"steps": 1, "unit": 7}


def test_roles_with_collectives_recover_together(tmp_path):
    job = toy_job(tmp_path, actor="Collective")
    for inspection in (inspect_job(job), inspect_in_child(replace(job, search_path=(TESTS,)))):
        assert (inspection.errors, inspection.collectives) == ((), ("ACTOR",))
        scopes = inspection.scope_of("ACTOR"), inspection.scope_of("REWARD")
        assert scopes == (RecoveryScope.GROUP, RecoveryScope.MEMBER)
        (refusal,) = inspection.single_process_refusals
        assert refusal.where == "workload.actor.num"
        assert "2 workers of Collective use collectives, which need one process per worker" in refusal.what


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos._exit(7)\n", "importing its classes ended with code 7: no output"),
        pytest.param("while True:\n    pass\n", "importing its classes took longer than 2 s", marks=pytest.mark.slow),
    ],
)
def test_inspect_in_child_with_a_dead_or_hung_child_is_an_error(folder, source, message):
    (folder / "failing_module.py").write_text(source)
    job = toy_job(folder)
    job = replace(job, search_path=(TESTS, str(folder)), trainer=replace(job.trainer, module="failing_module"))
    deadline = {"deadline_s": 2.0} if "longer" in message else {}
    assert inspect_in_child(job, **deadline).errors == (ConfigError("job", message),)


JOB = """
trainer: {module: trainers, class: T}
workload: {actor: {module: parts.actors, class: A}}
config:
  reward: {function: {rewards:short: 1.0}}
  list: ["rewards:long", "no:thing:more", 3]
"""
FILES = {
    "trainers.py": "import json, helpers.texts\n",
    "helpers/__init__.py": "",
    "helpers/texts.py": "from . import numbers_of\nfrom .marks import MARK\n",
    "helpers/numbers_of.py": "",
    "helpers/marks.py": "MARK = 1\n",
    "parts/actors.py": "import trainers\n",
    "rewards.py": "def short(): ...\n",
    "unused.py": "",
}


@pytest.fixture
def job(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return replace(load_job_text(JOB, "job"), work_dir=str(tmp_path))


def test_digest_leaves_out_values_that_cannot_be_read(job):
    config = OmegaConf.create({"function": "rewards:short", "name": "???", "list": ["${nowhere}"]})
    assert "rewards" in digest_code(replace(job, config=config))["modules"]


@pytest.mark.parametrize(
    ("file", "text", "changes"),
    [
        ("rewards.py", "def short(): return 1\n", "rewards"),
        ("helpers/marks.py", "MARK = 2\n", "helpers.marks"),
        (
            "trainers.py",
            "import unused\n",
            "helpers, helpers.marks, helpers.numbers_of, helpers.texts, trainers, unused",
        ),
        ("trainers.py", "this is no Python", "helpers, helpers.marks, helpers.numbers_of, helpers.texts, trainers"),
        ("unused.py", "print()\n", ""),
        ("rewards.py", "from . import nothing\nimport torch\n", "rewards"),  # the first cannot be imported either
    ],
)
def test_changes_name_the_modules(job, tmp_path, file, text, changes):
    before = digest_code(job)
    (tmp_path / file).write_text(text)
    assert describe_changes(before, digest_code(job)) == changes


def test_changes_name_versions_and_ignore_earlier_formats():
    before, now = {"torch": "2.1", "vllm": "1"}, {"torch": "2.2", "numpy": "2"}
    versions = [{"modules": {}, "versions": each} for each in (before, now)]
    assert describe_changes(*versions) == "numpy none -> 2, torch 2.1 -> 2.2, vllm 1 -> none"
    assert describe_changes({}, versions[1]) == ""
