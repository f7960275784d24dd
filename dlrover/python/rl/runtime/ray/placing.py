"""Reserving resources on Ray: one placement group for each node of the plan.

Groups are known by name, so that what is asked for again is found: ``<prefix>/node-<k>``, and
``<prefix>/node-<k>/2-<node id>`` for the one that took the place of the first, which was on that node.

Everything here but :func:`until_reserved` and :func:`place_options` talks to Ray's head and waits for its answer: call
it in a thread of its own (``asyncio.to_thread``), not on an event loop.
"""

import asyncio
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dlrover.python.rl.common.errors import ClusterUnavailable, PlacementTimeout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.control.placement import Bundle, Placement, Slot, sum_resources

_LOG = get_logger(__name__)

_POLL_S = 0.05
_SAY_S = 5.0
_MEGABYTE = 1024 * 1024
_NODES_SHOWN = 4

_RAY_NAMES = {"cpu": "CPU", "gpu": "GPU"}
_CREATED, _REMOVED = "CREATED", "REMOVED"
_NAME = re.compile(r"(?P<prefix>.+)/node-(?P<node>\d+)(?:/(?P<number>\d+)-(?P<was_on>\w*))?")


@dataclass(frozen=True)
class _Found:
    """A group that is on the cluster.

    Attributes:
        id: its id.
        prefix: of its name.
        node: number of the plan's node that it stands for.
        number: 1 for the first that stands for it, one more for each that took its place.
        instead_of: id of the node that the one before it was on when it was replaced, ``""`` for none.
        state: Ray's word.
        on: ids of the nodes that it has its resources on.
    """

    id: str
    prefix: str
    node: int
    number: int
    instead_of: str
    state: str
    on: frozenset[str]

    @property
    def group(self) -> PlacementGroup:
        return _group(self.id)

    def stands(self, excluded: Iterable[str]) -> bool:
        """Whether it has its resources, on other nodes than ``excluded``."""
        return self.state == _CREATED and not self.on & set(excluded)


def reserve(placement: Placement, prefix: str, excluded: tuple[str, ...] = ()) -> list[PlacementGroup]:
    """Ask for the resources of the whole plan. What an earlier call with this ``prefix`` got is used; what it could not
    get yet is asked for anew.

    Args:
        placement: the plan.
        prefix: of the groups' names.
        excluded: ids of nodes not to use.

    Returns:
        The groups in the order of the plan's nodes.
    """
    newest = _newest(_table(), prefix)
    groups = []
    for node, bundles in enumerate(placement.nodes):
        found = newest.get(node)
        if found is not None and found.stands(excluded):
            groups.append(found.group)
            continue
        name = f"{prefix}/node-{node}" + (f"/{found.number + 1}-" if found else "")
        groups.append(_create(bundles, name, excluded))
        if found is not None and found.state != _REMOVED:
            remove_placement_group(found.group)
    return groups


def reserve_node(
    placement: Placement, node: int, lost: PlacementGroup, excluded: tuple[str, ...] = ()
) -> PlacementGroup:
    """Ask for the resources of one node of the plan anew.

    Args:
        placement: the plan.
        node: number of the plan's node.
        lost: a group that stood for it. When its node is gone it is given back, since Ray would move it to a node that
            is needed; on a node that is only excluded it stays, for the processes that still run in it.
        excluded: ids of nodes not to use.

    Returns:
        The group that stands for it: what an earlier call has got, or a new one.

    Raises:
        ClusterUnavailable: Ray does not know ``lost`` any more.
    """
    table = _table()
    old = next((found for found in table if found.id == lost.id.hex()), None)
    if old is None:
        raise ClusterUnavailable(f"Ray does not know the placement group of the plan's node {node} any more")
    newest = _newest(table, old.prefix)[node]
    if newest.stands(excluded):
        return newest.group
    was_on = next(iter(newest.on), "") if newest.state == _CREATED else ""
    group = _create(placement.nodes[node], f"{old.prefix}/node-{node}/{newest.number + 1}-{was_on}", excluded)
    _give_back_replaced(_table(), old.prefix)
    return group


def is_usable(group: PlacementGroup, excluded: Iterable[str] = ()) -> bool:
    """Whether a group has its resources, on other nodes than ``excluded``."""
    row = placement_group_table(group)
    return bool(row) and row["state"] == _CREATED and not set(row["bundles_to_node_id"].values()) & set(excluded)


def find_groups(prefix: str) -> list[PlacementGroup]:
    """What is reserved under ``prefix``: the groups that stand for the plan's nodes now, in their order."""
    return [found.group for _, found in sorted(_newest(_table(), prefix).items()) if found.state != _REMOVED]


def release_groups(prefix: str) -> list[str]:
    """Give back all groups whose names begin with ``prefix`` and a slash; the names of those that were there."""
    released = []
    for identity, row in placement_group_table().items():
        if row["name"].startswith(f"{prefix}/") and row["state"] != _REMOVED:
            remove_placement_group(_group(identity))
            released.append(row["name"])
    return released


