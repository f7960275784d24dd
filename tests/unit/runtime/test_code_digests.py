# SPDX-License-Identifier: Apache-2.0
"""Digests of the code that computes a job's steps, and the names of what has changed."""

from dataclasses import replace

import pytest

from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.checkpoint.code import describe_changes, digest_code

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
