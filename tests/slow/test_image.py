# SPDX-License-Identifier: Apache-2.0
"""Installs in a virtual environment what the image's build steps install: no container engine is needed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]


def copy_context(folder):
    """Return the files that the Dockerfile copies before it installs."""
    text = (ROOT / "docker/Dockerfile").read_text().partition("RUN docker/install.sh")[0]
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, target = line.split()
        for source in (path for pattern in sources for path in ROOT.glob(pattern)):
            place = folder / target / (source.name if target == "./" else "")
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, place)


def test_the_install_script_makes_an_environment_that_runs_the_demo(tmp_path):
    context, home = tmp_path / "source", tmp_path / "rl"
    copy_context(context)
    env = {**os.environ, "PYTHON": sys.executable}
    env.pop("PYTHONPATH", None)
    built = subprocess.run(
        ["docker/install.sh", "core", str(home)], cwd=context, env=env, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-4000:]
    shutil.rmtree(context)  # the image has the installed package only
    shutil.copytree(ROOT / "examples", tmp_path / "work/examples")
    done = subprocess.run(
        [str(home / "bin/python"), "examples/arithmetic/demo.py", "--seed", "0"],
        cwd=tmp_path / "work",
        env={**env, "PATH": f"{home / 'bin'}:{env['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "work/build/demo/grpo/summary.json").read_text())
    assert summary["eval/accuracy"] - summary["before/eval/accuracy"] >= 0.25
    init = subprocess.run([str(home / "bin/dlrover-rl"), "init", "first"], cwd=tmp_path, env=env, check=False)
    assert init.returncode == 0 and (tmp_path / "first/job.yaml").is_file()


@pytest.mark.parametrize("arguments", [[], ["core"], ["cuda", "folder"]])
def test_a_wrong_call_of_the_install_script_is_said(tmp_path, arguments):
    done = subprocess.run([str(ROOT / "docker/install.sh"), *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and ("usage" in done.stderr or "no backend 'cuda'" in done.stderr)
    assert list(tmp_path.iterdir()) == []
