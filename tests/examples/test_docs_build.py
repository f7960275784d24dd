# SPDX-License-Identifier: Apache-2.0
"""The documentation builds without a warning, and has every key and every error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.common import errors

pytest.importorskip("sphinx")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages."""
    out = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "trees"), "-b", "html"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(out / "html")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_the_tables_of_keys_are_read_off_the_specifications(site):
    page = (site / "job-file.html").read_text(encoding="utf-8")
    for key in ("node_number", "device_per_node", "per_node", "resource", "workload_max_restart", "backoff_s"):
        assert f'<span class="pre">{key}</span>' in page


def test_the_contract_names_every_error_of_the_tree(site):
    page = (site / "contract.html").read_text(encoding="utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 18
    assert [kind.__name__ for kind in kinds if kind.__name__ not in page] == []
