# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the start of a cluster, the life of its head, and the end of both.
"""Connecting to a running Ray cluster, or starting and ending one with everything that it has started.

::

    SIGTERM --> SystemExit in the main thread --> actors end --> ray.shutdown() --> remaining children of the raylet die
    GCS dies --keeper notices within 0.1 s--> restarted: same port, same store --> actors, groups and KV are back

Ray's own handler would kill the cluster while others still wait for its answers. By default Ray's GCS (the process that
knows all actors, groups and nodes) keeps its tables in memory, and the cluster ends with it; newer wheels can store
them on disk. While it is away, calls between actors continue; name lookups and starts wait.
"""

import contextlib
import fcntl
import functools
import logging
import mmap
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, ray_logging, services, worker
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.node import Node

from dlrover.python.rl.common.errors import ClusterUnavailable, ConfigError, InvalidJob
from dlrover.python.rl.common.log import get_logger, inert
from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.runtime.interrupts import sigterm_unwinds
from dlrover.python.rl.runtime.member.loading import restore_environment
from dlrover.python.rl.runtime.ray.cluster.health import risk_of_open_ray

_LOG = get_logger(__name__)

_START_ATTEMPTS = 3
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0
_KILLED_S = 5.0
_LOOK_S = 0.1
RAYS_ERRORS = (ray.exceptions.RayError, ConnectionError, TimeoutError)  # calls raise them without a connection to Ray
_START_ERRORS = (*RAYS_ERRORS, RuntimeError, ValueError)

# Variables that Ray sets in the environment of a process that connects.
_TOUCHED = ("PYTHONBREAKPOINT", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 700,
    "health_check_failure_threshold": 3,
}
"""Ray detects a stopped or unreachable node within 4.5 s (default: a minute), even while every core is busy."""

_PATIENCE = {
    # A worker or raylet that cannot reach the GCS for this long ends itself (60 s by default).
    "gcs_rpc_server_reconnect_timeout_s": 600,
    # The same for one that starts while the GCS is away (5 s by default).
    "gcs_rpc_server_connect_timeout_s": 30,
}

_SPARE = ("start_monitor", "start_api_server")  # methods of Ray's node, which some versions lack
_GCS = "gcs_server"  # its name among the processes of a node
_FOLDER_PREFIX = "dlrover-ray-"
_LONGEST_BASE = 14  # Ray creates unix sockets, whose paths have at most 107 characters, deep below
_STALE_AFTER_S = 60.0
_ENABLE_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # for systems where Ray stays on loopback by default


@contextlib.contextmanager
def ray_cluster(
    address: str | None,
    needed: Mapping[str, float],
    namespace: str = NAMESPACE,
    log_to_driver: bool = True,
    folder: Path | None = None,
    cpus: int | None = None,
) -> Iterator[None]:
    """Connect to Ray inside the block. A connected process keeps its connection. Raises ClusterUnavailable.

    Args:
        address: of a running cluster (``"auto"``, ``"host:port"``); None starts one on this machine's loopback, and
            ends it with the block. It survives the death of its GCS, finds a lost node within seconds, and leaves no
            files.
        needed: the job's resources (``cpu``, ``gpu``, custom ones), which a new cluster has.
        folder: an empty folder for the files of a new cluster; by default a temporary one.
        cpus: the logical CPUs of a new cluster; by default two more than needed, at least the number of cores.
    """
    if ray.is_initialized():
        yield  # the caller's connection stays
        return
    common: dict[str, Any] = dict(namespace=namespace, log_to_driver=log_to_driver, configure_logging=True)
    common["logging_level"] = logging.ERROR
    before = {name: os.environ.get(name) for name in _TOUCHED}
    try:
        with (
            _inert_output(),
            _joined(address, common) if address is not None else _started(needed, common, folder, cpus),
        ):
            # Ray sets it to its own debugger, also in this process.
            restore_environment({"PYTHONBREAKPOINT": before["PYTHONBREAKPOINT"]})
            yield
    finally:
        restore_environment(before)


@contextlib.contextmanager
def _inert_output() -> Iterator[None]:
    """Make the cluster's output inert before Ray's own handler, which is added when it connects, prints it."""
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    dispatcher.add_handler("dlrover", lambda record: record.update(lines=[inert(line) for line in record["lines"]]))
    try:
        yield
    finally:
        dispatcher.remove_handler("dlrover")


