# SPDX-License-Identifier: Apache-2.0
"""The environment of the core's image, without a container engine."""

import os
import re
import shutil
import sys
from pathlib import Path

from tests.support.commands import ROOT, run

DOCKERFILE = ROOT / "docker/Dockerfile"


def copy_context(folder):
    """Copy the files that the Dockerfile copies before it installs."""
    text = DOCKERFILE.read_text().partition("RUN docker/install.sh")[0]
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, target = line.split()
        for source in (path for pattern in sources for path in ROOT.glob(pattern)):
            place = folder / target / (source.name if target == "./" else "")
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, place)


def install_image(folder):
    """Install the core from its lock into ``folder / "rl"``, as the Dockerfile does, and return that folder."""
    copy_context(folder / "source")
    home = folder / "rl"
    run(folder / "source", "docker/install.sh", "core", home, within_s=1200, PYTHON=sys.executable, PYTHONPATH="")
    shutil.rmtree(folder / "source")  # the image has the installed package only
    return home


def image_environment(folder):
    """Return an environment of the image: DLROVER_RL_IMAGE_ENV, which a run of these tests has left, or a new one."""
    if home := os.environ.get("DLROVER_RL_IMAGE_ENV"):
        return Path(home)
    return install_image(folder)
