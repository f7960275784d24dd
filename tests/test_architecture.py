"""The rooms of design.md: who may import whom, where heavy dependencies live, what stays light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from import_rules import HOMES, ROOT, ROW_OF, ROWS, faults, faults_of_tree, imports_of

REPOSITORY = Path(__file__).parent.parent


def test_the_whole_package_keeps_the_rules():
    found = faults_of_tree(REPOSITORY / "dlrover")
    assert not found, "\n" + "\n".join(found)


def test_every_room_exists_and_no_other_does():
    folders = {path.name for path in (REPOSITORY / "dlrover/python/rl").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(ROW_OF)


# -- the checker itself: each rule can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "row"), ROW_OF.items())
def test_a_room_imports_lower_rows_only(room, row):
    for other, other_row in ROW_OF.items():
        found = [fault for fault in faults(f"{room}/x.py", f"import {ROOT}.{other}.y\n") if "not below" in fault]
        assert bool(found) == (room != other and other_row >= row), (room, other)


def test_rooms_of_one_row_never_import_each_other():
    for row in ROWS:
        for room in row:
            for other in set(row) - {room}:
                assert faults(f"{room}/x.py", f"from {ROOT}.{other} import y\n")


@pytest.mark.parametrize(
    "source",
    [
        "import {0}.master.job\n",
        "from {0}.master import job\n",
        "from {0}.master.job import RLJob\n",
        "from {0} import master\n",
        "def lazy():\n    from {0}.master.job import RLJob\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {0}.master.job import RLJob\n",
        "import importlib\nimportlib.import_module('{0}.master.job')\n",
        "try:\n    import {0}.master.job as job\nexcept ImportError:\n    job = None\n",
        "class A:\n    def f(self):\n        __import__('{0}.master.job')\n",
    ],
)
def test_every_way_to_import_is_seen(source):
    (fault,) = faults("config/x.py", source.format(ROOT))
    assert "config may not import master" in fault
    assert fault.startswith("config/x.py:")


@pytest.mark.parametrize(("dependency", "home"), HOMES.items())
def test_a_heavy_dependency_is_at_home_in_one_place(dependency, home):
    source = f"def lazy():\n    import {dependency}.something\n"
    assert faults(f"{home}/x.py", source) == []
    for room in ROW_OF:
        if room != home.partition("/")[0]:
            assert any("at home in" in fault for fault in faults(f"{room}/x.py", source)), room


def test_an_engine_does_not_import_another_engines_library():
    assert faults("engine/torch/x.py", "import vllm\n")
    assert faults("engine/vllm/x.py", "import vllm\n") == []


@pytest.mark.parametrize("library", ["torch", "transformers", "tokenizers"])
def test_tensors_stay_in_the_model_half(library):
    for room in ("common", "config", "trainer", "control", "runtime", "master"):
        assert faults(f"{room}/x.py", f"import {library}\n"), room
    for room in ("data", "algorithm", "environment", "engine", "recipe", "session"):
        assert faults(f"{room}/x.py", f"import {library}\n") == [], room


def test_the_halves_meet_in_recipes_and_sessions_only():
    for room in ("trainer", "control", "runtime", "master"):
        for model in ("environment", "algorithm", "engine"):
            assert any("control half" in fault for fault in faults(f"{room}/x.py", f"import {ROOT}.{model}.y\n"))
            assert any("model half" in fault for fault in faults(f"{model}/x.py", f"import {ROOT}.{room}.y\n"))
    source = f"import {ROOT}.engine.base\nimport {ROOT}.trainer.trainer\n"
    assert faults("recipe/x.py", source) == faults("session/x.py", source) == []


def test_of_the_data_room_the_contract_and_the_runtimes_see_the_batch_alone():
    for room in ("trainer", "runtime"):
        assert faults(f"{room}/x.py", f"from {ROOT}.data.batch import Batch\n") == []
        assert faults(f"{room}/x.py", f"from {ROOT}.data.problems import load_prompts\n")
    assert faults("control/x.py", f"from {ROOT}.data.batch import Batch\n")
    assert faults("master/x.py", f"from {ROOT}.data.batch import Batch\n")
    assert faults("data/batch.py", f"from {ROOT}.data.jsonl import read_jsonl\n")
    assert faults("data/batch.py", "import torch\n")


@pytest.mark.parametrize(
    "module", ["time", "threading", "asyncio", "os", "pathlib", "socket", "random", "datetime", "concurrent.futures"]
)
def test_the_machine_and_the_contract_know_no_clock_thread_or_disk(module):
    for room in ("control", "trainer"):
        assert faults(f"{room}/x.py", f"import {module}\n")
        assert faults(f"{room}/x.py", f"def lazy():\n    from {module} import y\n")
    assert faults("runtime/x.py", f"import {module}\n") == []


def test_relative_imports_star_imports_and_the_front_door_are_refused():
    assert "relative import" in faults("trainer/x.py", "from . import shard\n")[0]
    assert "relative import" in faults("trainer/x.py", "from ..common import errors\n")[0]
    assert "star import" in faults("trainer/x.py", f"from {ROOT}.common.errors import *\n")[0]
    assert "front door" in faults("trainer/x.py", "from dlrover import BaseTrainer\n")[0]
    assert "front door" in faults("trainer/x.py", "import dlrover\n")[0]


def test_a_file_has_400_lines_at_most_and_the_message_names_it(tmp_path):
    assert faults("common/x.py", "x = 1\n" * 400) == []
    assert faults("common/x.py", "x = 1\n" * 401) == ["common/x.py: 401 lines, 400 at most"]
    (tmp_path / "outside.py").write_text("x = 1\n" * 401)
    assert faults_of_tree(tmp_path) == ["outside.py: 401 lines, 400 at most"]


def test_an_unknown_room_is_refused():
    assert "no room" in faults("utils/x.py", "")[0]
    assert "no room" in faults("trainer/x.py", f"import {ROOT}.utils.y\n")[0]


def test_the_checker_reads_the_real_tree():
    house = REPOSITORY / "dlrover/python/rl"
    source = (house / "config/load.py").read_text()
    assert "omegaconf.OmegaConf" in {item.name for item in imports_of(ast.parse(source))}
    assert any("at home" in fault for fault in faults("trainer/load.py", source))


# -- what importing loads ---------------------------------------------------------------------------------------------


def loaded_by(statement):
    """Top-level packages in a fresh interpreter after ``statement``."""
    code = (
        f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return set(json.loads(output.stdout))


HEAVY = {"torch", "ray", "grpc", "transformers"}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import dlrover; dir(dlrover)", HEAVY | {"omegaconf", "pydantic", "numpy"}),
        ("import dlrover.python.rl.config.load, dlrover.python.rl.config.builder", HEAVY),
        ("import dlrover.python.rl.control.machine, dlrover.python.rl.control.placement", HEAVY),
        ("from dlrover import BaseTrainer, BaseWorkload, RLRoleType, Replicate, Shard, trainer_invocation", HEAVY),
        ("import dlrover.python.rl.runtime.local.executor, dlrover.python.rl.runtime.inspection", HEAVY),
        ("import dlrover.python.rl.master.main", {"torch", "grpc", "transformers"}),
    ],
)
def test_importing_stays_light(statement, absent):
    assert not loaded_by(statement) & absent


def test_the_front_door_gives_every_name_it_promises():
    import dlrover

    assert all(getattr(dlrover, name).__name__ == name for name in dlrover.__all__)
    assert set(dlrover.__all__) <= set(dir(dlrover))
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = dlrover.Trainer
