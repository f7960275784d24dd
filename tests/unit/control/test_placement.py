# SPDX-License-Identifier: Apache-2.0
"""Places of workers and standbys, and their shares of devices."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.placement import plan
from tests.support.manual_clock import within
from tests.support.placements import bundles_of, check, job_of, nodes_of, placed, refused


def workers(num=1, per_node=None, standby=0, **resource):
    return {"num": num, "per_node": per_node, "standby": standby, "resource": resource}


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("device_type", ["CPU", "GPU"])
def test_whole_devices_fit_exactly_as_long_as_there_are_enough(nodes, devices, device_type):
    for actors, rollouts in itertools.product(range(1, 8), range(1, 8)):
        job = job_of({"ACTOR": actors, "ROLLOUT": rollouts}, (), nodes, devices, device_type)
        placement, problems = plan(job)
        assert (placement is not None) == (actors + rollouts <= nodes * devices)
        assert (placement is None) == bool(problems)
        if placement is not None:
            check(job, placement)


@pytest.mark.parametrize("roles", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_collocated_roles_fit_while_devices_suffice(roles, count):
    names = ["ACTOR", "ROLLOUT", "REWARD", "CRITIC"][:roles]
    for nodes, devices, instances in itertools.product([1, 2], [1, 2, 3, 4], [1, 2, 3, 4]):
        group = [dict.fromkeys(names, count)]
        job = job_of(dict.fromkeys(names, count * instances), group, nodes, devices)
        placement, _ = plan(job)
        assert (placement is not None) == (devices // count * nodes >= instances)
        if placement is not None:
            check(job, placement)
            assert len(placement.bundles) == count * instances
            assert all(bundle.resources == {"gpu": 1.0} for bundle in placement.bundles)


def test_three_roles_sharing_take_a_third_each():
    names = ["ACTOR", "ROLLOUT", "REWARD"]
    placement = placed(dict.fromkeys(names, 4), [dict.fromkeys(names, 4)])
    assert {slot.resources["gpu"] for slots in placement.slots.values() for slot in slots} == {0.3333}
    assert all(bundles_of(placement, name) == [0, 1, 2, 3] for name in names)


def test_uneven_counts_of_a_group():
    placement = placed({"ACTOR": 4, "ROLLOUT": 2}, [{"ACTOR": 2, "ROLLOUT": 1}])
    assert (bundles_of(placement, "ACTOR"), bundles_of(placement, "ROLLOUT")) == ([0, 1, 2, 3], [0, 2])
    assert all(bundle.resources == {"gpu": 1.0} for bundle in placement.bundles)


def test_roles_outside_a_group_need_not_fill_a_node():
    placement = placed({"ACTOR": 2, "ROLLOUT": 2, "REWARD": 1}, [{"ACTOR": 2, "ROLLOUT": 2}])
    assert bundles_of(placement, "REWARD") == [2]


def test_later_role_on_earlier_node_is_beside_others():
    placement = placed({"ACTOR": workers(2, gpu=3), "ROLLOUT": 2}, (), 2, 4)
    assert [bundle.node for bundle in placement.bundles] == [0, 0, 1, 1]
    assert (bundles_of(placement, "ACTOR"), bundles_of(placement, "ROLLOUT")) == ([0, 2], [1, 3])


PAIR = [{"ACTOR": 1, "CRITIC": 1}]
NODES = {
    "an instance of a group is on one node": (
        ({"ACTOR": 4, "CRITIC": 4}, [{"ACTOR": 2, "CRITIC": 2}], 2, 3),
        {"ACTOR": [0, 0, 1, 1], "CRITIC": [0, 0, 1, 1]},
    ),
    "many over many nodes": (({"ACTOR": 8}, (), 12, 2), {"ACTOR": [0, 0, 1, 1, 2, 2, 3, 3]}),
    "some on each node": (
        ({"ACTOR": workers(3, per_node=1), "ROLLOUT": workers(4, per_node=2)}, (), 3, 8),
        {"ACTOR": [0, 1, 2], "ROLLOUT": [0, 0, 1, 1]},
    ),
    "some of a group on each node": (({"ACTOR": workers(2, per_node=1), "CRITIC": 2}, PAIR, 2, 8), {"CRITIC": [0, 1]}),
    "some without devices on each node": (
        ({"ACTOR": workers(6, per_node=2, gpu=0), "CRITIC": workers(4, gpu=0)}, PAIR, 3, 8),
        {"ACTOR": [0, 0, 1, 1, 2, 2]},
    ),
    "a gap on an earlier node": (({"ACTOR": workers(3, per_node=2), "ROLLOUT": workers(2, gpu=3)}, (), 3, 4), {}),
    "a gap beside a larger one": (({"ROLLOUT": workers(1, gpu=3), "ACTOR": workers(3, per_node=2)}, (), 2, 4), {}),
    "another order of roles": (
        ({"REWARD": 2, "ROLLOUT": workers(2, gpu=3)}, (), 2, 4),
        {"REWARD": [0, 1], "ROLLOUT": [0, 1]},
    ),
    "another order of equal roles": (
        ({"ACTOR": 4, "ROLLOUT": workers(2, per_node=1, gpu=1)}, (), 2, 3),
        {"ROLLOUT": [0, 1]},
    ),
    "none of the devices": (
        ({"ACTOR": 4, "REWARD": workers(7, gpu=0, cpu=8)}, (), 3, 8),
        {"ACTOR": [0] * 4, "REWARD": [0, 0, 0, 1, 1, 1, 2]},
    ),
}


@pytest.mark.parametrize(("job", "expected"), NODES.values(), ids=NODES)
def test_ranks_are_on_the_nodes_that_fit_them(job, expected):
    placement = placed(*job)
    check(job_of(*job), placement)
    assert {role: nodes_of(placement, role) for role in expected} == expected


# -- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["AUTO", "GROUP"])
def test_auto_and_group_place_alike(strategy):
    job = job_of({"ACTOR": 2, "CRITIC": 2}, [{"ACTOR": 1, "CRITIC": 1}])
    assert plan(replace(job, scheduling_strategy=strategy)) == plan(job)


def test_simple_cannot_share_devices_since_it_reserves_none():
    job = replace(job_of({"ACTOR": 2, "CRITIC": 2}, [{"ACTOR": 1, "CRITIC": 1}]), scheduling_strategy="SIMPLE")
    _, (problem,) = plan(job)
    message = (
        "workload_group.0: ACTOR+CRITIC cannot share devices when nothing is reserved: scheduling_strategy is SIMPLE"
    )
    assert str(problem) == message
    assert plan(replace(job, groups=({RLRoleType("ACTOR"): 2},)))[0] is not None


# -- refused with the arithmetic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ({"ACTOR": 5},),
            "impossible placement: ACTOR x 5 do not fit 1 node(s) x 4 GPU = 4; ACTOR needs 1 more on one node, "
            "free are [0]",
        ),
        (
            ({"ACTOR": workers(2, gpu=3), "ROLLOUT": 3}, (), 2, 4),
            "ACTOR x 2, ROLLOUT x 3 do not fit 2 node(s) x 4 GPU = 8; ROLLOUT needs 1 more on one node, "
            "free are [0, 0]",
        ),
        (
            ({"ACTOR": workers(4, standby=1), "ROLLOUT": 1}, (), 1, 5),
            "ACTOR x 4 + 1 standby, ROLLOUT x 1 do not fit 1 node(s) x 5 GPU = 5; a standby of ACTOR needs 1 more on "
            "one node, free are [0]",
        ),
        (
            ({"ACTOR": 27}, (), 13, 2),
            "ACTOR x 27 do not fit 13 node(s) x 2 GPU = 26; ACTOR needs 1 more on one node, free are [0 on 13 nodes]",
        ),
        (({"ACTOR": workers(1, gpu=5)},), "ACTOR needs 5 GPU on one node, which has 4"),
        (({"ACTOR": 6, "CRITIC": 6}, [{"ACTOR": 6, "CRITIC": 6}]), "ACTOR+CRITIC needs 6 GPU on one node, which has 4"),
        (
            ({"ACTOR": workers(1, gpu=1.5)},),
            "workload.actor.resource.gpu: a worker would take 1.5 GPU; more than one must be a whole number",
        ),
        (
            ({"ACTOR": workers(3, per_node=1)}, (), 2, 8),
            "workload.actor.per_node: 3 workers, 1 on each node, need 3 nodes; trainer.node_number is 2",
        ),
        (
            ({"ACTOR": workers(4, per_node=2), "CRITIC": 4}, [{"ACTOR": 4, "CRITIC": 4}], 2, 8),
            "workload.actor.per_node: is 2, but its group puts 4 together on one node",
        ),
    ],
)
def test_an_impossible_placement_is_refused_with_the_arithmetic(args, message):
    assert message in refused(*args)


def test_a_custom_resource_keeps_its_name():
    text = "{trainer: {module: m, class: T, device_per_node: 2, device_type: CPU}, workload:"
    resource = '{CPU: 1, Memory: 5, NPU: 1, "accelerator_type:A100": 0.1}'
    job = load_job_text(f"{text} {{actor: {{module: m, class: A, num: 2, resource: {resource}}}}}}}", "job")
    placement, problems = plan(job)
    assert not problems
    (first, _) = placement.slots[RLRoleType.ACTOR]
    assert first.resources == {"cpu": 1.0, "memory": 5.0, "NPU": 1.0, "accelerator_type:A100": 0.1}


# -- shares of a device, and other resources --------------------------------------------------------------------------


def shares(workloads, group, **options):
    placement = placed(workloads, [group], **options)
    taken = {role: {slot.resources["gpu"] for slot in slots} for role, slots in placement.slots.items()}
    assert all(len(amounts) == 1 for amounts in taken.values()), "all workers of a role take the same"
    return {role: amounts.pop() for role, amounts in taken.items()}, placement


@pytest.mark.parametrize(("actors", "rewards"), itertools.product([1, 2, 3, 4], repeat=2))
def test_group_members_take_equal_shares(actors, rewards):
    taken, placement = shares({"ACTOR": actors, "REWARD": rewards}, {"ACTOR": 1, "REWARD": 1})
    assert taken == {"ACTOR": 0.5, "REWARD": 0.5}
    assert [bundle.resources for bundle in placement.bundles] == [{"gpu": 1.0}] * max(actors, rewards)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"ACTOR": 0.5, "ROLLOUT": 0.5}, {"ACTOR": 0.5, "ROLLOUT": 0.5}),
        ({"ACTOR": 0.5, "ROLLOUT": None}, {"ACTOR": 0.5, "ROLLOUT": 0.5}),
        ({"ACTOR": 0.3, "ROLLOUT": None, "REWARD": 0.1}, {"ACTOR": 0.3, "ROLLOUT": 0.6, "REWARD": 0.1}),
        ({"ACTOR": 0.4, "ROLLOUT": None, "REWARD": None}, {"ACTOR": 0.4, "ROLLOUT": 0.3, "REWARD": 0.3}),
        ({"ACTOR": None, "REWARD": 0}, {"ACTOR": 1.0, "REWARD": 0.0}),
        ({"ACTOR": 0.2, "ROLLOUT": 0.1}, {"ACTOR": 0.2, "ROLLOUT": 0.1}),
    ],
)
def test_a_named_part_of_a_device_is_taken_as_it_is(resources, expected):
    specs = {
        role: {"num": 2, "resource": {} if amount is None else {"gpu": amount}} for role, amount in resources.items()
    }
    taken, placement = shares(specs, dict.fromkeys(resources, 1))
    assert taken == expected
    assert [bundle.resources for bundle in placement.bundles] == [{"gpu": 1.0}] * 2


def test_group_with_whole_devices_is_on_one_node():
    specs = {role: workers(2, gpu=2) for role in ("ACTOR", "ROLLOUT")}
    taken, placement = shares(specs, {"ACTOR": 1, "ROLLOUT": 1}, nodes=2)
    assert taken == {"ACTOR": 2.0, "ROLLOUT": 2.0}
    assert nodes_of(placement, "ACTOR") == nodes_of(placement, "ROLLOUT") == [0, 1]


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (
            {"ACTOR": 0.7, "ROLLOUT": 0.6},
            "workload.actor.resource.gpu: the shares of one GPU in its group add up to more than 1: "
            "ACTOR 0.7 + ROLLOUT 0.6",
        ),
        (
            {"ACTOR": 1, "ROLLOUT": None},
            "workload.rollout.resource.gpu: set an amount: the other roles of its group leave nothing to "
            "share (ACTOR 1)",
        ),
        (
            {"ACTOR": 2, "ROLLOUT": None},
            "workload.rollout.resource.gpu: set an amount: the other roles of its group leave nothing to "
            "share (ACTOR 2)",
        ),
    ],
)
def test_impossible_shares_are_refused(resources, message):
    specs = {role: {"resource": {} if amount is None else {"gpu": amount}} for role, amount in resources.items()}
    assert refused(specs, [dict.fromkeys(resources, 1)]) == message


def test_the_cpus_of_a_node_are_one_pool_for_groups_too():
    specs = {role: workers(1, cpu=0.75) for role in ("ACTOR", "ROLLOUT")}
    assert placed(specs, [{"ACTOR": 1, "ROLLOUT": 1}], device_type="CPU").total == {"cpu": 2.0}
    specs = {"ACTOR": {"resource": {"cpu": 1.5}}, "ROLLOUT": {}}
    (rollout,) = placed(specs, [{"ACTOR": 1, "ROLLOUT": 1}], device_type="CPU").slots["ROLLOUT"]
    assert rollout.resources == {"cpu": 0.5}, "what the others leave of their last core"


# -- fractions, other resources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "members", "devices"), [(0.1, 20, 2), (0.3, 6, 2), (0.5, 8, 4), (0.25, 12, 3), (1 / 3, 6, 2)]
)
def test_fractions_fill_devices_exactly(fraction, members, devices):
    roles = {"ACTOR": workers(members, gpu=fraction)}
    assert plan(job_of(roles, (), 1, devices))[0] is not None
    roles["ACTOR"]["num"] += 1
    assert plan(job_of(roles, (), 1, devices))[0] is None


def test_a_fraction_of_a_gpu_is_not_put_together_from_two():
    roles = {"ACTOR": workers(3, gpu=0.6)}
    assert "ACTOR needs 0.6 more on one node, free are [0.8]" in refused(roles, (), 1, 2)
    roles = {"ACTOR": workers(3, cpu=0.6)}
    assert placed(roles, (), 1, 2, "CPU").total == {"cpu": 1.8}


def test_memory_and_custom_resources_are_reserved():
    roles = {"ACTOR": workers(2, memory=4096, disk=100, cpu=16)}
    placement = placed(roles, (), 1, 2)
    assert placement.slots["ACTOR"][0].resources == {"memory": 4096.0, "disk": 100.0, "cpu": 16.0, "gpu": 1.0}
    assert placement.total == {"memory": 8192.0, "disk": 200.0, "cpu": 32.0, "gpu": 2.0}


def test_a_member_may_take_several_devices_or_none():
    roles = {"ACTOR": workers(1, gpu=2), "REWARD": workers(5, gpu=0, cpu=1)}
    assert placed(roles, (), 1, 2).total == {"gpu": 2.0, "cpu": 5.0}


# -- standbys ---------------------------------------------------------------------------------------------------------


def standbys_of(placement, role):
    return [placement.bundles[slot.bundle].node for slot in placement.standbys[role]]


def test_standbys_are_on_different_nodes_than_rank_0():
    placement = placed({"ACTOR": workers(2, standby=3), "ROLLOUT": workers(1, standby=1)}, (), 4, 4)
    assert nodes_of(placement, "ACTOR") == [0, 0]
    assert standbys_of(placement, "ACTOR") == [1, 2, 3]
    assert standbys_of(placement, "ROLLOUT") == [1]


def test_a_standby_is_beside_rank_0_when_there_is_no_other_place():
    placement = placed({"ACTOR": workers(1, standby=1)}, (), 1, 2)
    assert standbys_of(placement, "ACTOR") == [0]
    placement = placed({"ACTOR": workers(3, standby=1), "ROLLOUT": workers(2, gpu=4)}, (), 3, 4)
    assert (standbys_of(placement, "ACTOR"), nodes_of(placement, "ROLLOUT")) == ([0], [1, 2])


@pytest.mark.parametrize(("nodes", "devices", "standby"), itertools.product([1, 2, 3], [1, 2, 4], [0, 1, 2, 3]))
def test_standbys_take_devices_like_members(nodes, devices, standby):
    for num in range(1, nodes * devices + 1):
        job = job_of({"ACTOR": workers(num, standby=standby)}, (), nodes, devices)
        placement, problems = plan(job)
        assert (placement is not None) == (num + standby <= nodes * devices), problems
        if placement is not None:
            check(job, placement)
            assert len(placement.bundles) == num + standby
            outside = nodes * devices - devices - max(num - devices, 0)
            assert sum(node != 0 for node in standbys_of(placement, "ACTOR")) == min(standby, outside)


def test_standby_of_sharing_role_takes_its_share():
    roles = {"ACTOR": workers(2, standby=1), "ROLLOUT": 2}
    placement = placed(roles, [{"ACTOR": 1, "ROLLOUT": 1}], 1, 3)
    (slot,) = placement.standbys["ACTOR"]
    assert (slot.resources, placement.bundles[slot.bundle].resources) == ({"gpu": 0.5}, {"gpu": 0.5})
    assert placement.total == {"gpu": 2.5}


def test_standbys_do_not_count_for_per_node():
    placement = placed({"ACTOR": workers(2, per_node=2, standby=1)}, (), 1, 3)
    assert [slot.local_world_size for slot in placement.slots["ACTOR"]] == [2, 2]


# -- any job, and large ones ------------------------------------------------------------------------------------------


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
    """Try everything to fit workers of these sizes on nodes with ``free`` left."""
    if not sizes:
        return True
    first, *smaller = sizes
    return any(
        left >= first and fits_somehow(smaller, (*free[:index], left - first, *free[index + 1 :]))
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
def test_members_of_1_2_or_4_devices_are_placed_if_possible(roles, nodes, devices):
    job = job_of({role: workers(num, gpu=size) for role, (num, size) in roles.items()}, (), nodes, devices)
    sizes = sorted((size for num, size in roles.values() for _ in range(num)), reverse=True)
    assert (plan(job)[0] is not None) == fits_somehow(sizes, (devices,) * nodes)


@pytest.mark.parametrize(
    ("workloads", "groups"),
    [
        ({"ACTOR": 8000}, ()),
        ({"ACTOR": 4000, "ROLLOUT": 4000}, ()),
        ({"ACTOR": workers(4000, per_node=4), "ROLLOUT": 4000}, ()),
        ({"ACTOR": 4000, "ROLLOUT": 4000}, [{"ACTOR": 8, "ROLLOUT": 8}]),
        ({"ACTOR": workers(8000, gpu=0.5)}, ()),
        ({"ACTOR": 4000, "REWARD": workers(4000, gpu=0, cpu=1)}, ()),
        ({"ACTOR": workers(7900, standby=100)}, ()),
        ({f"ROLE_{index}": 1 for index in range(8000)}, ()),
    ],
)
def test_8000_members_are_placed_on_1000_nodes_in_three_seconds(workloads, groups):
    job = job_of(workloads, groups, nodes=1000, devices=8)
    began_s = time.process_time()
    placement, problems = plan(job)
    took_s = time.process_time() - began_s
    assert not problems
    assert sum(map(len, (*placement.slots.values(), *placement.standbys.values()))) == 8000
    assert took_s < 3.0
    check(job, placement)


def test_8001_members_are_refused_by_1000_nodes_within_a_second():
    job = job_of({"ACTOR": 8001}, (), nodes=1000, devices=8)
    with within(1.0, time.process_time):
        placement, (problem,) = plan(job)
    assert placement is None
    assert str(problem).endswith("ACTOR needs 1 more on one node, free are [0 on 1000 nodes]")
