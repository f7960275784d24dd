# SPDX-License-Identifier: Apache-2.0
"""Engines driven by hand on Ray.

::

    script --starts or joins--> Ray cluster
       '--reserves--> a plan with a bundle for each device --> actors in it, as many as share the device

The plan is placed like a job's, but nothing is detached: actors and bundles end with the script. An actor reserves no
GPU itself; it runs in the GPU's bundle, and sees the devices in ``CUDA_VISIBLE_DEVICES``.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from dlrover.python.rl.common.errors import ClusterUnavailable, WorkloadStartError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.config.spec import JobSpec, TrainerSpec, WorkloadSpec
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.control.placement import Bundle, Placement, Slot
from dlrover.python.rl.runtime.member.loading import Device, own_search_path
from dlrover.python.rl.runtime.ray.cluster.api import ActorRequest, RayClusterApi, remove_groups
from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow
from dlrover.python.rl.runtime.ray.placement import placement_of, placement_timeout, request_group, waiting_nodes
from dlrover.python.rl.runtime.ray.processes.actors import ON_CPU, VISIBLE_DEVICES_OFF
from dlrover.python.rl.runtime.ray.processes.member import MemberActor
from dlrover.python.rl.runtime.ray.processes.port import RayPort
from dlrover.python.rl.runtime.ray.processes.process_table import Neighbours

_LOG = get_logger(__name__)

_POLL_S = 0.05
_CLOSE_S = 5.0
_GONE_S = 20.0


class RayHosting:
    """Implements ``Hosting`` on the Ray cluster at ``address`` (``"auto"``, ``"host:port"``), None: a new one.

    It uses up to ``per_node`` free GPUs of each node, or if no node has a GPU logical devices, one per free core; each
    wait for them or for processes takes at most ``timeout_s``. Raises ClusterUnavailable, also without a free device,
    and PlacementTimeout if another job has reserved the devices since they were counted.
    """

    separate = True

    def __init__(self, address: str | None, per_node: int | None, log_to_driver: bool, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._handles: dict[str, list[Any]] = {}
        self._cluster = RayClusterApi(detached=False)
        self._prefix = f"(session)/{uuid4().hex}"  # no job can have this name
        self.port = RayPort({})
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            own = address is None and not ray.is_initialized()
            cores = per_node or os.cpu_count() or 1
            self._stack.enter_context(ray_cluster(address, {"cpu": float(cores)}, log_to_driver=log_to_driver))
            kind, offers = self._find_free(per_node, cores if own else None)
            self.devices = self._reserve(kind, offers)
            undo.pop_all()

    def _find_free(
        self, per_node: int | None, most_cores: int | None
    ) -> tuple[Literal["cuda", "cpu"], list[tuple[NodeRow, int]]]:
        """Find the free devices of each node, the head first: up to ``per_node`` GPUs, or if no node has a GPU cores,
        up to ``most_cores``, since a cluster that this process started counts more than exist."""
        free, head = available_resources_per_node(), ray.get_runtime_context().get_node_id()
        nodes = sorted((row for row in self._cluster.list_nodes() if row.alive), key=lambda row: row.node_id != head)
        on_gpus = ray.cluster_resources().get("GPU", 0) > 0
        name, most = ("GPU", per_node) if on_gpus else ("CPU", per_node or most_cores)
        counts = [(row, int(free.get(row.node_id, {}).get(name, 0))) for row in nodes]
        offers = [(row, min(count, most or count)) for row, count in counts if count]
        if not offers:
            raise ClusterUnavailable(f"no node has a free {name}: {free}")
        return "cuda" if on_gpus else "cpu", offers

    def _reserve(self, kind: Literal["cuda", "cpu"], offers: Sequence[tuple[NodeRow, int]]) -> tuple[Device, ...]:
        needs = {"cpu" if kind == "cpu" else "gpu": 1.0}
        nodes = [row for row, count in offers for _ in range(count)]
        order = {row.node_id: number for number, (row, _) in enumerate(offers)}
        self._placement = placement = Placement(tuple(Bundle(order[row.node_id], needs) for row in nodes), {})
        self._groups = [
            request_group(self._cluster, bundles, f"{self._prefix}/1/node-{number}", on=offers[number][0].node_id)
            for number, bundles in enumerate(placement.nodes)
        ]
        deadline_s = time.monotonic() + self._timeout_s
        while waiting := waiting_nodes(self._cluster, self._groups):
            if time.monotonic() > deadline_s:
                raise placement_timeout(self._cluster, placement, self._timeout_s, waiting)
            time.sleep(_POLL_S)
        if kind == "cpu":
            return tuple(Device(row.node_id, row.host) for row in nodes)
        places = [placement_of(Slot(slot, {"gpu": 0.01}), placement, self._groups) for slot in range(len(nodes))]
        names = [ray.remote(_own_gpu).options(**place.to_ray()).remote() for place in places]
        gpus = ray.get(names, timeout=self._timeout_s)
        return tuple(Device(row.node_id, row.host, "cuda", gpu) for row, gpu in zip(nodes, gpus, strict=True))

    def start(self, name: str, slots: Sequence[Sequence[int]], where: str) -> list[Process]:
        module, _, class_name = where.partition(":")
        workload = WorkloadSpec(module=module, class_=class_name, num=len(slots))
        trainer = TrainerSpec(module=module, class_=class_name)
        # The part of a job that workers read.
        job = JobSpec(
            "session",
            trainer,
            {RLRoleType(name): workload},
            search_path=tuple(own_search_path()),
            spans_mb=0,
        )
        ids = [ProcessId(name, rank) for rank in range(len(slots))]
        handles = self._handles[name] = [self._start_actor(*member) for member in zip(ids, slots, strict=True)]
        with contextlib.ExitStack() as undo:
            undo.callback(self.end, name)
            processes: list[Process] = self._all(name, [handle.dlrover_locate.remote(()) for handle in handles])
            neighbours = Neighbours(dict(enumerate(processes)))
            contexts = [neighbours.context(job, member, str(member)) for member in ids]
            starts = zip(handles, contexts, strict=True)
            self._all(name, [handle.dlrover_start.remote(job, context, 1) for handle, context in starts])
            undo.pop_all()
        for rank, handle in enumerate(handles):
            self.port.replace(name, rank, handle, 1)
        return processes

    def _start_actor(self, process_id: ProcessId, slots: Sequence[int]) -> Any:
        devices = [self.devices[slot] for slot in slots]
        env = ON_CPU
        if devices[0].kind == "cuda":
            env = {**VISIBLE_DEVICES_OFF, "CUDA_VISIBLE_DEVICES": ",".join(device.name for device in devices)}
        place = placement_of(Slot(slots[0], {}), self._placement, self._groups)
        return self._cluster.start_actor(ActorRequest("", MemberActor, (process_id, 1, None, None), env, place))

    def _all(self, name: str, refs: Sequence[Any]) -> Any:
        try:
            return ray.get(list(refs), timeout=self._timeout_s)
        except GetTimeoutError as error:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            late = [rank for rank, ref in enumerate(refs) if ref not in ready]
            raise WorkloadStartError(name, f"ranks {late} did not start within {self._timeout_s:g} s") from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, WorkloadStartError) else error) from None
        except RayError as error:
            raise WorkloadStartError(name, f"{type(error).__name__}: {error}") from error

    def end(self, name: str) -> None:
        handles = self._handles.pop(name, [])
        if not handles or not ray.is_initialized():
            return
        ranks = {handle.dlrover_close.remote(): rank for rank, handle in enumerate(handles)}
        closed, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=_CLOSE_S)
        for ref in closed:
            try:
                ray.get(ref, timeout=_CLOSE_S)
            except RayActorError:
                pass  # it is gone already
            except RayError as error:
                _LOG.warning("%s[%d] did not close: %s", name, ranks[ref], error)
        for handle in handles:
            self._cluster.kill_actor(handle)
        for handle in handles:
            with contextlib.suppress(RayError):  # the actor is dead
                ray.get(handle.dlrover_ping.remote(), timeout=_GONE_S)

    def close(self) -> None:
        with self._stack:  # closes the connection last
            for name in list(self._handles):
                self.end(name)
            if ray.is_initialized():
                remove_groups(self._cluster, f"{self._prefix}/")


def _own_gpu() -> str:
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
