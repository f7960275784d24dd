# SPDX-License-Identifier: Apache-2.0
"""Sandboxes by name: each is a command line that runs a program elsewhere, in a container or on another machine.

A container has no network, a file system of its image that it cannot write, and limits; a remote service is a class of
the user, whose command line is a client of the service."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dlrover.python.rl.common.extensions import ExtensionPoint

if TYPE_CHECKING:
    from dlrover.python.rl.environment.sandbox.confinement import ProgramLimits

IMAGE_SETTING, IMAGE = "DLROVER_RL_SANDBOX_IMAGE", "python:3.11-slim"
"""Environment variable of the image with ``python3``, and its default. It is never pulled."""

_CONTAINER_PROCESSES = _CONTAINER_FILES = 64


class Sandbox(Protocol):
    """A place where programs of a model run."""

    def command(
        self, arguments: Sequence[str], folder: Path, shown: Sequence[Path], limits: "ProgramLimits"
    ) -> Sequence[str]:
        """Return a command line of this machine that runs Python with ``arguments`` and within ``limits``.

        It starts in an empty ``folder`` with the ``shown`` files at their paths, passes standard input, output and
        error on as they come, and has the program's exit code. When it is killed, the program ends, at the latest at
        its deadline."""


class Container:
    """A container of a program with Docker's command line."""

    program = "docker"

    def command(
        self, arguments: Sequence[str], folder: Path, shown: Sequence[Path], limits: "ProgramLimits"
    ) -> Sequence[str]:
        memory = f"{limits.memory_mb}m"
        return [
            *(self.program, "run", "--rm", "--interactive", "--pull", "never", "--log-driver", "none"),
            *("--network", "none", "--read-only"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"),
            *("--memory", memory, "--memory-swap", memory, "--cpus", "1", "--pids-limit", str(_CONTAINER_PROCESSES)),
            *("--ulimit", f"nofile={_CONTAINER_FILES}:{_CONTAINER_FILES}", "--ulimit", "core=0:0"),
            *("--tmpfs", f"{folder}:rw,size={limits.output_bytes},mode=1777", "--workdir", str(folder)),
            *(word for path in shown for word in ("--volume", f"{path}:{path}:ro")),
            *("--env", f"HOME={folder}", "--env", f"TMPDIR={folder}", "--env", "PYTHONHASHSEED=0"),
            os.environ.get(IMAGE_SETTING, IMAGE),
            *("timeout", "-s", "KILL", str(math.ceil(limits.timeout_s) + 1), "python3", *arguments),
        ]


class Podman(Container):
    program = "podman"


SANDBOXES = ExtensionPoint(
    "sandbox", "dlrover_rl.sandboxes", {"docker": f"{__name__}:Container", "podman": f"{__name__}:Podman"}, {}
)
