# SPDX-License-Identifier: Apache-2.0
"""What a run holds on the cluster besides its processes: placement groups, and memory on its nodes."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.control.placement import Placement, Slot
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.runtime.checkpoint.runs import forget_commits
from dlrover.python.rl.runtime.ray.cluster.api import ActorPlacement, ClusterApi, GroupRow, forget_on_nodes
from dlrover.python.rl.runtime.ray.placement_groups import (
    check_free,
    find_or_reserve,
    has_resources,
    is_usable,
    placement_of,
    placement_timeout,
    release_beyond,
    release_groups,
    reserve,
    reserve_beyond,
    reserve_node,
    wait_until_reserved,
)
from dlrover.python.rl.runtime.ray.processes.actors import Threads

_LOG = get_logger(__name__)

_SETTLE_S = 20.0
_ELASTIC_S = 10.0


@dataclass(frozen=True)
class RunPlan:
    """A run of a job, where its members go, and the public methods of each role's workload."""

    job: JobSpec
    run: str
    placement: Placement
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Reservations:
    """Reserves, finds and releases what one run needs of the cluster."""

    def __init__(self, plan: RunPlan, cluster: ClusterApi) -> None:
        self._job, self._run, self._cluster = plan.job, plan.run, cluster
        self._planned = plan.placement
        self._prefix = f"{plan.job.name}/{plan.run}"
        self._groups: list[str] = []
        self._nodes: set[str] = set()
        self._readmitted: set[str] = set()
        self._lacking: set[int] = set()
        self._locks = defaultdict[int, asyncio.Lock](asyncio.Lock)  # of the plan's nodes
        self._reading = asyncio.Lock()
        self._rows: dict[str, GroupRow] = {}
        self._read_s = -inf  # when reading them began
        self._threads = Threads()
        self._set_placement(plan.placement)

    @property
    def uses_groups(self) -> bool:
        """Return True if resources are reserved before processes start."""
        return self._job.scheduling_strategy != "SIMPLE"

    def add_node(self, node: str) -> None:
        """Record that a process runs on ``node``, where it may leave memory."""
        self._nodes.add(node)

    def has_node(self, node: str) -> bool:
        """Return True if a process of the run is or was on ``node``."""
        return node in self._nodes

    async def reserve(self, incarnation: int, excluded: tuple[str, ...]) -> None:
        """Reserve the whole plan. Raises PlacementTimeout."""
        if not self.uses_groups:
            return
        prefix, excluded = f"{self._prefix}/{incarnation}", self._still_excluded(excluded)
        try:
            await self._reserve(prefix, excluded)
        except PlacementTimeout as error:
            self._readmit(excluded, error)
            await asyncio.to_thread(release_groups, self._cluster, prefix)
            await self._reserve(prefix)

    async def _reserve(self, prefix: str, excluded: tuple[str, ...] = ()) -> None:
        self._groups = await self._threads.run(reserve, self._cluster, self._placement, prefix, excluded)
        nodes, spare, self._lacking = range(len(self._groups)), self._spare, set()
        await self._wait([self._groups[node] for node in nodes if node not in spare])
        for node in sorted(spare):
            try:
                await self._wait([self._groups[node]], _ELASTIC_S)
            except PlacementTimeout:
                self._lacking.add(node)

    async def _wait(self, groups: Sequence[str], limit_s: float = inf) -> None:
        timeout_s = min(limit_s, self._job.placement_timeout_s)
        await wait_until_reserved(self._cluster, groups, self._placement, timeout_s)

    # -- nodes that only have members without which the job can go on -------------------------------------------------

    def is_elastic(self, role: RLRoleType) -> bool:
        """Return True if the job may go on with fewer members of ``role``."""
        return self.uses_groups and bool(self._job.workloads[role].min)

    def _set_placement(self, placement: Placement) -> None:
        self._placement = placement
        roles = {*placement.slots, *placement.standbys}
        self._slots = {role: (*placement.slots.get(role, ()), *placement.standbys.get(role, ())) for role in roles}
        self._spare = self._spare_nodes()

    def _spare_nodes(self) -> set[int]:
        """The plan's nodes that have members of such roles only; the trainer goes to the first node."""
        needed = {0}
        for role in self._job.workloads:
            if not self.is_elastic(role):
                needed.update(self._node_of(slot) for slot in self.slots(role))
        return set(range(len(self._placement.nodes))) - needed

    def _node_of(self, slot: Slot) -> int:
        return self._placement.bundles[slot.bundle].node

    def lacking_slots(self, role: RLRoleType) -> list[int]:
        """Those for which there was no place when it was last tried."""
        slots = enumerate(self.slots(role)) if self._lacking else ()
        return [number for number, slot in slots if self._node_of(slot) in self._lacking]

    async def places(self, role: RLRoleType, wanted: int) -> int:
        """How many members of ``role``, up to ``wanted``, have a place now. What had none has an open request."""
        await self._look_for_places()
        return min(wanted, len(self.slots(role)) - len(self.lacking_slots(role)))

    async def _look_for_places(self) -> None:
        for node in sorted(self._lacking):
            if node >= len(self._groups) or await asyncio.to_thread(is_usable, self._cluster, self._groups[node]):
                self._lacking.discard(node)

    async def find(self, incarnation: int, excluded: tuple[str, ...], short: Iterable[str] = ()) -> None:
        """Find what an earlier master has reserved, request what it has not, and remove what is not in the plan. Roles
        that are ``short`` of members have nodes without a place."""
        if self.uses_groups:
            prefix = f"{self._prefix}/{incarnation}"
            self._groups = await asyncio.to_thread(find_or_reserve, self._cluster, self._placement, prefix, excluded)
            await asyncio.to_thread(release_beyond, self._cluster, prefix, len(self._groups))
            slots = (slot for role in short for slot in self.slots(RLRoleType(role)))
            self._lacking = self._spare & {self._node_of(slot) for slot in slots}
            await self._look_for_places()

    async def enlarge(self, state: JobState, role: str, num: int, timeout_s: float) -> None:
        """Reserve places for ``num`` members of ``role``, or see that those of an earlier size are still there. After a
        PlacementTimeout nothing has changed."""
        placement = self._planned.with_places({**state.most, role: max(num, state.most.get(role, 0))})
        incarnation, excluded = state.incarnation, state.excluded
        timeout_s = min(timeout_s, self._job.placement_timeout_s)
        former, prefix = self._groups, f"{self._prefix}/{incarnation}"
        if len(placement.bundles) <= len(self._placement.bundles):
            nodes = {self._node_of(slot) for slot in self.slots(RLRoleType(role))[:num]} if self.uses_groups else ()
            for node in nodes:
                await self._ensure_node(node, excluded, timeout_s)
            return
        if not self.uses_groups:
            await asyncio.to_thread(check_free, self._cluster, placement, len(self._placement.nodes))
        else:
            excluded = self._still_excluded(excluded)
            groups = await self._threads.run(reserve_beyond, self._cluster, placement, prefix, len(former), excluded)
            try:
                await wait_until_reserved(self._cluster, groups, placement, timeout_s)
            except BaseException:
                await asyncio.to_thread(release_beyond, self._cluster, prefix, len(former))
                raise
            if self._groups is not former:
                raise PlacementTimeout("the job was restarted meanwhile")
            self._groups.extend(groups)
        self._set_placement(placement)

    def slots(self, role: RLRoleType) -> tuple[Slot, ...]:
        """Of members and standbys of ``role``."""
        return self._slots[role]

    async def place(self, role: RLRoleType, slot: int, excluded: tuple[str, ...]) -> ActorPlacement:
        """Where a process of ``role`` goes. A node that was lost is replaced first, or PlacementTimeout raised."""
        slots = self.slots(role)
        if not self.uses_groups:
            return ActorPlacement(slots[slot].resources, excluded=excluded)
        node = self._node_of(slots[slot])
        await self._ensure_node(node, excluded, _ELASTIC_S if node in self._spare else inf)
        return placement_of(slots[slot], self._placement, self._groups)

    async def place_trainer(self, excluded: tuple[str, ...]) -> ActorPlacement:
        """As :meth:`place`: the trainer goes to the node of the plan's first members, whose memory has its commits."""
        if not self.uses_groups:
            return ActorPlacement(excluded=excluded)
        await self._ensure_node(0, excluded)
        return ActorPlacement(group=self._groups[0])

    async def _ensure_node(self, node: int, excluded: tuple[str, ...], limit_s: float = inf) -> None:
        """Reserve one node of the plan unless it is reserved. Raises PlacementTimeout after ``limit_s`` seconds, and at
        once where that has happened already."""
        asked_s = asyncio.get_running_loop().time()
        async with self._locks[node]:
            former, excluded = self._groups[node], self._still_excluded(excluded)
            await self._read_groups(asked_s)
            if has_resources(self._rows.get(former), excluded):
                self._lacking.discard(node)
                return
            if node in self._lacking:
                raise PlacementTimeout(f"there is still no place for node {node} of the plan")
            try:
                await self._replace_node(node, excluded, limit_s)
            except PlacementTimeout as error:
                if limit_s < inf:
                    self._lacking.add(node)
                    raise
                self._readmit(excluded, error)
                await asyncio.to_thread(self._cluster.remove_group, self._groups[node])
                self._groups[node] = former
                if not await asyncio.to_thread(is_usable, self._cluster, former):
                    await self._replace_node(node)

    async def _read_groups(self, asked_s: float) -> None:
        """Read the table of groups, unless that has begun after ``asked_s``: processes that start together share it."""
        async with self._reading:
            if self._read_s < asked_s:
                began_s = asyncio.get_running_loop().time()
                self._rows = {row.id: row for row in await asyncio.to_thread(self._cluster.list_groups)}
                self._read_s = began_s

    async def _replace_node(self, node: int, excluded: tuple[str, ...] = (), limit_s: float = inf) -> None:
        former, self._read_s = self._groups[node], -inf
        work = self._threads.run(reserve_node, self._cluster, self._placement, node, former, excluded)
        self._groups[node] = await work
        await self._wait([self._groups[node]], limit_s)

    def _still_excluded(self, excluded: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(node for node in excluded if node not in self._readmitted)

    def _readmit(self, excluded: tuple[str, ...], error: PlacementTimeout) -> None:
        """Use excluded nodes again: a node that has lost some processes is better than none. Without any, raise."""
        if not excluded:
            raise error
        self._readmitted.update(excluded)
        _LOG.warning("%s: nodes that were excluded are used again: %s", self._job.name, error)

    def replan(self, placement: Placement) -> None:
        """Another plan for what is reserved next."""
        self._set_placement(placement)

    async def timeout_error(self) -> PlacementTimeout:
        """The error of a cluster that lacks the plan's resources."""
        limit_s = self._job.placement_timeout_s
        return await asyncio.to_thread(placement_timeout, self._cluster, self._placement, limit_s)

    async def release(self) -> None:
        """Remove all placement groups of the run."""
        await self._threads.settle(_SETTLE_S)
        self._groups = []
        await asyncio.to_thread(release_groups, self._cluster, self._prefix)

    async def forget_commits(self, processes: Iterable[Process]) -> None:
        """Remove the run's commits from the memory of its nodes and from the job's directory. A killed actor's name is
        free before its process has ended, and a process that is still starting would write into memory again: all
        ``processes`` are dead before the memory is removed."""
        # A master that lost its journal knows no node.
        nodes = self._nodes or {row.node_id for row in await asyncio.to_thread(self._cluster.list_nodes) if row.alive}
        pids: dict[str, list[int]] = {node: [] for node in nodes}
        for process in processes:
            pids.setdefault(process.node, []).append(process.pid)
        job, run = self._job.name, self._run
        await forget_on_nodes(self._cluster, pids, job, run)
        await asyncio.to_thread(forget_commits, self._job.job_dir, self._run)
