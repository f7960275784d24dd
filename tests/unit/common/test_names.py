# SPDX-License-Identifier: Apache-2.0
"""Names of roles, jobs, processes and extensions, of a script's code, and names that moved; hints at the nearest."""

import copy
import dataclasses
import importlib
import json
import pickle
import re
import threading
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.by_value import label_of, name_for
from dlrover.python.rl.common.errors import ClassNotFound
from dlrover.python.rl.common.extensions import ExtensionPoint, load_object
from dlrover.python.rl.common.names import (
    TRAINER_ID,
    WELL_KNOWN_ROLES,
    ProcessId,
    ProcessKind,
    RLRoleType,
    check_job_name,
    hint,
    master_name,
    member_name,
    nearest,
    nearest_path,
    resume_command,
    run_of,
    standby_name,
    trainer_name,
)
from tests.support.commands import run_python


def test_roles_of_the_guide_are_constants():
    assert [str(role) for role in WELL_KNOWN_ROLES] == ["ACTOR", "ROLLOUT", "REWARD", "REFERENCE", "CRITIC"]
    assert RLRoleType.ACTOR.name == RLRoleType.ACTOR.value == "ACTOR"
    assert repr(RLRoleType.CRITIC) == "RLRoleType.CRITIC"


@pytest.mark.parametrize("role", [*WELL_KNOWN_ROLES, RLRoleType("judge")])
def test_roles_stay_roles_when_copied_and_pickled(role):
    for back in (pickle.loads(pickle.dumps(role)), copy.deepcopy(role), RLRoleType(role)):
        assert back == role
        assert type(back) is RLRoleType


OF_NO_ROLE = ("", "2fast", "a-b", "a b", "_x", "é", "a.b", 3)
OF_NO_JOB = ("", "-a", "a-", "My-Job", "a_b", "a/b", "a" * 64, "a\n")


@pytest.mark.parametrize(
    ("check", "name", "rule"),
    [
        *((RLRoleType, name, "a role name: use letters") for name in OF_NO_ROLE),
        *((check_job_name, name, "a job name: use 1 to 63 of a-z") for name in OF_NO_JOB),
    ],
)
def test_name_against_its_rule_is_refused(check, name, rule):
    with pytest.raises(ValueError, match=f"is not {rule}"):
        check(name)
    assert RLRoleType("Judge_2") == "JUDGE_2" and check_job_name("a" * 63) == "a" * 63


def test_actor_names_carry_job_run_and_process_number():
    assert master_name("j") == "j/master"
    assert trainer_name("j", "1a2b", 2) == "j/1a2b/trainer/2"
    assert member_name("j", "1a2b", "ROLLOUT", 1, 3) == "j/1a2b/ROLLOUT-1/3"
    assert standby_name("j", "1a2b", "ROLLOUT", 1) == "j/1a2b/ROLLOUT-standby/1"
    assert run_of(member_name("j", "1a2b", "ROLLOUT", 1, 3)) == ("j", "1a2b")


def test_resume_command_is_quoted_for_a_shell():
    assert resume_command("runs/it's mine") == """dlrover-rl resume 'runs/it'"'"'s mine'"""
    assert resume_command(Path("runs/j-1")) == "dlrover-rl resume runs/j-1"


def test_nearest_path_compares_each_part():
    names = ["config.seed", "config.optimizer.lr", "config.steps"]
    near = {"config.optimiser.lr": names[1], "confg.stps": names[2], "config.nowhere": None, "config.optimizer": None}
    assert {path: nearest_path(path, names) for path in near} == near


def test_hint_is_the_nearest_name_or_all():
    assert nearest("GENERTE", ["generate", "update"]) == "generate"
    assert nearest("xyz", ["generate", "update"]) is nearest("", ["a"]) is None
    assert hint("pre_function", ["post_func", "pre_func", "timeout"]) == "; did you mean 'pre_func'?"
    assert hint("zzz", ["b", "a"]) == "; known: a, b"
    assert hint("zzz", []) == ""


def test_process_id_spelling_and_pool():
    ids = (ProcessId("ROLLOUT", 1), ProcessId.standby("ROLLOUT", 2), TRAINER_ID)
    assert [str(process_id) for process_id in ids] == ["ROLLOUT[1]", "ROLLOUT-standby[2]", "trainer"]
    assert [process_id.pool for process_id in ids] == ["ROLLOUT", "ROLLOUT-standby", "trainer"]


@given(st.from_regex(r"[A-Z][A-Z_0-9]{0,9}", fullmatch=True), st.integers(-1, 10_000), st.booleans())
def test_process_id_parse_reads_its_str(role, rank, standby):
    process_id = ProcessId(role, rank, ProcessKind.STANDBY if standby else ProcessKind.MEMBER)
    assert ProcessId.parse(str(process_id)) == process_id
    assert ProcessId.parse("trainer") is TRAINER_ID


@pytest.mark.parametrize("text", ["", "job", "ROLLOUT", "ROLLOUT-1", "ROLLOUT[x]", "ROLLOUT[1", "ROLLOUT[1]x", "[1]"])
def test_process_id_of_another_text_is_refused(text):
    with pytest.raises(ValueError, match="is not a process such as"):
        ProcessId.parse(text)


def test_process_ids_sort_by_role_and_rank():
    ids = [ProcessId("ACTOR", 3), ProcessId("ROLLOUT", 2), ProcessId("ROLLOUT", 10)]
    assert sorted(reversed(ids)) == ids


POINT = ExtensionPoint("parser", "dlrover_rl_test.parsers", {"json": "json:loads"})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that registers the parsers ``toml`` and ``json``, as pip would have installed it."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dlrover_rl_test.parsers]\ntoml = tomllib:loads\njson = pickle:loads\n")
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('oh')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_extension_is_built_in_installed_or_a_place(installed):
    loaded = [POINT.load(name) for name in ("json", "toml", "pickle:loads")]
    assert loaded == [json.loads, tomllib.loads, pickle.loads]
    assert sorted(POINT.places()) == ["json", "toml"]


def test_extension_place_is_found_without_importing_it(installed):
    assert POINT.place("raises_on_import:Thing") == "raises_on_import:Thing"


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
    (tmp_path / "script.py").write_text(SCALE_SCRIPT)
    done = run_python(tmp_path, "script.py", tmp_path / "in puts.1")
    kind, function, value = done.stdout.splitlines()
    scale = load_object(kind)
    assert scale(2)(1) == 2 * 5 * 3
    assert dataclasses.fields(scale)[0].default is dataclasses.MISSING
    assert load_object(function)(1) == 4
    assert load_object(value)(1) == 30
    names = (kind, function, value, "gsm8k", "a.b:C.d")
    assert [label_of(name) for name in names] == ["Scale", "lambda", "Scale", "gsm8k", "d"]


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


@pytest.mark.parametrize(("module", "name"), [("", "RliteTrainEngine"), (".nn", "HuggingFaceFsdp2TrainModule")])
def test_name_of_rlite_names_its_new_one(module, name):
    new_name = re.sub(".*Train", "Train", name)
    with pytest.raises((AttributeError, ImportError), match=f"use '{new_name}'"):
        getattr(importlib.import_module(f"dlrover.rl{module}"), name)
    with pytest.raises(ImportError, match=f"use '{new_name}'"):
        exec(f"from dlrover.rl{module} import {name}")


def test_unknown_name_gets_no_hint():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'$"):
        getattr(importlib.import_module("dlrover.rl"), "Nothing")  # noqa: B009 -- the type checker knows the names
