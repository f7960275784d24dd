# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several nodes on this machine, whose parts can be killed, stopped and started again."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication import authentication_token_setup as tokens
from ray.cluster_utils import Cluster

from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.runtime.ray.cluster import cluster as own
from tests.support.commands import kill_processes, processes_below

_START_ATTEMPTS = 3
_STORE_BYTES = 100 * 1024 * 1024
_VARIABLES = ("RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "RAY_ADDRESS", "PYTHONBREAKPOINT")


Environment = Callable[[int], dict[str, str]]
"""Variables of the node of an index."""


@dataclass
class TwoNodes:
    """A head (index 0, not to be killed) and worker nodes (1, 2, ...), each with a resource ``node<index>``."""

    folder: Path
    cluster: Cluster
    cpus: float
    nodes: list[Any] = field(default_factory=list)
    keeper: own.GcsKeeper | None = None
    environment: Environment = lambda index: {}
    stopped: set[int] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # A raylet that has ended but was not waited for looks alive to its workers: they would live on.
        self._reaper = threading.Thread(target=self._reap, name="reaper", daemon=True)
        self._reaper.start()

    @property
    def address(self) -> str:
        """For ``ray.init``."""
        return self.nodes[0]._node_ip_address + ":" + str(self.nodes[0]._ray_params.gcs_server_port)

    @property
    def session_dir(self) -> Path:
        """Ray's folder with the sockets and logs."""
        return Path(self.nodes[0].get_session_dir_path())

    def node_id(self, index: int) -> str:
        return self.nodes[index].node_id

    def raylet_pid(self, index: int) -> int:
        return self._raylet(index).pid

    def gcs_pid(self) -> int:
        return self.nodes[0].all_processes["gcs_server"][0].process.pid

    def kill_raylet(self, index: int) -> float:
        """SIGKILL; the node's workers see it and end by themselves. The monotonic time of the kill."""
        process = self._raylet(index)
        process.kill()
        killed_s = time.monotonic()
        process.wait(timeout=10.0)
        self.stopped.discard(index)
        return killed_s

    def kill_node(self, index: int) -> float:
        """SIGKILL of a raylet and of everything that it started, as if the power had gone."""
        below = processes_below(self.raylet_pid(index))
        killed_s = self.kill_raylet(index)
        kill_processes(below)
        return killed_s

    def stop_raylet(self, index: int) -> float:
        """SIGSTOP: for the others like a partition, while the node's actors run on. The monotonic time of the stop."""
        self._raylet(index).send_signal(signal.SIGSTOP)
        self.stopped.add(index)
        return time.monotonic()

    def continue_raylet(self, index: int) -> None:
        """SIGCONT. A raylet that has been declared dead learns it now and ends itself."""
        self._raylet(index).send_signal(signal.SIGCONT)
        self.stopped.discard(index)

    def add_node(self) -> int:
        """Start a further worker node and return its index."""
        index = len(self.nodes)
        self.nodes.append(_start_node(self.cluster, index, self.cpus, self.environment(index)))
        return len(self.nodes) - 1

    def close(self) -> None:
        """End everything; no process may be left."""
        for index in sorted(self.stopped):
            self.continue_raylet(index)
        if self.keeper is not None:
            self.keeper.rest()
        ray.shutdown()
        try:
            self.cluster.shutdown()
        finally:
            if self.keeper is not None:
                self.keeper.close()
            self.over.set()
            self._reaper.join(timeout=10.0)
        deadline_s = time.monotonic() + 10.0
        while (left := users_of(self.folder)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        kill_processes(left)
        assert not left, f"left over: {left}"

    def _reap(self) -> None:
        while not self.over.wait(timeout=0.1):
            for node in list(self.nodes):
                for info in node.all_processes.get("raylet", []):
                    info.process.poll()

    def _raylet(self, index: int) -> Any:
        return self.nodes[index].all_processes["raylet"][0].process


@contextlib.contextmanager
def two_nodes(
    workers: int = 1,
    cpus: float = 8.0,
    head_cpus: float = 8.0,
    connect: bool = True,
    environment: Environment = lambda index: {},
) -> Iterator[TwoNodes]:
    """A cluster with the settings of one that the product starts itself."""
    assert not ray.is_initialized(), "this process is connected to another cluster"
    before = {name: os.environ.get(name) for name in _VARIABLES}
    with contextlib.ExitStack() as stack:
        stack.callback(own.restore_environment, before)
        folder = stack.enter_context(own.private_folder())
        stack.enter_context(own.on_loopback())
        nodes = _start(folder, workers, cpus, head_cpus, environment)
        stack.callback(nodes.close)
        if connect:
            ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        yield nodes


def _start(folder: Path, workers: int, cpus: float, head_cpus: float, environment: Environment) -> TwoNodes:
    tokens.enable_token_auth_by_default()
    tokens.ensure_token_if_auth_enabled({}, create_token_if_missing=True)
    for attempt in range(_START_ATTEMPTS):
        files = folder / str(attempt)
        files.mkdir()
        # Where Ray puts its files and notes the address of the newest cluster of this machine.
        os.environ["RAY_TMPDIR"] = str(files)
        cluster = Cluster()
        try:
            return _start_all(files, cluster, workers, cpus, head_cpus, environment)
        except Exception:
            cluster.shutdown()
            if attempt == _START_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _start_all(
    files: Path, cluster: Cluster, workers: int, cpus: float, head_cpus: float, environment: Environment
) -> TwoNodes:
    store = files / "gcs" if own.has_durable_gcs() else None
    for_head = {"include_dashboard": False, "_system_config": own.settings(store)}
    head = _start_node(cluster, 0, head_cpus, environment(0), attempts=1, **for_head)
    keeper = own.GcsKeeper(head) if store is not None else None
    nodes = TwoNodes(files, cluster, cpus, [head], keeper, environment)
    try:
        for _ in range(workers):
            nodes.add_node()
    except BaseException:
        nodes.over.set()
        if keeper is not None:
            keeper.close()
        raise
    return nodes


def _start_node(
    cluster: Cluster, index: int, cpus: float, env: dict[str, str], attempts: int = _START_ATTEMPTS, **more: Any
) -> Any:
    node = {"num_cpus": cpus, "resources": {f"node{index}": 1000}, "env_vars": env, **more}
    for attempt in range(attempts):
        before = _raylets()
        try:
            return cluster.add_node(node_ip_address="127.0.0.1", object_store_memory=_STORE_BYTES, **node)
        except Exception:  # Ray raises just that when a busy machine was too slow
            kill_processes(_raylets() - before)  # what it has started ends with it
            if attempt == attempts - 1:
                raise
    raise AssertionError("unreachable")


def _raylets() -> set[int]:
    """Return the raylets that this process has started."""
    commands = processes_below(os.getpid())
    return {pid for pid, command in commands.items() if command.split(" ")[0].endswith("/raylet")}


def users_of(folder: Path) -> list[int]:
    """The processes that have something below a folder open, or named on their command line; without this one."""
    name, mounts = str(folder), []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if name.encode() in (process / "cmdline").read_bytes() or any(
                os.readlink(fd).startswith(name + "/") for fd in (process / "fd").iterdir()
            ):
                mounts.append(int(process.name))
    return mounts
