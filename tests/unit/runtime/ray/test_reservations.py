# SPDX-License-Identifier: Apache-2.0
"""Reservations on a cluster in memory when nodes are excluded."""

import asyncio
from dataclasses import replace

import pytest
from memory_cluster import MemoryCluster

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.runtime.ray.reservations import Reservations, RunPlan

JOB = """
trainer: {module: toys, class: Loop, device_per_node: 4, device_type: CPU}
workload:
  actor: {module: toys, class: Policy, num: 1}
"""


def reservations_on(*nodes):
    job = replace(load_job_text(JOB, "job"), placement_timeout_s=0.1)
    cluster = MemoryCluster(nodes)
    return cluster, Reservations(RunPlan(job, "run", plan(job)[0]), cluster)


def placed_on(cluster, reservations, excluded):
    placement = asyncio.run(reservations.place(RLRoleType.ACTOR, 0, excluded))
    return cluster.reserved()[placement.group]


def test_an_excluded_node_is_replaced_by_one_with_free_capacity():
    cluster, reservations = reservations_on("a", "b")
    asyncio.run(reservations.reserve(1, ()))
    assert placed_on(cluster, reservations, ("a",)) == "b"


def test_an_excluded_node_is_used_again_where_no_other_has_free_capacity(caplog):
    cluster, reservations = reservations_on("a")
    asyncio.run(reservations.reserve(1, ()))
    for _ in range(2):
        assert placed_on(cluster, reservations, ("a",)) == "a"
        assert cluster.reserved() == {"group-0": "a"}
    assert caplog.text.count("used again") == 1


def test_a_whole_job_is_placed_on_excluded_nodes_where_there_are_no_others():
    cluster, reservations = reservations_on("a")
    asyncio.run(reservations.reserve(2, ("a",)))
    assert list(cluster.reserved().values()) == ["a"]


def test_a_cluster_without_free_capacity_is_an_error():
    _, reservations = reservations_on()
    with pytest.raises(PlacementTimeout, match=r"still lacks the resources: needed \{'cpu': 1.0\}"):
        asyncio.run(reservations.reserve(1, ()))


def request_by_a_killed_master(cluster, prefix, from_call):
    """Ray receives a request of an earlier process of the master with the ``from_call``-th listing of the groups."""
    calls, listed = [0], cluster.list_groups

    def list_groups():
        calls[0] += 1
        if calls[0] == from_call:
            cluster.create_group([{}], f"{prefix}/node-0", ())
        return listed()

    cluster.list_groups = list_groups


@pytest.mark.parametrize("from_call", [1, 2])
@pytest.mark.parametrize("prefix", ["job/run/1", "job/run/2"], ids=["earlier incarnation", "same incarnation"])
def test_a_late_request_of_a_killed_master_does_not_starve_the_next_one(prefix, from_call):
    cluster, reservations = reservations_on("a")
    request_by_a_killed_master(cluster, prefix, from_call)
    asyncio.run(reservations.reserve(2, ()))
    assert list(cluster.reserved().values()) == ["a"]
    assert placed_on(cluster, reservations, ()) == "a"
    assert [row.state for row in cluster.groups.values()].count("PENDING") == 0


def test_groups_of_other_runs_stay():
    cluster, reservations = reservations_on("a", "b")
    other = cluster.create_group([{}], "job/other/1/node-0", ())
    asyncio.run(reservations.reserve(2, ()))
    assert cluster.reserved()[other] == "a"
