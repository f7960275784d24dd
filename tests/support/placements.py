# SPDX-License-Identifier: Apache-2.0
"""Placements for tests, and what holds for every one of them."""

import itertools
from collections import Counter, defaultdict

import pytest

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec, TrainerSpec, WorkloadSpec
from dlrover.python.rl.control.placement import plan


def job_of(workloads, groups=(), nodes=1, devices=4, device_type="GPU"):
    """``workloads``: role to its number of workers, or to the fields of its spec."""
    fields = {role: {"num": spec} if isinstance(spec, int) else spec for role, spec in workloads.items()}
    specs = {RLRoleType(role): WorkloadSpec("m", "W", **spec) for role, spec in fields.items()}
    together = tuple({RLRoleType(role): count for role, count in group.items()} for group in groups)
    return JobSpec("job", TrainerSpec("m", "T", nodes, device_type, devices), specs, together)


def placed(*args, **options):
    placement, problems = plan(job_of(*args, **options))
    assert not problems, problems
    return placement


def refused(*args, **options):
    placement, (problem,) = plan(job_of(*args, **options))
    assert placement is None
    return str(problem)


def bundles_of(placement, role):
    return [slot.bundle for slot in placement.slots[role]]


def nodes_of(placement, role):
    return [placement.bundles[bundle].node for bundle in bundles_of(placement, role)]


def check(job, placement):
    """Everything that holds for every placement."""
    check_bundles(job, placement)
    assert list(placement.slots) == list(placement.standbys) == list(job.workloads)
    for role, spec in job.workloads.items():
        assert len(placement.slots[role]) == spec.num, "every worker has one place"
        assert len(placement.standbys[role]) == spec.standby, "and so has every standby"
        places = [*placement.slots[role], *placement.standbys[role]]
        assert len({slot.bundle for slot in places}) == len(places), "no two of a role in one bundle"
        assert all(slot.resources == places[0].resources for slot in places), "any of a role can take any place"
        assert all((slot.local_rank, slot.local_world_size) == (0, 1) for slot in placement.standbys[role])
        where = nodes_of(placement, role)
        assert where == sorted(where), "ranks are in the order of the nodes"
        for _, on_node in itertools.groupby(placement.slots[role], lambda slot: placement.bundles[slot.bundle].node):
            together = list(on_node)
            assert [slot.local_rank for slot in together] == list(range(len(together)))
            assert {slot.local_world_size for slot in together} == {len(together)}
            assert len(together) <= (spec.per_node or len(together))
    for group in job.groups:
        shared = [bundles_of(placement, role) for role in group]
        if len({(job.workloads[role].num, count) for role, count in group.items()}) == 1:
            assert all(bundles == shared[0] for bundles in shared), "worker i of each role is in the group's bundle i"


def check_bundles(job, placement):
    """No bundle, no device and no node gives more than it has."""
    device, devices = job.trainer.device_type.lower(), job.trainer.device_per_node
    nodes = [bundle.node for bundle in placement.bundles]
    assert nodes == sorted(nodes), "the bundles of a node are side by side"
    assert sorted(set(nodes)) == list(range(len(set(nodes)))), "nodes have no gaps"
    assert len(set(nodes)) <= job.trainer.node_number
    by_node = placement.nodes
    assert list(itertools.chain(*by_node)) == list(placement.bundles)
    assert [{bundle.node for bundle in bundles} for bundles in by_node] == [{node} for node in range(len(by_node))]
    for index, bundle in enumerate(placement.bundles):
        node, at = placement.position(index)
        assert (node, by_node[node][at]) == (bundle.node, bundle)
    taken = defaultdict(Counter)
    for slot in itertools.chain(*placement.slots.values(), *placement.standbys.values()):
        taken[slot.bundle].update(slot.resources)
    for index, bundle in enumerate(placement.bundles):
        assert all(taken[index][name] <= amount + 1e-6 for name, amount in bundle.resources.items())
        assert set(taken[index]) == set(bundle.resources), "nothing is asked of a bundle that it does not have"
        others = [name for name in bundle.resources if name != device]
        assert all(taken[index][name] == pytest.approx(bundle.resources[name]) for name in others)
    for bundles in by_node:
        amounts = [bundle.resources[device] for bundle in bundles]
        assert sum(amounts) <= devices + 1e-6, "no node over its devices"
        assert job.trainer.device_type == "CPU" or fit_as_ray_does(amounts, devices), "no device is over-committed"


def fit_as_ray_does(amounts, devices):
    """Whether bundles can be put on devices one after the other, a part on the fullest device that has room for it."""
    free = [10_000] * devices
    for amount in amounts:
        whole, part = divmod(round(amount * 10_000), 10_000)
        for need in [10_000] * whole + [part] * bool(part):
            fitting = [index for index, left in enumerate(free) if left >= need]
            if not fitting:
                return False
            free[min(fitting, key=lambda index: free[index])] -= need
    return True
