# SPDX-License-Identifier: Apache-2.0
"""Whatever job, placed rightly or refused; and large ones, quickly."""

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlrover.python.rl.control.placement import plan
from tests.support.placements import check, job_of

ROLES = ["ACTOR", "ROLLOUT", "REWARD", "CRITIC"]
RESOURCES = st.fixed_dictionaries(
    {}, optional={"gpu": st.sampled_from([0, 0.1, 0.25, 0.5, 0.7, 1, 2]), "memory": st.integers(0, 100)}
)
SPECS = st.fixed_dictionaries(
    {"num": st.integers(1, 6), "resource": RESOURCES},
    optional={"per_node": st.none() | st.integers(1, 4), "standby": st.integers(0, 3)},
)


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(st.sampled_from(ROLES), SPECS, min_size=1),
    st.lists(st.dictionaries(st.sampled_from(ROLES), st.integers(1, 3)), max_size=2),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["CPU", "GPU"]),
)
def test_a_job_is_placed_rightly_or_refused(workloads, groups, nodes, devices, device_type):
    grouped = [role for group in groups for role in group]
    assume(len(grouped) == len(set(grouped)))
    assume(all(group and set(group) <= set(workloads) for group in groups))
    assume(all(workloads[role]["num"] % count == 0 for group in groups for role, count in group.items()))
    job = job_of(workloads, groups, nodes, devices, device_type)
    placement, problems = plan(job)
    assert (placement is None) == bool(problems)
    if placement is not None:
        check(job, placement)
    assert plan(job) == (placement, problems), "the same job, the same placement"


def fits_somehow(sizes, free):
    """Whether workers of these sizes fit nodes with so much left each, trying everything."""
    if not sizes:
        return True
    first, *rest = sizes
    return any(
        left >= first and fits_somehow(rest, (*free[:index], left - first, *free[index + 1 :]))
        for index, left in enumerate(free)
        if left not in free[:index]
    )


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(ROLES), st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4])), min_size=1, max_size=4
    ),
    st.integers(1, 3),
    st.integers(1, 7),
)
def test_members_of_1_2_or_4_devices_are_refused_only_when_nothing_would_do(roles, nodes, devices):
    job = job_of(
        {role: {"num": num, "resource": {"gpu": size}} for role, (num, size) in roles.items()}, (), nodes, devices
    )
    sizes = sorted((size for num, size in roles.values() for _ in range(num)), reverse=True)
    assert (plan(job)[0] is not None) == fits_somehow(sizes, (devices,) * nodes)


@pytest.mark.parametrize(
    ("workloads", "groups"),
    [
        ({"ACTOR": 8000}, ()),
        ({"ACTOR": 4000, "ROLLOUT": 4000}, ()),
        ({"ACTOR": {"num": 4000, "per_node": 4}, "ROLLOUT": 4000}, ()),
        ({"ACTOR": 4000, "ROLLOUT": 4000}, [{"ACTOR": 8, "ROLLOUT": 8}]),
        ({"ACTOR": {"num": 8000, "resource": {"gpu": 0.5}}}, ()),
        ({"ACTOR": 4000, "REWARD": {"num": 4000, "resource": {"gpu": 0, "cpu": 1}}}, ()),
        ({"ACTOR": {"num": 7900, "standby": 100}}, ()),
        ({f"ROLE_{index}": 1 for index in range(8000)}, ()),
    ],
)
def test_8000_members_are_placed_on_1000_nodes_within_a_second(workloads, groups):
    job = job_of(workloads, groups, nodes=1000, devices=8)
    began_s = time.process_time()
    placement, problems = plan(job)
    took_s = time.process_time() - began_s
    assert not problems
    assert sum(map(len, (*placement.slots.values(), *placement.standbys.values()))) == 8000
    assert took_s < 1.0
    check(job, placement)


def test_8001_members_are_refused_by_1000_nodes_within_a_second():
    job = job_of({"ACTOR": 8001}, (), nodes=1000, devices=8)
    began_s = time.process_time()
    placement, (problem,) = plan(job)
    assert time.process_time() - began_s < 1.0
    assert placement is None
    assert str(problem).endswith("ACTOR needs 1 more on one node, free are [0 on 1000 nodes]")
