# SPDX-License-Identifier: Apache-2.0
"""The wheel installs beside upstream ``dlrover`` from the package index, which owns ``dlrover/__init__.py``; and the
build steps of the image install what its demo needs, for which no container engine is needed."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.image import install_image

UPSTREAM = "dlrover==0.6.1"
UPSTREAM_NEEDS = ("psutil", "nvidia-ml-py", "pynvml", "deprecated", "wrapt")
TRAINER = """
from dlrover.rl import BaseTrainer, BaseWorkload

class Adder(BaseWorkload):
    def add(self, number):
        return number + 1

class Loop(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        self.log(1, reward=self.RG_ACTOR.add(41)[0])
"""
JOB = """
trainer: {module: hello, class: Loop, device_type: CPU, device_per_node: 1}
workload: {actor: {module: hello, class: Adder}}
"""
RUN_OURS = ("-c", "from dlrover.python.rl.master.main import main; main()", *("run", "hello.yaml", "--local"))
RUN_UPSTREAM = ("-c", "from dlrover.trainer.torch.elastic_run import parse_args; print(parse_args(['script.py']))")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*command, cwd, succeeds=True, env=None):
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert (ran.returncode == 0) is succeeds, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Folder with our wheel, upstream's, and what upstream needs at run time."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT), cwd=folder)
    run(*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), UPSTREAM, *UPSTREAM_NEEDS, cwd=folder)
    return folder


class Environment:
    """A virtual environment that takes the dependencies, and nothing of ours, from the one that runs the tests."""

    def __init__(self, folder, wheels):
        venv.create(folder, with_pip=True)
        self.folder, self.wheels, self.python = folder, wheels, str(folder / "bin/python")
        where = run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
        site = Path(where.strip())
        # A plain path in a .pth file: the .pth files behind it, an editable install's among them, are not read.
        (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        (folder / "hello.py").write_text(TRAINER)
        (folder / "hello.yaml").write_text(JOB)
        self.pip("install", *UPSTREAM_NEEDS)

    def pip(self, command, *packages):
        local = ("--ignore-installed", "--no-index", "--no-deps", "--find-links", str(self.wheels))
        options = local if command == "install" else ("--yes",)
        run(self.python, "-m", "pip", command, "--quiet", *options, *packages, cwd=self.folder)

    def runs(self, command, succeeds=True):
        return run(self.python, *command, cwd=self.folder, succeeds=succeeds)


@pytest.fixture
def environment(tmp_path, wheels):
    return Environment(tmp_path / "env", wheels)


@pytest.mark.parametrize("order", [("dlrover-rl", UPSTREAM), (UPSTREAM, "dlrover-rl")], ids=["ours first", "ours last"])
def test_wheel_runs_beside_upstream_and_without_it(environment, order):
    for package in order:
        environment.pip("install", package)
    assert "reward 42" in environment.runs(RUN_OURS)
    assert "script.py" in environment.runs(RUN_UPSTREAM)
    environment.pip("uninstall", "dlrover")
    assert "reward 42" in environment.runs(RUN_OURS)
    environment.runs(RUN_UPSTREAM, succeeds=False)
    environment.pip("install", UPSTREAM)
    environment.pip("uninstall", "dlrover-rl")
    assert "script.py" in environment.runs(RUN_UPSTREAM)
    assert "reward 42" not in environment.runs(RUN_OURS, succeeds=False)


@pytest.mark.ray
def test_install_script_makes_an_environment_for_the_demo(tmp_path):
    home = install_image(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "work/examples")
    demo = (str(home / "bin/python"), "examples/arithmetic/demo.py", "--seed", "0")
    env = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    run(*demo, cwd=tmp_path / "work", env=env)
    summary = json.loads((tmp_path / "work/build/demo/grpo/summary.json").read_text())
    assert summary["eval/accuracy"] - summary["before/eval/accuracy"] >= 0.25
    run(str(home / "bin/dlrover-rl"), "init", "first", cwd=tmp_path, env=env)
    assert (tmp_path / "first/job.yaml").is_file()


@pytest.mark.parametrize("arguments", [[], ["core"], ["cuda", "folder"]])
def test_install_script_called_wrongly_is_refused(tmp_path, arguments):
    output = run(str(ROOT / "docker/install.sh"), *arguments, cwd=tmp_path, succeeds=False)
    assert "usage" in output or "no backend 'cuda'" in output
    assert list(tmp_path.iterdir()) == []
