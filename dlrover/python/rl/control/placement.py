"""Where members go: pure arithmetic from the job's description to bundles of resources.

A *bundle* is what is reserved together on one node. A role that shares no device gets one bundle for each member. The
roles of a group share: member ``i`` of each of them goes to the group instance's bundle ``i``. A *unit* is what must be
together on one node: an instance of a group, ``per_node`` members of a role, or one member.

Units go to the first node that has room, in the order of the file; when that fails, in two other orders. Units that
take no device are spread evenly over the nodes instead: what limits them is not known here. Standbys come last.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TypeAlias

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.filling import DoesNotFit, Shape, Unit, empty_nodes, fill, stand_by
from dlrover.python.rl.control.shares import UNITS, member_resources

DEVICE_RESOURCE = {"CPU": "cpu", "GPU": "gpu"}

_MANY_NODES = 12

Resources: TypeAlias = Mapping[RLRoleType, Mapping[str, float]]
"""Role to what one member takes."""


@dataclass(frozen=True)
class Slot:
    """The place of one member, or of one standby.

    Attributes:
        bundle: index of its bundle.
        resources: what it takes of the bundle, e.g. ``{"cpu": 0.5}``; ``memory`` in MB.
        local_rank: position among its role's members on the node; 0 for a standby.
        local_world_size: members of its role on the node; 1 for a standby.
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
    """The whole plan.

    Attributes:
        bundles: those of a node side by side, the nodes numbered from 0 without gaps.
        slots: role to its members' slots in rank order.
        standbys: role to its standbys' slots; the slots of a role are alike, any of its processes can take any of them.
    """

    bundles: tuple[Bundle, ...]
    slots: Mapping[RLRoleType, tuple[Slot, ...]]
    standbys: Mapping[RLRoleType, tuple[Slot, ...]] = field(default_factory=dict)

    @property
    def total(self) -> dict[str, float]:
        """Sum of all bundles."""
        return sum_resources(bundle.resources for bundle in self.bundles)

    @property
    def nodes(self) -> list[list[Bundle]]:
        """The bundles of each node."""
        return [list(bundles) for _, bundles in groupby(self.bundles, key=lambda bundle: bundle.node)]

    def position(self, bundle: int) -> tuple[int, int]:
        """A bundle's node, and its index among the bundles of the node."""
        node = self.bundles[bundle].node
        return node, bundle - bisect_left(self.bundles, node, key=lambda other: other.node)


