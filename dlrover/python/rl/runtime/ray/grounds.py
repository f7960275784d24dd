"""What a run holds on the cluster besides its processes: reserved resources, and memory on its nodes."""

import asyncio
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.runtime.durability import forget_commits
from dlrover.python.rl.runtime.node_memory import forget_memory
from dlrover.python.rl.runtime.ray.fleet import on_node
from dlrover.python.rl.runtime.ray.options import keep_off
from dlrover.python.rl.runtime.ray.placing import (
    is_usable,
    lacking,
    place_options,
    release_groups,
    reserve,
    reserve_node,
    until_reserved,
)
from dlrover.python.rl.runtime.ray.threads import Threads

_LOG = get_logger(__name__)

_SETTLE_S = 20.0


class Grounds:
    """Reserves, finds and gives back.

    Args:
        job: the job.
        run: which run of it.
        placement: the plan.
    """

    def __init__(self, job: JobSpec, run: str, placement: Placement) -> None:
        self._job, self._run, self._placement = job, run, placement
        self._prefix = f"{job.name}/{run}"
        self._groups: list[PlacementGroup] = []
        self._nodes: set[str] = set()
        self._pardoned: set[str] = set()
        self._lock = asyncio.Lock()
        self._threads = Threads()

    @property
    def reserved(self) -> bool:
        """Whether resources are reserved before processes start."""
        return self._job.scheduling_strategy != "SIMPLE"

    def used(self, node: str) -> None:
        """Note that a process runs on ``node``: it may leave memory there."""
        self._nodes.add(node)

    def is_used(self, node: str) -> bool:
        """Whether a process of the run is or was on ``node``."""
        return node in self._nodes

    async def reserve(self, incarnation: int, excluded: tuple[str, ...]) -> None:
        """Reserve the whole plan.

        Raises:
            PlacementTimeout: the cluster does not have the resources in time.
        """
        if not self.reserved:
            return
        prefix, kept_off = f"{self._prefix}/{incarnation}", self._kept_off(excluded)
        try:
            await self._reserve(prefix, kept_off)
        except PlacementTimeout as error:
            self._pardon(kept_off, error)
            await asyncio.to_thread(release_groups, prefix)
            await self._reserve(prefix)

    async def _reserve(self, prefix: str, excluded: tuple[str, ...] = ()) -> None:
        self._groups = await self._threads.run(reserve, self._placement, prefix, excluded)
        await until_reserved(self._groups, self._placement, self._job.placement_timeout_s)

    async def find(self, incarnation: int, excluded: tuple[str, ...]) -> None:
        """Find what an earlier master has reserved."""
        if self.reserved:
            # Whatever it had not got to is asked for now.
            self._groups = await asyncio.to_thread(reserve, self._placement, f"{self._prefix}/{incarnation}", excluded)

    async def options(self, role: RLRoleType, slot: int, excluded: tuple[str, ...]) -> dict[str, Any]:
        """Ray's options that put a process of ``role`` into its place. A node that was lost is replaced first.

        Raises:
            PlacementTimeout: no other node has the resources in time.
        """
        places = (*self._placement.slots[role], *self._placement.standbys.get(role, ()))
        if not self.reserved:
            return {**place_options(places[slot], self._placement, []), **keep_off(excluded)}
        await self._hold(self._placement.bundles[places[slot].bundle].node, excluded)
        return place_options(places[slot], self._placement, self._groups)

    async def trainer_options(self, excluded: tuple[str, ...]) -> dict[str, Any]:
        """Ray's options that put the trainer on the node of the plan's first members: what it commits is in the memory
        of that node.

        Raises:
            PlacementTimeout: no other node has the resources in time.
        """
        if not self.reserved:
            return {"num_cpus": 0, **keep_off(excluded)}
        await self._hold(0, excluded)
        return {"num_cpus": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(self._groups[0], -1)}

    async def _hold(self, node: int, excluded: tuple[str, ...]) -> None:
        """Make sure that the resources of one node of the plan are reserved."""
        async with self._lock:
            before, kept_off = self._groups[node], self._kept_off(excluded)
            if await asyncio.to_thread(is_usable, before, kept_off):
                return
            try:
                await self._hold_anew(node, kept_off)
            except PlacementTimeout as error:
                self._pardon(kept_off, error)
                await asyncio.to_thread(remove_placement_group, self._groups[node])
                self._groups[node] = before
                if not await asyncio.to_thread(is_usable, before):
                    await self._hold_anew(node)

    async def _hold_anew(self, node: int, excluded: tuple[str, ...] = ()) -> None:
        self._groups[node] = await self._threads.run(reserve_node, self._placement, node, self._groups[node], excluded)
        await until_reserved([self._groups[node]], self._placement, self._job.placement_timeout_s)

    def _kept_off(self, excluded: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(node for node in excluded if node not in self._pardoned)

    def _pardon(self, excluded: tuple[str, ...], error: PlacementTimeout) -> None:
        """Use excluded nodes again: one that has lost some processes is better than none. Without any, raise."""
        if not excluded:
            raise error
        self._pardoned.update(excluded)
        _LOG.warning("%s: nodes that were excluded are used again: %s", self._job.name, error)

    async def lacking(self) -> PlacementTimeout:
        """The error of a cluster that does not have the resources."""
        return await asyncio.to_thread(lacking, self._placement, self._job.placement_timeout_s)

    async def release(self) -> None:
        """Give all reserved resources back."""
        await self._threads.settle(_SETTLE_S)
        self._groups = []
        await asyncio.to_thread(release_groups, self._prefix)

    async def forget_commits(self) -> None:
        """Remove the run's commits, from the memory of its nodes and from the job's directory."""
        nodes = self._nodes or await asyncio.to_thread(_living_nodes)  # a master that lost its journal knows of none
        await asyncio.gather(*(on_node(node, forget_memory, self._job.name, self._run) for node in nodes))
        await asyncio.to_thread(forget_commits, self._job.job_dir, self._run)


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
