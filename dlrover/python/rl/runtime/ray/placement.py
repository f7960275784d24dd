# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: requesting, waiting for and releasing groups, and the reservations of a job that are made of them.
"""Placement: the resources that jobs and sessions reserve in a cluster, and the places of their processes.

::

    plan --reserve--> one placement group for each of its nodes --wait--> reserved --placement_of--> actors in bundles
                                                                             '--remove_groups--> released

Groups have names: ``<prefix>/node-<k>`` for node ``k`` of the plan, and ``<prefix>/node-<k>/2-<node id>`` for the
replacement of the first group, which was on that node. The prefix is ``<job>/<run>/<incarnation>``.

Every function but :func:`wait_until_reserved` and :func:`placement_of` waits for Ray's head: call it in a thread.
:class:`Reservations` does so for one run of a job.
"""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from dlrover.python.rl.common.errors import ClusterUnavailable, PlacementTimeout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.control.placement import Bundle, Placement, Slot, sum_resources
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.runtime.checkpoint.runs import forget_commits
from dlrover.python.rl.runtime.ray.cluster.api import (
    CREATED,
    MEGABYTE,
    PENDING,
    RAY_NAMES,
    REMOVED,
    ActorPlacement,
    GroupRow,
    RayClusterApi,
    forget_on_nodes,
    remove_groups,
)
from dlrover.python.rl.runtime.ray.processes.actors import Threads

_LOG = get_logger(__name__)

_POLL_S = 0.05
_LOG_INTERVAL_S = 5.0
_NODES_SHOWN = 4
_SETTLE_S = 20.0
_ELASTIC_S = 10.0
_NAME = re.compile(r"(?P<prefix>.+/\d+)/node-(?P<node>\d+)(?:/(?P<number>\d+)-(?P<replaced_node>\w*))?")


@dataclass(frozen=True)
class _NodeGroup(GroupRow):
    """A group of a plan. A PENDING one stays: Ray may lose resources if it is removed (ray-project/ray#64693)."""

    prefix: str
    node: int  # of the plan
    number: int  # 1 for the first group of that node, one more for each replacement
    replaced_node: str  # id of the cluster's node of its replaced predecessor, "" for none


def reserve(
    cluster: RayClusterApi, placement: Placement, prefix: str, excluded: tuple[str, ...] = (), has_members: bool = False
) -> list[str]:
    """Request the resources of the plan that no earlier call with this ``prefix`` has requested, and return its groups
    by node. Replaces groups on ``excluded`` nodes, unless the plan ``has_members``, which would die with them."""
    table = _list_groups(cluster)
    newest = _newest_by_node(table, prefix)
    usable = {node: group for node, group in newest.items() if group.state == PENDING}
    if has_members:
        usable |= _newest_by_node((group for group in table if group.is_reserved()), prefix)
    else:
        usable |= {node: group for node, group in newest.items() if group.is_reserved(excluded)}
    groups = []
    for node, bundles in enumerate(placement.nodes):
        last, group = newest.get(node), usable.get(node)
        if group is not None:
            groups.append(group.id)
        else:
            name = f"{prefix}/node-{node}" + (f"/{last.number + 1}-" if last else "")
            groups.append(request_group(cluster, bundles, name, excluded))
        if last is not None and last is not group and last.state != REMOVED:
            cluster.remove_group(last.id)
    return groups


def reserve_node(
    cluster: RayClusterApi, placement: Placement, node: int, lost: str, excluded: tuple[str, ...] = ()
) -> str:
    """Replace ``lost``, the group of one node of the plan, by the group of an earlier call or a new one.

    If the node of ``lost`` is gone, ``lost`` is removed, since Ray would move it to a needed node; on an excluded node
    it stays, for the processes that still run in it. Raises ClusterUnavailable if Ray no longer knows ``lost``.
    """
    groups = _list_groups(cluster)
    former = next((group for group in groups if group.id == lost), None)
    if former is None:
        raise ClusterUnavailable(f"Ray no longer knows the placement group of the plan's node {node}")
    newest = _newest_by_node(groups, former.prefix)[node]
    if newest.is_reserved(excluded):
        return newest.id
    replaced_node = next(iter(newest.nodes), "") if newest.state == CREATED else ""
    name = f"{former.prefix}/node-{node}/{newest.number + 1}-{replaced_node}"
    group = request_group(cluster, placement.nodes[node], name, excluded)
    _remove_replaced(cluster, _list_groups(cluster), former.prefix)
    return group