def sum_resources(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """All of ``parts`` together."""
    total: dict[str, float] = {}
    for name, amount in chain.from_iterable(part.items() for part in parts):
        total[name] = round(total.get(name, 0.0) + amount, 6)
    return total


def plan(job: JobSpec) -> tuple[Placement | None, list[Problem]]:
    """Place all members and standbys of ``job``, or say with the arithmetic why they can never fit its nodes."""
    resources, problems = member_resources(job)
    problems += _per_node_problems(job) + _strategy_problems(job)
    if problems:
        return None, problems
    shapes = list(_shapes(job, resources))
    failures = []
    for arranged in _orders(shapes):
        try:
            return _placed(job, arranged, resources), []
        except DoesNotFit as failure:
            failures.append(failure)
    return None, [_impossible(failures[0], job)]


def _orders(shapes: Sequence[Shape]) -> Iterator[Sequence[Shape]]:
    """In which orders to try: the file's, the largest first, those that are limited on each node first."""
    yield shapes
    if len({shape.key for shape in shapes}) > 1:
        yield sorted(shapes, key=lambda shape: -sum(shape.needs))
        yield sorted(shapes, key=lambda shape: (not shape.limits, -sum(shape.needs)))


def _strategy_problems(job: JobSpec) -> list[Problem]:
    if job.scheduling_strategy != "SIMPLE":
        return []
    return [
        Problem(
            f"workload_group.{index}",
            f"{'+'.join(group)} cannot share devices when nothing is reserved: scheduling_strategy is SIMPLE",
        )
        for index, group in enumerate(job.groups)
        if len(group) > 1
    ]


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


# -- units ------------------------------------------------------------------------------------------------------------


def _shapes(job: JobSpec, resources: Resources) -> Iterator[Shape]:
    """The units of the members: groups first, then the other roles."""
    for group in job.groups:
        done = 0
        instances = {role: job.workloads[role].num // count for role, count in group.items()}
        for upto in sorted(set(instances.values())):
            # Roles that have fewer instances are not in the later ones.
            counts = {role: count for role, count in group.items() if instances[role] >= upto}
            yield _shape(job, resources, counts, upto - done, "+".join(group))
            done = upto
    grouped = set(chain.from_iterable(job.groups))
    for role, spec in job.workloads.items():
        step = spec.per_node or 1
        for count, copies in ((step, spec.num // step), (spec.num % step, 1)):
            if role not in grouped and count and copies:
                yield _shape(job, resources, {role: count}, copies, str(role))


def _shape(
    job: JobSpec,
    resources: Resources,
    counts: Mapping[RLRoleType, int],
    copies: int,
    label: str,
) -> Shape:
    device = DEVICE_RESOURCE[job.trainer.device_type]
    shared = any(len(job.collocation_of(role)) > 1 for role in counts)
    contents, needs = [], []
    for index in range(max(counts.values())):
        content = sum_resources(resources[role] for role, count in counts.items() if count > index)
        need = round(content[device] * UNITS)
        if shared:  # the devices of a group are nobody else's
            need = -(-need // UNITS) * UNITS
            content[device] = need / UNITS
        contents.append(content)
        needs.append(need)
    limits = {role: limit for role in counts if (limit := job.workloads[role].per_node) is not None}
    return Shape(counts, copies, label, tuple(contents), tuple(needs), limits)


# -- placing ----------------------------------------------------------------------------------------------------------


def _placed(job: JobSpec, shapes: Sequence[Shape], resources: Resources) -> Placement:
    """The placement that comes of placing ``shapes`` in this order.

    Raises:
        DoesNotFit: they do not all fit.
    """
    trainer = job.trainer
    nodes = empty_nodes(trainer.device_type, trainer.node_number, trainer.device_per_node)
    cursors: dict[tuple[object, ...], int] = {}
    placed = chain.from_iterable(fill(nodes, shape, cursors) for shape in shapes)
    units = sorted(placed, key=lambda unit: (unit.node, unit.first))
    first_nodes: dict[RLRoleType, int] = {}
    for unit in units:
        for role in unit.counts:
            first_nodes.setdefault(role, unit.node)
    waiting = {role: list(stand_by(nodes, _standby(job, role, resources), first_nodes[role])) for role in job.workloads}
    bundles: list[Bundle] = []
    starts: dict[int, int] = {}
    for number, index in enumerate(index for index, node in enumerate(nodes) if node.bundles):
        starts[index] = len(bundles)
        bundles += [Bundle(number, content) for content in nodes[index].bundles]
    standbys = {
        role: tuple(Slot(starts[unit.node] + unit.first, resources[role]) for unit in found)
        for role, found in waiting.items()
    }
    return Placement(tuple(bundles), _ranked(job, units, starts, resources), standbys)


def _standby(job: JobSpec, role: RLRoleType, resources: Resources) -> Shape:
    need = round(resources[role][DEVICE_RESOURCE[job.trainer.device_type]] * UNITS)
    label = f"a standby of {role}"
    return Shape({role: 1}, job.workloads[role].standby, label, (resources[role],), (need,), limits={})


def _impossible(failure: DoesNotFit, job: JobSpec) -> Problem:
    trainer, shape = job.trainer, failure.shape
    kind, needed = trainer.device_type, sum(shape.needs) / UNITS
    if needed > trainer.device_per_node:
        what = f"{shape.label} needs {needed:g} {kind} on one node, which has {trainer.device_per_node}"
        return Problem("trainer.device_per_node", what)
    left = ", ".join(f"{units / UNITS:g}" for units in failure.left)
    if len(failure.left) > _MANY_NODES:
        counted = Counter(failure.left).most_common()
        left = ", ".join(f"{units / UNITS:g} on {count} nodes" for units, count in counted)
    roles = ", ".join(
        f"{role} x {spec.num}{f' + {spec.standby} standby' if spec.standby else ''}"
        for role, spec in job.workloads.items()
    )
    what = (
        f"impossible placement: {roles} do not fit {trainer.node_number} node(s) x {trainer.device_per_node} {kind} = "
        f"{trainer.node_number * trainer.device_per_node}; {shape.label} needs {needed:g} more on one node, "
        f"left are [{left}]"
    )
    return Problem("trainer.device_per_node", what)


def _ranked(
    job: JobSpec,
    units: Sequence[Unit],
    starts: Mapping[int, int],
    resources: Resources,
) -> dict[RLRoleType, tuple[Slot, ...]]:
    """Slots in rank order, which is the order of the nodes, with each member's position among its role's there."""
    places: dict[RLRoleType, list[tuple[int, int]]] = {role: [] for role in job.workloads}
    for unit in units:
        for role, count in unit.counts.items():
            places[role] += [(unit.node, starts[unit.node] + unit.first + index) for index in range(count)]
    ranked = {}
    for role, members in places.items():
        slots: list[Slot] = []
        for _, together in groupby(members, key=lambda place: place[0]):
            bundles = [bundle for _, bundle in together]
            slots += [Slot(bundle, resources[role], at, len(bundles)) for at, bundle in enumerate(bundles)]
        ranked[role] = tuple(slots)
    return ranked
