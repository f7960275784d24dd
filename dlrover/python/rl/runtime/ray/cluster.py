"""A Ray cluster to run on: one that is started here and ended again, or one that is there already."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray

from dlrover.python.rl.common.errors import ClusterUnavailable
from dlrover.python.rl.common.names import NAMESPACE

_LOG = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_LOOPBACK = "127.0.0.1"
_REACH_S = 10.0


@contextlib.contextmanager
def ray_cluster(
    address: str | None, needed: Mapping[str, float], namespace: str = NAMESPACE, log_to_driver: bool = True
) -> Iterator[None]:
    """Be connected to Ray inside the block.

    Args:
        address: of a running cluster (``"auto"``, ``"host:port"``); None starts one on loopback, on this machine only,
            with enough logical resources for ``needed``, and ends it with the block.
        needed: the job's resources (``cpu``, ``gpu``, custom ones).
        namespace: of the actors made inside.
        log_to_driver: print what the processes print.

    Raises:
        ClusterUnavailable: after some attempts, with Ray's own error as the cause.

    A process that is connected to Ray already stays connected as it is, whatever ``address`` says.
    """
    if ray.is_initialized():
        yield  # somebody else's connection: used, and left as it is
        return
    try:
        _connect(address, needed, namespace, log_to_driver)
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None, needed: Mapping[str, float], namespace: str, log_to_driver: bool) -> None:
    common: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    if address is None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        common |= {
            # Without it Ray joins any cluster that it finds on the machine.
            "address": "local",
            "num_cpus": max(int(needed.get("cpu", 0)) + 2, os.cpu_count() or 1),
            "include_dashboard": False,
            "_node_ip_address": _LOOPBACK,
            "resources": {name: amount for name, amount in needed.items() if name not in ("cpu", "gpu", "memory")},
        }
    else:
        _must_listen(address)
        common["address"] = address
    debugger = os.environ.get("PYTHONBREAKPOINT")
    last: BaseException | None = None
    for attempt in range(1 if address else _START_ATTEMPTS):
        try:
            ray.init(**common)
            _restore("PYTHONBREAKPOINT", debugger)  # Ray points it, in this process too, at a debugger of its own
            return
        except (RuntimeError, ConnectionError, TimeoutError, ray.exceptions.RayError, ValueError) as error:
            last = error
            _LOG.warning("Ray did not come up (attempt %d): %s", attempt + 1, error)
            ray.shutdown()
            time.sleep(0.5 * attempt)
    where = f"at {address}" if address else "on this machine"
    raise ClusterUnavailable(f"no Ray cluster {where}: {last}") from last


def _restore(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def _must_listen(address: str) -> None:
    """Refuse ``host:port`` at once when nothing listens there; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ClusterUnavailable(f"no Ray cluster at {address}: {error}") from error
