# SPDX-License-Identifier: Apache-2.0
"""Print ``requirements/core.lock``: what the core's image installs, at the versions of the constraints, with the hashes
of its wheels for Python 3.11 on Linux. ``python docker/lock.py > requirements/core.lock``, as ``make lock`` does.

Without torch, but with what it needs: its builds for CPUs and CUDA are different files of different indexes, and that
of CUDA brings packages of its own.
"""

import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = ("2_28", "2_27", "2_17", "2_5")

HEAD = """# What the image of the core installs, apart from torch; written by make lock.
"""


def main() -> None:
    versions: dict[str, str] = {}
    hashes = defaultdict[str, set[str]](set)
    for machine in MACHINES:
        for item in resolve(machine):
            name = item["metadata"]["name"].lower().replace("_", "-")
            version = item["metadata"]["version"]
            if versions.setdefault(name, version) != version:
                raise SystemExit(f"{name} is {version} on {machine} and {versions[name]} elsewhere")
            hashes[name].add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    entries = [
        " \\\n".join([f"{name}=={versions[name]}", *(f"    --hash=sha256:{each}" for each in sorted(hashes[name]))])
        for name in sorted(versions)
    ]
    sys.stdout.write(HEAD + "\n".join(entries) + "\n")


def resolve(machine: str) -> list[dict[str, object]]:
    """What pip would install, as its report lists it."""
    platforms = [f"--platform=manylinux_{glibc}_{machine}" for glibc in GLIBC]
    platforms += [f"--platform={name}_{machine}" for name in ("manylinux2014", "manylinux1", "linux")]
    target = [*platforms, "--python-version=3.11", "--only-binary=:all:", "--target=/nonexistent"]
    constraints = f"--constraint={ROOT / 'requirements/constraints.txt'}"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report=-"]
    done = subprocess.run(
        [*command, constraints, *target, *requirements()], stdout=subprocess.PIPE, check=True, timeout=1800
    )
    return json.loads(done.stdout)["install"]


def requirements() -> list[str]:
    """The core, its plots and dashboard without torch, and what the installed torch needs on every device."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["plot"], *extras["dashboard"]]
    own = [item for item in declared if not item.startswith("torch>")]
    torch = [item for item in metadata.requires("torch") or [] if ";" not in item]
    return [*own, *torch]


main()
