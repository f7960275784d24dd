# SPDX-License-Identifier: Apache-2.0
"""The placement of members: from a job's description to bundles of resources.

A *bundle* is reserved as a whole on one node. A role that shares no device gets one bundle per member; member ``i`` of
each role of a group goes to bundle ``i`` of the group's instance. A *unit* must be on one node: an instance of a group,
``per_node`` members of a role, or one member.

Units go to the first node with space, in the order of the file, then in two other orders. Units without devices are
spread evenly over the nodes. Standbys come last.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from typing import TypeAlias

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.bin_packing import (
    UNITS,
    DoesNotFit,
    PlacedUnit,
    Shape,
    empty_nodes,
    fill,
    member_resources,
    stand_by,
)

_MANY_NODES = 12

Resources: TypeAlias = Mapping[RLRoleType, Mapping[str, float]]
"""Role to the resources of one member."""


@dataclass(frozen=True)
class Slot:
    """The share of a bundle that one member or standby has."""

    bundle: int  # index
    resources: Mapping[str, float]  # {"cpu": 0.5, "memory": 1024}; memory in MB
    local_rank: int = 0  # among its role's members on the node
    local_world_size: int = 1


@dataclass(frozen=True)
class Bundle:
    """Resources reserved together on the job's node number ``node``."""

    node: int
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Placement:
    """The whole plan. All slots of a role are alike: any of its processes can take any of them."""

    bundles: tuple[Bundle, ...]  # sorted by node; nodes are numbered from 0 without gaps
    slots: Mapping[RLRoleType, tuple[Slot, ...]]  # of the members, in rank order
    standbys: Mapping[RLRoleType, tuple[Slot, ...]] = field(default_factory=dict)  # and of members beyond the plan's

    @property
    def total(self) -> dict[str, float]:
        return sum_resources(bundle.resources for bundle in self.bundles)

    @cached_property
    def nodes(self) -> list[list[Bundle]]:
        return [list(bundles) for _, bundles in groupby(self.bundles, key=lambda bundle: bundle.node)]

    def position(self, bundle: int) -> tuple[int, int]:
        """A bundle's node, and its index on the node."""
        node = self.bundles[bundle].node
        return node, bundle - bisect_left(self.bundles, node, key=lambda candidate: candidate.node)

    def with_places(self, most: Mapping[str, int]) -> "Placement":
        """The plan with places for as many members of each role, at the end: all others keep their numbers. Each has a
        node of the plan to itself, so that it may go to any node of the cluster."""
        bundles, spare = list(self.bundles), dict(self.standbys)
        for role, num in sorted(most.items()):
            for _ in range(num - len(self.slots[RLRoleType(role)])):
                resources = self.slots[RLRoleType(role)][0].resources
                bundles.append(Bundle(bundles[-1].node + 1, resources))
                spare[RLRoleType(role)] = (*spare.get(RLRoleType(role), ()), Slot(len(bundles) - 1, resources))
        return Placement(tuple(bundles), self.slots, spare)


