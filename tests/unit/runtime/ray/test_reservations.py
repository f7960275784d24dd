# SPDX-License-Identifier: Apache-2.0
"""Reservations on a cluster in memory when nodes are excluded."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.runtime.ray import placement as module
from dlrover.python.rl.runtime.ray.cluster.api import MEGABYTE, fenced
from dlrover.python.rl.runtime.ray.placement import Reservations, RunPlan
from tests.support.memory_cluster import MemoryCluster

JOB = """
trainer: {module: toys, class: Loop, device_per_node: 4, device_type: CPU}
workload:
  actor: {module: toys, class: Policy, num: 1}
"""


def reservations_on(*nodes, job=JOB, cluster=None):
    job = replace(load_job_text(job, "job"), placement_timeout_s=0.1)
    cluster = cluster or MemoryCluster(nodes)
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


@pytest.mark.parametrize("was_waiting", [True, False])
def test_what_an_earlier_master_has_asked_for_is_not_asked_for_again(was_waiting):
    cluster, reservations = reservations_on()
    with pytest.raises(PlacementTimeout):
        asyncio.run(reservations.reserve(1, ()))
    before = dict(cluster.groups)
    _, again = reservations_on(cluster=cluster)
    if was_waiting:
        with pytest.raises(PlacementTimeout):
            asyncio.run(again.reserve(1, ()))
    else:
        asyncio.run(again.find(1, ()))
    assert cluster.groups == before


def after_a_restart_of_the_master(cluster, incarnation, excluded, job=JOB, short=()):
    _, again = reservations_on(job=job, cluster=cluster)
    asyncio.run(again.find(incarnation, excluded, short))
    return again


def test_what_was_placed_on_nodes_that_are_used_again_outlives_the_master():
    cluster, reservations = reservations_on("a")
    asyncio.run(reservations.reserve(2, ("a",)))
    before = cluster.reserved()
    again = after_a_restart_of_the_master(cluster, 2, ("a",))
    assert cluster.reserved() == before
    assert placed_on(cluster, again, ("a",)) == "a"


def test_after_its_restart_a_node_that_was_used_again_is_still_used():
    cluster, reservations = reservations_on("a")
    asyncio.run(reservations.reserve(1, ()))
    assert placed_on(cluster, reservations, ("a",)) == "a"
    again = after_a_restart_of_the_master(cluster, 1, ("a",))
    assert cluster.reserved() == {"group-0": "a"}
    assert placed_on(cluster, again, ("a",)) == "a"
    assert [row.state for row in cluster.groups.values()].count("PENDING") == 0


def test_a_replacement_that_was_placed_is_found_and_a_request_that_was_not_is_removed():
    cluster, reservations = reservations_on("a", "b")
    asyncio.run(reservations.reserve(1, ()))
    replacement = cluster.create_group([{}], "job/run/1/node-0/2-a", ("a",))
    cluster.create_group([{}], "job/run/1/node-0/3-b", ("a", "b"))
    again = after_a_restart_of_the_master(cluster, 1, ("a",))
    assert again._groups == [replacement]
    assert [row.state for row in cluster.groups.values()].count("PENDING") == 0


ELASTIC = """
trainer: {module: toys, class: Loop, node_number: 2, device_per_node: 2, device_type: CPU}
workload:
  actor: {module: toys, class: Policy, num: 1}
  rollout: {module: toys, class: Policy, num: 2, min: 1, per_node: 1}
