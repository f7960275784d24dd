# SPDX-License-Identifier: Apache-2.0
"""The placement of workers: from a job's description to bundles of resources.

A *bundle* is reserved as a whole on one node. A role that shares no device gets one bundle per worker; worker ``i`` of
each role of a group goes to bundle ``i`` of the group's instance. A *unit* must be on one node: an instance of a group,
``per_node`` workers of a role, or one worker.

A role gets the amount of a device that it names. Without one it gets a whole device or, in a group, an equal share of
what the other roles leave of the group's devices. All workers of a role get the same amount.

Units go to the first node with space, in the order of the file; if they do not fit, in two other orders. Units without
devices are spread evenly over the nodes. Standbys are placed last."""

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

UNITS = 10_000
"""Devices are counted in ten-thousandths, Ray's resolution, so that sums stay exact."""


def member_resources(job: JobSpec) -> tuple[dict[RLRoleType, dict[str, float]], list[ConfigError]]:
    """Return the resources of one worker of each role (``memory`` in MB), and the errors of impossible amounts."""
    device = job.trainer.device_type.lower()
    amounts_of = {
        # The names of custom resources keep their case, since Ray compares them exactly.
        role: {
            name.lower() if name.lower() in ("cpu", "gpu", "memory") else name: float(amount)
            for name, amount in spec.resource.items()
        }
        for role, spec in job.workloads.items()
    }
    errors = []
    for role, amounts in amounts_of.items():
        if job.trainer.device_type == "GPU" and amounts.get(device, 0.0) > 1 and amounts[device] % 1:
            text = f"a worker would take {amounts[device]:g} GPU; more than one must be a whole number"
            errors.append(ConfigError(f"workload.{role.lower()}.resource.gpu", text))
    for group in job.groups:
        errors += _share(job, {role: amounts_of[role] for role in group}, device)
    for amounts in amounts_of.values():
        amounts.setdefault(device, 1.0)
    return amounts_of, errors


