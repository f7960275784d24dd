# SPDX-License-Identifier: Apache-2.0
"""Placement groups on a real Ray: reserved by name, found again, kept off excluded nodes, released."""

import asyncio
import logging

import pytest
import ray

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec, TrainerSpec, WorkloadSpec
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.runtime.ray import placement as module
from dlrover.python.rl.runtime.ray.cluster.api import REMOVED, RayClusterApi, remove_groups
from dlrover.python.rl.runtime.ray.placement import is_usable, placement_of, reserve, reserve_node

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

DEADLINE_S = 20.0
ACTOR = RLRoleType("ACTOR")
CLUSTER = RayClusterApi()


def find_groups(cluster, prefix):
    """The newest group of each of the plan's nodes."""
    newest = sorted(module._newest_by_node(module._list_groups(cluster), prefix).items())
    return [group.id for _, group in newest if group.state != REMOVED]


@pytest.fixture
def prefix(request):
    """A prefix of the test's own; whatever is reserved under it is given back."""
    name = f"placing/{request.node.name}"
    yield f"{name}/1"
    remove_groups(CLUSTER, f"{name}/")


def planned(nodes=1, **actor):
    actor = {"num": 2, "resource": {"cpu": 0.5}, **actor}
    trainer = TrainerSpec("m", "T", nodes, "CPU", 4)
    placement, errors = plan(JobSpec("job", trainer, {ACTOR: WorkloadSpec("m", "A", **actor)}))
    assert not errors
    return placement


def wait(groups, placement, timeout_s=DEADLINE_S):
    asyncio.run(module.wait_until_reserved(CLUSTER, groups, placement, timeout_s))


def reserved(prefix, **plan_of_job):
    """Reserve groups for a plan, and wait for them."""
    placement = planned(**plan_of_job)
    groups = reserve(CLUSTER, placement, prefix)
    wait(groups, placement)
    return placement, groups


def names(groups):
    by_id = {row.id: row.name for row in CLUSTER.list_groups()}
    return [by_id[group] for group in groups]


def here():
    return ray.get_runtime_context().get_node_id()


def actor_at(slot, placement, groups):
    """An actor that says what it has of the cluster, and in which placement group."""

    class Probe:
        def resources(self):
            group = ray.util.get_current_placement_group()
            return ray.get_runtime_context().get_assigned_resources(), group.id.hex()

    return ray.remote(Probe).options(**placement_of(slot, placement, groups).to_ray()).remote()


def test_reserve_makes_one_group_for_each_node(prefix):
    placement, groups = reserved(prefix, nodes=2, per_node=1)
    assert names(groups) == [f"{prefix}/node-0", f"{prefix}/node-1"]
    assert reserve(CLUSTER, placement, prefix) == groups
    assert find_groups(CLUSTER, prefix) == groups
    assert reserve_node(CLUSTER, placement, 1, groups[1]) == groups[1]
    assert all(is_usable(CLUSTER, group) for group in groups)


def test_remove_groups_gives_back_all_of_a_prefix(prefix):
    placement, groups = reserved(prefix, nodes=2, per_node=1)
    assert sorted(remove_groups(CLUSTER, f"{prefix}/")) == [f"{prefix}/node-0", f"{prefix}/node-1"]
    assert remove_groups(CLUSTER, f"{prefix}/") == find_groups(CLUSTER, prefix) == []
    assert not any(is_usable(CLUSTER, group) for group in groups)
    _, again = reserved(prefix, nodes=2, per_node=1)
    assert find_groups(CLUSTER, prefix) == again != groups


def test_workers_and_standbys_are_put_into_their_bundles(prefix):
    placement, groups = reserved(prefix, standby=1, resource={"cpu": 0.5, "memory": 16})
    slots = (*placement.slots[ACTOR], *placement.standbys[ACTOR])
    actors = [actor_at(slot, placement, groups) for slot in slots]
    answers = ray.get([actor.resources.remote() for actor in actors], timeout=60.0)
    assert [resources["CPU"] for resources, _ in answers] == [0.5] * 3
    assert [resources["memory"] for resources, _ in answers] == [16 * 1024 * 1024] * 3, "megabytes are megabytes"
    assert [group for _, group in answers] == [groups[0]] * 3


def test_placement_without_groups_asks_for_resources_alone():
    placement = planned(resource={"cpu": 0.5, "memory": 1, "disk": 2, "gpu": 0, "other": 0})
    options = {"num_cpus": 0.5, "num_gpus": 0.0, "memory": 1024 * 1024, "resources": {"disk": 2.0}}
    assert placement_of(placement.slots[ACTOR][0], placement, []).to_ray() == options


def test_worker_without_resources_has_a_place(prefix):
    placement, groups = reserved(prefix, resource={"cpu": 0})
    actor = actor_at(placement.slots[ACTOR][0], placement, groups)
    resources, group = ray.get(actor.resources.remote(), timeout=60.0)
    assert (resources.get("CPU", 0), group) == (0, groups[0])


def test_excluded_node_is_left_out_and_the_wait_logged(prefix, monkeypatch, caplog):
    monkeypatch.setattr(module, "_LOG_INTERVAL_S", 0.1)
    monkeypatch.setattr(logging.getLogger("dlrover"), "propagate", True)
    placement = planned()
    groups = reserve(CLUSTER, placement, prefix, (here(),))
    with pytest.raises(PlacementTimeout, match=r"after 0.4 s .* lacks the resources: needed {'cpu': 1.0}; free {'cpu'"):
        wait(groups, placement, 0.4)
    assert "waiting for resources since" in caplog.text
    assert not is_usable(CLUSTER, groups[0])
    assert reserve(CLUSTER, placement, prefix, (here(),)) == groups
    remove_groups(CLUSTER, f"{prefix}/")
    _, allowed = reserved(prefix)
    assert is_usable(CLUSTER, allowed[0])
    assert not is_usable(CLUSTER, allowed[0], (here(),))


def test_place_on_a_node_excluded_later_is_reserved_again(prefix):
    placement, (old,) = reserved(prefix)
    new = reserve_node(CLUSTER, placement, 0, old, (here(),))
    assert names([new]) == [f"{prefix}/node-0/2-{here()}"]
    assert is_usable(CLUSTER, old), "processes may still run in it"
    assert find_groups(CLUSTER, prefix) == [new]
    renewed = reserve_node(CLUSTER, placement, 0, old)
    wait([renewed], placement)
    assert find_groups(CLUSTER, prefix) == [renewed]
    assert not is_usable(CLUSTER, new), "what never got its resources is given back"
    assert len(remove_groups(CLUSTER, f"{prefix}/")) == 2


def test_wait_for_removed_groups_ends_at_once(prefix):
    placement = planned()
    groups = reserve(CLUSTER, placement, prefix, (here(),))
    remove_groups(CLUSTER, f"{prefix}/")
    with pytest.raises(PlacementTimeout, match="released while the job waited for them"):
        wait(groups, placement)


def test_many_nodes_without_resources_are_not_all_listed(prefix):
    placement = planned(nodes=6, num=6, per_node=1, resource={"cpu": 4})
    groups = reserve(CLUSTER, placement, prefix, (here(),))
    with pytest.raises(PlacementTimeout, match=r"needed {'cpu': 24.0}, each of these parts on one node: .*\(6 nodes\)"):
        wait(groups, placement, 0.1)
