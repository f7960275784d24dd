"""Where resources are reserved when nodes are excluded; nothing of Ray runs."""

import asyncio

import pytest

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.runtime.ray import grounds as module
from dlrover.python.rl.runtime.ray.grounds import Grounds

JOB = """
trainer: {module: toys, class: Loop, device_per_node: 4, device_type: CPU}
workload:
  actor: {module: toys, class: Policy, num: 1}
"""


class Cluster:
    """Nodes with room for one group each; groups are (id, node), node "" for one that still waits."""

    def __init__(self, monkeypatch, *nodes):
        self.nodes, self.groups = set(nodes), {}
        for name in ("reserve", "reserve_node", "is_usable", "until_reserved", "release_groups"):
            monkeypatch.setattr(module, name, getattr(self, name))
        monkeypatch.setattr(module, "remove_placement_group", self.groups.pop)
        monkeypatch.setattr(module, "place_options", lambda place, placement, groups: {"groups": list(groups)})

    def new(self, excluded):
        room = sorted(self.nodes - set(excluded) - set(self.groups.values()))
        group = f"group-{len(self.groups)}"
        self.groups[group] = room[0] if room else ""
        return group

    def reserve(self, placement, prefix, excluded=()):
        return [self.new(excluded) for _ in placement.nodes]

    def reserve_node(self, placement, node, lost, excluded=()):
        return self.new(excluded)

    def is_usable(self, group, excluded=()):
        return self.groups.get(group, "") not in {"", *excluded}

    async def until_reserved(self, groups, placement, timeout_s):
        if not all(self.groups[group] for group in groups):
            raise PlacementTimeout("no room")

    def release_groups(self, prefix):
        self.groups.clear()
        return []


def grounds_of():
    job = load_job_text(JOB, "job")
    return Grounds(job, "run", plan(job)[0])


def options(grounds, excluded):
    return asyncio.run(grounds.options(RLRoleType.ACTOR, 0, excluded))["groups"]


def test_an_excluded_node_is_left_for_another_with_room(monkeypatch):
    cluster, grounds = Cluster(monkeypatch, "a", "b"), grounds_of()
    asyncio.run(grounds.reserve(1, ()))
    assert [cluster.groups[group] for group in options(grounds, ("a",))] == ["b"]


def test_where_no_other_has_room_an_excluded_node_is_used_again(monkeypatch, caplog):
    cluster, grounds = Cluster(monkeypatch, "a"), grounds_of()
    asyncio.run(grounds.reserve(1, ()))
    for _ in range(2):
        assert options(grounds, ("a",)) == ["group-0"]
        assert cluster.groups == {"group-0": "a"}
    assert caplog.text.count("used again") == 1


def test_a_whole_job_is_placed_on_excluded_nodes_where_there_are_no_others(monkeypatch):
    cluster, grounds = Cluster(monkeypatch, "a"), grounds_of()
    asyncio.run(grounds.reserve(2, ("a",)))
    assert list(cluster.groups.values()) == ["a"]


def test_a_cluster_without_room_is_an_error(monkeypatch):
    Cluster(monkeypatch)
    with pytest.raises(PlacementTimeout):
        asyncio.run(grounds_of().reserve(1, ()))
