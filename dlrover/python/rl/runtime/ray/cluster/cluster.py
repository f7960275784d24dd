# SPDX-License-Identifier: Apache-2.0
"""Connecting to a running Ray cluster, or starting one; its orderly end, including everything that it has started.

::

    SIGTERM --> SystemExit in the main thread --> actors end --> ray.shutdown() --> remaining children of the raylet die

Ray's own handler would kill the cluster first, while others still wait for its answers.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_logging, services, worker
from ray._private.accelerators import get_accelerator_manager_for_resource

from dlrover.python.rl.common.errors import ClusterUnavailable, ConfigError, InvalidJob
from dlrover.python.rl.common.log import inert
from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.runtime.interrupts import sigterm_unwinds
from dlrover.python.rl.runtime.member.loading import restore_environment
from dlrover.python.rl.runtime.ray.cluster.head import (
    GcsKeeper,
    has_durable_gcs,
    listens_on_loopback_only,
    on_loopback,
    private_folder,
    settings,
    use_token,
    without_spare_processes,
)
from dlrover.python.rl.runtime.ray.cluster.health import risk_of_open_ray

_LOG = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_LOOPBACK = "127.0.0.1"
_REACH_S = 10.0
_LOOK_S = 0.1
RAYS_ERRORS = (ray.exceptions.RayError, ConnectionError, TimeoutError)
"""What calls raise when the connection to Ray is lost."""
_START_ERRORS = (*RAYS_ERRORS, RuntimeError, ValueError)

# What Ray sets in the environment of a process that connects, for itself and for what it starts.
_TOUCHED = ("PYTHONBREAKPOINT", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")


@contextlib.contextmanager
def ray_cluster(
    address: str | None,
    needed: Mapping[str, float],
    namespace: str = NAMESPACE,
    log_to_driver: bool = True,
    folder: Path | None = None,
    cpus: int | None = None,
) -> Iterator[None]:
    """Connect to Ray inside the block. A process that is connected already keeps its connection.

    Args:
        address: of a running cluster (``"auto"``, ``"host:port"``); None starts one on loopback, on this machine only,
            with enough logical resources for ``needed``, and ends it with the block. It survives the death of its GCS,
            finds a lost node within seconds, and leaves no files.
        needed: the job's resources (``cpu``, ``gpu``, custom ones).
        folder: an empty one for the files of a cluster that is started; by default one is made, and removed.
        cpus: the logical CPUs of a cluster that is started; by default two more than needed, and no fewer than cores.

    Raises:
        ClusterUnavailable: after several attempts, with Ray's error as the cause.
    """
    if ray.is_initialized():
        yield  # the caller's connection stays as it is
        return
    common: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    before = {name: os.environ.get(name) for name in _TOUCHED}
    try:
        with (
            _inert_output(),
            _joined(address, common) if address is not None else _started(needed, common, folder, cpus),
        ):
            # Ray sets it to its own debugger, in this process too.
            restore_environment({"PYTHONBREAKPOINT": before["PYTHONBREAKPOINT"]})
            yield
    finally:
        restore_environment(before)


@contextlib.contextmanager
def _inert_output() -> Iterator[None]:
    """Inside the block, what the cluster's processes print reaches this terminal as inert text: Ray gives each record
    to all handlers, and its own, which prints, is added when it connects."""

    def make_inert(record: dict[str, Any]) -> None:
        record["lines"] = [inert(line) for line in record["lines"]]

    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    dispatcher.add_handler("dlrover", make_inert)
    try:
        yield
    finally:
        dispatcher.remove_handler("dlrover")


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
        if risk := risk_of_open_ray():
            _LOG.warning("%s", risk)
        yield


@contextlib.contextmanager
def _started(
    needed: Mapping[str, float], common: Mapping[str, Any], given: Path | None, cpus: int | None
) -> Iterator[None]:
    gpus = get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators()
    if needed.get("gpu", 0.0) > gpus:
        what = f"the job needs {needed['gpu']:g} GPU{'s' * (needed['gpu'] > 1)}, this machine has {gpus}"
        advice = "write trainer.device_type=CPU, or name a cluster that has them (--address)"
        raise InvalidJob([ConfigError("trainer.device_type", f"{what}: {advice}")])
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    files = private_folder() if given is None else contextlib.nullcontext(given)
    with files as folder, on_loopback(), sigterm_unwinds() as take_sigterm_back:
        keeper = _start(folder, {**common, **_own(needed, cpus)})
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


def current_address() -> str:
    """Of the cluster that this process is connected to, ``host:port``."""
    return str(ray.get_runtime_context().gcs_address)


def other_addresses() -> list[str]:
    """Of the other clusters whose head runs on this machine."""
    return sorted(services.find_gcs_addresses() - {current_address()})


def lost_process(patience_s: float = 0.0) -> str:
    """The process of Ray that has died, of the cluster that this process has started; it gets ``patience_s`` seconds
    to do so. Empty if none has."""
    until_s = time.monotonic() + patience_s
    while True:
        node = worker._global_node
        processes = dict(node.all_processes) if node is not None else {}
        for name in ("raylet", "gcs_server"):
            if name in processes and processes[name][0].process.poll() is not None:
                return name
        if time.monotonic() >= until_s:
            return ""
        time.sleep(_LOOK_S)


def _start(folder: Path, common: Mapping[str, Any]) -> GcsKeeper | None:
    """Start a cluster; returns the keeper of its GCS if the GCS stores its tables on disk."""
    last: Exception | None = None
    for attempt in range(_START_ATTEMPTS):
        # The last attempt runs without the store, which is new in Ray.
        durable = has_durable_gcs() and attempt < _START_ATTEMPTS - 1
        files = folder / str(attempt)
        store = files / "gcs" if durable else None
        files.mkdir()
        try:
            with without_spare_processes():
                ray.init(**common, _temp_dir=str(files), _system_config=settings(store))
            return GcsKeeper(worker._global_node) if durable else None
        except Exception as error:  # noqa: BLE001 - Ray raises just that when a busy machine was too slow
            last = error
            _LOG.warning("Ray did not come up (attempt %d): %s", attempt + 1, error)
            ray.shutdown()
            time.sleep(0.5 * attempt)
    raise ClusterUnavailable(f"no Ray cluster on this machine: {last}") from last


def _own(needed: Mapping[str, float], cpus: int | None) -> dict[str, Any]:
    return {
        # Without it Ray joins any cluster that it finds on the machine.
        "address": "local",
        "num_cpus": cpus or max(int(needed.get("cpu", 0)) + 2, os.cpu_count() or 1),
        "include_dashboard": False,
        "_node_ip_address": _LOOPBACK,
        "resources": {name: amount for name, amount in needed.items() if name not in ("cpu", "gpu", "memory")},
    }


def _is_own(address: str) -> bool:
    """Return True if this package started the cluster, on this machine."""
    try:
        actual = services.get_ray_address_from_environment(address, None)
    except ConnectionError:
        return False  # no cluster, which Ray's own error reports
    host, _, port = actual.rpartition(":")
    return port.isdigit() and listens_on_loopback_only(host, int(port))


def _must_listen(address: str) -> None:
    """Raise at once if nothing listens at ``host:port``; Ray itself would try for minutes, with ``auto`` at the address
    that the last cluster of this machine has left, even if that was killed."""
    if address == "auto":
        try:
            address = services.get_ray_address_from_environment(address, None)
        except ConnectionError as error:
            what = "no Ray cluster runs on this machine (--address or RAY_ADDRESS names one elsewhere)"
            raise ClusterUnavailable(what) from error
        except ValueError as error:
            raise ClusterUnavailable(f"no Ray cluster: {error}") from error
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ClusterUnavailable(f"no Ray cluster at {address}: {error}") from error


_KILLED_S = 5.0


@contextlib.contextmanager
def children_end(parent: int, patience_s: float = 2.0) -> Iterator[None]:
    """After the block, which ends the process ``parent``, its children are dead too; they are killed ``patience_s``
    seconds after the block. Ray kills a raylet that does not end within a second, but not its agents."""
    with contextlib.ExitStack() as stack:
        children = []
        for pid in _children(parent):
            with contextlib.suppress(ProcessLookupError):
                children.append(os.pidfd_open(pid))
                stack.callback(os.close, children[-1])
        try:
            yield
        finally:
            deadline_s = time.monotonic() + patience_s
            for child in children:
                _end(child, deadline_s)


def _end(child: int, deadline_s: float) -> None:
    death = select.poll()
    death.register(child, select.POLLIN)
    if not death.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        death.poll(_KILLED_S * 1000)


def _children(parent: int) -> list[int]:
    children = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(process.name))
    return children
