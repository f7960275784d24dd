# SPDX-License-Identifier: Apache-2.0
"""The tests of confinement with bubblewrap, unpacked from Debian's package where it is not installed."""

import os
from pathlib import Path

import pytest

from tests.support.commands import debian_programs, run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1] / "unit" / "environment"


def test_programs_are_confined_by_bubblewrap(tmp_path):
    folder = debian_programs(tmp_path, "bubblewrap", "bwrap") or pytest.skip("neither bwrap nor apt-get is here")
    files = [TESTS / "test_code.py"]
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "DLROVER_RL_SANDBOX": "bubblewrap"}
    done = run_python(Path.cwd(), "-m", "pytest", *files, within_s=280, **env)
    assert "skipped" not in done.stdout
