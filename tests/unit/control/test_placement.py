# SPDX-License-Identifier: Apache-2.0
"""Where workers go: small sizes exhaustively."""

import itertools
from dataclasses import replace

import pytest

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.placement import plan
from tests.support.placements import bundles_of, check, job_of, nodes_of, placed, refused


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
def test_collocated_roles_share_devices_exactly_as_long_as_there_are_enough(roles, count):
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


def test_three_roles_sharing_take_a_third_each_and_never_more_than_the_device():
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


def test_an_instance_of_a_group_never_spans_two_nodes():
    placement = placed({"ACTOR": 4, "CRITIC": 4}, [{"ACTOR": 2, "CRITIC": 2}], 2, 3)
    assert nodes_of(placement, "ACTOR") == nodes_of(placement, "CRITIC") == [0, 0, 1, 1]


def test_many_members_over_many_nodes():
    placement = placed({"ACTOR": 8}, (), 12, 2)
    assert nodes_of(placement, "ACTOR") == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [slot.local_rank for slot in placement.slots["ACTOR"]] == [0, 1] * 4


def test_what_is_placed_later_on_an_earlier_node_stands_beside_what_is_there():
    job = job_of({"ACTOR": {"num": 2, "resource": {"gpu": 3}}, "ROLLOUT": 2}, (), 2, 4)
    placement, _ = plan(job)
    check(job, placement)
    assert [bundle.node for bundle in placement.bundles] == [0, 0, 1, 1]
    assert (bundles_of(placement, "ACTOR"), bundles_of(placement, "ROLLOUT")) == ([0, 2], [1, 3])


def test_members_per_node_are_spread():
    placement = placed({"ACTOR": {"num": 3, "per_node": 1}, "ROLLOUT": {"num": 4, "per_node": 2}}, (), 3, 8)
    assert nodes_of(placement, "ACTOR") == [0, 1, 2]
    assert nodes_of(placement, "ROLLOUT") == [0, 0, 1, 1]


def test_members_per_node_hold_for_groups_too():
    roles = {"ACTOR": {"num": 2, "per_node": 1}, "CRITIC": 2}
    assert nodes_of(placed(roles, [{"ACTOR": 1, "CRITIC": 1}], 2, 8), "CRITIC") == [0, 1]


@pytest.mark.parametrize(
    ("roles", "nodes"),
    [
        ({"ACTOR": {"num": 3, "per_node": 2}, "ROLLOUT": {"num": 2, "resource": {"gpu": 3}}}, 3),
        ({"ROLLOUT": {"num": 1, "resource": {"gpu": 3}}, "ACTOR": {"num": 3, "per_node": 2}}, 2),
    ],
)
def test_ranks_follow_the_nodes_even_where_the_last_ones_filled_a_gap(roles, nodes):
    job = job_of(roles, (), nodes, 4)
    placement, problems = plan(job)
    assert not problems
    check(job, placement)


def test_what_only_fits_in_another_order_than_the_files_is_found():
    job = job_of({"REWARD": 2, "ROLLOUT": {"num": 2, "resource": {"gpu": 3}}}, (), 2, 4)
    placement, _ = plan(job)
    check(job, placement)
    assert nodes_of(placement, "REWARD") == nodes_of(placement, "ROLLOUT") == [0, 1]
    job = job_of({"ACTOR": 4, "ROLLOUT": {"num": 2, "per_node": 1, "resource": {"gpu": 1}}}, (), 2, 3)
    placement, _ = plan(job)
    check(job, placement)


def test_members_without_a_device_are_spread_evenly():
    roles = {"ACTOR": 4, "REWARD": {"num": 7, "resource": {"gpu": 0, "cpu": 8}}}
    placement = placed(roles, (), 3, 8)
    assert nodes_of(placement, "ACTOR") == [0] * 4
    assert nodes_of(placement, "REWARD") == [0, 0, 0, 1, 1, 1, 2]


