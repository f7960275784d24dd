# SPDX-License-Identifier: Apache-2.0
"""The distribution without torch: what it has, what runs there, and what it says of the library."""

import ast
import shutil
import sys
import tomllib
import zipfile
from importlib import metadata

import pytest

from dlrover.python.rl import _LIBRARY
from dlrover.python.rl.runtime.member.inspection import CHECKS
from tests.import_rules import TENSOR_LIBRARIES, imports_of
from tests.support.commands import ROOT, run_python
from tests.test_repository import BUILD

CORE = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ELSEWHERE = "is part of dlrover-rl, and only dlrover-rl-core is installed"
OPTIONAL = {"huggingface_hub", "matplotlib", "pandas", "pydantic_core", "torch", "upath"}
"""Packages that come with a dependency, or that a module imports where they are installed."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder of the unpacked wheel, as ``pip`` builds it, but by the setuptools that is here."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "core", folder / "source/core", ignore=shutil.ignore_patterns("build"))
    shutil.copytree(ROOT / "dlrover", folder / "source/dlrover", ignore=shutil.ignore_patterns("__pycache__"))
    run_python(folder / "source/core", "-c", BUILD, folder / "out", PYTHONPATH="")
    (built,) = (folder / "out").glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def core(wheel, tmp_path):
    """A function that runs the command line of the core alone, and returns its output."""
    site = tmp_path / "site"
    shutil.copytree(wheel / "dlrover", site / "dlrover")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/hello.py").write_text(
        "from dlrover.rl import BaseTrainer, BaseWorkload\n"
        "class Adder(BaseWorkload):\n    def add(self, number):\n        return number + 1\n"
        "class Loop(BaseTrainer):\n    def init(self): pass\n"
        "    def fit(self): self.log(1, reward=self.RG_ACTOR.add(41)[0])\n"
    )
    (tmp_path / "jobs/hello.yaml").write_text(
        "trainer: {module: hello, class: Loop, device_type: CPU}\nworkload: {actor: {module: hello, class: Adder}}\n"
    )
    (tmp_path / "jobs/grpo.yaml").write_text("recipe: grpo\ntrainer: {device_type: CPU}\nconfig: {model: m, lrr: 1}\n")

    # The finder of an editable install would find the library.
    forget = "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if '__editable__' not in repr(each)]\n"
    (site / "sitecustomize.py").write_text(forget)

    def call(*command, **options):
        ran = run_python(tmp_path / "jobs", *command, PYTHONPATH=str(site), **options)
        return ran.stdout + ran.stderr

    return call


def test_wheel_has_the_layers_below_the_library_only(wheel):
    base = wheel / "dlrover/python/rl"
    modules = {path.relative_to(base).as_posix() for path in base.rglob("*.py")}
    repository = ROOT / "dlrover/python/rl"
    expected = {path.relative_to(repository).as_posix() for path in repository.rglob("*.py")}
    expected = {name for name in expected if name.partition("/")[0] not in (*_LIBRARY, "data")}
    assert modules == expected | {f"data/{name}.py" for name in ("__init__", "batch", "device_bytes", "state_tree")}
    assert (base / "page/static").is_dir() and (base / "cli/skeleton/local").is_dir()


def test_imports_of_the_core_are_its_dependencies(wheel):
    names = {item.partition(">")[0].lower().replace("-", "_") for item in CORE["dependencies"]}
    provided = {
        top
        for top, distributions in metadata.packages_distributions().items()
        if {each.lower().replace("-", "_") for each in distributions} & names
    }
    files = {path: ast.parse(path.read_text()) for path in (wheel / "dlrover/python").rglob("*.py")}
    tops = {item.top for tree in files.values() for item in imports_of(tree)}
    missing = tops - provided - set(sys.stdlib_module_names) - OPTIONAL - {"dlrover"}
    assert not missing
    loaders = {path.name for path, tree in files.items() if TENSOR_LIBRARIES & {item.top for item in imports_of(tree)}}
    assert loaders == {"device_bytes.py", "state_tree.py"}  # for states with tensors
    assert names <= {item.partition(">")[0].lower().replace("-", "_") for item in WHOLE["dependencies"]}
    assert CORE["version"] == WHOLE["version"]


def test_core_runs_a_job_of_plain_classes(core):
    assert "reward 42" in core("-m", "dlrover.python.rl.cli", "run", "hello.yaml", "--local")


def test_core_beside_torch_writes_and_reads_tensors(core):
    code = "import torch; from dlrover.python.rl.data import state_tree as s; print(s.load(*s.dump([torch.ones(2)])))"
    assert "[tensor([1., 1.])]" in core("-c", code)


def test_core_check_of_a_recipe_says_what_it_did_not_check(core):
    output = core("-m", "dlrover.python.rl.cli", "check", "grpo.yaml")
    assert "not checked here, since only dlrover-rl-core is installed: keys and values of the recipe's config" in output


def test_core_enqueue_of_a_recipe_says_what_it_did_not_check(core):
    output = core("-m", "dlrover.python.rl.cli", "enqueue", "grpo.yaml", "--server", "127.0.0.1:9", code=None)
    assert "not checked here, since only dlrover-rl-core is installed: keys" in output


def test_core_run_of_a_recipe_names_the_library(core):
    output = core("-m", "dlrover.python.rl.cli", "run", "grpo.yaml", code=2)
    assert f"trainer.class: 'dlrover.python.rl.recipe' {ELSEWHERE} here: install dlrover-rl instead" in output
    assert "Traceback" not in output


def test_page_has_the_table_of_checks():
    page = (ROOT / "docs/install.md").read_text()
    for check, (in_core, at_submission) in CHECKS.items():
        core, client = ("yes" if done else "" for done in (in_core, at_submission))
        assert f"| {check} | {core} | {client} | yes |".replace("  ", " ") in page.replace("  ", " ")


@pytest.mark.parametrize("name", ["train_grpo", "InferenceEngine", "EnvBase", "nn"])
def test_name_of_the_library_imported_from_the_core_names_it(core, name):
    assert ELSEWHERE in core("-c", f"from dlrover.rl import {name}", code=1)


def test_both_distributions_in_one_environment_are_an_error(wheel, tmp_path):
    for name in ("dlrover-rl", "dlrover-rl-core"):
        folder = tmp_path / f"{name.replace('-', '_')}-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    command = ("-m", "dlrover.python.rl.cli", "doctor")
    output = run_python(ROOT, *command, PYTHONPATH=str(tmp_path), code=1).stderr
    assert "dlrover-rl and dlrover-rl-core are both installed: uninstall both, and install one of them" in output
