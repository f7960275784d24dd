# SPDX-License-Identifier: Apache-2.0
"""One placement group for each node of a plan.

Groups are found by name: ``<prefix>/node-<k>`` for node ``k`` of the plan, and ``<prefix>/node-<k>/2-<node id>`` for
the one that replaced the first, which was on that node. The prefix is ``<job>/<run>/<incarnation>``.

Every function but :func:`wait_until_reserved` and :func:`placement_of` waits for Ray's head: call it in a thread.
"""

import asyncio
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrover.python.rl.common.errors import ClusterUnavailable, PlacementTimeout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.control.placement import Bundle, Placement, Slot, sum_resources
from dlrover.python.rl.runtime.ray.cluster.api import (
    CREATED,
    MEGABYTE,
    PENDING,
    RAY_NAMES,
    REMOVED,
    ActorPlacement,
    ClusterApi,
    GroupRow,
)

_LOG = get_logger(__name__)

_POLL_S = 0.05
_LOG_INTERVAL_S = 5.0
_NODES_SHOWN = 4
_NAME = re.compile(r"(?P<prefix>.+/\d+)/node-(?P<node>\d+)(?:/(?P<number>\d+)-(?P<replaced_node>\w*))?")


@dataclass(frozen=True)
class _NodeGroup:
    id: str
    prefix: str
    node: int  # the plan's node that it reserves
    number: int  # 1 for the first group of that node, one more for each replacement
    replaced_node: str  # id of the cluster's node that its predecessor was on when it was replaced, "" for none
    state: str
    on: frozenset[str]  # ids of the cluster's nodes that have its bundles

    @property
    def run(self) -> str:
        return self.prefix.rpartition("/")[0]

    @property
    def incarnation(self) -> int:
        return int(self.prefix.rpartition("/")[2])

    @property
    def is_requested(self) -> bool:
        """Ray looks for its resources. It stays, since Ray may lose what it has found for a group that is removed
        meanwhile (ray-project/ray#64693)."""
        return self.state == PENDING

    def is_reserved(self, excluded: Iterable[str]) -> bool:
        """Return True if it has its resources on nodes other than ``excluded``."""
        return self.state == CREATED and not self.on & set(excluded)


def reserve(cluster: ClusterApi, placement: Placement, prefix: str, excluded: tuple[str, ...] = ()) -> list[str]:
    """Request the resources of the whole plan, except those that an earlier call with this ``prefix`` has reserved or
    requested; returns the groups in the order of the plan's nodes."""
    newest = _newest_by_node(_list_groups(cluster), prefix)
    held = {node: group for node, group in newest.items() if group.is_requested or group.is_reserved(excluded)}
    return _reserve_rest(cluster, placement, prefix, excluded, newest, held)


def find_or_reserve(
    cluster: ClusterApi, placement: Placement, prefix: str, excluded: tuple[str, ...] = ()
) -> list[str]:
    """As :func:`reserve`, where members run: of each of the plan's nodes the newest group that has its resources is
    kept, also on a node that is excluded, whose members would be killed with it."""
    groups = _list_groups(cluster)
    newest = _newest_by_node(groups, prefix)
    held = {node: group for node, group in newest.items() if group.is_requested}
    held |= _newest_by_node((group for group in groups if group.is_reserved(())), prefix)
    return _reserve_rest(cluster, placement, prefix, excluded, newest, held)


def _reserve_rest(  # noqa: PLR0913 - what both ways of reserving have in common
    cluster: ClusterApi,
    placement: Placement,
    prefix: str,
    excluded: tuple[str, ...],
    newest: Mapping[int, _NodeGroup],
    held: Mapping[int, _NodeGroup],
) -> list[str]:
    """Request the plan's nodes that are not ``held``, and remove the ``newest`` groups that are not."""
    groups = []
    for node, bundles in enumerate(placement.nodes):
        last, kept = newest.get(node), held.get(node)
        if kept is not None:
            groups.append(kept.id)
        else:
            name = f"{prefix}/node-{node}" + (f"/{last.number + 1}-" if last else "")
            groups.append(_create(cluster, bundles, name, excluded))
        if last is not None and last is not kept and last.state != REMOVED:
            cluster.remove_group(last.id)
    return groups