def request_group(
    cluster: RayClusterApi, bundles: Sequence[Bundle], name: str, excluded: tuple[str, ...] = (), on: str = ""
) -> str:
    """Request the bundles of one node of a plan ``on`` a node of the cluster, or on any that is not excluded."""
    amounts = []
    for bundle in bundles:
        needs = {RAY_NAMES.get(kind, kind): amount for kind, amount in bundle.resources.items() if amount}
        if "memory" in needs:
            needs["memory"] = math.ceil(needs["memory"] * MEGABYTE)
        amounts.append(needs or {"memory": 1})  # Ray refuses an empty bundle
    return cluster.create_group(amounts, name, excluded, on)


def release_beyond(cluster: RayClusterApi, prefix: str, node: int) -> None:
    """Remove the groups of the plan's nodes from number ``node`` on."""
    for group in _list_groups(cluster):
        if group.prefix == prefix and group.node >= node and group.state != REMOVED:
            cluster.remove_group(group.id)


def is_usable(cluster: RayClusterApi, group: str, excluded: Iterable[str] = ()) -> bool:
    """Return True if a group has its resources on nodes other than ``excluded``."""
    return any(row.id == group and row.is_reserved(excluded) for row in cluster.list_groups())


def placement_of(slot: Slot, placement: Placement, groups: Sequence[str]) -> ActorPlacement:
    """Return the place of a worker or standby: its bundle if ``groups`` are reserved."""
    if not groups:
        return ActorPlacement(slot.resources)
    node, bundle = placement.position(slot.bundle)
    return ActorPlacement(slot.resources, groups[node], bundle)


async def wait_until_reserved(
    cluster: RayClusterApi, groups: Sequence[str], placement: Placement, timeout_s: float
) -> None:
    """Wait for the resources of all groups. Raises PlacementTimeout after ``timeout_s``, or if a group was removed."""
    loop = asyncio.get_running_loop()
    start_s = logged_s = loop.time()
    while waiting := await asyncio.to_thread(waiting_nodes, cluster, groups):
        now_s = loop.time()
        if now_s - start_s > timeout_s:
            raise await asyncio.to_thread(placement_timeout, cluster, placement, timeout_s, waiting)
        if now_s - logged_s > _LOG_INTERVAL_S:
            logged_s = now_s
            text = await asyncio.to_thread(_describe_lack, cluster, placement, waiting)
            _LOG.warning("waiting for resources since %.0f s of %g: %s", now_s - start_s, timeout_s, text)
        await asyncio.sleep(_POLL_S)


def waiting_nodes(cluster: RayClusterApi, groups: Sequence[str]) -> list[int]:
    """List the plan's nodes without resources; removes strays. Raises PlacementTimeout if a group was removed."""
    table, wanted = _list_groups(cluster), set(groups)
    present = [group for group in table if group.id in wanted and group.state != REMOVED]
    if len(present) < len(wanted):
        raise PlacementTimeout("the reserved resources were released while the job waited for them")
    for prefix in {group.prefix for group in present}:
        _remove_replaced(cluster, table, prefix)
    _remove_strays(cluster, table, present)
    return sorted(group.node for group in present if group.state != CREATED)


def _remove_replaced(cluster: RayClusterApi, table: Iterable[_NodeGroup], prefix: str) -> None:
    """Remove replaced groups that Ray has moved from a lost node to another, where they are not needed."""
    groups = [group for group in table if group.prefix == prefix]
    successors = {(group.node, group.number - 1): group for group in groups}
    for group in groups:
        successor = successors.get((group.node, group.number)) if group.state != REMOVED else None
        if successor is not None and not (group.state == CREATED and group.nodes == {successor.replaced_node}):
            cluster.remove_group(group.id)


