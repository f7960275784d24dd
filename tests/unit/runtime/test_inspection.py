# SPDX-License-Identifier: Apache-2.0
"""Loading the user's classes, looking at them before a job starts, and digests of their code."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

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


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_class_is_loaded_by_name():
    assert load_class("tests.support.toy_jobs", "Adder") is toy_jobs.Adder


def test_a_class_is_found_in_the_search_path_nested_ones_too(folder):
    (folder / "my_models.py").write_text("class Outer:\n    class Inner:\n        pass\n")
    assert load_class("my_models", "Outer.Inner", (str(folder),)).__name__ == "Inner"


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (
            "tests.support.toy_jobs",
            "Addder",
            "module 'tests.support.toy_jobs' has no class 'Addder'; did you mean 'Adder'?",
        ),
        ("tests.support.toy_jobs", "adder", "did you mean 'Adder'?"),
        ("tests.support.toy_jobs", "Adder.Inner", "module 'tests.support.toy_jobs' has no class 'Adder.Inner'"),
        ("tests.support.toy_jobs", "NOT_A_CLASS", "'tests.support.toy_jobs.NOT_A_CLASS' is a int, not a class"),
        ("no_such_module", "A", "module 'no_such_module' cannot be imported: no module named 'no_such_module'"),
        ("toy_jobs.deeper", "A", "module 'toy_jobs.deeper' cannot be imported"),
        ("", "A", "module '' cannot be imported: ValueError"),
        (".relative", "A", "module '.relative' cannot be imported: TypeError"),
    ],
)
def test_what_is_missing_is_said(module, name, said):
    with pytest.raises(ClassNotFound) as caught:
        load_class(module, name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import not_installed", "no module named 'not_installed'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_a_module_that_fails_says_why(folder, source, said):
    (folder / "failing_module.py").write_text(source)
    with pytest.raises(ClassNotFound, match=f"module 'failing_module' cannot be imported: {said}") as caught:
        load_class("failing_module", "A", (str(folder),))
    assert caught.value.__cause__ is not None


# -- inspection -------------------------------------------------------------------------------------------------------


def test_a_good_job_has_no_problems_and_its_methods_are_known(tmp_path):
    found = inspect_job(toy_job(tmp_path))
    assert (found.errors, found.single_process_refusals) == ((), ())
    assert {"add", "who", "close"} <= set(found.methods["ACTOR"])
    assert not any(name.startswith("_") for name in found.methods["ACTOR"])


def test_every_problem_is_found_at_once(tmp_path):
    found = inspect_job(toy_job(tmp_path, "Picky", "Addder", members=4, steps=0))
    assert found.errors == (
        ConfigError("config.steps", "is below 1"),
        ConfigError("workload.actor.num", "4 is more than 3"),
        ConfigError(
            "workload.actor.class", "module 'tests.support.toy_jobs' has no class 'Addder'; did you mean 'Adder'?"
        ),
    )


@pytest.mark.parametrize(
    ("trainer", "actor", "problem"),
    [
        ("Adder", "Adder", ConfigError("trainer.class", "Adder does not extend BaseTrainer")),
        ("Loop", "Loop", ConfigError("workload.actor.class", "Loop does not extend BaseWorkload")),
        ("NoFit", "Adder", ConfigError("trainer.class", "NoFit does not define fit")),
    ],
)
def test_a_class_of_the_wrong_kind_is_a_problem(tmp_path, trainer, actor, problem):
    assert inspect_job(toy_job(tmp_path, trainer, actor)).errors == (problem,)


def test_trainer_that_names_a_plan_is_asked_through_it(tmp_path):
    found = inspect_job(toy_job(tmp_path, "Planned", steps=0))
    assert found.errors == (ConfigError("config.steps", "is 0, says the plan of Planned"),)
    found = inspect_job(toy_job(tmp_path, "Planned", steps=1))
    assert (found.errors, found.about) == ((), ("1 step",))
    assert dict(found.config) == {"steps": 1, "unit": 7}


def test_a_check_that_fails_is_a_problem_itself(tmp_path):
    (problem,) = inspect_job(toy_job(tmp_path, "Picky", broken=True)).errors
    assert problem == ConfigError("trainer", "check_config raised RuntimeError: the check itself broke")


def test_members_that_meet_in_collectives_cannot_share_a_process(tmp_path):
    found = inspect_job(toy_job(tmp_path, actor="Collective"))
    assert found.errors == ()
    (refusal,) = found.single_process_refusals
    assert refusal.where == "workload.actor.num"
    assert "2 workers of Collective meet in collectives, which one process cannot hold" in refusal.what


def test_roles_whose_ranks_meet_in_collectives_recover_together(tmp_path):
    job = toy_job(tmp_path, actor="Collective")
    for found in (inspect_job(job), inspect_in_child(replace(job, search_path=(TESTS,)))):
        assert found.collectives == ("ACTOR",)
        assert (found.scope_of("ACTOR"), found.scope_of("REWARD")) == (RecoveryScope.GROUP, RecoveryScope.MEMBER)


def test_a_child_finds_the_same_and_the_caller_imports_nothing(tmp_path):
    job = toy_job(tmp_path, "Picky", "Addder", members=4, steps=0)
    object.__setattr__(job, "search_path", (TESTS,))
    assert inspect_in_child(job) == inspect_job(job)


def test_a_child_that_dies_is_a_problem(folder):
    (folder / "dying_module.py").write_text("import os\nos._exit(7)\n")
    job = toy_job(folder)
    object.__setattr__(job, "search_path", (TESTS, str(folder)))
    object.__setattr__(job.trainer, "module", "dying_module")
    assert inspect_in_child(job).errors == (ConfigError("job", "importing its classes ended with code 7: no output"),)


@pytest.mark.slow
def test_a_child_that_takes_too_long_is_ended(folder):
    (folder / "endless_module.py").write_text("while True:\n    pass\n")
    job = toy_job(folder)
    object.__setattr__(job, "search_path", (TESTS, str(folder)))
    object.__setattr__(job.trainer, "module", "endless_module")
    (error,) = inspect_in_child(job, deadline_s=2.0).errors
    assert error == ConfigError("job", "importing its classes took longer than 2 s")


JOB = """
trainer: {module: trainers, class: T}
workload: {actor: {module: parts.actors, class: A}}
config: {reward: {function: {rewards:short: 1.0}}, list: ["rewards:long", "no:thing:more", 3]}
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


def test_digest_has_named_modules_and_what_they_import(job):
    digests = digest_code(job)
    imported = {"helpers", "helpers.texts", "helpers.numbers_of", "helpers.marks"}
    assert digests["modules"].keys() == {"trainers", "parts.actors", "rewards", *imported}
    assert digests["versions"]["torch"].startswith("2.")


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


def test_changes_name_versions_and_say_nothing_of_earlier_formats():
    before, now = {"torch": "2.1", "vllm": "1"}, {"torch": "2.2", "numpy": "2"}
    versions = [{"modules": {}, "versions": each} for each in (before, now)]
    assert describe_changes(*versions) == "numpy none -> 2, torch 2.1 -> 2.2, vllm 1 -> none"
    assert describe_changes({}, versions[1]) == ""
