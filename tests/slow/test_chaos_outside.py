# SPDX-License-Identifier: Apache-2.0
"""A part of ``make chaos-outside``: processes of a run are killed by a process that only knows the process table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("victims", [(), ("--rays-own",)], ids=["workers, trainer and master", "Ray's, too"])
def test_a_run_ends_in_its_bits_whatever_is_killed_from_its_first_second_on(tmp_path, victims):
    seed = "2-2" if victims else "1-1"
    command = [sys.executable, "-m", "tests.chaos.outside", "--seeds", seed, "--out", str(tmp_path), *victims]
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **threads}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "wrong: none" in done.stdout
