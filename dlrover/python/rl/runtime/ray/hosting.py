# SPDX-License-Identifier: Apache-2.0
"""Engines driven by hand on Ray.

::

    script --starts or joins--> Ray cluster
       '--reserves--> a bundle for each device --> actors in it, as many as share the device

Nothing is detached: actors and bundles end with the script. An actor reserves no GPU itself; it runs in the bundle that
has the GPU, and sees the devices in ``CUDA_VISIBLE_DEVICES``.
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
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dlrover.python.rl.common.errors import ClusterUnavailable, PlacementTimeout, WorkloadStartError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.config.spec import JobSpec, TrainerSpec, WorkloadSpec
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.member.loading import Device, own_search_path
from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster
from dlrover.python.rl.runtime.ray.processes.actors import ON_CPU, VISIBLE_DEVICES_OFF
from dlrover.python.rl.runtime.ray.processes.member import MemberActor, MemberStart
from dlrover.python.rl.runtime.ray.processes.port import RayPort
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)

_CLOSE_S = 5.0
_GONE_S = 20.0


@dataclass(frozen=True)
class _FreeDevices:
    node: str
    address: str
    kind: str
    count: int


class RayHosting:
    """Implements :class:`~dlrover.python.rl.runtime.member.loading.Hosting` on Ray.

    Args:
        address: of a running cluster (``"auto"``, ``"host:port"``); None starts one on loopback.
        per_node: devices to use on each node, at most; None uses all: its free GPUs, or if no node has a GPU, a logical
            device for each free core.
        timeout_s: for the devices, and for each start of a process group.

    Raises:
        ClusterUnavailable: Ray could not be started or reached, or has no device.
        PlacementTimeout: another job has reserved the devices in the meantime.
    """

    separate = True

    def __init__(self, address: str | None, per_node: int | None, log_to_driver: bool, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._handles: dict[str, list[Any]] = {}
        self._placement_groups: list[PlacementGroup] = []
        self._bundles: list[tuple[PlacementGroup, int]] = []
        self.port = RayPort({})
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            own = address is None and not ray.is_initialized()
            cores = per_node or os.cpu_count() or 1
            self._stack.enter_context(ray_cluster(address, {"cpu": float(cores)}, log_to_driver=log_to_driver))
            self.devices = self._reserve(_free_devices(per_node, cores if own else None))
            undo.pop_all()

    def _reserve(self, offers: Sequence[_FreeDevices]) -> tuple[Device, ...]:
        """One placement group on each node, one bundle for each device."""
        for offer in offers:
            amounts = {"CPU": 1.0} if offer.kind == "cpu" else {"GPU": 1.0}
            selector = {"ray.io/node-id": offer.node}
            bundles, selectors = [amounts] * offer.count, [selector] * offer.count
            self._placement_groups.append(placement_group(bundles, "STRICT_PACK", bundle_label_selector=selectors))
        devices = []
        for offer, group in zip(offers, self._placement_groups, strict=True):
            if not group.wait(self._timeout_s):
                raise PlacementTimeout(
                    f"after {self._timeout_s:g} s the node {offer.address} still lacks {offer.count} free"
                    f" {'cores' if offer.kind == 'cpu' else 'GPUs'}: {available_resources_per_node().get(offer.node)}"
                )
            self._bundles += [(group, bundle) for bundle in range(offer.count)]
            devices += [self._device(offer, group, bundle) for bundle in range(offer.count)]
        return tuple(devices)

    def _device(self, offer: _FreeDevices, group: PlacementGroup, bundle: int) -> Device:
        if offer.kind == "cpu":
            return Device(offer.node, offer.address)
        strategy = PlacementGroupSchedulingStrategy(group, bundle)
        task = ray.remote(_own_gpu).options(num_cpus=0, num_gpus=0.01, scheduling_strategy=strategy)
        return Device(offer.node, offer.address, "cuda", ray.get(task.remote(), timeout=self._timeout_s))

    def start(self, name: str, slots: Sequence[Sequence[int]], where: str) -> list[Process]:
        handles = self._handles[name] = [self._make(name, rank, slot) for rank, slot in enumerate(slots)]
        with contextlib.ExitStack() as undo:
            undo.callback(self.end, name)
            processes: list[Process] = self._all(name, [handle.dlrover_locate.remote(()) for handle in handles])
            job = _describe(name, where, len(slots))
            contexts = [_context(name, rank, processes) for rank in range(len(slots))]
            refs = [
                handle.dlrover_start.remote(MemberStart(job, context, 1))
                for handle, context in zip(handles, contexts, strict=True)
            ]
            self._all(name, refs)
            undo.pop_all()
        for rank, handle in enumerate(handles):
            self.port.replace(name, rank, handle, 1)
        return processes

    def _make(self, name: str, rank: int, indices: Sequence[int]) -> Any:
        group, bundle = self._bundles[indices[0]]
        devices = [self.devices[index] for index in indices]
        env = ON_CPU
        if devices[0].kind == "cuda":
            env = {**VISIBLE_DEVICES_OFF, "CUDA_VISIBLE_DEVICES": ",".join(device.name for device in devices)}
        options = {
            "num_cpus": 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
        }
        return ray.remote(MemberActor).options(**options).remote(ProcessId(name, rank), 1, None, None)

    def _all(self, name: str, refs: Sequence[Any]) -> Any:
        try:
            return ray.get(list(refs), timeout=self._timeout_s)
        except GetTimeoutError as error:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            late = [rank for rank, ref in enumerate(refs) if ref not in ready]
            text = f"ranks {late} did not come up within {self._timeout_s:g} s"
            raise WorkloadStartError(name, text) from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, WorkloadStartError) else error) from None
        except RayError as error:
            raise WorkloadStartError(name, f"{type(error).__name__}: {error}") from error

    def end(self, name: str) -> None:
        handles = self._handles.pop(name, [])
        if not handles or not ray.is_initialized():
            return
        self._let_close(name, handles)
        for handle in handles:
            ray.kill(handle)
        for handle in handles:
            # Raises once the actor is dead.
            with contextlib.suppress(RayError):
                ray.get(handle.dlrover_ping.remote(), timeout=_GONE_S)

    def _let_close(self, name: str, handles: Sequence[Any]) -> None:
        ranks = {handle.dlrover_close.remote(): rank for rank, handle in enumerate(handles)}
        closed, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=_CLOSE_S)
        for ref in closed:
            try:
                ray.get(ref, timeout=_CLOSE_S)
            except RayActorError:
                pass  # it is gone already
            except RayError as error:
                _LOG.warning("%s[%d] did not close: %s", name, ranks[ref], error)

    def close(self) -> None:
        groups, self._placement_groups = self._placement_groups, []
        with self._stack:  # closes the connection last
            for name in list(self._handles):
                self.end(name)
            for group in groups if ray.is_initialized() else ():
                remove_placement_group(group)


def _free_devices(per_node: int | None, most_cores: int | None) -> list[_FreeDevices]:
    """The free devices of each node, the head's first: up to ``per_node`` GPUs, or cores if no node has a GPU; of these
    no more than ``most_cores``, since a cluster that this process started counts more than there are. Raises
    ClusterUnavailable if there are none."""
    free = available_resources_per_node()
    nodes = [row for row in ray.nodes() if row["Alive"]]
    head = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda row: row["NodeID"] != head)
    on_gpus = any(row["Resources"].get("GPU", 0) for row in nodes)
    kind, name, most = ("cuda", "GPU", per_node) if on_gpus else ("cpu", "CPU", per_node or most_cores)
    counts = {row["NodeID"]: int(free.get(row["NodeID"], {}).get(name, 0)) for row in nodes}
    free_nodes = ((row, counts[row["NodeID"]]) for row in nodes if counts[row["NodeID"]])
    offers = [
        _FreeDevices(row["NodeID"], row["NodeManagerAddress"], kind, min(count, most or count))
        for row, count in free_nodes
    ]
    if not offers:
        raise ClusterUnavailable(f"no node has a free {name}: {free}")
    return offers


def _own_gpu() -> str:
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def _describe(name: str, where: str, members: int) -> JobSpec:
    """A job of one role, as far as its members read it."""
    module, _, class_name = where.partition(":")
    workload = WorkloadSpec(module=module, class_=class_name, num=members)
    trainer = TrainerSpec(module=module, class_=class_name)
    return JobSpec("session", trainer, {RLRoleType(name): workload}, search_path=tuple(own_search_path()))


def _context(name: str, rank: int, processes: Sequence[Process]) -> MemberContext:
    on_node = [at for at, process in enumerate(processes) if process.node == processes[rank].node]
    return MemberContext(
        name=f"{name}[{rank}]",
        role=RLRoleType(name),
        rank=rank,
        world_size=len(processes),
        local_rank=on_node.index(rank),
        local_world_size=len(on_node),
        master_addr=processes[0].address,
        master_port=processes[0].port,
    )