def _remove_strays(cluster: RayClusterApi, table: Iterable[_NodeGroup], wanted: Iterable[_NodeGroup]) -> None:
    """Remove groups of earlier incarnations of the run, and second requests of wanted groups: Ray may receive a killed
    master's request after its successor has released the groups that it found."""
    runs = {run: int(incarnation) for run, _, incarnation in (group.prefix.rpartition("/") for group in wanted)}
    ids = {(group.prefix, group.node, group.number): group.id for group in wanted}
    for group in table:
        run, _, incarnation = group.prefix.rpartition("/")
        is_earlier = run in runs and int(incarnation) < runs[run]
        is_second = ids.get((group.prefix, group.node, group.number), group.id) != group.id
        if (is_earlier or is_second) and group.state != REMOVED:
            _LOG.warning("removing the placement group %s/node-%d, which nothing uses", group.prefix, group.node)
            cluster.remove_group(group.id)


def _list_groups(cluster: RayClusterApi) -> list[_NodeGroup]:
    groups = []
    for row in cluster.list_groups():
        if match := _NAME.fullmatch(row.name):
            node, number, replaced = int(match["node"]), int(match["number"] or 1), match["replaced_node"] or ""
            groups.append(_NodeGroup(row.id, row.name, row.state, row.nodes, match["prefix"], node, number, replaced))
    return groups


def _newest_by_node(groups: Iterable[_NodeGroup], prefix: str) -> dict[int, _NodeGroup]:
    by_number = sorted(groups, key=lambda group: group.number)
    return {group.node: group for group in by_number if group.prefix == prefix}


def placement_timeout(
    cluster: RayClusterApi, placement: Placement, timeout_s: float, nodes: Sequence[int] = ()
) -> PlacementTimeout:
    """Return the error of a cluster that lacks the resources of ``nodes`` of the plan (default: all)."""
    text = _describe_lack(cluster, placement, nodes)
    return PlacementTimeout(f"after {timeout_s:g} s the cluster still lacks the resources: {text}")


def check_free(cluster: RayClusterApi, placement: Placement, node: int) -> None:
    """Raise PlacementTimeout unless the cluster has the free resources for the plan's nodes from ``node`` on."""
    nodes = range(node, len(placement.nodes))
    needed = sum_resources(bundle.resources for number in nodes for bundle in placement.nodes[number])
    free = _free_of(cluster, needed)
    if any(free[name] < needed[name] for name in needed):
        raise PlacementTimeout(f"the cluster lacks the resources: {_describe_lack(cluster, placement, nodes)}")