@contextlib.contextmanager
def _joined(address: str, common: Mapping[str, Any]) -> Iterator[None]:
    gcs = _reach_gcs(address)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        if gcs is not None and listens_on_loopback_only(*gcs):  # this package started it, on this machine
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
    needed: Mapping[str, float], common: Mapping[str, Any], place: Path | None, cpus: int | None
) -> Iterator[None]:
    gpus = get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators()
    if needed.get("gpu", 0.0) > gpus:
        lack = f"the job needs {needed['gpu']:g} GPU{'s' * (needed['gpu'] > 1)}, this machine has {gpus}"
        advice = "write trainer.device_type=CPU, or name a cluster that has them (--address)"
        raise InvalidJob([ConfigError("trainer.device_type", f"{lack}: {advice}")])
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    files = private_folder() if place is None else contextlib.nullcontext(place)
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
    """Return the address of the connected cluster, ``host:port``."""
    return str(ray.get_runtime_context().gcs_address)


def other_addresses() -> list[str]:
    """Return the addresses of the other clusters whose head runs on this machine."""
    return sorted(services.find_gcs_addresses() - {current_address()})


def lost_process(patience_s: float = 0.0) -> str:
    """Return the Ray process of this cluster that has died, or dies within ``patience_s`` seconds; else empty."""
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


def _start(folder: Path, common: Mapping[str, Any]) -> "GcsKeeper | None":
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
        except Exception as error:  # noqa: BLE001 - Ray raises a plain Exception when a busy machine was too slow
            last = error
            _LOG.warning("Ray did not start (attempt %d): %s", attempt + 1, error)
            ray.shutdown()
            time.sleep(0.5 * attempt)
    raise ClusterUnavailable(f"no Ray cluster on this machine: {last}") from last


def _own(needed: Mapping[str, float], cpus: int | None) -> dict[str, Any]:
    return {
        "address": "local",  # else Ray joins any cluster that it finds on the machine
        "num_cpus": cpus or max(int(needed.get("cpu", 0)) + 2, os.cpu_count() or 1),
        "include_dashboard": False,
        "_node_ip_address": _LOOPBACK,
        "resources": {name: amount for name, amount in needed.items() if name not in ("cpu", "gpu", "memory")},
    }


def _reach_gcs(address: str) -> tuple[str, int] | None:
    """Return the host and port of a cluster's GCS; None for an address that only Ray understands. Raises at once if
    nothing listens there, where Ray would try for minutes, with ``auto`` even the address of a killed cluster."""
    if address == "auto":
        try:
            address = services.get_ray_address_from_environment(address, None)
        except ConnectionError as error:
            message = "no Ray cluster runs on this machine (--address or RAY_ADDRESS names one elsewhere)"
            raise ClusterUnavailable(message) from error
        except ValueError as error:
            raise ClusterUnavailable(f"no Ray cluster: {error}") from error
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return None
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ClusterUnavailable(f"no Ray cluster at {address}: {error}") from error
    return None if address.startswith("ray://") else (host, int(port))


@contextlib.contextmanager
def children_end(parent: int, patience_s: float = 2.0) -> Iterator[None]:
    """Kill the children of the process ``parent``, which the block ends, ``patience_s`` seconds after the block. Ray
    kills a raylet that does not end within a second, but not its agents."""
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


def settings(store: Path | None) -> dict[str, Any]:
    """Return Ray's system settings; ``store`` is an empty folder for the tables of the GCS, None for memory."""
    durable = {"gcs_storage": "rocksdb", "gcs_storage_path": str(store)} if store is not None else {}
    return HEALTH | _PATIENCE | durable


