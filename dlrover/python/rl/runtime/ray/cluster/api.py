# SPDX-License-Identifier: Apache-2.0
"""The use of a Ray cluster: its actors, placement groups and nodes, and functions that run on a node.

Except for the coroutines and :meth:`RayClusterApi.kill_actor` every method waits for Ray's head: call it in a thread.
"""

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ray
from ray._raylet import PlacementGroupID
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory, known_in_memory, save_from_memory
from dlrover.python.rl.runtime.checkpoint.store import decode
from dlrover.python.rl.runtime.member.heartbeat import stacks_of
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow, node_table

_LOG = get_logger(__name__)

MEGABYTE = 1024 * 1024
PENDING, CREATED, REMOVED = "PENDING", "CREATED", "REMOVED"
RAY_NAMES = {"cpu": "CPU", "gpu": "GPU"}

REMOTE_S = 20.0
_GONE_S = 10.0
_POLL_S = 0.02

_CHANGES = frozenset({"start_actor", "kill_actor", "create_group", "remove_group", "run_on"})
_LOOK_S = 0.2
_RELEASED_S = 5.0
_SAVED_S = 900.0


@dataclass(frozen=True)
class ActorPlacement:
    resources: Mapping[str, float] = field(default_factory=dict)  # cpu, gpu, memory in MB, and custom ones
    group: str = ""  # id of a placement group, "" for none
    bundle: int = -1  # index in the group, -1 for any
    excluded: tuple[str, ...] = ()  # ids of nodes not to use; only without a group

    def to_ray(self) -> dict[str, Any]:
        amounts = dict(self.resources)
        options: dict[str, Any] = {
            "num_cpus": amounts.pop("cpu", 0.0),
            "num_gpus": amounts.pop("gpu", 0.0),
            "memory": int(amounts.pop("memory", 0.0) * MEGABYTE) or None,
            "resources": {name: amount for name, amount in amounts.items() if amount} or None,
        }
        if self.group:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(_group(self.group), self.bundle)
        elif self.excluded:
            options["label_selector"] = _all_but(self.excluded)
        return options


@dataclass(frozen=True)
class ActorRequest:
    """An actor to start; ``name`` is in the system's namespace, "" for none."""

    name: str
    cls: type
    arguments: tuple[Any, ...]
    env: Mapping[str, str]
    placement: ActorPlacement
    max_restarts: int = 0  # by Ray, which runs the constructor again while calls wait
    python: str = ""  # path of the interpreter, "" for the cluster's

    def runtime_env(self) -> dict[str, Any] | None:
        executable = {"py_executable": shlex.quote(self.python)} if self.python else {}  # Ray gives it to a shell
        return {**({"env_vars": dict(self.env)} if self.env else {}), **executable} or None


@dataclass(frozen=True)
class GroupRow:
    """A placement group; ``nodes`` are the ids of the nodes with its bundles."""

    id: str
    name: str
    state: str
    nodes: frozenset[str]

    def is_reserved(self, excluded: Iterable[str] = ()) -> bool:
        """Return True if it has its resources on nodes other than ``excluded``."""
        return self.state == CREATED and self.nodes.isdisjoint(excluded)


class RayClusterApi:
    """The connected cluster; ``detached`` actors and placement groups outlive this process. The awaitable that an
    actor's ``handle.method.remote(...)`` returns raises RayActorError once the actor is dead. Tests have a twin."""

    def __init__(self, detached: bool = True) -> None:
        self._lifetime = "detached" if detached else None
        self._classes: dict[type, Any] = {}  # Ray's classes, which its head stores once
        self._watched: dict[asyncio.Future[None], Any] = {}  # actors by the future of their end
        self._looking: asyncio.Task[None] | None = None

    def list_actors(self, prefix: str) -> list[str]:
        rows = ray.util.list_named_actors(all_namespaces=True)
        return [row["name"] for row in rows if row["namespace"] == NAMESPACE and row["name"].startswith(prefix)]

    def find_actor(self, name: str) -> Any:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None

    def start_actor(self, request: ActorRequest) -> Any:
        options = {
            "name": request.name or None,
            "namespace": NAMESPACE,
            "lifetime": self._lifetime,
            "max_restarts": request.max_restarts,
            "max_task_retries": -1 if request.max_restarts else 0,
            "runtime_env": request.runtime_env(),
            **request.placement.to_ray(),
        }
        if request.cls not in self._classes:
            self._classes[request.cls] = ray.remote(request.cls)
        return self._classes[request.cls].options(**options).remote(*request.arguments)

    def kill_actor(self, handle: Any) -> None:
        ray.kill(handle)

    async def until_ended(self, handle: Any) -> RayActorError:
        """Return the error of calls to the actor once its process has ended, busy or not."""
        loop = asyncio.get_running_loop()
        handle.dlrover_ping.remote()  # Ray follows the actors that this process has called
        ended = loop.create_future()
        self._watched[ended] = handle
        if self._looking is None or self._looking.done():
            self._looking = loop.create_task(self._look_for_ends())
        try:
            await ended  # waits: for the end of the process, which may never come
        finally:
            del self._watched[ended]
        while True:
            try:
                await handle.dlrover_ping.remote()  # waits: no longer than Ray needs to say that the actor is dead
            except ActorUnavailableError:
                pass
            except RayActorError as error:
                return error
            await asyncio.sleep(_LOOK_S)

    async def _look_for_ends(self) -> None:
        """Look at all watched actors, as long as there are any."""
        while self._watched:
            for ended, handle in [item for item in self._watched.items() if not item[0].done()]:
                try:
                    is_dead = handle._get_local_state() == ActorTableData.ActorState.DEAD
                except Exception as error:  # noqa: BLE001 -- the waiting code would miss this end
                    ended.set_exception(error)
                    continue
                if is_dead:
                    ended.set_result(None)
            await asyncio.sleep(_LOOK_S)

    def list_groups(self) -> list[GroupRow]:
        return [
            GroupRow(group, row["name"], row["state"], frozenset(row["bundles_to_node_id"].values()) - {""})
            for group, row in placement_group_table().items()
        ]

    def create_group(
        self, bundles: Sequence[Mapping[str, float]], name: str, excluded: tuple[str, ...] = (), node: str = ""
    ) -> str:
        """Request bundles on ``node``, or on any node that is not ``excluded``. Returns the group's id."""
        nodes = {"ray.io/node-id": node} if node else _all_but(excluded)
        selectors = [nodes] * len(bundles) if node or excluded else None
        group = placement_group(
            [dict(bundle) for bundle in bundles],
            "STRICT_PACK",
            name=name,
            lifetime=self._lifetime,
            bundle_label_selector=selectors,
        )
        return str(group.id.hex())

    def remove_group(self, group: str) -> None:
        remove_placement_group(_group(group))

    def free_resources(self) -> dict[str, float]:
        return dict(ray.available_resources())

    def list_nodes(self) -> list[NodeRow]:
        return node_table()

    async def run_on(self, node: str, function: Callable[..., Any], *arguments: Any, limit_s: float = REMOTE_S) -> Any:
        """Return the result of a function on a node; None if there is no answer within the limit."""
        if node == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(function, *arguments)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        with suppress(TimeoutError, ray.exceptions.RayError):  # the node may be lost, and its processes with it
            async with asyncio.timeout(limit_s):
                return await awaited(task.remote(*arguments))
        return None


