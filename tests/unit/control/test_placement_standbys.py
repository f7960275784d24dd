# SPDX-License-Identifier: Apache-2.0
"""Where the processes are kept ready that can take a worker's place."""

import itertools

import pytest

from dlrover.python.rl.control.placement import plan
from tests.support.placements import check, job_of, nodes_of, placed


def standbys_of(placement, role):
    return [placement.bundles[slot.bundle].node for slot in placement.standbys[role]]


def test_standbys_are_on_other_nodes_than_rank_0_and_on_different_ones():
    placement = placed({"ACTOR": {"num": 2, "standby": 3}, "ROLLOUT": {"num": 1, "standby": 1}}, (), 4, 4)
    assert nodes_of(placement, "ACTOR") == [0, 0]
    assert standbys_of(placement, "ACTOR") == [1, 2, 3]
    assert standbys_of(placement, "ROLLOUT") == [1]


def test_a_standby_is_beside_rank_0_when_there_is_no_other_place():
    placement = placed({"ACTOR": {"num": 1, "standby": 1}}, (), 1, 2)
    assert standbys_of(placement, "ACTOR") == [0]
    placement = placed({"ACTOR": {"num": 3, "standby": 1}, "ROLLOUT": {"num": 2, "resource": {"gpu": 4}}}, (), 3, 4)
    assert (standbys_of(placement, "ACTOR"), nodes_of(placement, "ROLLOUT")) == ([0], [1, 2])


@pytest.mark.parametrize(("nodes", "devices", "standby"), itertools.product([1, 2, 3], [1, 2, 4], [0, 1, 2, 3]))
def test_standbys_take_devices_like_members(nodes, devices, standby):
    for num in range(1, nodes * devices + 1):
        job = job_of({"ACTOR": {"num": num, "standby": standby}}, (), nodes, devices)
        placement, problems = plan(job)
        assert (placement is not None) == (num + standby <= nodes * devices), problems
        if placement is not None:
            check(job, placement)
            assert len(placement.bundles) == num + standby
            outside = nodes * devices - devices - max(num - devices, 0)
            assert sum(node != 0 for node in standbys_of(placement, "ACTOR")) == min(standby, outside)


def test_the_standby_of_a_role_that_shares_takes_its_share():
    roles = {"ACTOR": {"num": 2, "standby": 1}, "ROLLOUT": 2}
    placement = placed(roles, [{"ACTOR": 1, "ROLLOUT": 1}], 1, 3)
    (slot,) = placement.standbys["ACTOR"]
    assert (slot.resources, placement.bundles[slot.bundle].resources) == ({"gpu": 0.5}, {"gpu": 0.5})
    assert placement.total == {"gpu": 2.5}


def test_standbys_do_not_count_for_per_node():
    placement = placed({"ACTOR": {"num": 2, "per_node": 2, "standby": 1}}, (), 1, 3)
    assert [slot.local_world_size for slot in placement.slots["ACTOR"]] == [2, 2]
