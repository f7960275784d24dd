"""Where members go: pure arithmetic from the job's description to bundles of resources.

A *bundle* is what is reserved together on one node. A role that shares no device gets one bundle for each member. The
roles of a group share: member ``i`` of each of them goes to the group's bundle ``i``, and a bundle holds one device.
Nodes are filled in order, a group instance never spans two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec, WorkloadSpec

DEVICE_RESOURCE = {"CPU": "cpu", "GPU": "gpu"}


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
    """The whole plan: bundles, and each member's slot (role to slots in rank order)."""

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
class _Nodes:
    """Devices left on each node while placing."""

    free: list[float]
    bundles: list[Bundle] = field(default_factory=list)


def plan(job: JobSpec) -> tuple[Placement | None, list[Problem]]:
    """Place all members of ``job``, or say with the arithmetic why they can never fit its nodes."""
    device = DEVICE_RESOURCE[job.trainer.device_type]
    nodes = _Nodes([float(job.trainer.device_per_node)] * job.trainer.node_number)
    slots: dict[RLRoleType, dict[int, tuple[int, Mapping[str, float]]]] = {role: {} for role in job.workloads}
    for unit in _units(job):
        problem = _place(unit, job, device, nodes, slots)
        if problem is not None:
            return None, [problem]
    return Placement(tuple(nodes.bundles), _ranked(slots, nodes)), []


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
    unit: _Unit,
    job: JobSpec,
    device: str,
    nodes: _Nodes,
    slots: dict[RLRoleType, dict[int, tuple[int, Mapping[str, float]]]],
) -> Problem | None:
    sharing = len(unit.ranks) if len(unit.ranks) > 1 else 1
    contents: list[dict[str, float]] = [{} for _ in range(unit.width)]
    takes: dict[tuple[RLRoleType, int], tuple[int, Mapping[str, float]]] = {}
    for role, ranks in unit.ranks.items():
        resources = member_resources(job.workloads[role], device, sharing)
        for index, rank in enumerate(ranks):
            add_resources(contents[index], resources)
            takes[role, rank] = (index, resources)
    for content in contents if sharing > 1 else ():
        content[device] = float(-(-content[device] // 1)) if content[device] % 1 else content[device]
    needed = sum(content[device] for content in contents)
    node = next((index for index, free in enumerate(nodes.free) if free >= needed), None)
    if node is None:
        return _does_not_fit(unit, job, needed, nodes)
    nodes.free[node] -= needed
    first = len(nodes.bundles)
    nodes.bundles += [Bundle(node, content) for content in contents]
    for (role, rank), (index, taken) in takes.items():
        slots[role][rank] = (first + index, taken)
    return None


def _does_not_fit(unit: _Unit, job: JobSpec, needed: float, nodes: _Nodes) -> Problem:
    trainer = job.trainer
    capacity = trainer.node_number * trainer.device_per_node
    kind = trainer.device_type
    if needed > trainer.device_per_node:
        what = f"{unit.label} needs {needed:g} {kind} on one node, which has {trainer.device_per_node}"
    else:
        left = ", ".join(f"{free:g}" for free in nodes.free)
        roles = ", ".join(f"{role} x {spec.num}" for role, spec in job.workloads.items())
        what = (
            f"impossible placement: {roles} do not fit {trainer.node_number} node(s) x {trainer.device_per_node} "
            f"{kind} = {capacity}; {unit.label} needs {needed:g} more on one node, left are [{left}]"
        )
    return Problem("trainer.device_per_node", what)


def _ranked(
    slots: Mapping[RLRoleType, Mapping[int, tuple[int, Mapping[str, float]]]], nodes: _Nodes
) -> dict[RLRoleType, tuple[Slot, ...]]:
    """Slots in rank order, with each member's position among its role's members on its node."""
    ranked = {}
    for role, members in slots.items():
        on_node: dict[int, int] = {}
        placed = []
        for _, (bundle, resources) in sorted(members.items()):
            node = nodes.bundles[bundle].node
            placed.append((bundle, resources, node, on_node.get(node, 0)))
            on_node[node] = on_node.get(node, 0) + 1
        ranked[role] = tuple(
            Slot(bundle, resources, local_rank, on_node[node]) for bundle, resources, node, local_rank in placed
        )
    return ranked
