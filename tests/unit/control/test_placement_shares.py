# SPDX-License-Identifier: Apache-2.0
"""How much of a device, and of what else, each worker takes."""

import itertools

import pytest

from dlrover.python.rl.control.placement import plan
from tests.support.placements import job_of, nodes_of, placed, refused


def shares(workloads, group, **options):
    placement = placed(workloads, [group], **options)
    taken = {role: {slot.resources["gpu"] for slot in slots} for role, slots in placement.slots.items()}
    assert all(len(amounts) == 1 for amounts in taken.values()), "all workers of a role take the same"
    return {role: amounts.pop() for role, amounts in taken.items()}, placement


@pytest.mark.parametrize(("actors", "rewards"), itertools.product([1, 2, 3, 4], repeat=2))
def test_all_members_of_a_group_take_equal_shares_however_many_instances_each_role_has(actors, rewards):
    found, placement = shares({"ACTOR": actors, "REWARD": rewards}, {"ACTOR": 1, "REWARD": 1})
    assert found == {"ACTOR": 0.5, "REWARD": 0.5}
    assert [bundle.resources for bundle in placement.bundles] == [{"gpu": 1.0}] * max(actors, rewards)


@pytest.mark.parametrize(
    ("resources", "taken"),
    [
        ({"ACTOR": 0.5, "ROLLOUT": 0.5}, {"ACTOR": 0.5, "ROLLOUT": 0.5}),
        ({"ACTOR": 0.5, "ROLLOUT": None}, {"ACTOR": 0.5, "ROLLOUT": 0.5}),
        ({"ACTOR": 0.3, "ROLLOUT": None, "REWARD": 0.1}, {"ACTOR": 0.3, "ROLLOUT": 0.6, "REWARD": 0.1}),
        ({"ACTOR": 0.4, "ROLLOUT": None, "REWARD": None}, {"ACTOR": 0.4, "ROLLOUT": 0.3, "REWARD": 0.3}),
        ({"ACTOR": None, "REWARD": 0}, {"ACTOR": 1.0, "REWARD": 0.0}),
        ({"ACTOR": 0.2, "ROLLOUT": 0.1}, {"ACTOR": 0.2, "ROLLOUT": 0.1}),
    ],
)
def test_a_named_part_of_a_device_is_taken_as_it_is(resources, taken):
    specs = {
        role: {"num": 2, "resource": {} if amount is None else {"gpu": amount}} for role, amount in resources.items()
    }
    found, placement = shares(specs, dict.fromkeys(resources, 1))
    assert found == taken
    assert [bundle.resources for bundle in placement.bundles] == [{"gpu": 1.0}] * 2


def test_roles_of_a_group_that_name_whole_devices_are_together_on_a_node():
    specs = {role: {"num": 2, "resource": {"gpu": 2}} for role in ("ACTOR", "ROLLOUT")}
    found, placement = shares(specs, {"ACTOR": 1, "ROLLOUT": 1}, nodes=2)
    assert found == {"ACTOR": 2.0, "ROLLOUT": 2.0}
    assert nodes_of(placement, "ACTOR") == nodes_of(placement, "ROLLOUT") == [0, 1]


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        (
            {"ACTOR": 0.7, "ROLLOUT": 0.6},
            "workload.actor.resource.gpu: the parts of one GPU that its group shares are too many: "
            "ACTOR 0.7 + ROLLOUT 0.6",
        ),
        (
            {"ACTOR": 1, "ROLLOUT": None},
            "workload.rollout.resource.gpu: name an amount: the others of its group leave nothing of what they "
            "share (ACTOR 1)",
        ),
        (
            {"ACTOR": 2, "ROLLOUT": None},
            "workload.rollout.resource.gpu: name an amount: the others of its group leave nothing of what they "
            "share (ACTOR 2)",
        ),
    ],
)
def test_shares_that_cannot_be_are_refused(resources, said):
    specs = {role: {"resource": {} if amount is None else {"gpu": amount}} for role, amount in resources.items()}
    assert refused(specs, [dict.fromkeys(resources, 1)]) == said


def test_the_cpus_of_a_node_are_one_pool_for_groups_too():
    specs = {role: {"num": 1, "resource": {"cpu": 0.75}} for role in ("ACTOR", "ROLLOUT")}
    assert placed(specs, [{"ACTOR": 1, "ROLLOUT": 1}], device_type="CPU").total == {"cpu": 2.0}
    specs = {"ACTOR": {"resource": {"cpu": 1.5}}, "ROLLOUT": {}}
    (rollout,) = placed(specs, [{"ACTOR": 1, "ROLLOUT": 1}], device_type="CPU").slots["ROLLOUT"]
    assert rollout.resources == {"cpu": 0.5}, "what the others leave of their last core"


# -- fractions, other resources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "members", "devices"), [(0.1, 20, 2), (0.3, 6, 2), (0.5, 8, 4), (0.25, 12, 3), (1 / 3, 6, 2)]
)
def test_fractions_fill_devices_exactly(fraction, members, devices):
    roles = {"ACTOR": {"num": members, "resource": {"gpu": fraction}}}
    assert plan(job_of(roles, (), 1, devices))[0] is not None
    roles["ACTOR"]["num"] += 1
    assert plan(job_of(roles, (), 1, devices))[0] is None


def test_a_fraction_of_a_gpu_is_not_put_together_from_two():
    roles = {"ACTOR": {"num": 3, "resource": {"gpu": 0.6}}}
    assert "ACTOR needs 0.6 more on one node, free are [0.8]" in refused(roles, (), 1, 2)
    roles = {"ACTOR": {"num": 3, "resource": {"cpu": 0.6}}}
    assert placed(roles, (), 1, 2, "CPU").total == {"cpu": 1.8}


def test_memory_and_custom_resources_are_reserved_but_are_no_devices():
    roles = {"ACTOR": {"num": 2, "resource": {"memory": 4096, "disk": 100, "cpu": 16}}}
    placement = placed(roles, (), 1, 2)
    assert placement.slots["ACTOR"][0].resources == {"memory": 4096.0, "disk": 100.0, "cpu": 16.0, "gpu": 1.0}
    assert placement.total == {"memory": 8192.0, "disk": 200.0, "cpu": 32.0, "gpu": 2.0}


def test_a_member_may_take_several_devices_or_none():
    roles = {"ACTOR": {"num": 1, "resource": {"gpu": 2}}, "REWARD": {"num": 5, "resource": {"gpu": 0, "cpu": 1}}}
    assert placed(roles, (), 1, 2).total == {"gpu": 2.0, "cpu": 5.0}
