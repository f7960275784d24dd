# SPDX-License-Identifier: Apache-2.0
"""Reservations on a cluster in memory when nodes are excluded."""

import asyncio
from contextlib import nullcontext, suppress
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
workload: {actor: {module: toys, class: Policy, num: 1}}
"""
ELASTIC = """
trainer: {module: toys, class: Loop, node_number: 2, device_per_node: 2, device_type: CPU}
workload: {actor: {module: toys, class: Policy}, rollout: {module: toys, class: Policy, num: 2, min: 1, per_node: 1}}
"""


@pytest.fixture(autouse=True)
def _elastic_roles_wait_for_a_moment(monkeypatch):
    monkeypatch.setattr(module, "_ELASTIC_S", 0.1)


def reservations_on(*nodes, job=JOB, cluster=None):
    job = replace(load_job_text(job, "job"), placement_timeout_s=0.1)
    cluster = cluster or MemoryCluster(nodes)
    return cluster, Reservations(RunPlan(job, "run", plan(job)[0]), cluster)


async def reserved_on(*nodes, job=JOB, incarnation=1, excluded=()):
    cluster, reservations = reservations_on(*nodes, job=job)
    await reservations.reserve(incarnation, excluded)
    return cluster, reservations


async def placed_on(cluster, reservations, excluded=()):
    placement = await reservations.place(RLRoleType.ACTOR, 0, excluded)
    return cluster.reserved()[placement.group]


async def after_a_restart_of_the_master(cluster, incarnation, excluded, job=JOB, short=()):
    _, again = reservations_on(job=job, cluster=cluster)
    await again.find(incarnation, excluded, short)
    return again


def state_of_roles():
    return SimpleNamespace(most={}, incarnation=1, excluded=())


def lose_node_b(cluster):
    (lost,) = [group for group, node in cluster.reserved().items() if node == "b"]
    cluster.nodes = ("a",)
    cluster.remove_group(lost)
    return lost


def states_of(cluster):
    return {row.name: row.state for row in cluster.groups.values() if row.state != "REMOVED"}


async def test_excluded_node_is_replaced_by_a_free_one():
    cluster, reservations = await reserved_on("a", "b")
    assert await placed_on(cluster, reservations, ("a",)) == "b"


async def test_excluded_node_without_another_is_used_again(caplog):
    cluster, reservations = await reserved_on("a")
    for _ in range(2):
        assert await placed_on(cluster, reservations, ("a",)) == "a"
        assert cluster.reserved() == {"group-0": "a"}
    assert caplog.text.count("used again") == 1
    again = await after_a_restart_of_the_master(cluster, 1, ("a",))
    assert cluster.reserved() == {"group-0": "a"}
    assert await placed_on(cluster, again, ("a",)) == "a"
    assert "PENDING" not in states_of(cluster).values()


@pytest.mark.parametrize("was_waiting", [True, False])
async def test_requests_of_an_earlier_master_are_not_repeated(was_waiting):
    cluster, reservations = reservations_on()
    with pytest.raises(PlacementTimeout, match=r"still lacks the resources: needed \{'cpu': 1.0\}"):
        await reservations.reserve(1, ())
    before = dict(cluster.groups)
    _, again = reservations_on(cluster=cluster)
    with pytest.raises(PlacementTimeout) if was_waiting else nullcontext():
        await (again.reserve(1, ()) if was_waiting else again.find(1, ()))
    assert cluster.groups == before


async def test_placed_replacement_is_found_and_a_waiting_one_removed():
    cluster, _ = await reserved_on("a", "b")
    replacement = cluster.create_group([{}], "job/run/1/node-0/2-a", ("a",))
    cluster.create_group([{}], "job/run/1/node-0/3-b", ("a", "b"))
    again = await after_a_restart_of_the_master(cluster, 1, ("a",))
    assert again._groups == [replacement]
    assert "PENDING" not in states_of(cluster).values()


async def test_role_short_of_a_place_is_so_after_a_restart():
    cluster, reservations = await reserved_on("a", job=ELASTIC)
    again = await after_a_restart_of_the_master(cluster, 1, (), ELASTIC, ("ROLLOUT",))
    for each in (reservations, again):
        assert await each.places(RLRoleType.ROLLOUT, 2) == 1
    cluster.nodes += ("b",)
    cluster._schedule()
    assert await again.places(RLRoleType.ROLLOUT, 2) == 2


@pytest.mark.parametrize("from_call", [1, 2])
@pytest.mark.parametrize("prefix", ["job/run/1", "job/run/2"], ids=["earlier incarnation", "same incarnation"])
async def test_late_request_of_a_killed_master_starves_no_other(prefix, from_call):
    """Ray receives it with the ``from_call``-th listing of the groups."""
    cluster, reservations = reservations_on("a")
    calls, list_groups = [], cluster.list_groups

    def list_later():
        calls.append(1)
        if len(calls) == from_call:
            cluster.create_group([{}], f"{prefix}/node-0", ())
        return list_groups()

    cluster.list_groups = list_later
    await reservations.reserve(2, ())
    assert list(cluster.reserved().values()) == ["a"]
    assert await placed_on(cluster, reservations) == "a"
    assert "PENDING" not in states_of(cluster).values()


async def test_groups_of_other_runs_stay():
    cluster, reservations = reservations_on("a", "b")
    other = cluster.create_group([{}], "job/other/1/node-0", ())
    await reservations.reserve(2, ())
    assert cluster.reserved()[other] == "a"


async def test_earlier_size_of_a_role_is_refused_without_its_node():
    cluster, reservations = await reserved_on("a", "b", job=ELASTIC)
    state = state_of_roles()
    await reservations.enlarge(state, "ROLLOUT", 2, 0.1)
    lose_node_b(cluster)
    with pytest.raises(PlacementTimeout):
        await reservations.enlarge(state, "ROLLOUT", 2, 0.1)


async def test_wait_for_one_node_does_not_hold_up_another():
    cluster, reservations = await reserved_on("a", "b", job=ELASTIC.replace(", min: 1", ""))
    slots, placed = reservations.slots[RLRoleType.ROLLOUT], []

    async def place(slot):
        with suppress(PlacementTimeout):
            await reservations.place(RLRoleType.ROLLOUT, slot, ())
        placed.append(slot)

    lost = lose_node_b(cluster)
    on_b = next(slot for slot in (0, 1) if reservations._groups[reservations._node_of(slots[slot])] == lost)
    await asyncio.gather(place(on_b), place(1 - on_b))
    assert placed == [1 - on_b, on_b]


async def test_node_of_the_trainer_is_needed():
    with pytest.raises(PlacementTimeout):
        await reserved_on(job=JOB.replace("num: 1", "num: 1, min: 1"))


async def test_places_beyond_the_plan_go_when_the_master_is_back():
    cluster, _ = await reserved_on("a", "b")
    cluster.create_group([{}], "job/run/1/node-1", ())
    await after_a_restart_of_the_master(cluster, 1, ())
    assert states_of(cluster) == {"job/run/1/node-0": "CREATED"}


async def test_places_too_late_for_a_resize_go():
    cluster, reservations = await reserved_on("a", "b", job=ELASTIC)
    before = states_of(cluster)
    with pytest.raises(PlacementTimeout):
        await reservations.enlarge(state_of_roles(), "ROLLOUT", 6, 0.01)
    assert states_of(cluster) == before and len(reservations.slots[RLRoleType.ROLLOUT]) == 2


async def test_resize_in_the_middle_of_a_restart_is_refused():
    cluster, reservations = await reserved_on("a", "b", "c", "d", job=ELASTIC)
    create_group = cluster.create_group

    def restart(*arguments):
        reservations._groups = []
        return create_group(*arguments)

    cluster.create_group = restart
    with pytest.raises(PlacementTimeout, match="the job was restarted"):
        await reservations.enlarge(state_of_roles(), "ROLLOUT", 4, 0.1)
    assert reservations._groups == []


async def test_commits_of_a_master_without_journal_go_from_all_nodes():
    cluster, reservations = reservations_on("a", "b")
    await reservations.forget_commits([])
    assert {node for node, name, *_ in cluster.calls if name == "_forget"} == {"a", "b"}


@pytest.mark.parametrize(("free_mb", "is_enough"), [(100, False), (200, True)])
def test_check_free_compares_memory_in_megabytes(free_mb, is_enough):
    cluster, reservations = reservations_on(job=JOB.replace("num: 1", "num: 1, resource: {memory: 150}"))
    cluster.free_resources = lambda: {"CPU": 8.0, "memory": float(free_mb * MEGABYTE)}
    with nullcontext() if is_enough else pytest.raises(PlacementTimeout):
        module.check_free(cluster, reservations._placement, 0)


async def test_replaced_group_moved_by_ray_is_removed():
    cluster, reservations = await reserved_on("a", "b", "c")
    (former,) = reservations._groups
    cluster.create_group([{}], "job/run/1/node-0/2-a", ("a",))
    cluster.groups[former] = replace(cluster.groups[former], nodes=frozenset("c"))
    await module.wait_until_reserved(cluster, ["group-1"], reservations._placement, 0.1)
    assert cluster.reserved() == {"group-1": "b"}


CALLS = {"start_actor": [None], "kill_actor": [None], "create_group": [[{}], "name"], "remove_group": ["group"]}


@pytest.mark.parametrize(("method", "arguments"), [*CALLS.items(), ("run_on", ["a", print])])
def test_replaced_master_changes_nothing_on_the_cluster(method, arguments):
    def refuse():
        raise SystemExit(75)

    cluster = MemoryCluster(("a",))
    with pytest.raises(SystemExit):
        asyncio.run(getattr(fenced(cluster, refuse), method)(*arguments))
    assert (cluster.groups, cluster.calls, cluster.actors) == ({}, [], {})
