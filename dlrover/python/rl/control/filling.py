"""Filling nodes: which node has room for what must be together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.control.shares import UNITS


@dataclass(frozen=True)
class Shape:
    """A kind of unit.

    Attributes:
        counts: role to its members in one unit.
        copies: how many such units there are.
        label: how the unit is called in problems.
        contents: of its bundles.
        needs: devices that each of its bundles takes, in ten-thousandths.
        limits: role to the most members on one node, where that is limited.
    """

    counts: Mapping[RLRoleType, int]
    copies: int
    label: str
    contents: tuple[Mapping[str, float], ...]
    needs: tuple[int, ...]
    limits: Mapping[RLRoleType, int]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for shapes that fit the same nodes."""
        return self.needs, tuple((role, self.counts[role]) for role in self.limits)


@dataclass(frozen=True)
class Unit:
    """A unit that has its place: its first bundle is number ``first`` of the node."""

    node: int
    first: int
    counts: Mapping[RLRoleType, int]


class DoesNotFit(Exception):
    """No node has room for a unit of ``shape``; ``left`` are the devices that each has, in ten-thousandths."""

    def __init__(self, shape: Shape, nodes: "list[Node]") -> None:
        super().__init__(shape.label)
        self.shape, self.left = shape, [sum(node.free) for node in nodes]


@dataclass
class Node:
    """What is left of a node while placing, and what is on it.

    Attributes:
        size: units of one pool. A GPU is a pool of its own, since a fraction cannot be put together from two; the CPUs
            of a node are one pool.
        free: units left in each pool.
        held: members of each role.
        bundles: contents of its bundles.
    """

    size: int
    free: list[int]
    held: dict[RLRoleType, int] = field(default_factory=dict)
    bundles: list[Mapping[str, float]] = field(default_factory=list)

    def after(self, shape: Shape) -> list[int] | None:
        """The pools once a unit is here, None when it does not fit.

        A part of a device is taken from the device that has least left, as Ray does it.
        """
        if any(self.held.get(role, 0) + shape.counts[role] > limit for role, limit in shape.limits.items()):
            return None
        free = list(self.free)
        for need in shape.needs:
            whole, part = divmod(need, self.size)
            for amount in (*[self.size] * whole, *([part] if part else [])):
                pool = min((left, index) for index, left in enumerate([*free, self.size + 1]) if left >= amount)[1]
                if pool == len(free):
                    return None
                free[pool] -= amount
        return free

    def take(self, shape: Shape, free: list[int]) -> int:
        """Put a unit here, which leaves ``free``; the index of its first bundle."""
        first, self.free = len(self.bundles), free
        self.bundles += shape.contents
        for role, count in shape.counts.items():
            self.held[role] = self.held.get(role, 0) + count
        return first


def empty_nodes(device_type: str, count: int, devices: int) -> list[Node]:
    """``count`` nodes of ``devices`` devices."""
    size, pools = (UNITS, devices) if device_type == "GPU" else (UNITS * devices, 1)
    return [Node(size, [size] * pools) for _ in range(count)]


def fill(nodes: list[Node], shape: Shape, cursors: dict[tuple[object, ...], int]) -> Iterator[Unit]:
    """Place all copies of a shape on the first nodes with room; without devices and limits, evenly over all of them.

    Args:
        nodes: changed as they fill.
        shape: what to place.
        cursors: shape to the first node that it may still fit: what is full stays full.

    Raises:
        DoesNotFit: no node has room for the next copy.
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
        yield Unit(index, nodes[index].take(shape, free), shape.counts)
    if not spread:
        cursors[shape.key] = index


def stand_by(nodes: list[Node], shape: Shape, first_node: int) -> Iterator[Unit]:
    """Places for a role's standbys, on different nodes and on others than ``first_node``, rank 0's, where possible.

    Raises:
        DoesNotFit: no node has room for the next one.
    """
    last = first_node
    for _ in range(shape.copies):
        around = [(last + 1 + offset) % len(nodes) for offset in range(len(nodes))]
        order = [*(index for index in around if index != first_node), first_node]
        found = next(((index, free) for index in order if (free := nodes[index].after(shape)) is not None), None)
        if found is None:
            raise DoesNotFit(shape, nodes)
        last, free = found
        yield Unit(last, nodes[last].take(shape, free), shape.counts)
