# SPDX-License-Identifier: Apache-2.0
"""Other environments: of the engines and libraries that exclude each other, and one that a test makes."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.commands import ROOT


def engine_python(name):
    """Return the path of the interpreter of the environment ``.venv-NAME``, in the checkout or in the folder that
    ``DLROVER_RL_ENVIRONMENTS`` names."""
    return str(Path(os.environ.get("DLROVER_RL_ENVIRONMENTS", ROOT)) / f".venv-{name}/bin/python")


def needs_environments(*names):
    """Return a mark that skips a test unless the environments of these engines exist."""
    absent = [f".venv-{name}" for name in names if not Path(engine_python(name)).exists()]
    reason = f"make {' '.join(f'{name}/ready' for name in absent)} makes its environments"
    return pytest.mark.skipif(bool(absent), reason=reason)


def make_environment(folder):
    """Return the path of the interpreter of a new environment in ``folder``, with the packages of this one and a module
    ``only_there``, and without this package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    place = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # The files *.pth in the other folder, which have the path to this package, are not read.
    (folder / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "packages.pth").rename(f"{place}/packages.pth")
    with open(f"{place}/only_there.py", "w") as module:
        module.write("NUMBER = 41\n")
    return python