def fenced(cluster: RayClusterApi, check: Callable[[], None]) -> RayClusterApi:
    """Return ``cluster`` with a ``check`` before each change, which does not return in a replaced process: a master
    that was frozen in a release would otherwise continue it later, and end its successor's processes."""
    methods = {name: getattr(cluster, name) for name in vars(RayClusterApi) if not name.startswith("_")}
    for name in _CHANGES:
        methods[name] = partial(_check_first, check, methods[name])
    return cast(RayClusterApi, SimpleNamespace(**methods))


def _check_first(check: Callable[[], None], method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    check()
    return method(*arguments, **options)


def remove_groups(cluster: RayClusterApi, prefix: str) -> list[str]:
    """Remove all placement groups whose names begin with ``prefix``; returns their names."""
    rows = [row for row in cluster.list_groups() if row.name.startswith(prefix) and row.state != REMOVED]
    for row in rows:
        cluster.remove_group(row.id)
    return [row.name for row in rows]


async def awaited(ref: Any) -> Any:
    """Await a ref in a coroutine, which can be cancelled."""
    return await ref  # waits: the caller's deadline


def _group(identity: str) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID(bytes.fromhex(identity)))


def _all_but(nodes: Sequence[str]) -> dict[str, str]:
    return {"ray.io/node-id": f"!in({','.join(nodes)})"}


async def kill_process(cluster: RayClusterApi, process: Process) -> None:
    """SIGKILL a process: Ray's own kill asks the process to end itself, which a stopped one does not."""
    if process.pid:
        await cluster.run_on(process.node, kill_and_wait, (process.pid,))


async def read_stacks(cluster: RayClusterApi, process: Process) -> str:
    return await cluster.run_on(process.node, stacks_of, process.pid) or "its node does not answer"


def kill_and_wait(pids: Iterable[int]) -> None:
    """SIGKILL Ray workers of this machine and wait for their end; a reused pid is ignored."""
    pids = [pid for pid in pids if _is_ray_worker(pid)]
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _GONE_S
    while any(map(_is_ray_worker, pids)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _is_ray_worker(pid: int) -> bool:
    """Return True if the process runs; a zombie has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


async def forget_on_nodes(cluster: RayClusterApi, pids: Mapping[str, Sequence[int]], job: str, run: str) -> bool:
    """End the processes ``pids`` of each node and remove the run's commits from its memory, after saving the newest
    whole one beyond the copies in the run's folder. If that fails, logs it, removes nothing, and returns False."""
    ended = (cluster.run_on(node, _end_and_list, pids[node], job, run, limit_s=_SAVED_S) for node in pids)
    answers = dict(zip(pids, await asyncio.gather(*ended), strict=True))
    answering = [node for node, manifests in answers.items() if manifests is not None]
    by_age = {decode(each).age: each for node in answering for each in answers[node]}  # several nodes know a manifest
    for _, each in sorted(by_age.items(), reverse=True):
        saving = (cluster.run_on(node, save_from_memory, job, run, each, limit_s=_SAVED_S) for node in answering)
        saved = await asyncio.gather(*saving)
        if any(saved):
            break
        if None in saved:
            _LOG.error("%s: step %d stays in the memory of its nodes", job, decode(each).step)
            return False
        _LOG.error("%s: step %d is lost with the nodes that had parts of it", job, decode(each).step)
    await asyncio.gather(*(cluster.run_on(node, _forget, job, run, limit_s=_SAVED_S) for node in pids))
    return True


def _end_and_list(pids: Sequence[int], job: str, run: str) -> list[bytes]:
    kill_and_wait(pids)
    return known_in_memory(job, run)


def _forget(job: str, run: str) -> None:
    forget_memory(job, run, patience_s=_RELEASED_S)
