"""Engines driven by hand on Ray.

::

    script --starts or joins--> Ray cluster
       '--reserves--> a bundle for each device --> actors in it, as many as share the device

Nothing is detached: actors and bundles belong to the script, and end with it however it ends. An actor takes no GPU of
Ray's own count; it is in the bundle that has the GPU, and sees the devices that it is told to.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dlrover.python.rl.common.errors import ClusterUnavailable, PlacementTimeout, WorkloadStartError
from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.executor import starting
from dlrover.python.rl.runtime.host import CallHeader, MemberHost
from dlrover.python.rl.runtime.hosting import Device, class_at, own_search_path
from dlrover.python.rl.runtime.node_memory import forget_memory
from dlrover.python.rl.runtime.ports import HeldPort
from dlrover.python.rl.runtime.ray.cluster import ray_cluster
from dlrover.python.rl.runtime.ray.member import locate_with_port, serve
from dlrover.python.rl.runtime.ray.options import ON_CPU, VISIBLE_DEVICES_OFF
from dlrover.python.rl.runtime.ray.port import RayPort
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)

_CLOSE_S = 5.0
_GONE_S = 20.0


class HostedActor:
    """Holds one object.

    Args:
        who: ``"TRAIN_1[0]"``.
    """

    def __init__(self, who: str) -> None:
        configure_logging(who)
        self._host = MemberHost(1, ray.get_runtime_context().get_node_id())
        self._port = HeldPort()

    def dlrover_locate(self) -> Process:
        """Where this process is, and a TCP port that is kept free for it there."""
        return locate_with_port(self._port)

    def dlrover_start(self, context: MemberContext, where: str, search_path: Sequence[str]) -> None:
        """Make the object.

        Raises:
            WorkloadStartError: importing or making it failed.
        """
        os.environ.update(context.to_env())
        with starting(context.name):
            cls = class_at(where, search_path)
            self._host.start(lambda _handle, _config: cls(), context, None, None)

    def dlrover_invoke(self, header: CallHeader, *values: Any) -> Any:
        """Call a method of the object; see :func:`~dlrover.python.rl.runtime.ray.member.serve`."""
        return serve(self._host, header, values)

    def dlrover_ping(self) -> bool:
        """Answer, once nothing else is running."""
        return True

    def dlrover_close(self) -> None:
        """Let the object give back what it holds."""
        self._host.close()


@dataclass(frozen=True)
class _Room:
    """What is free on a node."""

    node: str
    address: str
    kind: str
    count: int


class RayHosting:
    """Implements :class:`~dlrover.python.rl.runtime.hosting.Hosting` on Ray.

    Args:
        address: of a running cluster (``"auto"``, ``"host:port"``); None starts one on loopback.
        per_node: devices to take of each node, at most; None takes all: its free GPUs, or where no node has any, a
            logical device for each free core.
        log_to_driver: print what the processes print.
        timeout_s: for the devices, and for each start of a crew.

    Raises:
        ClusterUnavailable: Ray could not be started or reached, or has no device.
        PlacementTimeout: the devices were taken by somebody else in the meantime.
    """

    separate = True

    def __init__(self, address: str | None, per_node: int | None, log_to_driver: bool, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._crews: dict[str, list[Any]] = {}
        self._groups: list[PlacementGroup] = []
        self._places: list[tuple[PlacementGroup, int]] = []
        self.port = RayPort({})
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            own = address is None and not ray.is_initialized()
            cores = per_node or os.cpu_count() or 1
            self._stack.enter_context(ray_cluster(address, {"cpu": float(cores)}, log_to_driver=log_to_driver))
            self.devices = self._reserve(_rooms(per_node, cores if own else None))
            undo.pop_all()

    # -- devices ------------------------------------------------------------------------------------------------------

    def _reserve(self, rooms: Sequence[_Room]) -> tuple[Device, ...]:
        """A group of bundles on each node, a bundle for each device."""
        for room in rooms:
            amounts = {"CPU": 1.0} if room.kind == "cpu" else {"GPU": 1.0}
            selector = {"ray.io/node-id": room.node}
            bundles, selectors = [amounts] * room.count, [selector] * room.count
            self._groups.append(placement_group(bundles, "STRICT_PACK", bundle_label_selector=selectors))
        devices = []
        for room, group in zip(rooms, self._groups, strict=True):
            if not group.wait(self._timeout_s):
                raise PlacementTimeout(
                    f"after {self._timeout_s:g} s the node {room.address} still lacks {room.count} free"
                    f" {'cores' if room.kind == 'cpu' else 'GPUs'}: {available_resources_per_node().get(room.node)}"
                )
            self._places += [(group, bundle) for bundle in range(room.count)]
            devices += [self._device(room, group, bundle) for bundle in range(room.count)]
        return tuple(devices)

    def _device(self, room: _Room, group: PlacementGroup, bundle: int) -> Device:
        if room.kind == "cpu":
            return Device(room.node, room.address)
        there = PlacementGroupSchedulingStrategy(group, bundle)
        task = ray.remote(_gpu_here).options(num_cpus=0, num_gpus=0.01, scheduling_strategy=there)
        return Device(room.node, room.address, "cuda", ray.get(task.remote(), timeout=self._timeout_s))

    # -- crews --------------------------------------------------------------------------------------------------------

    def start(self, crew: str, seats: Sequence[Sequence[int]], where: str) -> list[Process]:
        handles = self._crews[crew] = [self._make(crew, rank, seat) for rank, seat in enumerate(seats)]
        with contextlib.ExitStack() as undo:
            undo.callback(self.end, crew)
            processes: list[Process] = self._all(crew, [handle.dlrover_locate.remote() for handle in handles])
            path = own_search_path()
            contexts = [_context(crew, rank, processes) for rank in range(len(seats))]
            refs = [
                handle.dlrover_start.remote(context, where, path)
                for handle, context in zip(handles, contexts, strict=True)
            ]
            self._all(crew, refs)
            undo.pop_all()
        for rank, handle in enumerate(handles):
            self.port.replace(crew, rank, handle, 1)
        return processes

    def _make(self, crew: str, rank: int, seat: Sequence[int]) -> Any:
        group, bundle = self._places[seat[0]]
        devices = [self.devices[slot] for slot in seat]
        env = ON_CPU
        if devices[0].kind == "cuda":
            env = {**VISIBLE_DEVICES_OFF, "CUDA_VISIBLE_DEVICES": ",".join(device.name for device in devices)}
        options = {
            "num_cpus": 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
        }
        return ray.remote(HostedActor).options(**options).remote(f"{crew}[{rank}]")

    def _all(self, crew: str, refs: Sequence[Any]) -> Any:
        try:
            return ray.get(list(refs), timeout=self._timeout_s)
        except GetTimeoutError as error:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            late = [rank for rank, ref in enumerate(refs) if ref not in ready]
            text = f"ranks {late} did not come up within {self._timeout_s:g} s"
            raise WorkloadStartError(crew, text) from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, WorkloadStartError) else error) from None
        except RayError as error:
            raise WorkloadStartError(crew, f"{type(error).__name__}: {error}") from error

    def end(self, crew: str) -> None:
        handles = self._crews.pop(crew, [])
        if not handles or not ray.is_initialized():
            return
        self._let_close(crew, handles)
        for handle in handles:
            ray.kill(handle)
        for handle in handles:
            # Answered with the news of its death, once it is dead.
            with contextlib.suppress(RayError):
                ray.get(handle.dlrover_ping.remote(), timeout=_GONE_S)

    def _let_close(self, crew: str, handles: Sequence[Any]) -> None:
        ranks = {handle.dlrover_close.remote(): rank for rank, handle in enumerate(handles)}
        closed, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=_CLOSE_S)
        for ref in closed:
            try:
                ray.get(ref, timeout=_CLOSE_S)
            except RayActorError:
                pass  # It is gone already.
            except RayError as error:
                _LOG.warning("%s[%d] did not close: %s", crew, ranks[ref], error)

    def forget(self, job: str, run: str) -> None:
        forget_memory(job, run)
        if not ray.is_initialized():
            return
        others = {device.node for device in self.devices} - {ray.get_runtime_context().get_node_id()}
        tasks = [
            ray.remote(forget_memory)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(job, run)
            for node in others
        ]
        if tasks:
            ray.wait(tasks, num_returns=len(tasks), timeout=_GONE_S)

    def close(self) -> None:
        groups, self._groups = self._groups, []
        with self._stack:  # the connection goes last, whatever happens before
            for crew in list(self._crews):
                self.end(crew)
            for group in groups if ray.is_initialized() else ():
                remove_placement_group(group)


def _rooms(per_node: int | None, most_cores: int | None) -> list[_Room]:
    """What each node has to give, the head first.

    Args:
        per_node: GPUs to take of each node at most, or cores where no node has a GPU; None for no limit.
        most_cores: cores to take of each node at most; a cluster of our own counts some more than there are.

    Raises:
        ClusterUnavailable: no node has a free device.
    """
    free = available_resources_per_node()
    nodes = [row for row in ray.nodes() if row["Alive"]]
    head = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda row: row["NodeID"] != head)
    on_gpus = any(row["Resources"].get("GPU", 0) for row in nodes)
    kind, name, most = ("cuda", "GPU", per_node) if on_gpus else ("cpu", "CPU", per_node or most_cores)
    counts = {row["NodeID"]: int(free.get(row["NodeID"], {}).get(name, 0)) for row in nodes}
    rooms = [
        _Room(row["NodeID"], row["NodeManagerAddress"], kind, min(counts[row["NodeID"]], most or counts[row["NodeID"]]))
        for row in nodes
        if counts[row["NodeID"]]
    ]
    if not rooms:
        raise ClusterUnavailable(f"no node has a free {name}: {free}")
    return rooms


def _gpu_here() -> str:
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def _context(crew: str, rank: int, processes: Sequence[Process]) -> MemberContext:
    on_node = [at for at, process in enumerate(processes) if process.node == processes[rank].node]
    return MemberContext(
        name=f"{crew}[{rank}]",
        role=RLRoleType(crew),
        rank=rank,
        world_size=len(processes),
        local_rank=on_node.index(rank),
        local_world_size=len(on_node),
        master_addr=processes[0].address,
        master_port=processes[0].port,
    )
