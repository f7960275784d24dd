# SPDX-License-Identifier: Apache-2.0
"""Names of extensions: built in, installed, ``module:Attribute``, names of a script's code, and names that moved."""

import dataclasses
import importlib
import json
import pickle
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from dlrover.python.rl.common.by_value import label_of, name_for
from dlrover.python.rl.common.errors import ClassNotFound
from dlrover.python.rl.common.extensions import ExtensionPoint, load_object

POINT = ExtensionPoint("parser", "dlrover_rl_test.parsers", {"json": "json:loads"})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that registers the parsers ``toml`` and ``json``, as pip would have installed it."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dlrover_rl_test.parsers]\ntoml = tomllib:loads\njson = pickle:loads\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_extension_is_built_in_installed_or_a_place(installed):
    loaded = [POINT.load(name) for name in ("json", "toml", "pickle:loads")]
    assert loaded == [json.loads, tomllib.loads, pickle.loads]
    assert sorted(POINT.places()) == ["json", "toml"]


def test_extension_place_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert POINT.place("never_imported:Thing") == "never_imported:Thing"
    assert "never_imported" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jsn", "no parser is called 'jsn'; did you mean 'json'?; there are json, toml, or give 'package.module:Name'"),
        ("zzz", "no parser is called 'zzz'; there are json, toml"),
        ("json:lods", "module 'json' has no 'lods'; did you mean 'loads'?"),
        ("jsom:loads", "no module named 'jsom'; did you mean 'json'?"),
        ("raises_on_import:Thing", "'raises_on_import' cannot be imported: RuntimeError: oh"),
    ],
)
def test_unknown_extension_is_answered_with_the_nearest(name, message, installed):
    with pytest.raises(ClassNotFound) as caught:
        POINT.load(name)
    assert message in str(caught.value)
    with pytest.raises(ClassNotFound, match="'json' is not of the form 'package.module:Name'"):
        load_object("json")


def test_extension_place_of_earlier_versions_is_noted(caplog):
    point = ExtensionPoint("parser", "dlrover_rl_test.parsers", {"json": "json:loads"}, {"old.json:loads": "json"})
    assert point.place("old.json:loads") == "json:loads"
    assert "the parser 'old.json:loads' is now called 'json'" in caplog.text
    assert point.place("json") == "json:loads"


ROOT = Path(__file__).resolve().parents[3]

SCALE_SCRIPT = """
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


def test_name_for_importable_code_is_its_place(tmp_path):
    assert name_for(at_the_top, tmp_path) == f"{__name__}:at_the_top"
    assert load_object(name_for(Path, tmp_path)) is Path
    assert list(tmp_path.iterdir()) == []


def test_name_for_code_of_a_script_loads_its_globals(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "in puts.1"
    script.write_text(SCALE_SCRIPT)
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0, done.stderr
    kind, function, value = done.stdout.splitlines()
    scale = load_object(kind)
    assert scale(2)(1) == 2 * 5 * 3
    assert dataclasses.fields(scale)[0].default is dataclasses.MISSING
    assert load_object(function)(1) == 4
    assert load_object(value)(1) == 30
    assert [label_of(name) for name in (kind, function, value)] == ["Scale", "lambda", "Scale"]


def test_name_for_the_same_code_is_one_file(tmp_path):
    def inner():
        return 1

    assert name_for(inner, tmp_path) == name_for(inner, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    next(tmp_path.iterdir()).unlink()
    with pytest.raises(ClassNotFound, match="inner"):
        load_object(name_for(at_the_top, tmp_path).replace("at_the_top", "inner"))


def test_name_for_code_of_unpicklable_values_is_refused(tmp_path):
    lock = threading.Lock()

    def locked():
        return lock

    with pytest.raises(TypeError, match="locked cannot be pickled: TypeError: cannot pickle '_thread.lock'"):
        name_for(locked, tmp_path)


@pytest.mark.parametrize(("name", "label"), [("gsm8k", "gsm8k"), ("a.b:C.d", "d"), ("a.b:judge", "judge")])
def test_label_of_a_name_is_its_last_part(name, label):
    assert label_of(name) == label


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("driver.main", "dlrover-rl submit"),
        ("api.api", "from dlrover.rl import RLJobBuilder, RLJob"),
        ("common.enums", "from dlrover.rl import RLRoleType"),
        ("common.roles", "from dlrover.rl import RLRoleType"),
        ("trainer.example.openrlhf", "examples/openrlhf and examples/verl"),
        ("common.nowhere", "^No module named"),
    ],
)
def test_module_of_upstream_names_its_new_place(module, hint):
    with pytest.raises(ModuleNotFoundError, match=hint):
        importlib.import_module(f"dlrover.python.rl.{module}")


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        ("dlrover.rl", "RliteTrainEngine", "use 'TrainEngine'"),
        ("dlrover.rl", "RliteInferenceEngine", "use 'InferenceEngine'"),
        ("dlrover.rl.nn", "HuggingFaceFsdp2TrainModule", "use 'TrainModule'"),
        ("dlrover.rl", "Nothing", "Nothing"),
    ],
)
def test_name_of_rlite_names_its_new_one(module, name, hint):
    with pytest.raises((AttributeError, ImportError), match=hint):
        getattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match=hint):
        exec(f"from {module} import {name}")


def test_both_modules_of_the_guide_have_its_names():
    from dlrover.python.rl.trainer import trainer, workload

    assert trainer.BaseWorkload is workload.BaseWorkload
    assert trainer.trainer_invocation is workload.trainer_invocation