def test_a_limit_on_each_node_holds_for_members_without_a_device_too():
    group = [{"ACTOR": 1, "REWARD": 1}]
    spec = {"resource": {"gpu": 0}}
    job = job_of({"ACTOR": {"num": 6, "per_node": 2, **spec}, "REWARD": {"num": 4, **spec}}, group, 3, 8)
    placement, problems = plan(job)
    assert not problems
    check(job, placement)


# -- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["AUTO", "GROUP"])
def test_auto_and_group_place_alike(strategy):
    job = job_of({"ACTOR": 2, "CRITIC": 2}, [{"ACTOR": 1, "CRITIC": 1}])
    assert plan(replace(job, scheduling_strategy=strategy)) == plan(job)


def test_simple_cannot_share_devices_since_it_reserves_none():
    job = replace(job_of({"ACTOR": 2, "CRITIC": 2}, [{"ACTOR": 1, "CRITIC": 1}]), scheduling_strategy="SIMPLE")
    _, (problem,) = plan(job)
    said = "workload_group.0: ACTOR+CRITIC cannot share devices when nothing is reserved: scheduling_strategy is SIMPLE"
    assert str(problem) == said
    assert plan(replace(job, groups=({RLRoleType("ACTOR"): 2},)))[0] is not None


# -- refused with the arithmetic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ({"ACTOR": 5},),
            "impossible placement: ACTOR x 5 do not fit 1 node(s) x 4 GPU = 4; ACTOR needs 1 more on one node, "
            "free are [0]",
        ),
        (
            ({"ACTOR": {"num": 2, "resource": {"gpu": 3}}, "ROLLOUT": 3}, (), 2, 4),
            "ACTOR x 2, ROLLOUT x 3 do not fit 2 node(s) x 4 GPU = 8; ROLLOUT needs 1 more on one node, "
            "free are [0, 0]",
        ),
        (
            ({"ACTOR": {"num": 4, "standby": 1}, "ROLLOUT": 1}, (), 1, 5),
            "ACTOR x 4 + 1 standby, ROLLOUT x 1 do not fit 1 node(s) x 5 GPU = 5; a standby of ACTOR needs 1 more on "
            "one node, free are [0]",
        ),
        (
            ({"ACTOR": 27}, (), 13, 2),
            "ACTOR x 27 do not fit 13 node(s) x 2 GPU = 26; ACTOR needs 1 more on one node, free are [0 on 13 nodes]",
        ),
        (({"ACTOR": {"num": 1, "resource": {"gpu": 5}}},), "ACTOR needs 5 GPU on one node, which has 4"),
        (({"ACTOR": 6, "CRITIC": 6}, [{"ACTOR": 6, "CRITIC": 6}]), "ACTOR+CRITIC needs 6 GPU on one node, which has 4"),
        (
            ({"ACTOR": {"num": 1, "resource": {"gpu": 1.5}}},),
            "workload.actor.resource.gpu: a worker would take 1.5 GPU; more than one must be a whole number",
        ),
        (
            ({"ACTOR": {"num": 3, "per_node": 1}}, (), 2, 8),
            "workload.actor.per_node: 3 workers, 1 on each node, need 3 nodes; trainer.node_number is 2",
        ),
        (
            ({"ACTOR": {"num": 4, "per_node": 2}, "CRITIC": 4}, [{"ACTOR": 4, "CRITIC": 4}], 2, 8),
            "workload.actor.per_node: is 2, but its group puts 4 together on one node",
        ),
    ],
)
def test_an_impossible_placement_is_refused_with_the_arithmetic(args, said):
    assert said in refused(*args)


def test_a_custom_resource_keeps_its_name():
    text = "{trainer: {module: m, class: T, device_per_node: 2, device_type: CPU}, workload:"
    resource = '{CPU: 1, Memory: 5, NPU: 1, "accelerator_type:A100": 0.1}'
    job = load_job_text(f"{text} {{actor: {{module: m, class: A, num: 2, resource: {resource}}}}}}}", "job")
    placement, problems = plan(job)
    assert not problems
    (first, _) = placement.slots[RLRoleType.ACTOR]
    assert first.resources == {"cpu": 1.0, "memory": 5.0, "NPU": 1.0, "accelerator_type:A100": 0.1}