def reserve_node(
    cluster: ClusterApi, placement: Placement, node: int, lost: str, excluded: tuple[str, ...] = ()
) -> str:
    """Replace ``lost``, the group of one node of the plan, by the group that an earlier call has reserved or a new one.

    If the node of ``lost`` is gone, ``lost`` is removed, since Ray would move it to a node that is needed; on a node
    that is only excluded it stays, for the processes that still run in it.

    Raises:
        ClusterUnavailable: Ray does not know ``lost`` any more.
    """
    groups = _list_groups(cluster)
    former = next((group for group in groups if group.id == lost), None)
    if former is None:
        raise ClusterUnavailable(f"Ray does not know the placement group of the plan's node {node} any more")
    newest = _newest_by_node(groups, former.prefix)[node]
    if newest.is_reserved(excluded):
        return newest.id
    replaced_node = next(iter(newest.on), "") if newest.state == CREATED else ""
    name = f"{former.prefix}/node-{node}/{newest.number + 1}-{replaced_node}"
    group = _create(cluster, placement.nodes[node], name, excluded)
    _remove_replaced(cluster, _list_groups(cluster), former.prefix)
    return group


def reserve_beyond(
    cluster: ClusterApi, placement: Placement, prefix: str, node: int, excluded: tuple[str, ...] = ()
) -> list[str]:
    """Request the plan's nodes from number ``node`` on, which no earlier call has reserved."""
    nodes = enumerate(placement.nodes[node:], start=node)
    return [_create(cluster, bundles, f"{prefix}/node-{number}", excluded) for number, bundles in nodes]


def release_beyond(cluster: ClusterApi, prefix: str, node: int) -> None:
    """Remove the groups of the plan's nodes from number ``node`` on."""
    for group in _list_groups(cluster):
        if group.prefix == prefix and group.node >= node and group.state != REMOVED:
            cluster.remove_group(group.id)


def check_free(cluster: ClusterApi, placement: Placement, node: int) -> None:
    """Raise PlacementTimeout unless the cluster has free what the plan needs from its node number ``node`` on."""
    needed = sum_resources(bundle.resources for bundles in placement.nodes[node:] for bundle in bundles)
    available = cluster.free_resources()
    units = {name: MEGABYTE if name == "memory" else 1 for name in needed}
    if any(available.get(RAY_NAMES.get(name, name), 0.0) < needed[name] * units[name] for name in needed):
        nodes = range(node, len(placement.nodes))
        raise PlacementTimeout(f"the cluster lacks the resources: {_describe_lack(cluster, placement, nodes)}")


def is_usable(cluster: ClusterApi, group: str, excluded: Iterable[str] = ()) -> bool:
    """Return True if a group has its resources on nodes other than ``excluded``."""
    return has_resources({row.id: row for row in cluster.list_groups()}.get(group), excluded)


def has_resources(row: GroupRow | None, excluded: Iterable[str] = ()) -> bool:
    return row is not None and row.state == CREATED and row.nodes.isdisjoint(excluded)


def release_groups(cluster: ClusterApi, prefix: str) -> list[str]:
    """Remove all groups below ``prefix``; returns the names of those that were there."""
    rows = [row for row in cluster.list_groups() if row.name.startswith(f"{prefix}/") and row.state != REMOVED]
    for row in rows:
        cluster.remove_group(row.id)
    return [row.name for row in rows]


async def wait_until_reserved(
    cluster: ClusterApi, groups: Sequence[str], placement: Placement, timeout_s: float
) -> None:
    """Wait until all groups have their resources; logs the missing resources every few seconds.

    Raises:
        PlacementTimeout: they do not after ``timeout_s`` seconds, or were removed.
    """
    loop = asyncio.get_running_loop()
    start_s = logged_s = loop.time()
    while waiting := await asyncio.to_thread(_waiting_nodes, cluster, groups):
        now_s = loop.time()
        if now_s - start_s > timeout_s:
            raise await asyncio.to_thread(placement_timeout, cluster, placement, timeout_s, waiting)
        if now_s - logged_s > _LOG_INTERVAL_S:
            logged_s = now_s
            text = await asyncio.to_thread(_describe_lack, cluster, placement, waiting)
            _LOG.warning("waiting for resources since %.0f s of %g: %s", now_s - start_s, timeout_s, text)
        await asyncio.sleep(_POLL_S)


def _waiting_nodes(cluster: ClusterApi, groups: Sequence[str]) -> list[int]:
    """The plan's nodes whose groups do not have their resources yet."""
    table, wanted = _list_groups(cluster), set(groups)
    present = [group for group in table if group.id in wanted and group.state != REMOVED]
    if len(present) < len(wanted):
        raise PlacementTimeout("the reserved resources were released while the job waited for them")
    for prefix in {group.prefix for group in present}:
        _remove_replaced(cluster, table, prefix)
    _remove_strays(cluster, table, present)
    return sorted(group.node for group in present if group.state != CREATED)


