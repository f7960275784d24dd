# SPDX-License-Identifier: Apache-2.0
"""What our own cluster needs beyond Ray's defaults: settings, a private folder, and a GCS that is restarted.

::

    GCS dies --keeper notices within 0.1 s--> restarted: same port, same store --> actors, groups and KV are back
       '-- meanwhile calls between actors go on; name lookups and starts wait

By default Ray's GCS (the process that knows all actors, groups and nodes) keeps its tables in memory: the cluster ends
with it. Newer wheels can store them on disk.
"""

import contextlib
import fcntl
import functools
import logging
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services
from ray._private.node import Node

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.runtime.member.loading import restore_environment

_LOG = get_logger(__name__)

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

_SPARE = ("start_monitor", "start_api_server")  # of Ray's node; one that a Ray does not have is not needed either

_GCS = "gcs_server"  # its name among the processes of a node
_FOLDER_PREFIX = "dlrover-ray-"
_LONGEST_BASE = 14  # Ray puts unix sockets, whose paths have 107 characters at most, deep below
_STALE_AFTER_S = 60.0
_REACH_S = 5.0

# Made for other systems, where Ray stays on loopback by default.
_ENABLE_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def settings(store: Path | None) -> dict[str, Any]:
    """Ray's system settings; ``store`` is an empty folder for the tables of the GCS, None keeps them in memory."""
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
    """Inside, Ray uses 127.0.0.1 as it is, in this process and its children. On Linux Ray would otherwise replace it by
    the machine's address and listen on every interface."""
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
    """Inside, Ray starts a head node without the processes of its autoscaler and dashboard: seconds of processor time
    for each start, for a cluster that has one node and shows no dashboard."""
    with contextlib.ExitStack() as stack:
        for name in _SPARE:
            if (start := getattr(Node, name, None)) is not None:
                setattr(Node, name, lambda *_, **__: None)
                stack.callback(setattr, Node, name, start)
        yield


def use_token() -> None:
    """Authenticate with this user's token, which Ray itself does only for clusters that it has searched."""
    with contextlib.suppress(ImportError):  # a Ray that has no tokens
        from ray._private.authentication import authentication_token_setup

        # At each command it would say that there is a token.
        logging.getLogger(authentication_token_setup.__name__).setLevel(logging.ERROR)
        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def listens_on_loopback_only(host: str, port: int) -> bool:
    """Return True if a GCS was started :func:`on_loopback` on this machine."""
    if host not in ("127.0.0.1", "localhost"):
        return False
    try:
        socket.create_connection((services.get_node_ip_address(), port), timeout=_REACH_S).close()
    except OSError:
        return True
    return False


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for this user only, with a path short enough for Ray; removed at the end, as are the folders that killed
    processes have left: the owner of each holds a lock on it."""
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
            # A new one may not be locked yet.
            if time.time() - folder.stat().st_mtime > _STALE_AFTER_S:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)


def _remove(folder: Path) -> None:
    # Processes that end late may still be writing a last log line.
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    _LOG.warning("could not remove %s", folder)


class GcsKeeper:
    """Restarts the GCS of a head node in a thread.

    The thread must outlive the GCS that it started, since Linux ends a child with the thread that started it: call
    :meth:`rest`, end the cluster, then call :meth:`close`. It stops after ``most_in_a_row`` restarts within ``quiet_s``
    seconds of each other. ``node`` is Ray's object of the head node, which this process has started.
    """

    _LOOK_S = 0.1

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
        while not self._closed.wait(timeout=self._LOOK_S):
            dead = None if self._resting.is_set() else self._remove_dead()
            if dead is None:
                continue
            in_a_row = in_a_row + 1 if time.monotonic() - last_s < self._quiet_s else 1
            if in_a_row > self._most:
                _LOG.error("the GCS of Ray died %d times in a row: not started again", in_a_row)
                self.rest()
            else:
                self._start()
                last_s = time.monotonic()
            with self._node.removal_lock:  # what is lost for good, or is to be started again, is seen in the table
                self._node.all_processes.setdefault(_GCS, dead)

    def _remove_dead(self) -> Any:
        """The GCS if it has died by itself, else None; it is then removed from the node's table."""
        with self._node.removal_lock:  # Ray holds it while it ends the GCS on purpose
            processes = self._node.all_processes.get(_GCS)
            if not processes or processes[0].process.poll() is None:
                return None
            _LOG.warning("the GCS of Ray has died (exit code %s): starting it again", processes[0].process.returncode)
            del self._node.all_processes[_GCS]
            self._node._gcs_address = None
            self._node._gcs_client = None
            return processes

    def _start(self) -> None:
        try:
            self._node.start_gcs_server()  # with the port and the store of the first
        except (OSError, RuntimeError, AssertionError) as error:
            _LOG.error("the GCS of Ray could not be started again: %s", error)
            return
        self.restarts += 1
