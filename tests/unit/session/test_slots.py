# SPDX-License-Identifier: Apache-2.0
"""The slots that an engine gets, and the way that weights take from one engine of a script to another."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import SessionError
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.member.loading import Device
from dlrover.python.rl.session.engine import train_sizes
from dlrover.python.rl.session.session import Members, SlotRequest, SlotTable
from dlrover.python.rl.session.weight_sync import Endpoints, Route, choose_route


def table(*per_node):
    nodes = (node for node, count in enumerate(per_node) for _ in range(count))
    return SlotTable([Device(f"id{node}", f"10.0.0.{node}") for node in nodes])


@pytest.mark.feature(6)
def test_groups_fill_the_machine_by_default():
    assert list(table(4).take("A", SlotRequest(group=2))) == [(0, 1), (2, 3)]
    assert list(table(5).take("A", SlotRequest(group=2))) == [(0, 1), (2, 3)]
    assert train_sizes(4, tensor=1, context=1, replicas=None, shards=2) == (2, 2)


@pytest.mark.parametrize(
    ("free", "replica", "replicas", "shards", "expected"),
    [
        (4, (1, 1), None, None, (1, 4)),  # ZeRO-3 over everything
        (4, (2, 1), None, None, (1, 4)),  # two tensor ranks, two shards of them
        (5, (4, 1), None, None, (1, 4)),
        (4, (2, 1), 1, None, (1, 2)),
        (4, (1, 1), None, 1, (4, 1)),
        (5, (1, 1), None, 2, (2, 2)),
        (8, (2, 1), 2, 2, (1, 4)),
        (8, (1, 1), 6, 2, (3, 2)),
        (8, (2, 2), None, None, (1, 8)),  # two context ranks of two tensor ranks each, two shards of them
        (8, (1, 2), None, 1, (4, 2)),
    ],
)
def test_missing_train_sizes_fill_the_free_slots(free, replica, replicas, shards, expected):
    assert train_sizes(free, *replica, replicas, shards) == expected


@pytest.mark.parametrize(
    ("free", "sizes", "message"),
    [
        (4, (0, 1, 1, 1), "positive"),
        (4, (1, 1, 1, -1), "positive"),
        (3, (4, 1, None, None), "3 free slots are too few for one group: tensor_parallel_size 4"),
        (3, (1, 1, None, 4), "3 free slots are too few for one group: .*, shards 4"),
        (4, (1, 1, 3, 2), "data_parallel_size 3 is no multiple of shards 2"),
    ],
)
def test_impossible_train_sizes_are_refused(free, sizes, message):
    with pytest.raises(SessionError, match=message):
        train_sizes(free, *sizes)


SHORTAGE = r"B requests 3 x 1 = 3 slots; free are \[2, 3\] of 4 \(A has \[0, 1\]\); init\(slots_per_node=N\) takes"


@pytest.mark.feature(8, 9, 10)
@pytest.mark.parametrize(
    ("owner", "wanted", "message"),
    [
        ("B", SlotRequest(group=1, groups=3), SHORTAGE),
        ("A", SlotRequest(group=1, groups=1), r"A holds the slots \[0, 1\] already"),
        ("B", SlotRequest(2, 2, colocate_with=(0, 1)), r"requests 2 x 2 = 4 slots, but colocate_with has 2: \[0, 1\]"),
        ("B", SlotRequest(group=3, colocate_with=(0, 1)), "groups of 3 slots, but colocate_with has 2"),
        ("B", SlotRequest(group=3, one_node=True), "with each group on one node"),
        ("B", SlotRequest(group=3, apart_from=frozenset({0, 1})), "apart from not_colocate_with"),
        ("B", SlotRequest(1, colocate_with=(0, 1), apart_from=frozenset({1})), "are in both colocate_with and not_"),
        ("B", SlotRequest(1, nodes=("10.0.0.7",)), r"no node '10.0.0.7'; did you mean '10.0.0.[01]'"),
        ("B", SlotRequest(1, colocate_with=(0,), nodes=("10.0.0.1",)), r"\[0\] of colocate_with are not on the nodes"),
    ],
)
def test_impossible_request_of_slots_is_refused(owner, wanted, message):
    slots = table(2, 2)
    slots.take("A", SlotRequest(group=2, groups=1))
    with pytest.raises(SessionError, match=message):
        slots.take(owner, wanted)
    assert slots.free == (2, 3)


@pytest.mark.feature(8)
def test_colocated_engines_have_the_same_slots():
    slots = table(4)
    slots.take("A", SlotRequest(group=4))
    assert list(slots.take("B", SlotRequest(group=2, colocate_with=(0, 1, 2, 3)))) == [(0, 1), (2, 3)]
    slots.give_back("A")
    assert slots.free == (), "B still has them"
    slots.give_back("B")
    assert slots.free == (0, 1, 2, 3)


@pytest.mark.feature(10)
def test_nodes_are_chosen_by_address_or_id():
    slots = table(2, 2)
    assert list(slots.take("A", SlotRequest(group=1, nodes=("10.0.0.1",)))) == [(2,), (3,)]
    assert list(slots.take("B", SlotRequest(group=1, groups=1, nodes=("id0",)))) == [(0,)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(1, 4), st.booleans()), max_size=6),
)
def test_slots_are_given_once_and_none_is_lost(per_node, requests):
    slots = table(*per_node)
    taken = {}
    for number, (group, groups, one_node) in enumerate(requests):
        owner = f"E{number}"
        before = set(slots.free)
        try:
            parts = slots.take(owner, SlotRequest(group, groups, one_node))
        except SessionError:
            assert set(slots.free) == before
            continue
        taken[owner] = {slot for part in parts for slot in part}
        assert all(len(part) == group for part in parts)
        assert groups is None or len(parts) == groups
        assert taken[owner] <= before
        assert set(slots.free) == before - taken[owner]
        if one_node:
            assert all(len({slots.devices[slot].node for slot in part}) == 1 for part in parts)
    for owner in taken:
        slots.give_back(owner)
    assert slots.free == tuple(range(sum(per_node)))


TRAIN, ROLLOUT = "TRAIN_1", "INFERENCE_1"


@dataclass
class FourSlots:
    """Stands in for a session that has four slots of a kind, two on each node."""

    kind: str = "cuda"
    separate: bool = True
    id: str = "session"
    hosting: "FourSlots" = field(init=False)

    def __post_init__(self):
        self.hosting = self
        self.slots = tuple(Device(f"node{slot // 2}", f"10.0.0.{slot // 2}", self.kind) for slot in range(4))

    def members(self, name, *slots):
        devices = [self.slots[rank[0]] for rank in slots]
        processes = tuple(Process(device.node, 1, device.node, device.address) for device in devices)
        return Members(name, slots, slots, processes, None)


def choose(cluster, source, target, way=None):
    return choose_route(cluster.members(TRAIN, *source), cluster.members(ROLLOUT, *target), cluster, way)


@pytest.mark.feature(101)
@pytest.mark.parametrize(
    ("cluster", "target", "way"),
    [
        (FourSlots(), [(0,)], "shared memory"),
        (FourSlots(), [(1,)], "shared memory"),
        (FourSlots(), [(2,)], "broadcast"),
        (FourSlots("cpu"), [(0,)], "shared memory"),
        (FourSlots(separate=False), [(0,)], "shared memory"),
    ],
)
def test_shortest_way_is_taken(cluster, target, way):
    assert choose(cluster, [(0,), (1,)], target).way == way


@pytest.mark.feature(102)
@pytest.mark.parametrize(
    ("cluster", "target", "at", "by_host"),
    [
        (FourSlots(), [(2,), (3,)], "10.0.0.0", False),
        (FourSlots(), [(1,)], "10.0.0.0", True),
        (FourSlots("cpu"), [(2,)], "10.0.0.0", True),
    ],
)
def test_broadcast_is_nccls_if_each_device_is_in_it_once(cluster, target, at, by_host):
    route = choose(cluster, [(0,), (1,)], target, "broadcast")
    assert route == Route("broadcast", "TRAIN_1-INFERENCE_1", len(target), at, by_host)


@pytest.mark.parametrize(
    ("cluster", "target", "way", "reason"),
    [
        (FourSlots(), [(1,)], "device memory", r"TRAIN_1\[0\] and INFERENCE_1 have different first devices"),
        (FourSlots(), [(1, 0)], "device memory", r"TRAIN_1\[0\] and INFERENCE_1 have different first devices"),
        (FourSlots(), [(2,)], "device memory", "they are on 2 nodes"),
        (FourSlots(), [(2,)], "shared memory", "they are on 2 nodes"),
        (FourSlots(separate=False), [(0,)], "broadcast", r"init\(local=True\) has one process"),
    ],
)
def test_impossible_way_is_refused_with_the_reason(cluster, target, way, reason):
    with pytest.raises(SessionError, match=f"cannot send weights from TRAIN_1 to INFERENCE_1 by '{way}': {reason}"):
        choose(cluster, [(0,)], target, way)


@pytest.mark.parametrize(
    ("way", "hint"), [(3, "known: "), ("disk", "known: broadcast, "), ("brodcast", "did you mean 'broadcast'")]
)
def test_unknown_way_is_refused_with_the_nearest(way, hint):
    with pytest.raises(SessionError, match=f"unknown way '{way}' to send weights; {hint}"):
        choose(FourSlots(), [(0,)], [(1,)], way)


def test_endpoint_is_kept_until_the_way_changes():
    ends = Endpoints("TRAIN_1[0]", True, "cpu", None)
    shared = choose(FourSlots("cpu"), [(0,)], [(1,)], "shared memory")
    broadcast = choose(FourSlots("cpu"), [(0,)], [(1,)], "broadcast")
    first = ends.endpoint(shared)
    assert ends.endpoint(shared) is first
    assert type(ends.endpoint(broadcast)) is not type(first)
    assert ends.endpoint(shared) is not first
    ends.close()
