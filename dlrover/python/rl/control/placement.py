"""Where members go: pure arithmetic from the job's description to bundles of resources.

A *bundle* is what is reserved together on one node. A role that shares no device gets one bundle for each member. The
roles of a group share: member ``i`` of each of them goes to the group's bundle ``i``, and a bundle holds one device.
Nodes are filled in order, a group instance never spans two.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec, WorkloadSpec

DEVICE_RESOURCE = {"CPU": "cpu", "GPU": "gpu"}

_UNIT = 10_000
"""Devices are counted in ten-thousandths, Ray's own resolution: sums stay exact."""


@dataclass(frozen=True)
class Slot:
    """The place of one member.

    Attributes:
        bundle: index of its bundle.
        resources: what it takes of the bundle, e.g. ``{"cpu": 0.5}``; ``memory`` in MB.
        local_rank: position among its role's members on the node.
        local_world_size: members of its role on the node.
    """

    bundle: int
    resources: Mapping[str, float]
    local_rank: int = 0
    local_world_size: int = 1


@dataclass(frozen=True)
class Bundle:
    """Resources reserved together on the job's node number ``node``."""

    node: int
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Placement:
    """The whole plan: bundles, those of a node side by side, and each member's slot (role to slots in rank order)."""

    bundles: tuple[Bundle, ...]
    slots: Mapping[RLRoleType, tuple[Slot, ...]]

    @property
    def total(self) -> dict[str, float]:
        """Sum of all bundles."""
        total: dict[str, float] = {}
        for bundle in self.bundles:
            add_resources(total, bundle.resources)
        return total


