# SPDX-License-Identifier: Apache-2.0
"""The layers of the package, a deadline on every wait, no code from data, and light imports."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.import_rules import HOMES, LAYER_OF, ROOT, faults, faults_of_tree, folder_cycle, imports_of
from tests.wait_rules import wait_faults, wait_faults_of_tree

REPOSITORY = Path(__file__).parent.parent


def test_package_keeps_the_rules_of_imports():
    violations = faults_of_tree(REPOSITORY / "dlrover")
    assert not violations, "\n" + "\n".join(violations)


def test_folders_have_no_cycle():
    assert folder_cycle(REPOSITORY / "dlrover") == []


def test_cycle_of_a_folder_and_its_sub_folder_is_seen(tmp_path):
    base = tmp_path / "python/rl"
    for name, source in {
        "data/rows.py": f"from {ROOT}.data.readers.jsonl import read\n",
        "data/readers/jsonl.py": f"def read():\n    from {ROOT}.data import rows\n",
    }.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(source)
    assert set(folder_cycle(tmp_path)) == {"data", "data/readers"}


def test_packages_are_those_of_the_layers():
    folders = {path.name for path in (REPOSITORY / "dlrover/python/rl").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(LAYER_OF)


def test_make_looks_for_every_test_on_ray():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (named,) = re.findall(r"^ON_RAY := (.*)$", makefile, re.MULTILINE)
    looked = tuple(str(REPOSITORY / name) for name in (*named.split(), "tests/slow", "tests/chaos", "tests/page"))
    files = (REPOSITORY / "tests").rglob("test_*.py")
    marked = [str(file) for file in files if re.search(r"mark\.ray\b", file.read_text(encoding="utf-8"))]
    assert [name for name in marked if not name.startswith(looked)] == []


# -- the checker itself: each rule can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "layer"), LAYER_OF.items())
def test_package_imports_lower_layers_only(package, layer):
    for other, other_layer in LAYER_OF.items():
        messages = faults(f"{package}/x.py", f"import {ROOT}.{other}.y\n")
        is_refused = any("not below" in message for message in messages)
        assert is_refused == (package != other and other_layer >= layer), other


@pytest.mark.parametrize(
    "source",
    [
        "import {0}.master.job\n",
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
def test_heavy_dependency_has_one_home(dependency, home):
    source = f"def lazy():\n    import {dependency}.something\n"
    assert faults(f"{home}/x.py", source) == []
    for package in LAYER_OF:
        if package != home.partition("/")[0]:
            assert any("may be imported in" in fault for fault in faults(f"{package}/x.py", source)), package


CONTROL = ("trainer", "control", "runtime", "master")
MODEL = ("environment", "algorithm", "engine")
CLOCKS = ("time", "threading", "asyncio", "os", "pathlib", "socket", "random", "datetime", "concurrent.futures")
TENSORS = ("torch", "transformers", "tokenizers")
REFUSED = [
    (("engine/rollout_torch",), "import vllm\n", "vllm may be imported in engine/vllm/ only"),
    *(((*CONTROL, "common", "config"), f"import {name}\n", f"may not import {name}") for name in TENSORS),
    *((CONTROL, f"import {ROOT}.{name}.y\n", "the control half") for name in MODEL),
    *((MODEL, f"import {ROOT}.{name}.y\n", "the model half") for name in CONTROL),
    (("trainer", "control", "master"), f"from {ROOT}.data.state_tree import dump\n", "the control half"),
    (("trainer", "runtime"), f"from {ROOT}.data.errors import load_prompts\n", "the control half"),
    (("control", "master"), f"from {ROOT}.data.batch import Batch\n", "the control half"),
    *((("control", "trainer"), f"import {name}\n", "knows no clock, thread or disk") for name in CLOCKS),
    *((("control",), f"def lazy():\n    from {name} import y\n", "knows no clock") for name in CLOCKS),
    (("trainer",), "from dlrover.rl import BaseTrainer\n", "front door"),
    (("trainer",), "import dlrover.rl\n", "front door"),
    (("trainer",), f"import {ROOT}.utils.y\n", "not a package"),
    (("utils",), "", "not a package"),
]
ALLOWED_IMPORTS = [
    (("engine/vllm",), "import vllm\n"),
    *((("data", *MODEL, "recipe", "session"), f"import {name}\n") for name in TENSORS),
    (("recipe", "session"), f"import {ROOT}.engine.base\nimport {ROOT}.trainer.trainer\n"),
    (("runtime",), f"from {ROOT}.data.state_tree import dump\n"),
    (("trainer", "runtime"), f"from {ROOT}.data.batch import Batch\n"),
    *((("runtime",), f"import {name}\n") for name in CLOCKS),
]


@pytest.mark.parametrize(("folders", "source", "message"), REFUSED)
def test_import_against_a_rule_is_refused(folders, source, message):
    for folder in folders:
        assert any(message in fault for fault in faults(f"{folder}/x.py", source)), folder


@pytest.mark.parametrize(("folders", "source"), ALLOWED_IMPORTS)
def test_import_within_the_rules_is_allowed(folders, source):
    assert [faults(f"{folder}/x.py", source) for folder in folders] == [[]] * len(folders)


def test_batch_module_imports_neither_data_nor_tensors():
    assert faults("data/batch.py", f"from {ROOT}.data.jsonl import scan_jsonl\n")
    assert faults("data/batch.py", "import torch\n")


def test_checker_reads_the_real_tree():
    base = REPOSITORY / "dlrover/python/rl"
    source = (base / "config/load.py").read_text()
    assert "omegaconf.OmegaConf" in {item.name for item in imports_of(ast.parse(source))}
    assert any("may be imported in" in fault for fault in faults("trainer/load.py", source))


# -- a deadline on every wait -----------------------------------------------------------------------------------------


def test_waits_of_the_package_have_a_deadline_or_a_reason():
    violations = wait_faults_of_tree(REPOSITORY / "dlrover/python/rl")
    assert not violations, "\n" + "\n".join(violations)


WITHOUT_DEADLINE = [
    "ray.get(ref)", "ray.get(ref, timeout=None)", "ray.wait([ref], num_returns=1)", "subprocess.run(['true'])",
    "process.wait()", "process.communicate()", "process.wait(timeout=None)", "thread.join()",
    "thread.join(timeout=None)", "future.result()", "queue.get()", "queue.get(True)", "queue.get(block=True)",
    "condition.wait_for(done)", "lock.acquire()", "lock.acquire(True)", "wait(futures)", "cf.wait(futures)",
    "connection.poll(None)", "connection.recv()", "socket.create_connection(address)",
    "fcntl.flock(file, fcntl.LOCK_EX)", "await asyncio.wait([task])", "await asyncio.wait_for(task, None)",
    "await event.wait()", "await queue.get()", "await actor.method.remote()", "x = actor.method.remote(); await x",
    "await asyncio.wait_for(task, None or timeout) and await event.wait()",
]  # fmt: skip


@pytest.mark.parametrize("wait", WITHOUT_DEADLINE)
def test_wait_without_a_deadline_needs_a_reason(wait):
    head = "import asyncio, ray\nfrom concurrent.futures import wait\nimport concurrent.futures as cf\n"
    source = f"{head}async def f():\n    {wait}\n"
    (fault,) = wait_faults("x.py", source)
    assert fault.startswith("x.py:5: ")
    assert wait_faults("x.py", source.replace(wait, f"{wait}  # waits: for the user")) == []
    assert wait_faults("x.py", source.replace(wait, f"# waits: for the user\n    {wait}")) == []
    assert wait_faults("x.py", source.replace(wait, f"{wait}  # waits:"))


WITH_DEADLINE = [
    "ray.get(ref, timeout=1.0)", "ray.wait([ref], timeout=0)", "subprocess.run(['true'], timeout=limit_s)",
    "process.wait(1.0)", "thread.join(timeout=1.0)", "', '.join(names)", "table.get(key)", "table.get('key', None)",
    "os.path.join(a, b)", "future.result(timeout=1.0)", "queue.get(timeout=1.0)", "queue.get(True, 1.0)",
    "queue.get(block=False)", "condition.wait_for(done, 1.0)", "lock.acquire(blocking=False)", "lock.acquire(False)",
    "lock.acquire(timeout=1.0)", "process.poll()", "connection.poll(1.0)",
    "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "await asyncio.wait([task], timeout=1.0)",
    "await asyncio.wait_for(event.wait(), 1.0)", "await asyncio.wait_for(actor.method.remote(), timeout=1.0)",
    "ready = news.wait_for(done); await asyncio.wait_for(ready, 1.0)",
    "async with asyncio.timeout(1.0): await actor.method.remote()", "await asyncio.sleep(1.0)",
    "ref = actor.method.remote()",
]  # fmt: skip


@pytest.mark.parametrize("call", WITH_DEADLINE)
def test_call_with_a_deadline_is_no_fault(call):
    assert wait_faults("x.py", f"import asyncio, ray\nasync def f():\n    {call}\n") == []


def test_reading_a_context_variable_is_no_wait():
    source = "from contextvars import ContextVar\na: ContextVar[int] = ContextVar('a')\na.get()\n"
    assert wait_faults("x.py", source) == []


def test_deadline_bounds_the_waits_inside_it_alone():
    source = "import asyncio\nasync def f():\n    await asyncio.wait_for(g(event.wait()), 1)\n    await event.wait()\n"
    (fault,) = wait_faults("x.py", source)
    assert fault.startswith("x.py:4: ")


# -- data that is no code, and secrets ---------------------------------------------------------------------------------

PACKAGE = REPOSITORY / "dlrover"


def test_code_from_data_is_banned_by_the_linter():
    """Ruff refuses it but at lines that say why."""
    rules = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    banned = rules["flake8-tidy-imports"]["banned-api"].keys()
    assert {"pickle.load", "pickle.loads", "cloudpickle.loads", "torch.load", "numpy.load", "yaml.load"} <= banned
    assert {"TID251", "S102", "S307", "S602", "S604", "S605", "RUF100"} <= {*rules["select"]}
    assert not [path for path in PACKAGE.rglob("*.py") if "trust_remote_code" in path.read_text(encoding="utf-8")]


EQUALITY = ast.Eq | ast.NotEq | ast.In | ast.NotIn


def test_tokens_are_compared_in_constant_time():
    """``==`` and ``in`` end at the first difference."""
    for path in sorted((PACKAGE / "python/rl").rglob("*.py")):
        if not {"service", "metrics.py", "torchrun"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and any(isinstance(op, EQUALITY) for op in node.ops):
                words = ast.unparse(node).lower()
                assert not re.search(r"secret|sha256|bearer|\b(token|digest)\b", words), (
                    f"{path}:{node.lineno}: {words}"
                )


# -- what importing loads ---------------------------------------------------------------------------------------------


def loaded_by(statement):
    """Top-level packages in a fresh interpreter after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*(name.partition('.')[0] for name in sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return set(output.stdout.split())


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
        ("import numpy as n, dlrover.python.rl.data.state_tree as s; s.load(*s.dump([n.ones(3), b'x']))", {"torch"}),
        ("import dlrover.python.rl.master.client.supervisor", {"torch", "grpc", "transformers"}),
        ("import dlrover.python.rl.recipe.grpo, dlrover.python.rl.recipe.workloads", {"ray", "transformers", "sympy"}),
    ],
)
def test_importing_stays_light(statement, absent):
    assert not loaded_by(statement) & absent


def test_front_door_gives_every_name_it_promises():
    import dlrover.rl as rl

    # RLFusion's trainers have other names inside, ClassicGRPOTrainer: the recipes have theirs.
    assert all(getattr(rl, name).__name__.rpartition(".")[2].removeprefix("Classic") == name for name in rl.__all__)
    assert set(rl.__all__) == {name for name in dir(rl) if not name.startswith("__")}
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = rl.Trainer