def _describe_lack(cluster: RayClusterApi, placement: Placement, nodes: Sequence[int]) -> str:
    listed = [placement.nodes[node] for node in nodes or range(len(placement.nodes))]
    by_node = [sum_resources(bundle.resources for bundle in bundles) for bundles in listed]
    needed, together = sum_resources(by_node), ""
    if len(by_node) > 1:
        shown = ", ".join(map(str, by_node[:_NODES_SHOWN]))
        more = f", ... ({len(by_node)} nodes)" if len(by_node) > _NODES_SHOWN else ""
        together = f", each of these parts on one node: {shown}{more}"
    free = {name: amount // 1 if name == "memory" else amount for name, amount in _free_of(cluster, needed).items()}
    return f"needed {needed}{together}; free {free}"


def _free_of(cluster: RayClusterApi, names: Iterable[str]) -> dict[str, float]:
    """Return the free amounts of these resources, memory in MB."""
    available = cluster.free_resources()
    free = {name: available.get(RAY_NAMES.get(name, name), 0.0) for name in names}
    return {name: amount / MEGABYTE if name == "memory" else amount for name, amount in free.items()}


@dataclass(frozen=True)
class RunPlan:
    """A run of a job, the places of its workers, and the public methods of each role's workload."""

    job: JobSpec
    run: str
    placement: Placement
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Reservations:
    """Reserves, finds and releases a run's resources; ``nodes`` are the cluster's nodes that have or had a process of
    the run, which may have left memory there; ``slots`` are the places of workers and standbys by role."""

    def __init__(self, plan: RunPlan, cluster: RayClusterApi) -> None:
        self._job, self._run, self._cluster = plan.job, plan.run, cluster
        self._planned = plan.placement
        self._groups: list[str] = []
        self.nodes: set[str] = set()
        self._readmitted: set[str] = set()
        self._lacking: set[int] = set()
        self._locks = defaultdict[int, asyncio.Lock](asyncio.Lock)  # of the plan's nodes
        self._reading = asyncio.Lock()
        self._rows: dict[str, GroupRow] = {}
        self._read_s = -inf  # when reading them began
        self._threads = Threads()
        self.replan(plan.placement)

    @property
    def uses_groups(self) -> bool:
        """Return True if resources are reserved before processes start."""
        return self._job.scheduling_strategy != "SIMPLE"

    def is_elastic(self, role: RLRoleType) -> bool:
        """Return True if the job can continue with fewer workers of ``role``."""
        return self.uses_groups and bool(self._job.workloads[role].min)

    def replan(self, placement: Placement) -> None:
        """Use another plan for the next reservations."""
        self._placement = placement
        roles = {*placement.slots, *placement.standbys}
        self.slots = {role: (*placement.slots.get(role, ()), *placement.standbys.get(role, ())) for role in roles}
        # Spare nodes have only workers that the job can do without; the trainer is on the first node.
        needed = {0}
        for role in self._job.workloads:
            if not self.is_elastic(role):
                needed.update(self._node_of(slot) for slot in self.slots[role])
        self._spare = set(range(len(placement.nodes))) - needed

    def _node_of(self, slot: Slot) -> int:
        return self._placement.bundles[slot.bundle].node

    async def reserve(self, incarnation: int, excluded: tuple[str, ...]) -> None:
        if not self.uses_groups:
            return
        prefix, excluded = self._prefix(incarnation), self._still_excluded(excluded)
        try:
            await self._reserve(prefix, excluded)
        except PlacementTimeout as error:
            self._readmit(excluded, error)
            await asyncio.to_thread(remove_groups, self._cluster, f"{prefix}/")
            await self._reserve(prefix)

    def _prefix(self, incarnation: int) -> str:
        return f"{self._job.name}/{self._run}/{incarnation}"

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

    async def find(self, incarnation: int, excluded: tuple[str, ...], short: Iterable[str] = ()) -> None:
        """Find or request the plan's groups, and remove others. Roles ``short`` of workers have lacking nodes."""
        if self.uses_groups:
            prefix = self._prefix(incarnation)
            self._groups = await asyncio.to_thread(reserve, self._cluster, self._placement, prefix, excluded, True)
            await asyncio.to_thread(release_beyond, self._cluster, prefix, len(self._groups))
            slots = (slot for role in short for slot in self.slots[RLRoleType(role)])
            self._lacking = self._spare & {self._node_of(slot) for slot in slots}
            await self._look_for_places()

    def lacking_slots(self, role: RLRoleType) -> list[int]:
        """List the slots that had no place at the last attempt."""
        slots = enumerate(self.slots[role]) if self._lacking else ()
        return [number for number, slot in slots if self._node_of(slot) in self._lacking]

    async def places(self, role: RLRoleType, wanted: int) -> int:
        """Count the workers of ``role``, up to ``wanted``, that have a place now. Requests for missing places stay."""
        await self._look_for_places()
        return min(wanted, len(self.slots[role]) - len(self.lacking_slots(role)))

    async def _look_for_places(self) -> None:
        for node in sorted(self._lacking):
            if node >= len(self._groups) or await asyncio.to_thread(is_usable, self._cluster, self._groups[node]):
                self._lacking.discard(node)

    async def enlarge(self, state: JobState, role: str, num: int, timeout_s: float) -> None:
        """Reserve or check the places of ``num`` workers of ``role``; after a PlacementTimeout nothing has changed."""
        placement = self._planned.with_places({**state.most, role: max(num, state.most.get(role, 0))})
        excluded, timeout_s = state.excluded, min(timeout_s, self._job.placement_timeout_s)
        if len(placement.bundles) <= len(self._placement.bundles):
            nodes = {self._node_of(slot) for slot in self.slots[RLRoleType(role)][:num]} if self.uses_groups else ()
            for node in nodes:
                await self._ensure_node(node, excluded, timeout_s)
            return
        if not self.uses_groups:
            await asyncio.to_thread(check_free, self._cluster, placement, len(self._placement.nodes))
        else:
            await self._reserve_beyond(placement, state.incarnation, self._still_excluded(excluded), timeout_s)
        self.replan(placement)

    async def _reserve_beyond(
        self, placement: Placement, incarnation: int, excluded: tuple[str, ...], timeout_s: float
    ) -> None:
        """Reserve the nodes that ``placement`` has beyond the present plan."""
        former, prefix, groups = self._groups, self._prefix(incarnation), list[str]()
        try:
            for node in range(len(former), len(placement.nodes)):
                request = self._cluster, placement.nodes[node], f"{prefix}/node-{node}", excluded
                groups.append(await self._threads.run(request_group, *request))
            await wait_until_reserved(self._cluster, groups, placement, timeout_s)
        except BaseException:
            await asyncio.to_thread(release_beyond, self._cluster, prefix, len(former))
            raise
        if self._groups is not former:
            raise PlacementTimeout("the job was restarted during the resize")
        self._groups.extend(groups)

    async def place(self, role: RLRoleType, slot: int, excluded: tuple[str, ...]) -> ActorPlacement:
        """Return the place of a process of ``role``, after replacing a lost node. Raises PlacementTimeout."""
        slots = self.slots[role]
        if not self.uses_groups:
            return ActorPlacement(slots[slot].resources, excluded=excluded)
        node = self._node_of(slots[slot])
        await self._ensure_node(node, excluded, _ELASTIC_S if node in self._spare else inf)
        return placement_of(slots[slot], self._placement, self._groups)

    async def place_trainer(self, excluded: tuple[str, ...]) -> ActorPlacement:
        """Return the trainer's place, like :meth:`place`: the plan's first node, whose memory has its commits."""
        if not self.uses_groups:
            return ActorPlacement(excluded=excluded)
        await self._ensure_node(0, excluded)
        return ActorPlacement(group=self._groups[0])

    async def _ensure_node(self, node: int, excluded: tuple[str, ...], limit_s: float = inf) -> None:
        """Reserve one node of the plan if necessary. Raises PlacementTimeout, at once after an earlier one."""
        loop = asyncio.get_running_loop()
        called_s = loop.time()
        async with self._locks[node]:
            former, excluded = self._groups[node], self._still_excluded(excluded)
            async with self._reading:
                if self._read_s < called_s:  # processes that start together share one reading
                    began_s = loop.time()
                    self._rows = {row.id: row for row in await asyncio.to_thread(self._cluster.list_groups)}
                    self._read_s = began_s
            row = self._rows.get(former)
            if row is not None and row.is_reserved(excluded):
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

    async def _replace_node(self, node: int, excluded: tuple[str, ...] = (), limit_s: float = inf) -> None:
        former, self._read_s = self._groups[node], -inf
        work = self._threads.run(reserve_node, self._cluster, self._placement, node, former, excluded)
        self._groups[node] = await work
        await self._wait([self._groups[node]], limit_s)

    def _still_excluded(self, excluded: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(node for node in excluded if node not in self._readmitted)

    def _readmit(self, excluded: tuple[str, ...], error: PlacementTimeout) -> None:
        """Use excluded nodes again, since a node that lost some processes is better than none, or raise ``error``."""
        if not excluded:
            raise error
        self._readmitted.update(excluded)
        _LOG.warning("%s: nodes that were excluded are used again: %s", self._job.name, error)

    async def timeout_error(self) -> PlacementTimeout:
        limit_s = self._job.placement_timeout_s
        return await asyncio.to_thread(placement_timeout, self._cluster, self._placement, limit_s)

    async def release(self) -> None:
        await self._threads.settle(_SETTLE_S)
        self._groups = []
        await asyncio.to_thread(remove_groups, self._cluster, f"{self._job.name}/{self._run}/")

    async def forget_commits(self, processes: Iterable[Process]) -> None:
        """Remove the run's commits from the memory of its nodes and the job's directory, after all ``processes`` are
        dead: a killed actor's name is free before its process has ended, and a starting one would write again."""
        # A master that lost its journal knows no node.
        nodes = self.nodes or {row.node_id for row in await asyncio.to_thread(self._cluster.list_nodes) if row.alive}
        pids: dict[str, list[int]] = {node: [] for node in nodes}
        for process in processes:
            pids.setdefault(process.node, []).append(process.pid)
        await forget_on_nodes(self._cluster, pids, self._job.name, self._run)
        await asyncio.to_thread(forget_commits, self._job.job_dir, self._run)
