# SPDX-License-Identifier: Apache-2.0
"""Interpreters of other environments, in which the workers of a role run (``workload.ROLE.python``).

::

    check, before the start --one process--> PATH: versions of Python and Ray, import of a worker's modules
          '--one more--> PATH: import of the role's classes, their check_config (inspection.py)
    start of a worker --Ray's py_executable--> PATH, which imports this package from ``beside``, and all else from its
                                               own environment
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec

_BESIDE = str(Path(__file__).parent / "beside")
_PROBE_S = 120.0  # the first import of Ray from a cold disk

# Any Python 3 can run it.
_PROBE = """
import json, sys
answer = {"python": "%d.%d" % sys.version_info[:2]}
try:
    import ray
    answer["ray"] = ray.__version__
    import dlrover.python.rl.runtime.ray.processes.member
except Exception as error:
    answer["error"] = "%s: %s" % (type(error).__name__, error)
print("\\n" + json.dumps(answer))
"""


def roles_by_interpreter(job: JobSpec) -> dict[str, list[RLRoleType]]:
    """Return the roles of each interpreter that is not the job's."""
    roles: dict[str, list[RLRoleType]] = {}
    for role, spec in job.workloads.items():
        if spec.python:
            roles.setdefault(spec.python, []).append(role)
    return roles


def interpreter_env(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with the package on the path of another interpreter, unchanged if ``python`` is empty."""
    if not python:
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (_BESIDE, env.get("PYTHONPATH"))))}


def refuse_interpreters(job: JobSpec, where: str) -> Iterable[ConfigError]:
    """Report the roles with an interpreter in a job whose roles share processes ``where``."""
    for roles in roles_by_interpreter(job).values():
        for role in roles:
            yield ConfigError(f"workload.{role.lower()}.python", f"needs separate processes, so not {where}: use Ray")


def find_fault(python: str) -> str:
    """Return why an interpreter cannot run workers, empty if it can."""
    if fault := _find_file_fault(Path(python)):
        return fault
    env = interpreter_env(python, {**os.environ, "PYTHONPATH": ""})
    options: dict[str, Any] = {"text": True, "errors": "replace", "capture_output": True, "check": False}
    try:
        ended = subprocess.run([python, "-c", _PROBE], timeout=_PROBE_S, env=env, **options)
    except subprocess.TimeoutExpired:
        return f"did not answer within {_PROBE_S:g} s"
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
        return _find_environment_fault(python, answer["python"], answer.get("ray", ""), answer.get("error", ""))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        lines = (ended.stderr or ended.stdout).strip().splitlines()
        return f"is no Python 3: exit code {ended.returncode}, {lines[-1] if lines else 'no output'}"


def _find_file_fault(path: Path) -> str:
    if path.is_dir():
        own = next((inner for inner in (path / "bin" / "python", path / "python") if inner.is_file()), None)
        return f"is a folder{f': did you mean {own}?' if own else ''}"
    if not path.exists():
        return "does not exist"
    return "" if os.access(path, os.X_OK) else "is not executable"


def _find_environment_fault(python: str, minor_version: str, ray: str, error: str) -> str:
    own_version, own_ray = "{}.{}".format(*sys.version_info), version("ray")
    if minor_version != own_version:
        return f"is Python {minor_version}, and the job's is {own_version}: both need the same minor version"
    if ray != own_ray:
        state = f"has Ray {ray}, and the job has {own_ray}" if ray else f"cannot import Ray ({error})"
        return f"{state}: {python} -m pip install ray=={own_ray}"
    return f"lacks what a worker imports ({error}): install what dlrover-rl-core requires there" if error else ""
