# SPDX-License-Identifier: Apache-2.0
"""The layers of the package: who may import whom, where heavy dependencies live, what stays light."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_rules import (
    HOMES,
    LAYER_OF,
    LAYERS,
    ROOT,
    faults,
    faults_of_tree,
    folder_cycle,
    imports_of,
)
from tests.wait_rules import wait_faults, wait_faults_of_tree

REPOSITORY = Path(__file__).parent.parent


def test_the_whole_package_keeps_the_rules():
    found = faults_of_tree(REPOSITORY / "dlrover")
    assert not found, "\n" + "\n".join(found)


def test_no_cycle_between_folders():
    assert folder_cycle(REPOSITORY / "dlrover") == []


def test_a_cycle_between_a_folder_and_its_sub_folder_is_found(tmp_path):
    base = tmp_path / "python/rl"
    for name, source in {
        "data/rows.py": f"from {ROOT}.data.readers.jsonl import read\n",
        "data/readers/jsonl.py": f"def read():\n    from {ROOT}.data import rows\n",
    }.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(source)
    assert set(folder_cycle(tmp_path)) == {"data", "data/readers"}


def test_every_package_exists_and_no_other_does():
    folders = {path.name for path in (REPOSITORY / "dlrover/python/rl").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(LAYER_OF)


ALL_SLOW = ("tests/slow", "tests/chaos")
"""Where those on Ray are."""


def test_make_looks_for_tests_on_ray_wherever_there_are_any():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (named,) = re.findall(r"^ON_RAY := (.*)$", makefile, re.MULTILINE)
    looked = tuple(str(REPOSITORY / name) for name in (*named.split(), *ALL_SLOW))
    files = (REPOSITORY / "tests").rglob("test_*.py")
    marked = [str(file) for file in files if re.search(r"mark\.ray\b", file.read_text(encoding="utf-8"))]
    assert [name for name in marked if not name.startswith(looked)] == []


# -- the checker itself: each rule can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "layer"), LAYER_OF.items())
def test_a_package_imports_lower_layers_only(package, layer):
    for other, other_layer in LAYER_OF.items():
        found = [fault for fault in faults(f"{package}/x.py", f"import {ROOT}.{other}.y\n") if "not below" in fault]
        assert bool(found) == (package != other and other_layer >= layer), (package, other)


def test_packages_of_one_layer_never_import_each_other():
    for layer in LAYERS:
        for package in layer:
            for other in set(layer) - {package}:
                assert faults(f"{package}/x.py", f"from {ROOT}.{other} import y\n")


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
    for package in LAYER_OF:
        if package != home.partition("/")[0]:
            assert any("may be imported in" in fault for fault in faults(f"{package}/x.py", source)), package


def test_an_engine_does_not_import_another_engines_library():
    assert faults("engine/rollout_torch/x.py", "import vllm\n")
    assert faults("engine/vllm/x.py", "import vllm\n") == []


@pytest.mark.parametrize("library", ["torch", "transformers", "tokenizers"])
def test_tensors_stay_in_the_model_half(library):
    for package in ("common", "config", "trainer", "control", "runtime", "master"):
        assert faults(f"{package}/x.py", f"import {library}\n"), package
    for package in ("data", "algorithm", "environment", "engine", "recipe", "session"):
        assert faults(f"{package}/x.py", f"import {library}\n") == [], package


def test_the_halves_meet_in_recipes_and_sessions_only():
    for package in ("trainer", "control", "runtime", "master"):
        for model in ("environment", "algorithm", "engine"):
            assert any("control half" in fault for fault in faults(f"{package}/x.py", f"import {ROOT}.{model}.y\n"))
            assert any("model half" in fault for fault in faults(f"{model}/x.py", f"import {ROOT}.{package}.y\n"))
    source = f"import {ROOT}.engine.base\nimport {ROOT}.trainer.trainer\n"
    assert faults("recipe/x.py", source) == faults("session/x.py", source) == []


def test_of_the_data_package_the_contract_sees_the_batch_alone_and_the_runtimes_how_state_is_written_too():
    assert faults("runtime/x.py", f"from {ROOT}.data.state_tree import dump\n") == []
    assert faults("trainer/x.py", f"from {ROOT}.data.state_tree import dump\n")
    for package in ("trainer", "runtime"):
        assert faults(f"{package}/x.py", f"from {ROOT}.data.batch import Batch\n") == []
        assert faults(f"{package}/x.py", f"from {ROOT}.data.errors import load_prompts\n")
    assert faults("control/x.py", f"from {ROOT}.data.batch import Batch\n")
    assert faults("master/x.py", f"from {ROOT}.data.batch import Batch\n")
    assert faults("data/batch.py", f"from {ROOT}.data.jsonl import scan_jsonl\n")
    assert faults("data/batch.py", "import torch\n")


@pytest.mark.parametrize(
    "module", ["time", "threading", "asyncio", "os", "pathlib", "socket", "random", "datetime", "concurrent.futures"]
)
def test_the_machine_and_the_contract_know_no_clock_thread_or_disk(module):
    for package in ("control", "trainer"):
        assert faults(f"{package}/x.py", f"import {module}\n")
        assert faults(f"{package}/x.py", f"def lazy():\n    from {module} import y\n")
    assert faults("runtime/x.py", f"import {module}\n") == []


def test_relative_imports_star_imports_and_the_front_door_are_refused():
    assert "relative import" in faults("trainer/x.py", "from . import shard\n")[0]
    assert "relative import" in faults("trainer/x.py", "from ..common import errors\n")[0]
    assert "star import" in faults("trainer/x.py", f"from {ROOT}.common.errors import *\n")[0]
    assert "front door" in faults("trainer/x.py", "from dlrover.rl import BaseTrainer\n")[0]
    assert "front door" in faults("trainer/x.py", "import dlrover.rl\n")[0]


def test_an_unknown_package_is_refused():
    assert "not a package" in faults("utils/x.py", "")[0]
    assert "not a package" in faults("trainer/x.py", f"import {ROOT}.utils.y\n")[0]


def test_the_checker_reads_the_real_tree():
    base = REPOSITORY / "dlrover/python/rl"
    source = (base / "config/load.py").read_text()
    assert "omegaconf.OmegaConf" in {item.name for item in imports_of(ast.parse(source))}
    assert any("may be imported in" in fault for fault in faults("trainer/load.py", source))


# -- a deadline on every wait -----------------------------------------------------------------------------------------


def test_every_wait_of_the_package_has_a_deadline_or_a_reason():
    found = wait_faults_of_tree(REPOSITORY / "dlrover/python/rl")
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "wait",
    [
        "ray.get(ref)",
        "ray.get(ref, timeout=None)",
        "ray.wait([ref], num_returns=1)",
        "subprocess.run(['true'])",
        "process.wait()",
        "process.communicate()",
        "process.wait(timeout=None)",
        "thread.join()",
        "thread.join(timeout=None)",
        "future.result()",
        "queue.get()",
        "queue.get(True)",
        "queue.get(block=True)",
        "condition.wait_for(done)",
        "lock.acquire()",
        "lock.acquire(True)",
        "wait(futures)",
        "cf.wait(futures)",
        "connection.poll(None)",
        "connection.recv()",
        "socket.create_connection(address)",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "await asyncio.wait([task])",
        "await asyncio.wait_for(task, None)",
        "await event.wait()",
        "await queue.get()",
        "await actor.method.remote()",
        "x = actor.method.remote(); await x",
        "await asyncio.wait_for(task, None or timeout) and await event.wait()",
    ],
)
def test_a_wait_without_a_deadline_is_a_fault_unless_it_gives_a_reason(wait):
    head = "import asyncio, ray\nfrom concurrent.futures import wait\nimport concurrent.futures as cf\n"
    source = f"{head}async def f():\n    {wait}\n"
    (fault,) = wait_faults("x.py", source)
    assert fault.startswith("x.py:5: ")
    assert wait_faults("x.py", source.replace(wait, f"{wait}  # waits: for the user")) == []
    assert wait_faults("x.py", source.replace(wait, f"# waits: for the user\n    {wait}")) == []
    assert wait_faults("x.py", source.replace(wait, f"{wait}  # waits:"))


@pytest.mark.parametrize(
    "call",
    [
        "ray.get(ref, timeout=1.0)",
        "ray.wait([ref], timeout=0)",
        "subprocess.run(['true'], timeout=limit_s)",
        "process.wait(1.0)",
        "thread.join(timeout=1.0)",
        "', '.join(names)",
        "table.get(key)",
        "table.get('key', None)",
        "os.path.join(a, b)",
        "future.result(timeout=1.0)",
        "queue.get(timeout=1.0)",
        "queue.get(True, 1.0)",
        "queue.get(block=False)",
        "condition.wait_for(done, 1.0)",
        "lock.acquire(blocking=False)",
        "lock.acquire(False)",
        "lock.acquire(timeout=1.0)",
        "process.poll()",
        "connection.poll(1.0)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "await asyncio.wait([task], timeout=1.0)",
        "await asyncio.wait_for(event.wait(), 1.0)",
        "await asyncio.wait_for(actor.method.remote(), timeout=1.0)",
        "ready = news.wait_for(done); await asyncio.wait_for(ready, 1.0)",
        "async with asyncio.timeout(1.0): await actor.method.remote()",
        "await asyncio.sleep(1.0)",
        "ref = actor.method.remote()",
    ],
)
def test_what_has_a_deadline_or_is_no_wait_is_none(call):
    assert wait_faults("x.py", f"import asyncio, ray\nasync def f():\n    {call}\n") == []


def test_reading_a_context_variable_is_no_wait():
    assert (
        wait_faults("x.py", "from contextvars import ContextVar\na: ContextVar[int] = ContextVar('a')\na.get()\n") == []
    )


def test_a_wait_inside_one_with_a_deadline_is_bounded_by_it_and_the_next_is_not():
    source = "import asyncio\nasync def f():\n    await asyncio.wait_for(g(event.wait()), 1)\n    await event.wait()\n"
    (fault,) = wait_faults("x.py", source)
    assert fault.startswith("x.py:4: ")


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
        ("import dlrover.rl as rl; dir(rl)", HEAVY | {"omegaconf", "pydantic", "numpy"}),
        ("import dlrover.python.rl.config.load, dlrover.python.rl.config.builder", HEAVY),
        ("import dlrover.python.rl.control.machine, dlrover.python.rl.control.placement", HEAVY),
        ("from dlrover.rl import BaseTrainer, BaseWorkload, RLRoleType, Replicate, Shard, trainer_invocation", HEAVY),
        ("import dlrover.python.rl.runtime.local, dlrover.python.rl.runtime.member.inspection", HEAVY),
        ("import dlrover.python.rl.cli.commands", HEAVY),
        ("import dlrover.python.rl.master.client.supervisor", {"torch", "grpc", "transformers"}),
        ("import dlrover.python.rl.recipe.grpo, dlrover.python.rl.recipe.workloads", {"ray", "transformers", "sympy"}),
    ],
)
def test_importing_stays_light(statement, absent):
    assert not loaded_by(statement) & absent


def test_the_front_door_gives_every_name_it_promises():
    import dlrover.rl as rl

    # RLFusion's trainers have other names inside, ClassicGRPOTrainer: the recipes have theirs.
    assert all(getattr(rl, name).__name__.rpartition(".")[2].removeprefix("Classic") == name for name in rl.__all__)
    assert set(rl.__all__) == {name for name in dir(rl) if not name.startswith("__")}
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = rl.Trainer