def _share(job: JobSpec, group: Mapping[RLRoleType, dict[str, float]], device: str) -> list[ConfigError]:
    """Give each role of a group that names no amount its share."""
    kind = job.trainer.device_type
    units_of = {role: round(amounts[device] * UNITS) for role, amounts in group.items() if device in amounts}
    unnamed = [role for role in group if role not in units_of]
    text = " + ".join(f"{role} {units / UNITS:g}" for role, units in units_of.items())
    parts = sum(units for units in units_of.values() if units < UNITS)
    if kind == "GPU" and parts > UNITS and len(group) > 1:
        where = f"workload.{min(units_of, key=list(group).index).lower()}.resource.{device}"
        return [ConfigError(where, f"the shares of one GPU in its group add up to more than 1: {text}")]
    if not unnamed:
        return []
    used = sum(units_of.values())
    share = (max(UNITS, -(-used // UNITS) * UNITS) - used) // len(unnamed)
    if not share:
        text = f"set an amount: the other roles of its group leave nothing to share ({text})"
        return [ConfigError(f"workload.{role.lower()}.resource.{device}", text) for role in unnamed]
    for role in unnamed:
        group[role][device] = share / UNITS
    return []


@dataclass(frozen=True)
class Shape:
    """A kind of unit, whose workers must be together on one node."""

    counts: Mapping[RLRoleType, int]  # role to its workers in one unit
    copies: int
    label: str  # for errors
    contents: tuple[Mapping[str, float], ...]  # of its bundles
    needs: tuple[int, ...]  # devices of each bundle, in ten-thousandths
    limits: Mapping[RLRoleType, int]  # role to the most workers on one node, if limited

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for shapes that fit the same nodes."""
        return self.needs, tuple((role, self.counts[role]) for role in self.limits)


PlacedUnit: TypeAlias = tuple[int, int, Mapping[RLRoleType, int]]
"""A unit's node, its first bundle there, and how many workers of each role it has."""


class DoesNotFit(Exception):
    """No node has space for a unit of ``shape``; ``free`` has each node's free devices, in ten-thousandths."""

    def __init__(self, shape: Shape, nodes: "list[Node]") -> None:
        super().__init__(shape.label)
        self.shape, self.free = shape, [sum(node.free) for node in nodes]


@dataclass
class Node:
    """A node that is being filled. Each GPU is a pool, since a fraction cannot span two; the CPUs are one pool."""

    size: int  # of one pool, in ten-thousandths
    free: list[int]  # in each pool
    members: dict[RLRoleType, int] = field(default_factory=dict)
    bundles: list[Mapping[str, float]] = field(default_factory=list)

    def after(self, shape: Shape) -> list[int] | None:
        """Return the free amount of each pool once the unit is added, None if it does not fit. Like Ray, take a part of
        a device from the one with the least free."""
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
        """Add a unit, after which ``free`` is left; return the index of its first bundle."""
        first, self.free = len(self.bundles), free
        self.bundles += shape.contents
        for role, count in shape.counts.items():
            self.members[role] = self.members.get(role, 0) + count
        return first


def fill(nodes: list[Node], shape: Shape, cursors: dict[tuple[object, ...], int]) -> Iterator[PlacedUnit]:
    """Place all copies of a shape on the first nodes with space; without devices and limits, evenly over all nodes.
    ``cursors`` maps a shape to the first node that may still fit it. Raises DoesNotFit."""
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
        yield index, nodes[index].take(shape, free), shape.counts
    if not spread:
        cursors[shape.key] = index


def stand_by(nodes: list[Node], shape: Shape, first_node: int) -> Iterator[PlacedUnit]:
    """Place a role's standbys, if possible on different nodes and not on rank 0's ``first_node``. Raises DoesNotFit."""
    last = first_node
    for _ in range(shape.copies):
        around = [(last + 1 + offset) % len(nodes) for offset in range(len(nodes))]
        order = [*(index for index in around if index != first_node), first_node]
        fit = next(((index, free) for index in order if (free := nodes[index].after(shape)) is not None), None)
        if fit is None:
            raise DoesNotFit(shape, nodes)
        last, free = fit
        yield last, nodes[last].take(shape, free), shape.counts


_MANY_NODES = 12

Resources: TypeAlias = Mapping[RLRoleType, Mapping[str, float]]
"""Role to the resources of one worker."""


@dataclass(frozen=True)
class Slot:
    """The share of a bundle for one worker or standby."""

    bundle: int  # index
    resources: Mapping[str, float]  # {"cpu": 0.5, "memory": 1024}; memory in MB
    local_rank: int = 0  # among its role's workers on the node
    local_world_size: int = 1


@dataclass(frozen=True)
class Bundle:
    """Resources reserved together on the job's node number ``node``."""

    node: int
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Placement:
    """The whole plan. All slots of a role are alike: each of its processes can take any of them."""

    bundles: tuple[Bundle, ...]  # sorted by node; nodes are numbered from 0 without gaps
    slots: Mapping[RLRoleType, tuple[Slot, ...]]  # of the workers, in rank order
    standbys: Mapping[RLRoleType, tuple[Slot, ...]] = field(default_factory=dict)  # and of additional workers

    @property
    def total(self) -> dict[str, float]:
        return sum_resources(bundle.resources for bundle in self.bundles)

    @cached_property
    def nodes(self) -> list[list[Bundle]]:
        return [list(bundles) for _, bundles in groupby(self.bundles, key=lambda bundle: bundle.node)]

    def position(self, bundle: int) -> tuple[int, int]:
        """Return a bundle's node, and its index on the node."""
        node = self.bundles[bundle].node
        return node, bundle - bisect_left(self.bundles, node, key=lambda candidate: candidate.node)

    def with_places(self, most: Mapping[str, int]) -> "Placement":
        """Return the plan with places for ``most`` workers of each role. New ones are at the end, so that all
        others keep their numbers; each has a node of the plan to itself, so it may go to any node of the cluster."""
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
    """Place all workers and standbys of ``job``, or explain with numbers why they cannot fit its nodes."""
    resources, errors = member_resources(job)
    errors += _validate_per_node(job)
    if job.scheduling_strategy == "SIMPLE":
        reason = "cannot share devices when nothing is reserved: scheduling_strategy is SIMPLE"
        groups = [(index, "+".join(group)) for index, group in enumerate(job.groups) if len(group) > 1]
        errors += [ConfigError(f"workload_group.{index}", f"{roles} {reason}") for index, roles in groups]
    if errors:
        return None, errors
    shapes = list(_shapes(job, resources))
    failures = []
    orders = [shapes]
    if len({shape.key for shape in shapes}) > 1:  # the largest first, then those with a limit per node first
        orders.append(sorted(shapes, key=lambda shape: -sum(shape.needs)))
        orders.append(sorted(shapes, key=lambda shape: (not shape.limits, -sum(shape.needs))))
    for arranged in orders:
        try:
            return _place(job, arranged, resources), []
        except DoesNotFit as failure:
            failures.append(failure)
    return None, [_impossible(failures[0], job)]


def _validate_per_node(job: JobSpec) -> list[ConfigError]:
    errors = []
    nodes = job.trainer.node_number
    for role, spec in job.workloads.items():
        if spec.per_node is None:
            continue
        together = max((group.get(role, 0) for group in job.groups), default=0)
        where = f"workload.{role.lower()}.per_node"
        if spec.num > spec.per_node * nodes:
            need = f"{spec.num} workers, {spec.per_node} on each node, need {-(-spec.num // spec.per_node)} nodes; "
            errors.append(ConfigError(where, f"{need}trainer.node_number is {nodes}"))
        if together > spec.per_node:
            errors.append(ConfigError(where, f"is {spec.per_node}, but its group puts {together} together on one node"))
    return errors


def _shapes(job: JobSpec, resources: Resources) -> Iterator[Shape]:
    """Yield the units of the workers: groups first, then the other roles."""
    for group in job.groups:
        first = 0
        instances = {role: job.workloads[role].num // count for role, count in group.items()}
        for upto in sorted(set(instances.values())):
            # Roles with fewer instances are not in the later ones.
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
    devices = trainer.device_per_node
    size, pools = (UNITS, devices) if trainer.device_type == "GPU" else (UNITS * devices, 1)
    nodes = [Node(size, [size] * pools) for _ in range(trainer.node_number)]
    cursors: dict[tuple[object, ...], int] = {}
    placed = chain.from_iterable(fill(nodes, shape, cursors) for shape in shapes)
    units = sorted(placed, key=lambda unit: unit[:2])
    first_nodes: dict[RLRoleType, int] = {}
    for node, _, counts in units:
        for role in counts:
            first_nodes.setdefault(role, node)
    waiting: dict[RLRoleType, list[PlacedUnit]] = {}
    for role, spec in job.workloads.items():
        need = round(resources[role][trainer.device_type.lower()] * UNITS)
        standby = Shape({role: 1}, spec.standby, f"a standby of {role}", (resources[role],), (need,), limits={})
        waiting[role] = list(stand_by(nodes, standby, first_nodes[role]))
    bundles: list[Bundle] = []
    starts: dict[int, int] = {}
    for number, index in enumerate(index for index, node in enumerate(nodes) if node.bundles):
        starts[index] = len(bundles)
        bundles += [Bundle(number, content) for content in nodes[index].bundles]
    standbys = {
        role: tuple(Slot(starts[node] + first, resources[role]) for node, first, _ in placed_units)
        for role, placed_units in waiting.items()
    }
    return Placement(tuple(bundles), _rank_slots(job, units, starts, resources), standbys)


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
    for node, first, counts in units:
        for role, count in counts.items():
            places[role] += [(node, starts[node] + first + index) for index in range(count)]
    ranked = {}
    for role, members in places.items():
        slots: list[Slot] = []
        for _, together in groupby(members, key=lambda location: location[0]):
            bundles = [bundle for _, bundle in together]
            slots += [Slot(bundle, resources[role], at, len(bundles)) for at, bundle in enumerate(bundles)]
        ranked[role] = tuple(slots)
    return ranked