@functools.cache
def has_durable_gcs() -> bool:
    """Return True if the GCS of this Ray can store its tables on disk."""
    try:
        with (
            Path(services.GCS_SERVER_EXECUTABLE).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as program,
        ):
            return program.find(b"RocksDbStoreClient") >= 0
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Let Ray listen on 127.0.0.1 only, where on Linux it would replace the address and listen on every interface."""
    attribute = ray_constants.ENABLE_RAY_CLUSTER
    variable = os.environ.get(_ENABLE_CLUSTER)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[_ENABLE_CLUSTER] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = attribute
        restore_environment({_ENABLE_CLUSTER: variable})


@contextlib.contextmanager
def without_spare_processes() -> Iterator[None]:
    """Let Ray start a head node without its autoscaler and dashboard, which take seconds of processor time."""
    with contextlib.ExitStack() as stack:
        for name in _SPARE:
            if (start := getattr(Node, name, None)) is not None:
                setattr(Node, name, lambda *_, **__: None)
                stack.callback(setattr, Node, name, start)
        yield


def use_token() -> None:
    """Authenticate with this user's token, which Ray itself does only for ``auto``."""
    with contextlib.suppress(ImportError):  # a Ray without tokens
        from ray._private.authentication import authentication_token_setup

        # Each command would log that there is a token.
        logging.getLogger(authentication_token_setup.__name__).setLevel(logging.ERROR)
        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def listens_on_loopback_only(host: str, port: int) -> bool:
    """Return True if a GCS listens :func:`on_loopback` of this machine."""
    if host not in ("127.0.0.1", "localhost"):
        return False
    try:
        socket.create_connection((services.get_node_ip_address(), port), timeout=_CONNECT_S).close()
    except OSError:
        return True
    return False


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder for this user only, with a path short enough for Ray. Removes it at the end, and at the start the
    folders of killed processes, which hold no locks on them."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > _LONGEST_BASE and Path("/tmp").is_dir():
        base = Path("/tmp")
    _remove_stale(base)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=base))
    try:
        with (folder / "owner").open("w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        _remove(folder)


def _remove_stale(base: Path) -> None:
    for folder in base.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / "owner").open("r+") as owner:
            # A new folder may not be locked yet.
            if time.time() - folder.stat().st_mtime > _STALE_AFTER_S:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)


def _remove(folder: Path) -> None:
    # Processes that end late may still write a last log line.
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    _LOG.warning("could not remove %s", folder)


class GcsKeeper:
    """Restarts the GCS of a head node in a thread.

    Linux ends a child with the thread that started it, so the thread must outlive the GCS: call :meth:`rest`, end the
    cluster, then call :meth:`close`. It stops after ``most_in_a_row`` restarts within ``quiet_s`` seconds of each
    other. ``node`` is Ray's object of the head node of this process.
    """

    def __init__(self, node: Any, most_in_a_row: int = 5, quiet_s: float = 5.0) -> None:
        self.restarts = 0
        self._node, self._most, self._quiet_s = node, most_in_a_row, quiet_s
        self._resting, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="gcs-keeper", daemon=True)
        self._thread.start()

    def rest(self) -> None:
        self._resting.set()

    def close(self) -> None:
        """End the thread, and with it a GCS that it started."""
        self.rest()
        self._closed.set()
        self._thread.join(timeout=30.0)

    def _keep(self) -> None:
        in_a_row, last_s = 0, float("-inf")
        while not self._closed.wait(timeout=_LOOK_S):
            dead = None if self._resting.is_set() else self._remove_dead()
            if dead is None:
                continue
            in_a_row = in_a_row + 1 if time.monotonic() - last_s < self._quiet_s else 1
            if in_a_row > self._most:
                _LOG.error("the GCS of Ray died %d times in a row: not started again", in_a_row)
                self.rest()
            else:
                last_s = time.monotonic()
                try:
                    self._node.start_gcs_server()  # with the port and the store of the first
                    self.restarts += 1
                except (OSError, RuntimeError, AssertionError) as error:
                    _LOG.error("the GCS of Ray could not be started again: %s", error)
            with self._node.removal_lock:  # the table shows a GCS that is lost, or that will be restarted
                self._node.all_processes.setdefault(_GCS, dead)

    def _remove_dead(self) -> Any:
        """Return the GCS, removed from the node's table, if it has died by itself; else None."""
        with self._node.removal_lock:  # Ray holds it while it ends the GCS on purpose
            processes = self._node.all_processes.get(_GCS)
            if not processes or processes[0].process.poll() is None:
                return None
            _LOG.warning("the GCS of Ray has died (exit code %s): restarting it", processes[0].process.returncode)
            del self._node.all_processes[_GCS]
            self._node._gcs_address = None
            self._node._gcs_client = None
            return processes