def _remove_replaced(cluster: ClusterApi, table: Iterable[_NodeGroup], prefix: str) -> None:
    """Remove groups that were replaced, unless they are still on the node that they were on when they were replaced:
    Ray moves a group whose node is gone to another node, where it is not needed."""
    groups = [group for group in table if group.prefix == prefix]
    successors = {(group.node, group.number - 1): group for group in groups}
    for group in groups:
        successor = successors.get((group.node, group.number)) if group.state != REMOVED else None
        if successor is not None and not (group.state == CREATED and group.on == {successor.replaced_node}):
            cluster.remove_group(group.id)


def _remove_strays(cluster: ClusterApi, table: Iterable[_NodeGroup], wanted: Iterable[_NodeGroup]) -> None:
    """Remove groups of earlier incarnations of the run, and second requests of wanted groups.

    Ray may receive the request of a master that was killed only after its successor has released what it found.
    """
    runs = {group.run: group.incarnation for group in wanted}
    ids = {(group.prefix, group.node, group.number): group.id for group in wanted}
    for group in table:
        is_earlier = group.run in runs and group.incarnation < runs[group.run]
        is_second = ids.get((group.prefix, group.node, group.number), group.id) != group.id
        if (is_earlier or is_second) and group.state != REMOVED:
            _LOG.warning("removing the placement group %s/node-%d, which nothing uses", group.prefix, group.node)
            cluster.remove_group(group.id)


def placement_timeout(
    cluster: ClusterApi, placement: Placement, timeout_s: float, nodes: Sequence[int] | None = None
) -> PlacementTimeout:
    """The error of a cluster that lacks the resources of ``nodes`` of the plan (of all by default)."""
    text = _describe_lack(cluster, placement, nodes)
    return PlacementTimeout(f"after {timeout_s:g} s the cluster still lacks the resources: {text}")


def _describe_lack(cluster: ClusterApi, placement: Placement, nodes: Sequence[int] | None) -> str:
    bundles = placement.nodes
    by_node = [sum_resources(item.resources for item in bundles[node]) for node in nodes or range(len(bundles))]
    needed = sum_resources(by_node)
    available = cluster.free_resources()
    free = {name: available.get(RAY_NAMES.get(name, name), 0.0) for name in needed}
    if "memory" in free:
        free["memory"] //= MEGABYTE
    together = "" if len(by_node) < 2 else f", of these together on one node each: {_shorten(by_node)}"
    return f"needed {needed}{together}; free {free}"


def _shorten(items: Sequence[Any]) -> str:
    text = ", ".join(map(str, items[:_NODES_SHOWN]))
    return text if len(items) <= _NODES_SHOWN else f"{text}, ... ({len(items)} nodes)"


def placement_of(slot: Slot, placement: Placement, groups: Sequence[str]) -> ActorPlacement:
    """Where a member or standby goes: into its bundle if ``groups`` are reserved."""
    if not groups:
        return ActorPlacement(slot.resources)
    node, bundle = placement.position(slot.bundle)
    return ActorPlacement(slot.resources, groups[node], bundle)


def _create(cluster: ClusterApi, bundles: Sequence[Bundle], name: str, excluded: tuple[str, ...]) -> str:
    return cluster.create_group([_ray_bundle(bundle.resources) for bundle in bundles], name, excluded)


def _ray_bundle(resources: Mapping[str, float]) -> dict[str, float]:
    amounts: dict[str, float] = {
        RAY_NAMES.get(name, name): math.ceil(amount * MEGABYTE) if name == "memory" else amount
        for name, amount in resources.items()
        if amount
    }
    return amounts or {"memory": 1}  # Ray refuses an empty bundle


def _list_groups(cluster: ClusterApi) -> list[_NodeGroup]:
    groups = []
    for row in cluster.list_groups():
        if match := _NAME.fullmatch(row.name):
            node, number, replaced = int(match["node"]), int(match["number"] or 1), match["replaced_node"] or ""
            groups.append(_NodeGroup(row.id, match["prefix"], node, number, replaced, row.state, row.nodes))
    return groups


def _newest_by_node(groups: Iterable[_NodeGroup], prefix: str) -> dict[int, _NodeGroup]:
    """The plan's nodes to the latest group of each, which may be removed."""
    by_number = sorted(groups, key=lambda group: group.number)
    return {group.node: group for group in by_number if group.prefix == prefix}