"""


def test_a_role_that_lacks_a_place_lacks_it_after_a_restart_of_the_master(monkeypatch):
    monkeypatch.setattr(module, "_ELASTIC_S", 0.1)
    cluster, reservations = reservations_on("a", job=ELASTIC)
    asyncio.run(reservations.reserve(1, ()))
    again = after_a_restart_of_the_master(cluster, 1, (), ELASTIC, ("ROLLOUT",))
    for each in (reservations, again):
        assert asyncio.run(each.places(RLRoleType.ROLLOUT, 2)) == 1
    cluster.nodes += ("b",)
    cluster._schedule()
    assert asyncio.run(again.places(RLRoleType.ROLLOUT, 2)) == 2


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


def test_a_size_that_a_role_had_before_is_refused_where_its_node_is_gone(monkeypatch):
    monkeypatch.setattr(module, "_ELASTIC_S", 0.1)
    cluster, reservations = reservations_on("a", "b", job=ELASTIC)
    asyncio.run(reservations.reserve(1, ()))
    state = SimpleNamespace(most={}, incarnation=1, excluded=())
    asyncio.run(reservations.enlarge(state, "ROLLOUT", 2, 0.1))
    (lost,) = [group for group, node in cluster.reserved().items() if node == "b"]
    cluster.nodes = ("a",)
    cluster.remove_group(lost)
    with pytest.raises(PlacementTimeout):
        asyncio.run(reservations.enlarge(state, "ROLLOUT", 2, 0.1))


async def test_what_waits_for_one_node_does_not_hold_up_another():
    cluster, reservations = reservations_on("a", "b", job=ELASTIC.replace(", min: 1", ""))
    placed = []

    async def place(slot):
        with suppress(PlacementTimeout):
            await reservations.place(RLRoleType.ROLLOUT, slot, ())
        placed.append(slot)

    slots = reservations.slots[RLRoleType.ROLLOUT]
    await reservations.reserve(1, ())
    (lost,) = [group for group, node in cluster.reserved().items() if node == "b"]
    cluster.nodes = ("a",)
    cluster.remove_group(lost)
    on_b = next(slot for slot in (0, 1) if reservations._groups[reservations._node_of(slots[slot])] == lost)
    await asyncio.gather(place(on_b), place(1 - on_b))
    assert placed == [1 - on_b, on_b]


def test_trainers_node_is_needed_whatever_its_roles_may_lack(monkeypatch):
    monkeypatch.setattr(module, "_ELASTIC_S", 0.01)
    _, reservations = reservations_on(job=JOB.replace("num: 1", "num: 1, min: 1"))
    with pytest.raises(PlacementTimeout):
        asyncio.run(reservations.reserve(1, ()))


def states_of(cluster):
    return {row.name: row.state for row in cluster.groups.values() if row.state != "REMOVED"}


def test_places_beyond_the_plan_go_when_the_master_is_back():
    cluster, reservations = reservations_on("a", "b")
    asyncio.run(reservations.reserve(1, ()))
    cluster.create_group([{}], "job/run/1/node-1", ())
    after_a_restart_of_the_master(cluster, 1, ())
    assert states_of(cluster) == {"job/run/1/node-0": "CREATED"}


def test_places_that_came_too_late_for_a_resize_go():
    cluster, reservations = reservations_on("a", "b", job=ELASTIC)
    asyncio.run(reservations.reserve(1, ()))
    before = states_of(cluster)
    state = SimpleNamespace(most={}, incarnation=1, excluded=())
    with pytest.raises(PlacementTimeout):
        asyncio.run(reservations.enlarge(state, "ROLLOUT", 6, 0.01))
    assert states_of(cluster) == before and len(reservations.slots[RLRoleType.ROLLOUT]) == 2


def test_resize_in_the_middle_of_a_restart_is_refused():
    cluster, reservations = reservations_on("a", "b", "c", "d", job=ELASTIC)
    create_group = cluster.create_group

    def restart_meanwhile(*arguments):
        reservations._groups = []
        return create_group(*arguments)

    asyncio.run(reservations.reserve(1, ()))
    cluster.create_group = restart_meanwhile
    state = SimpleNamespace(most={}, incarnation=1, excluded=())
    with pytest.raises(PlacementTimeout, match="the job was restarted"):
        asyncio.run(reservations.enlarge(state, "ROLLOUT", 4, 0.1))
    assert reservations._groups == []


def test_commits_of_a_master_without_journal_go_from_all_nodes():
    cluster, reservations = reservations_on("a", "b")
    asyncio.run(reservations.forget_commits([]))
    assert {node for node, name, *_ in cluster.calls if name == "_forget"} == {"a", "b"}


@pytest.mark.parametrize(("free_mb", "is_enough"), [(100, False), (200, True)])
def test_check_free_compares_memory_in_megabytes(free_mb, is_enough):
    cluster, reservations = reservations_on(job=JOB.replace("num: 1", "num: 1, resource: {memory: 150}"))
    cluster.free_resources = lambda: {"CPU": 8.0, "memory": float(free_mb * MEGABYTE)}
    with suppress(PlacementTimeout):
        module.check_free(cluster, reservations._placement, 0)
        assert is_enough
        return
    assert not is_enough


async def test_replaced_group_that_ray_moves_is_removed():
    cluster, reservations = reservations_on("a", "b", "c")
    await reservations.reserve(1, ())
    (former,) = reservations._groups
    cluster.create_group([{}], "job/run/1/node-0/2-a", ("a",))
    cluster.groups[former] = replace(cluster.groups[former], nodes=frozenset("c"))
    await module.wait_until_reserved(cluster, ["group-1"], reservations._placement, 0.1)
    assert cluster.reserved() == {"group-1": "b"}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("start_actor", [None]),
        ("kill_actor", [None]),
        ("create_group", [[{}], "name"]),
        ("remove_group", ["group"]),
        ("run_on", ["a", print]),
    ],
)
def test_replaced_master_changes_nothing_on_the_cluster(method, arguments):
    def refuse():
        raise SystemExit(75)

    cluster = MemoryCluster(("a",))
    with pytest.raises(SystemExit):
        done = getattr(fenced(cluster, refuse), method)(*arguments)
        asyncio.run(done)
    assert (cluster.groups, cluster.calls, cluster.actors) == ({}, [], {})