async def until_reserved(groups: Sequence[PlacementGroup], placement: Placement, timeout_s: float) -> None:
    """Wait until all groups have their resources; every few seconds, say in the log what is needed and what is free.

    Raises:
        PlacementTimeout: they do not after ``timeout_s`` seconds (says what is needed and what is free), or were given
            back in the meantime.
    """
    loop = asyncio.get_running_loop()
    began_s = said_s = loop.time()
    while waiting := await asyncio.to_thread(_waiting, groups):
        now_s = loop.time()
        if now_s - began_s > timeout_s:
            raise await asyncio.to_thread(lacking, placement, timeout_s, waiting)
        if now_s - said_s > _SAY_S:
            said_s = now_s
            text = await asyncio.to_thread(_need_and_have, placement, waiting)
            _LOG.warning("waiting for resources since %.0f s of %g: %s", now_s - began_s, timeout_s, text)
        await asyncio.sleep(_POLL_S)


def _waiting(groups: Sequence[PlacementGroup]) -> list[int]:
    """The plan's nodes whose groups do not have their resources yet."""
    table = _table()
    mine = {group.id.hex() for group in groups}
    here = [found for found in table if found.id in mine and found.state != _REMOVED]
    if len(here) < len(mine):
        raise PlacementTimeout("the reserved resources were given back while they were waited for")
    for prefix in {found.prefix for found in here}:
        _give_back_replaced(table, prefix)
    return sorted(found.node for found in here if found.state != _CREATED)


def _give_back_replaced(table: Iterable[_Found], prefix: str) -> None:
    """Remove groups that others stand for, unless they are still on the node that they were on when they were replaced:
    Ray moves a group whose node is gone to another one, where nobody needs it."""
    of_prefix = [found for found in table if found.prefix == prefix]
    heirs = {(found.node, found.number - 1): found for found in of_prefix}
    for found in of_prefix:
        heir = heirs.get((found.node, found.number)) if found.state != _REMOVED else None
        if heir is not None and not (found.state == _CREATED and found.on == {heir.instead_of}):
            remove_placement_group(found.group)


def lacking(placement: Placement, timeout_s: float, nodes: Sequence[int] | None = None) -> PlacementTimeout:
    """The error of a cluster that does not have the resources of ``nodes`` of the plan (of all by default)."""
    text = _need_and_have(placement, nodes)
    return PlacementTimeout(f"after {timeout_s:g} s the cluster still lacks the resources: {text}")


def _need_and_have(placement: Placement, nodes: Sequence[int] | None) -> str:
    bundles = placement.nodes
    each = [sum_resources(item.resources for item in bundles[node]) for node in nodes or range(len(bundles))]
    needed = sum_resources(each)
    have = ray.available_resources()
    free = {name: have.get(_RAY_NAMES.get(name, name), 0.0) for name in needed}
    if "memory" in free:
        free["memory"] //= _MEGABYTE
    together = "" if len(each) < 2 else f", of these together on one node each: {_some(each)}"
    return f"needed {needed}{together}; free {free}"


def _some(items: Sequence[Any]) -> str:
    shown = ", ".join(map(str, items[:_NODES_SHOWN]))
    return shown if len(items) <= _NODES_SHOWN else f"{shown}, ... ({len(items)} nodes)"


def place_options(slot: Slot, placement: Placement, groups: Sequence[PlacementGroup]) -> dict[str, Any]:
    """Ray's actor options for the resources of a member or standby and, where ``groups`` are reserved, its place in
    them. Quick: asks nobody."""
    amounts = dict(slot.resources)
    options: dict[str, Any] = {
        "num_cpus": amounts.pop("cpu", 0.0),
        "num_gpus": amounts.pop("gpu", 0.0),
        "memory": int(amounts.pop("memory", 0.0) * _MEGABYTE) or None,
        "resources": {name: amount for name, amount in amounts.items() if amount} or None,
    }
    if groups:
        node, index = placement.position(slot.bundle)
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(groups[node], index)
    return options


# -- groups by name ---------------------------------------------------------------------------------------------------


def _create(bundles: Sequence[Bundle], name: str, excluded: tuple[str, ...]) -> PlacementGroup:
    amounts = [_ray_bundle(bundle.resources) for bundle in bundles]
    selector = {"ray.io/node-id": f"!in({','.join(excluded)})"}
    return placement_group(
        amounts,
        "STRICT_PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[selector] * len(amounts) if excluded else None,
    )


def _ray_bundle(resources: Mapping[str, float]) -> dict[str, float]:
    amounts: dict[str, float] = {
        _RAY_NAMES.get(name, name): math.ceil(amount * _MEGABYTE) if name == "memory" else amount
        for name, amount in resources.items()
        if amount
    }
    return amounts or {"memory": 1}  # Ray refuses a bundle of nothing


def _group(identity: str) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID(bytes.fromhex(identity)))


def _table() -> list[_Found]:
    """The groups of all plans on the cluster."""
    found = []
    for identity, row in placement_group_table().items():
        named = _NAME.fullmatch(row["name"])
        if named:
            on = frozenset(row["bundles_to_node_id"].values()) - {""}
            number, instead_of = int(named["number"] or 1), named["was_on"] or ""
            found.append(_Found(identity, named["prefix"], int(named["node"]), number, instead_of, row["state"], on))
    return found


def _newest(table: Iterable[_Found], prefix: str) -> dict[int, _Found]:
    """The plan's nodes to the latest group that stood for each, which may be removed."""
    newest: dict[int, _Found] = {}
    for found in table:
        if found.prefix == prefix and (found.node not in newest or newest[found.node].number < found.number):
            newest[found.node] = found
    return newest
