"""What a cluster of our own needs beyond Ray's defaults: its settings, a private folder, a GCS that is started anew.

::

    GCS dies --keeper sees it within 0.1 s--> started again: same port, same store --> actors, groups, KV are there
       '-- meanwhile: calls between actors go on; looking up names and starting anything waits

Ray's GCS (the process that knows all actors, groups and nodes) keeps them in memory by default: its end is the end of
the cluster. The store on disk that newer wheels have makes it an interruption.
"""

import contextlib
import fcntl
import functools
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 700,
    "health_check_failure_threshold": 3,
}
"""Ray finds a stopped or cut-off node within 4.5 s (by default after a minute), also while every core is busy."""

_PATIENCE = {
    # A worker or raylet that cannot reach the GCS for this long ends itself (60 s by default).
    "gcs_rpc_server_reconnect_timeout_s": 600,
    # The same for one that starts while the GCS is away (5 s by default).
    "gcs_rpc_server_connect_timeout_s": 30,
}

_GCS = "gcs_server"  # its name among the processes of a node
_FOLDER_PREFIX = "dlrover-ray-"
_LONGEST_BASE = 14  # Ray puts unix sockets, whose paths have 107 characters at most, deep below
_STALE_AFTER_S = 60.0
_REACH_S = 5.0

# Made for other systems, where Ray stays on loopback by default.
_ENABLE_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def settings(store: Path | None) -> dict[str, Any]:
    """Ray's system settings for a cluster of our own.

    Args:
        store: an empty folder that the GCS keeps its tables in; None: it keeps them in memory.
    """
    durable = {"gcs_storage": "rocksdb", "gcs_storage_path": str(store)} if store is not None else {}
    return HEALTH | _PATIENCE | durable


@functools.cache
def has_durable_gcs() -> bool:
    """Whether the GCS of this Ray can keep its tables on disk."""
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
    """Inside, 127.0.0.1 means just that to Ray, in this process and in those that it starts.

    On Linux Ray replaces it by the machine's own address otherwise, and then listens on every interface.
    """
    attribute = ray_constants.ENABLE_RAY_CLUSTER
    variable = os.environ.get(_ENABLE_CLUSTER)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[_ENABLE_CLUSTER] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = attribute
        restore_environment({_ENABLE_CLUSTER: variable})


def use_token() -> None:
    """Show a cluster this user's token, as Ray does by itself only for clusters that it has searched."""
    with contextlib.suppress(ImportError):  # a Ray that has no tokens
        from ray._private.authentication import authentication_token_setup

        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def listens_on_loopback_only(host: str, port: int) -> bool:
    """Whether a GCS is one that was started :func:`on_loopback`, here."""
    if host not in ("127.0.0.1", "localhost"):
        return False
    try:
        socket.create_connection((services.get_node_ip_address(), port), timeout=_REACH_S).close()
    except OSError:
        return True
    return False


def restore_environment(variables: Mapping[str, str | None]) -> None:
    """Set variables to what they were; None: there was none."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of this user alone, with a path short enough for Ray; removed with everything in it.

    Those that killed processes have left behind are removed as well: the owner of each holds a lock on it.
    """
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
    """Starts the GCS of a head node anew when it has died, from a thread of its own.

    The thread outlives the GCS that it started: Linux ends a child with the thread that made it. So the order at the
    end is :meth:`rest`, then the end of the cluster, then :meth:`close`.

    Args:
        node: Ray's object of the head node, which this process has started.
        most_in_a_row: starts without ``quiet_s`` seconds of life in between, after which it gives up.
    """

    _LOOK_S = 0.1

    def __init__(self, node: Any, most_in_a_row: int = 5, quiet_s: float = 5.0) -> None:
        self.restarts = 0
        self._node = node
        self._most = most_in_a_row
        self._quiet_s = quiet_s
        self._resting = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="gcs-keeper", daemon=True)
        self._thread.start()

    def rest(self) -> None:
        """From here on a GCS that ends has been ended on purpose."""
        self._resting.set()

    def close(self) -> None:
        """End the thread, and with it a GCS that it started."""
        self.rest()
        self._over.set()
        self._thread.join(timeout=30.0)

    def _keep(self) -> None:
        in_a_row, last_s = 0, float("-inf")
        while not self._over.wait(timeout=self._LOOK_S):
            if self._resting.is_set() or not self._take_dead():
                continue
            in_a_row = in_a_row + 1 if time.monotonic() - last_s < self._quiet_s else 1
            if in_a_row > self._most:
                _LOG.error("the GCS of Ray died %d times in a row: not started again", in_a_row)
                self.rest()
                continue
            self._start()
            last_s = time.monotonic()

    def _take_dead(self) -> bool:
        """Whether the GCS has died by itself; it is then struck off the node's books."""
        with self._node.removal_lock:  # held by those who end it on purpose
            found = self._node.all_processes.get(_GCS)
            if not found or found[0].process.poll() is None:
                return False
            _LOG.warning("the GCS of Ray has died (exit code %s): starting it again", found[0].process.returncode)
            del self._node.all_processes[_GCS]
            self._node._gcs_address = None
            self._node._gcs_client = None
            return True

    def _start(self) -> None:
        try:
            self._node.start_gcs_server()  # with the port and the store of the first
        except (OSError, RuntimeError, AssertionError) as error:
            _LOG.error("the GCS of Ray could not be started again: %s", error)
            return
        self.restarts += 1
