# SPDX-License-Identifier: Apache-2.0
"""The core as users install it: in an environment without torch, and beside the requirements of other frameworks."""

import json
import shutil
import subprocess
import venv
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.slow.test_installs import JOB, TRAINER
from tests.support.commands import ROOT, Command, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MOST_BYTES = 480_000_000
CONSTRAINTS = ROOT / "requirements/constraints.txt"
PROGRAM = "trainer: {device_type: CPU}\nworkload: {eval: {command: [echo, hello]}}\n"


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the core is packed from, since pip builds inside the folder."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "core", folder / "core", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    shutil.copytree(ROOT / "dlrover", folder / "dlrover", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "core"


@pytest.fixture(scope="module")
def home(tmp_path_factory, source):
    """A virtual environment with the core alone."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder, with_pip=True)
    run(folder / "bin/pip", "install", "--quiet", "--constraint", CONSTRAINTS, source, cwd=folder)
    return folder


@pytest.fixture
def start(home, tmp_path):
    """A function that starts the core's command line in a folder with jobs."""
    (tmp_path / "hello.py").write_text(TRAINER)
    (tmp_path / "hello.yaml").write_text(JOB)
    (tmp_path / "program.yaml").write_text(PROGRAM)
    commands = []

    def begin(*line, **env):
        output = tmp_path / f"output-{len(commands)}.txt"
        env |= {"HOME": str(tmp_path), "PYTHONPATH": ""}  # without the checkout
        commands.append(Command([str(home / "bin/dlrover-rl"), *line], output, tmp_path, **env))
        return commands[-1]

    yield begin
    for command in commands:
        command.terminate()
        command.wait(60)


def test_core_is_small_and_has_neither_torch_nor_transformers(home):
    packages = {each["name"].lower() for each in json.loads(run(home / "bin/pip", "list", "--format=json", cwd=home))}
    assert "dlrover-rl-core" in packages and "ray" in packages
    assert not packages & {"torch", "transformers", "safetensors", "dlrover-rl"}
    files = [path for path in home.glob("lib/*/site-packages/**/*") if path.is_file() and not path.is_symlink()]
    assert 100e6 < sum(path.stat().st_size for path in files) <= MOST_BYTES


@pytest.mark.ray
def test_core_alone_checks_runs_serves_and_lists(start, tmp_path):
    start("check", "hello.yaml").end()
    assert "reward 42" in start("run", "hello.yaml").end(within_s=120)
    assert "is part of dlrover-rl" in start("run", "program.yaml").end(code=2)
    (tmp_path / "root").mkdir()
    start("serve", "--root", "root", "--cpus", "2", "--port", "0", "--metrics-port", "0")
    address = tmp_path / ".dlrover-rl/service/address"
    wait_for(address.exists, 100)
    server = address.read_text().strip()
    assert "hello: finished" in start("run", "hello.yaml", "--working-dir", ".", DLROVER_RL_SERVER=server).end(
        within_s=200
    )
    assert "finished" in start("list", DLROVER_RL_SERVER=server).end()


def requirements_of(package, folder, *without):
    """Return what a distribution of the package index requires, apart from its extras and some packages."""
    run("python3", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "unpacked", "zip")
    (info,) = (folder / "unpacked").glob("*.dist-info")
    lines = Distribution.at(info).requires or []
    return [line for line in lines if "extra ==" not in line and not line.startswith(without)]


@pytest.mark.parametrize("package", ["verl==0.9.1", "openrlhf==0.11.2"])
def test_core_installs_beside_another_framework(home, source, tmp_path, package):
    """All requirements resolve together, but for ``flash-attn``, whose build needs CUDA."""
    needed = requirements_of(package, tmp_path, "flash-attn")
    assert len(needed) > 5
    (tmp_path / "torch.txt").write_text("torch==2.13.0\n")
    options = ["--dry-run", "--ignore-installed", "--report", "report.json", "--constraint", "torch.txt"]
    run(home / "bin/pip", "install", *options, source, *needed, cwd=tmp_path)
    report = json.loads(Path(tmp_path / "report.json").read_text())
    resolved = {each["metadata"]["name"].lower().replace("_", "-") for each in report["install"]}
    assert {"dlrover-rl-core", "ray", "transformers", "torch"} <= resolved
