# SPDX-License-Identifier: Apache-2.0
"""The child of a supervisor: it is connected to Ray, runs the master there, and passes on what it hears."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from dlrover.python.rl.common.errors import MasterLost
from dlrover.python.rl.common.log import configure_logging
from dlrover.python.rl.master.checked_job import CheckedJob
from dlrover.python.rl.master.ray_run import interrupted, run_on_cluster
from dlrover.python.rl.runtime.ray.cluster.cluster import RAYS_ERRORS, lost_process

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5
_RAYLET_S = 2.0
_GCS_S = 30.0  # it is started again
_LOST = 76

READY = "ready"
"""The first message: from here on Ctrl-C stops the job, and before it there is nothing to stop."""


@dataclass(frozen=True)
class Errand:
    """What to run where: on the cluster of ``address``, or on one that has its files in ``folder``; ``again``: an
    earlier child was lost."""

    checked: CheckedJob
    address: str | None
    folder: Path | None
    again: bool


def end_with(parent: int) -> None:
    """Let this process be killed when ``parent``, its parent, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _end_if_lost(tell: Callable[[Any], None]) -> None:
    """End this process if one of Ray has died for good: the supervisor starts another cluster."""
    limits_s, since_s = {"raylet": _RAYLET_S, "gcs_server": _GCS_S}, dict[str, float]()
    while True:
        time.sleep(_LOOK_S)
        lost = lost_process()
        since_s = {lost: since_s.get(lost, time.monotonic())} if lost else {}
        if lost and time.monotonic() - since_s[lost] > limits_s[lost]:
            tell(MasterLost(f"Ray's {lost} has died"))
            os._exit(_LOST)


def _run(errand: Errand, tell: Callable[[Any], None]) -> Any:
    try:
        tell(READY)
        return run_on_cluster(errand.checked, tell, tell, errand.address, folder=errand.folder, again=errand.again)
    except KeyboardInterrupt:
        return interrupted(errand.checked.job)
    except RAYS_ERRORS as error:
        return MasterLost(f"Ray was lost: {type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 -- the supervisor raises it
        return error


def main() -> None:
    end_with(int(sys.argv[1]))
    connection, one_by_one = Connection(int(sys.argv[2])), threading.Lock()
    os.set_inheritable(connection.fileno(), False)
    configure_logging()
    # waits: for the supervisor, with which this process ends
    sys.path[:], sys.argv[:] = connection.recv()  # Ray's workers get them from here
    errand: Errand = cloudpickle.loads(connection.recv_bytes())  # waits: likewise

    def tell(message: Any) -> None:
        with one_by_one:
            connection.send(message)

    threading.Thread(target=_end_if_lost, args=(tell,), name="dlrover-lost", daemon=True).start()
    tell(_run(errand, tell))


if __name__ == "__main__":
    main()