def sum_resources(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, amount in chain.from_iterable(part.items() for part in parts):
        total[name] = round(total.get(name, 0.0) + amount, 6)
    return total


def plan(job: JobSpec) -> tuple[Placement | None, list[ConfigError]]:
    """Place all members and standbys of ``job``, or explain with numbers why they can never fit its nodes."""
    resources, errors = member_resources(job)
    errors += _validate_per_node(job) + _validate_strategy(job)
    if errors:
        return None, errors
    shapes = list(_shapes(job, resources))
    failures = []
    for arranged in _orders(shapes):
        try:
            return _place(job, arranged, resources), []
        except DoesNotFit as failure:
            failures.append(failure)
    return None, [_impossible(failures[0], job)]


def _orders(shapes: Sequence[Shape]) -> Iterator[Sequence[Shape]]:
    """Orders to try: the file's, the largest first, those with a limit per node first."""
    yield shapes
    if len({shape.key for shape in shapes}) > 1:
        yield sorted(shapes, key=lambda shape: -sum(shape.needs))
        yield sorted(shapes, key=lambda shape: (not shape.limits, -sum(shape.needs)))


def _validate_strategy(job: JobSpec) -> list[ConfigError]:
    if job.scheduling_strategy != "SIMPLE":
        return []
    return [
        ConfigError(
            f"workload_group.{index}",
            f"{'+'.join(group)} cannot share devices when nothing is reserved: scheduling_strategy is SIMPLE",
        )
        for index, group in enumerate(job.groups)
        if len(group) > 1
    ]


def _validate_per_node(job: JobSpec) -> list[ConfigError]:
    errors = []
    nodes = job.trainer.node_number
    for role, spec in job.workloads.items():
        if spec.per_node is None:
            continue
        together = max((group.get(role, 0) for group in job.groups), default=0)
        where = f"workload.{role.lower()}.per_node"
        if spec.num > spec.per_node * nodes:
            need = f"{spec.num} members, {spec.per_node} on each node, need {-(-spec.num // spec.per_node)} nodes; "
            errors.append(ConfigError(where, f"{need}trainer.node_number is {nodes}"))
        if together > spec.per_node:
            errors.append(ConfigError(where, f"is {spec.per_node}, but its group puts {together} together on one node"))
    return errors


def _shapes(job: JobSpec, resources: Resources) -> Iterator[Shape]:
    """The units of the members: groups first, then the other roles."""
    for group in job.groups:
        first = 0
        instances = {role: job.workloads[role].num // count for role, count in group.items()}
        for upto in sorted(set(instances.values())):
            # Roles that have fewer instances are not in the later ones.
            counts = {role: count for role, count in group.items() if instances[role] >= upto}
            yield _shape(job, resources, counts, upto - first, "+".join(group))
            first = upto
    grouped = set(chain.from_iterable(job.groups))
    for role, spec in job.workloads.items():
        step = spec.per_node or 1
        for count, copies in ((step, spec.num // step), (spec.num % step, 1)):
            if role not in grouped and count and copies:
                yield _shape(job, resources, {role: count}, copies, str(role))


def _shape(job: JobSpec, resources: Resources, counts: Mapping[RLRoleType, int], copies: int, label: str) -> Shape:
    device = job.trainer.device_type.lower()
    shared = any(len(job.collocation_of(role)) > 1 for role in counts)
    contents, needs = [], []
    for index in range(max(counts.values())):
        content = sum_resources(resources[role] for role, count in counts.items() if count > index)
        need = round(content[device] * UNITS)
        if shared:  # the group has its devices to itself
            need = -(-need // UNITS) * UNITS
            content[device] = need / UNITS
        contents.append(content)
        needs.append(need)
    limits = {role: limit for role in counts if (limit := job.workloads[role].per_node) is not None}
    return Shape(counts, copies, label, tuple(contents), tuple(needs), limits)


def _place(job: JobSpec, shapes: Sequence[Shape], resources: Resources) -> Placement:
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
        role: tuple(Slot(starts[unit.node] + unit.first, resources[role]) for unit in placed_units)
        for role, placed_units in waiting.items()
    }
    return Placement(tuple(bundles), _rank_slots(job, units, starts, resources), standbys)


def _standby(job: JobSpec, role: RLRoleType, resources: Resources) -> Shape:
    need = round(resources[role][job.trainer.device_type.lower()] * UNITS)
    label = f"a standby of {role}"
    return Shape({role: 1}, job.workloads[role].standby, label, (resources[role],), (need,), limits={})


def _impossible(failure: DoesNotFit, job: JobSpec) -> ConfigError:
    trainer, shape = job.trainer, failure.shape
    kind, needed = trainer.device_type, sum(shape.needs) / UNITS
    if needed > trainer.device_per_node:
        text = f"{shape.label} needs {needed:g} {kind} on one node, which has {trainer.device_per_node}"
        return ConfigError("trainer.device_per_node", text)
    free = ", ".join(f"{units / UNITS:g}" for units in failure.free)
    if len(failure.free) > _MANY_NODES:
        counted = Counter(failure.free).most_common()
        free = ", ".join(f"{units / UNITS:g} on {count} nodes" for units, count in counted)
    standbys = {role: f" + {spec.standby} standby" if spec.standby else "" for role, spec in job.workloads.items()}
    roles = ", ".join(f"{role} x {spec.num}{standbys[role]}" for role, spec in job.workloads.items())
    text = (
        f"impossible placement: {roles} do not fit {trainer.node_number} node(s) x {trainer.device_per_node} {kind} = "
        f"{trainer.node_number * trainer.device_per_node}; {shape.label} needs {needed:g} more on one node, "
        f"free are [{free}]"
    )
    return ConfigError("trainer.device_per_node", text)


def _rank_slots(
    job: JobSpec, units: Sequence[PlacedUnit], starts: Mapping[int, int], resources: Resources
) -> dict[RLRoleType, tuple[Slot, ...]]:
    places: dict[RLRoleType, list[tuple[int, int]]] = {role: [] for role in job.workloads}
    for unit in units:
        for role, count in unit.counts.items():
            places[role] += [(unit.node, starts[unit.node] + unit.first + index) for index in range(count)]
    ranked = {}
    for role, members in places.items():
        slots: list[Slot] = []
        for _, together in groupby(members, key=lambda location: location[0]):
            bundles = [bundle for _, bundle in together]
            slots += [Slot(bundle, resources[role], at, len(bundles)) for at, bundle in enumerate(bundles)]
        ranked[role] = tuple(slots)
    return ranked
