# SPDX-License-Identifier: Apache-2.0
"""The tests of confinement with bubblewrap, unpacked from Debian's package where it is not installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1] / "unit" / "environment"


def test_programs_are_confined_by_bubblewrap(tmp_path):
    if not shutil.which("bwrap") and not shutil.which("apt-get"):
        pytest.skip("neither bwrap nor apt-get is here")
    if not shutil.which("bwrap"):
        subprocess.run(
            ["apt-get", "download", "bubblewrap"], cwd=tmp_path, check=True, capture_output=True, timeout=120
        )
        (package,) = tmp_path.glob("*.deb")
        subprocess.run(["dpkg", "-x", package, tmp_path / "root"], check=True, timeout=60)
    path = f"{tmp_path / 'root/usr/bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(TESTS / "test_code.py")],
        env={**os.environ, "PATH": path, "DLROVER_RL_SANDBOX": "bubblewrap"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout
