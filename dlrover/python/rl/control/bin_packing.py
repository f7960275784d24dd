# SPDX-License-Identifier: Apache-2.0
"""Resources of each member, and first-fit packing of units into nodes.

A role gets the amount that it names. Without one it gets a whole device, or, in a group, an equal share of what the
others leave of theirs. All members of a role take the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec

UNITS = 10_000
"""Devices are counted in ten-thousandths, Ray's own resolution: sums stay exact."""


def member_resources(job: JobSpec) -> tuple[dict[RLRoleType, dict[str, float]], list[ConfigError]]:
    """Resources of one member of each role (``memory`` in MB), and the errors of impossible amounts."""
    device = job.trainer.device_type.lower()
    amounts_of = {
        role: {_resource_name(name): float(amount) for name, amount in spec.resource.items()}
        for role, spec in job.workloads.items()
    }
    errors = []
    for role, amounts in amounts_of.items():
        if job.trainer.device_type == "GPU" and amounts.get(device, 0.0) > 1 and amounts[device] % 1:
            text = f"a member would take {amounts[device]:g} GPU; more than one must be a whole number"
            errors.append(ConfigError(f"workload.{role.lower()}.resource.gpu", text))
    for group in job.groups:
        errors += _share(job, {role: amounts_of[role] for role in group}, device)
    for amounts in amounts_of.values():
        amounts.setdefault(device, 1.0)
    return amounts_of, errors


def _resource_name(name: str) -> str:
    """Ray's names of custom resources are as they were given to it."""
    return name.lower() if name.lower() in ("cpu", "gpu", "memory") else name


def _share(job: JobSpec, group: Mapping[RLRoleType, dict[str, float]], device: str) -> list[ConfigError]:
    """Give every role of a group that names no amount its share."""
    kind = job.trainer.device_type
    units_of = {role: round(amounts[device] * UNITS) for role, amounts in group.items() if device in amounts}
    unnamed = [role for role in group if role not in units_of]
    text = " + ".join(f"{role} {units / UNITS:g}" for role, units in units_of.items())
    parts = sum(units for units in units_of.values() if units < UNITS)
    if kind == "GPU" and parts > UNITS and len(group) > 1:
        where = f"workload.{min(units_of, key=list(group).index).lower()}.resource.{device}"
        return [ConfigError(where, f"the parts of one GPU that its group shares are too many: {text}")]
    if not unnamed:
        return []
    used = sum(units_of.values())
    share = (max(UNITS, -(-used // UNITS) * UNITS) - used) // len(unnamed)
    if not share:
        text = f"name an amount: the others of its group leave nothing of what they share ({text})"
        return [ConfigError(f"workload.{role.lower()}.resource.{device}", text) for role in unnamed]
    for role in unnamed:
        group[role][device] = share / UNITS
    return []


@dataclass(frozen=True)
class Shape:
    """A kind of unit: what must be together on one node."""

    counts: Mapping[RLRoleType, int]  # role to its members in one unit
    copies: int
    label: str  # for errors
    contents: tuple[Mapping[str, float], ...]  # of its bundles
    needs: tuple[int, ...]  # devices of each bundle, in ten-thousandths
    limits: Mapping[RLRoleType, int]  # role to the most members on one node, if limited

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for shapes that fit the same nodes."""
        return self.needs, tuple((role, self.counts[role]) for role in self.limits)


@dataclass(frozen=True)
class PlacedUnit:
    node: int
    first: int  # its first bundle on the node
    counts: Mapping[RLRoleType, int]


class DoesNotFit(Exception):
    """No node has space for a unit of ``shape``; ``free`` are the devices of each, in ten-thousandths."""

    def __init__(self, shape: Shape, nodes: "list[Node]") -> None:
        super().__init__(shape.label)
        self.shape, self.free = shape, [sum(node.free) for node in nodes]


@dataclass
class Node:
    """A node while it is being filled. Each GPU is a pool, since a fraction cannot span two; its CPUs are one pool."""

    size: int  # of one pool, in ten-thousandths
    free: list[int]  # in each pool
    members: dict[RLRoleType, int] = field(default_factory=dict)
    bundles: list[Mapping[str, float]] = field(default_factory=list)

    def after(self, shape: Shape) -> list[int] | None:
        """Free units of each pool with the unit added, None when it does not fit. A part of a device is taken from the
        device with the least free, as Ray does."""
        if any(self.members.get(role, 0) + shape.counts[role] > limit for role, limit in shape.limits.items()):
            return None
        free = list(self.free)
        for need in shape.needs:
            whole, part = divmod(need, self.size)
            for amount in (*[self.size] * whole, *([part] if part else [])):
                pool = min((units, index) for index, units in enumerate([*free, self.size + 1]) if units >= amount)[1]
                if pool == len(free):
                    return None
                free[pool] -= amount
        return free

    def take(self, shape: Shape, free: list[int]) -> int:
        """Add a unit, which leaves ``free``; return the index of its first bundle."""
        first, self.free = len(self.bundles), free
        self.bundles += shape.contents
        for role, count in shape.counts.items():
            self.members[role] = self.members.get(role, 0) + count
        return first


def empty_nodes(device_type: str, count: int, devices: int) -> list[Node]:
    size, pools = (UNITS, devices) if device_type == "GPU" else (UNITS * devices, 1)
    return [Node(size, [size] * pools) for _ in range(count)]


def fill(nodes: list[Node], shape: Shape, cursors: dict[tuple[object, ...], int]) -> Iterator[PlacedUnit]:
    """Place all copies of a shape on the first nodes with space; without devices and limits, evenly over all nodes.

    ``cursors`` maps a shape to the first node that may still fit it: a full node stays full. Raises DoesNotFit.
    """
    spread = not any(shape.needs) and not shape.limits
    most = -(-shape.copies // len(nodes)) if spread else shape.copies
    index = 0 if spread else cursors.get(shape.key, 0)
    here = 0
    for _ in range(shape.copies):
        free = None
        while index < len(nodes) and free is None:
            free = nodes[index].after(shape) if here < most else None
            index, here = (index, here + 1) if free is not None else (index + 1, 0)
        if free is None:
            raise DoesNotFit(shape, nodes)
        yield PlacedUnit(index, nodes[index].take(shape, free), shape.counts)
    if not spread:
        cursors[shape.key] = index


def stand_by(nodes: list[Node], shape: Shape, first_node: int) -> Iterator[PlacedUnit]:
    """Place a role's standbys, if possible on different nodes and not on ``first_node``, that of rank 0. Raises
    DoesNotFit."""
    last = first_node
    for _ in range(shape.copies):
        around = [(last + 1 + offset) % len(nodes) for offset in range(len(nodes))]
        order = [*(index for index in around if index != first_node), first_node]
        fit = next(((index, free) for index in order if (free := nodes[index].after(shape)) is not None), None)
        if fit is None:
            raise DoesNotFit(shape, nodes)
        last, free = fit
        yield PlacedUnit(last, nodes[last].take(shape, free), shape.counts)