def add_resources(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add ``more`` into ``total``."""
    for name, amount in more.items():
        total[name] = round(total.get(name, 0.0) + amount, 6)


@dataclass(frozen=True)
class _Unit:
    """Bundles that must be on one node, and who goes into which: role to the ranks of one group instance."""

    ranks: Mapping[RLRoleType, tuple[int, ...]]
    label: str

    @property
    def width(self) -> int:
        return max(len(ranks) for ranks in self.ranks.values())


@dataclass
class _Node:
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
    bundles: list[dict[str, float]] = field(default_factory=list)

    def after(self, needs: Sequence[int]) -> list[int] | None:
        """The pools once ``needs`` are taken, None when they do not fit."""
        free = list(self.free)
        for need in needs:
            whole, part = divmod(need, self.size)
            for amount in (*[self.size] * whole, *([part] if part else [])):
                pool = next((index for index, left in enumerate(free) if left >= amount), None)
                if pool is None:
                    return None
                free[pool] -= amount
        return free

    def has_room(self, unit: _Unit, job: JobSpec) -> bool:
        """Whether no role's ``per_node`` is exceeded by ``unit``."""
        limits = {role: job.workloads[role].per_node for role in unit.ranks}
        return all(
            limit is None or self.held.get(role, 0) + len(unit.ranks[role]) <= limit for role, limit in limits.items()
        )


@dataclass(frozen=True)
class _Taken:
    """Where a member went: the node, the bundle among those of the node, and what it takes of it."""

    node: int
    bundle: int
    resources: Mapping[str, float]


def plan(job: JobSpec) -> tuple[Placement | None, list[Problem]]:
    """Place all members of ``job``, or say with the arithmetic why they can never fit its nodes."""
    problems = _per_node_problems(job)
    if problems:
        return None, problems
    devices = job.trainer.device_per_node
    size, pools = (_UNIT, devices) if job.trainer.device_type == "GPU" else (_UNIT * devices, 1)
    nodes = [_Node(size, [size] * pools) for _ in range(job.trainer.node_number)]
    taken: dict[RLRoleType, dict[int, _Taken]] = {role: {} for role in job.workloads}
    for unit in _units(job):
        problem = _place(unit, job, nodes, taken)
        if problem is not None:
            return None, [problem]
    bundles = tuple(Bundle(index, content) for index, node in enumerate(nodes) for content in node.bundles)
    return Placement(bundles, _ranked(taken, nodes)), []


def _per_node_problems(job: JobSpec) -> list[Problem]:
    problems = []
    nodes = job.trainer.node_number
    for role, spec in job.workloads.items():
        together = max((group.get(role, 0) for group in job.groups), default=0)
        if spec.per_node is None:
            continue
        where = f"workload.{role.lower()}.per_node"
        if spec.num > spec.per_node * nodes:
            what = f"{spec.num} members, {spec.per_node} on each node, need {-(-spec.num // spec.per_node)} nodes; "
            problems.append(Problem(where, f"{what}trainer.node_number is {nodes}"))
        if together > spec.per_node:
            problems.append(Problem(where, f"is {spec.per_node}, but its group puts {together} together on one node"))
    return problems


def _units(job: JobSpec) -> list[_Unit]:
    grouped: set[RLRoleType] = set()
    units = []
    for group in job.groups:
        grouped.update(group)
        instances = [job.workloads[role].num // count for role, count in group.items()]
        label = "+".join(group)
        for instance in range(max(instances)):
            ranks = {
                role: tuple(range(instance * count, (instance + 1) * count))
                for role, count in group.items()
                if instance < job.workloads[role].num // count
            }
            units.append(_Unit(ranks, label))
    for role, spec in job.workloads.items():
        if role not in grouped:
            step = spec.per_node or 1
            units += [
                _Unit({role: (rank,)}, str(role)) if spec.per_node is None else _whole(role, rank, step, spec.num)
                for rank in range(0, spec.num, step)
            ]
    return units


def _whole(role: RLRoleType, first: int, step: int, num: int) -> _Unit:
    return _Unit({role: tuple(range(first, min(first + step, num)))}, str(role))


def member_resources(spec: WorkloadSpec, device: str, sharing: int) -> dict[str, float]:
    """What one member takes: what its role asks for, its device (a fraction when ``sharing`` roles share it)."""
    asked = {name.lower(): float(amount) for name, amount in spec.resource.items()}
    asked.setdefault(device, 1.0)
    if sharing > 1:
        # Rounded down, so that the shares never add up to more than the device.
        asked[device] = int(asked[device] / sharing * 10_000) / 10_000
    return asked


def _place(
    unit: _Unit, job: JobSpec, nodes: list[_Node], taken: Mapping[RLRoleType, dict[int, _Taken]]
) -> Problem | None:
    device = DEVICE_RESOURCE[job.trainer.device_type]
    sharing = len(unit.ranks)
    contents: list[dict[str, float]] = [{} for _ in range(unit.width)]
    resources = {role: member_resources(job.workloads[role], device, sharing) for role in unit.ranks}
    for role, ranks in unit.ranks.items():
        if job.trainer.device_type == "GPU" and resources[role][device] > 1 and resources[role][device] % 1:
            what = f"a member would take {resources[role][device]:g} GPU; more than one must be a whole number"
            return Problem(f"workload.{role.lower()}.resource.gpu", what)
        for content in contents[: len(ranks)]:
            add_resources(content, resources[role])
    for content in contents if sharing > 1 else ():
        content[device] = float(math.ceil(content[device]))
    needs = [round(content[device] * _UNIT) for content in contents]
    for index, node in enumerate(nodes):
        free = node.after(needs) if node.has_room(unit, job) else None
        if free is None:
            continue
        first = len(node.bundles)
        node.free = free
        node.bundles += contents
        for role, ranks in unit.ranks.items():
            node.held[role] = node.held.get(role, 0) + len(ranks)
            taken[role].update({rank: _Taken(index, first + at, resources[role]) for at, rank in enumerate(ranks)})
        return None
    return _does_not_fit(unit, job, sum(needs) / _UNIT, nodes)


def _does_not_fit(unit: _Unit, job: JobSpec, needed: float, nodes: Sequence[_Node]) -> Problem:
    trainer = job.trainer
    capacity = trainer.node_number * trainer.device_per_node
    kind = trainer.device_type
    if needed > trainer.device_per_node:
        what = f"{unit.label} needs {needed:g} {kind} on one node, which has {trainer.device_per_node}"
    else:
        left = ", ".join(f"{sum(node.free) / _UNIT:g}" for node in nodes)
        roles = ", ".join(f"{role} x {spec.num}" for role, spec in job.workloads.items())
        what = (
            f"impossible placement: {roles} do not fit {trainer.node_number} node(s) x {trainer.device_per_node} "
            f"{kind} = {capacity}; {unit.label} needs {needed:g} more on one node, left are [{left}]"
        )
    return Problem("trainer.device_per_node", what)


def _ranked(
    taken: Mapping[RLRoleType, Mapping[int, _Taken]], nodes: Sequence[_Node]
) -> dict[RLRoleType, tuple[Slot, ...]]:
    """Slots in rank order, with each member's position among its role's members on its node."""
    first = [sum(len(node.bundles) for node in nodes[:index]) for index in range(len(nodes))]
    ranked = {}
    for role, members in taken.items():
        on_node: dict[int, int] = {}
        slots = []
        for _, member in sorted(members.items()):
            local_rank = on_node.get(member.node, 0)
            on_node[member.node] = local_rank + 1
            local_world_size = nodes[member.node].held[role]
            slots.append(Slot(first[member.node] + member.bundle, member.resources, local_rank, local_world_size))
        ranked[role] = tuple(slots)
    return ranked
