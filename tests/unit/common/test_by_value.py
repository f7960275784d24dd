# SPDX-License-Identifier: Apache-2.0
"""Code of a script in other processes."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlrover.python.rl.common.by_value import label_of, name_for
from dlrover.python.rl.common.errors import ClassNotFound
from dlrover.python.rl.common.extensions import load_object

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys
from dataclasses import dataclass
from pathlib import Path
from dlrover.python.rl.common.by_value import name_for

FACTOR = 3

@dataclass(frozen=True)
class Scale:
    first: int
    second: int = 5

    def __call__(self, number):
        return self.first * self.second * number * FACTOR

print(name_for(Scale, Path(sys.argv[1])))
print(name_for(lambda number: number + FACTOR, Path(sys.argv[1])))
print(name_for(Scale(2), Path(sys.argv[1])))
"""


def at_the_top():
    return "top"


def test_what_can_be_imported_is_named_as_it_is(tmp_path):
    assert name_for(at_the_top, tmp_path) == f"{__name__}:at_the_top"
    assert load_object(name_for(Path, tmp_path)) is Path
    assert list(tmp_path.iterdir()) == []


def test_a_scripts_code_is_loaded_elsewhere_with_what_it_refers_to(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "in puts.1"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert made.returncode == 0, made.stderr
    kind, function, value = made.stdout.splitlines()
    scale = load_object(kind)
    assert scale(2)(1) == 2 * 5 * 3
    assert dataclasses.fields(scale)[0].default is dataclasses.MISSING
    assert load_object(function)(1) == 4
    assert load_object(value)(1) == 30
    assert [label_of(name) for name in (kind, function, value)] == ["Scale", "lambda", "Scale"]


def test_the_same_code_is_one_file(tmp_path):
    def inner():
        return 1

    assert name_for(inner, tmp_path) == name_for(inner, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    next(tmp_path.iterdir()).unlink()
    with pytest.raises(ClassNotFound, match="inner"):
        load_object(name_for(at_the_top, tmp_path).replace("at_the_top", "inner"))


def test_what_cannot_be_sent_is_said(tmp_path):
    lock = threading.Lock()

    def locked():
        return lock

    with pytest.raises(TypeError, match="locked cannot be pickled: TypeError: cannot pickle '_thread.lock'"):
        name_for(locked, tmp_path)


@pytest.mark.parametrize(("name", "label"), [("gsm8k", "gsm8k"), ("a.b:C.d", "d"), ("a.b:judge", "judge")])
def test_a_label_is_the_last_part_of_a_name(name, label):
    assert label_of(name) == label
