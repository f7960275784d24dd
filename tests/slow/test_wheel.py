# SPDX-License-Identifier: Apache-2.0
"""The wheel that users install."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.feature(149)
@pytest.mark.slow
def test_the_wheel_has_the_package_its_job_files_and_nothing_else(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"dlrover/python/rl/recipe/{name}.yaml" for name in ("sft", "rm", "dpo", "ppo", "grpo", "distill")}
    assert recipes | {"dlrover/rl/py.typed", "dlrover/python/rl/recipe/grpo.py"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"dlrover"}
