# SPDX-License-Identifier: Apache-2.0
"""A second environment of this Python, in which ``only_there`` can be imported, and this package cannot."""

import subprocess
import sys
import sysconfig


def make_environment(folder):
    """Return the path of the interpreter of a new environment in ``folder``, with the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    place = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # The files *.pth in the other folder, which have the path to this package, are not read.
    (folder / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "packages.pth").rename(f"{place}/packages.pth")
    with open(f"{place}/only_there.py", "w") as module:
        module.write("NUMBER = 41\n")
    return python
