# SPDX-License-Identifier: Apache-2.0
"""A private Ray cluster for a program that is a role (``ray: true``).

::

    Script --folder--> shield > warden > supervisor --resources of the worker, 127.0.0.1--> GCS, raylet
                                  |          '--RAY_ADDRESS--> the program --ray.init()--> its actors
                                  '--at the end of the supervisor or of Script: kills all of them, removes the folder

The cluster lives as long as the program: a restarted one begins with an empty cluster. If the raylet dies, the program
ends, and its role is restarted.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dlrover.python.rl.environment.sandbox.child_process import interpreter_command, stand_guard

_LOOK_S = 0.5


@contextmanager
def beside_ray(program: Sequence[str], resources: Mapping[str, float], namespace: str) -> Iterator[list[str]]:
    """Yield the command line that runs ``program`` in a cluster with ``resources``, which ends with the command."""
    from dlrover.python.rl.runtime.ray.cluster.cluster import private_folder  # imports Ray

    with private_folder() as folder:
        yield interpreter_command(run_beside_ray, str(folder), json.dumps(dict(resources)), namespace, *program)


def run_beside_ray(folder: str, resources: str, namespace: str, *program: str) -> None:
    stand_guard(folder=folder)
    from dlrover.python.rl.runtime.ray.cluster.cluster import current_address, lost_process, ray_cluster

    needed = json.loads(resources)
    files = Path(folder, "ray")
    files.mkdir()
    with ray_cluster(None, needed, namespace, log_to_driver=False, folder=files, cpus=int(needed["cpu"])):
        environment = {**os.environ, "RAY_ADDRESS": current_address(), "RAY_NAMESPACE": namespace}
        process = subprocess.Popen(program, env=environment)
        while (code := _wait(process)) is None:
            if lost_process() == "raylet":  # a lost GCS comes back
                sys.exit("the raylet of the program's Ray cluster has died")
    if code < 0:  # end by the same signal
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(abs(code))


def _wait(process: "subprocess.Popen[bytes]") -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_LOOK_S)
    return None
