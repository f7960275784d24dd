"""A Ray cluster to run on: one that is started here and ended again, or one that is there already."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import services, worker

from dlrover.python.rl.common.errors import ClusterUnavailable
from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.runtime.ray.ending import children_end, sigterm_unwinds
from dlrover.python.rl.runtime.ray.head import (
    GcsKeeper,
    has_durable_gcs,
    listens_on_loopback_only,
    on_loopback,
    private_folder,
    restore_environment,
    settings,
    use_token,
)

_LOG = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_LOOPBACK = "127.0.0.1"
_REACH_S = 10.0
_START_ERRORS = (RuntimeError, ConnectionError, TimeoutError, ray.exceptions.RayError, ValueError)

# What Ray sets in the environment of a process that connects, for itself and for what it starts.
_TOUCHED = ("PYTHONBREAKPOINT", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")


@contextlib.contextmanager
def ray_cluster(
    address: str | None, needed: Mapping[str, float], namespace: str = NAMESPACE, log_to_driver: bool = True
) -> Iterator[None]:
    """Be connected to Ray inside the block.

    Args:
        address: of a running cluster (``"auto"``, ``"host:port"``); None starts one on loopback, on this machine only,
            with enough logical resources for ``needed``, and ends it with the block. It survives the death of its GCS,
            finds a lost node within seconds, and leaves no files.
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
    common: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    before = {name: os.environ.get(name) for name in _TOUCHED}
    try:
        with _joined(address, common) if address is not None else _started(needed, common):
            # Ray points it, in this process too, at a debugger of its own.
            restore_environment({"PYTHONBREAKPOINT": before["PYTHONBREAKPOINT"]})
            yield
    finally:
        restore_environment(before)


@contextlib.contextmanager
def _joined(address: str, common: Mapping[str, Any]) -> Iterator[None]:
    _must_listen(address)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        if _is_own(address):
            stack.enter_context(on_loopback())
            use_token()
        try:
            ray.init(address=address, **common)
        except _START_ERRORS as error:
            raise ClusterUnavailable(f"no Ray cluster at {address}: {error}") from error
        yield


@contextlib.contextmanager
def _started(needed: Mapping[str, float], common: Mapping[str, Any]) -> Iterator[None]:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with private_folder() as folder, on_loopback(), sigterm_unwinds() as take_sigterm_back:
        keeper = _start(folder, needed, common)
        take_sigterm_back()
        raylet = worker._global_node.all_processes["raylet"][0].process.pid
        try:
            yield
        finally:
            if keeper is not None:
                keeper.rest()
            with children_end(raylet):
                ray.shutdown()
            if keeper is not None:
                keeper.close()


def _start(folder: Path, needed: Mapping[str, float], common: Mapping[str, Any]) -> GcsKeeper | None:
    """Start a cluster; the keeper of its GCS where that has a store to come back with."""
    last: Exception | None = None
    for attempt in range(_START_ATTEMPTS):
        # The last attempt does without the store: it is young in Ray.
        durable = has_durable_gcs() and attempt < _START_ATTEMPTS - 1
        files = folder / str(attempt)
        store = files / "gcs" if durable else None
        files.mkdir()
        try:
            ray.init(**common, **_own(needed), _temp_dir=str(files), _system_config=settings(store))
            return GcsKeeper(worker._global_node) if durable else None
        except Exception as error:  # noqa: BLE001 - Ray raises just that when a busy machine was too slow
            last = error
            _LOG.warning("Ray did not come up (attempt %d): %s", attempt + 1, error)
            ray.shutdown()
            time.sleep(0.5 * attempt)
    raise ClusterUnavailable(f"no Ray cluster on this machine: {last}") from last


def _own(needed: Mapping[str, float]) -> dict[str, Any]:
    return {
        # Without it Ray joins any cluster that it finds on the machine.
        "address": "local",
        "num_cpus": max(int(needed.get("cpu", 0)) + 2, os.cpu_count() or 1),
        "include_dashboard": False,
        "_node_ip_address": _LOOPBACK,
        "resources": {name: amount for name, amount in needed.items() if name not in ("cpu", "gpu", "memory")},
    }


def _is_own(address: str) -> bool:
    """Whether the cluster is one that this system started on this machine."""
    try:
        found = services.get_ray_address_from_environment(address, None)
    except ConnectionError:
        return False  # none at all, which Ray itself says best
    host, _, port = found.rpartition(":")
    return port.isdigit() and listens_on_loopback_only(host, int(port))


def _must_listen(address: str) -> None:
    """Refuse ``host:port`` at once when nothing listens there; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ClusterUnavailable(f"no Ray cluster at {address}: {error}") from error
