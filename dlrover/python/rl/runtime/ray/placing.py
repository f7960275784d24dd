"""Reserving resources on Ray: one placement group for each node of the plan."""

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.control.placement import Placement, Slot

_POLL_S = 0.05
_MEGABYTE = 1024 * 1024


def reserve(placement: Placement, prefix: str) -> list[PlacementGroup]:
    """Ask for the resources of the whole plan; the groups in the order of the plan's nodes, named after ``prefix``."""
    groups = []
    for node in sorted({bundle.node for bundle in placement.bundles}):
        bundles = [_ray_bundle(item.resources) for item in placement.bundles if item.node == node]
        groups.append(placement_group(bundles, "STRICT_PACK", name=f"{prefix}/node-{node}", lifetime="detached"))
    return groups


async def until_reserved(groups: list[PlacementGroup], placement: Placement, timeout_s: float) -> None:
    """Wait until all groups have their resources.

    Raises:
        PlacementTimeout: they do not after ``timeout_s`` seconds; says what is needed and what is free.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while any(placement_group_table(group)["state"] != "CREATED" for group in groups):
        if asyncio.get_running_loop().time() > deadline_s:
            raise lacking(placement, timeout_s)
        await asyncio.sleep(_POLL_S)


def lacking(placement: Placement, timeout_s: float) -> PlacementTimeout:
    """The error of a cluster that does not have the resources."""
    free = {name: amount for name, amount in ray.available_resources().items() if ":" not in name}
    return PlacementTimeout(
        f"after {timeout_s:g} s the cluster still lacks the resources: needed {placement.total}, free {free}"
    )


def place_options(slot: Slot, placement: Placement, groups: list[PlacementGroup]) -> dict[str, Any]:
    """Ray's actor options for a member's resources and, where ``groups`` are reserved, its place in them."""
    amounts = dict(slot.resources)
    options: dict[str, Any] = {
        "num_cpus": amounts.pop("cpu", 0.0),
        "num_gpus": amounts.pop("gpu", 0.0),
        "memory": int(amounts.pop("memory", 0.0) * _MEGABYTE) or None,
        "resources": amounts or None,
    }
    if groups:
        node = placement.bundles[slot.bundle].node
        first = next(index for index, bundle in enumerate(placement.bundles) if bundle.node == node)
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(groups[node], slot.bundle - first)
    return options


def _ray_bundle(resources: Mapping[str, float]) -> dict[str, float]:
    names = {"cpu": "CPU", "gpu": "GPU"}
    return {
        names.get(name, name): amount * _MEGABYTE if name == "memory" else amount
        for name, amount in resources.items()
        if amount
    }
