# SPDX-License-Identifier: Apache-2.0
"""Which slots an engine gets."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import SessionError
from dlrover.python.rl.runtime.member.loading import Device
from dlrover.python.rl.session.engine import train_sizes
from dlrover.python.rl.session.session import SlotRequest, SlotTable


def table(*per_node):
    return SlotTable(
        [Device(f"id{node}", f"10.0.0.{node}") for node, count in enumerate(per_node) for _ in range(count)]
    )


# -- filling, explicit sizes ------------------------------------------------------------------------------------------


@pytest.mark.feature(6)
def test_groups_fill_the_machine_by_default():
    assert list(table(4).take("A", SlotRequest(group=2))) == [(0, 1), (2, 3)]
    assert list(table(5).take("A", SlotRequest(group=2))) == [(0, 1), (2, 3)]
    assert train_sizes(4, tensor=1, context=1, replicas=None, shards=2) == (2, 2)


@pytest.mark.feature(7)
def test_an_explicit_number_of_groups_leaves_the_rest_free():
    slots = table(4)
    assert list(slots.take("A", SlotRequest(group=2, groups=1))) == [(0, 1)]
    assert slots.free == (2, 3)
    assert list(slots.take("B", SlotRequest(group=1))) == [(2,), (3,)]


@pytest.mark.parametrize(
    ("free", "replica", "replicas", "shards", "expected"),
    [
        (4, (1, 1), None, None, (1, 4)),  # ZeRO-3 over everything
        (4, (2, 1), None, None, (1, 4)),  # two tensor ranks, two shards of them
        (4, (4, 1), None, None, (1, 4)),
        (5, (2, 1), None, None, (1, 4)),
        (4, (1, 1), 2, None, (1, 2)),
        (4, (2, 1), 1, None, (1, 2)),
        (4, (1, 1), None, 1, (4, 1)),
        (5, (1, 1), None, 2, (2, 2)),
        (8, (2, 1), 2, 2, (1, 4)),
        (8, (1, 1), 6, 2, (3, 2)),
        (8, (2, 2), None, None, (1, 8)),  # two context ranks of two tensor ranks each, two shards of them
        (8, (1, 2), None, 1, (4, 2)),
    ],
)
def test_train_sizes_that_are_not_given_fill_the_free(free, replica, replicas, shards, expected):
    assert train_sizes(free, *replica, replicas, shards) == expected


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, -1)])
def test_sizes_are_positive(sizes):
    with pytest.raises(SessionError, match="positive"):
        train_sizes(4, *sizes)
    with pytest.raises(SessionError, match="positive"):
        table(4).take("A", SlotRequest(group=0))


def test_too_little_free_is_refused_with_the_numbers():
    with pytest.raises(SessionError, match="3 free slots are too few for one group: tensor_parallel_size 4"):
        train_sizes(3, 4, 1, None, None)
    with pytest.raises(SessionError, match="3 free slots are too few for one group: .*, shards 4"):
        train_sizes(3, 1, 1, None, 4)
    with pytest.raises(SessionError, match="data_parallel_size 3 is no multiple of shards 2"):
        train_sizes(4, 1, 1, 3, 2)
    slots = table(4)
    slots.take("A", SlotRequest(group=2, groups=1))
    shortage = r"B requests 3 x 1 = 3 slots; free are \[2, 3\] of 4 \(A has \[0, 1\]\); init\(slots_per_node=N\) takes"
    with pytest.raises(SessionError, match=shortage):
        slots.take("B", SlotRequest(group=1, groups=3))
    assert slots.free == (2, 3)


# -- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.feature(8)
def test_colocated_engines_have_the_same_slots_and_a_misfit_is_refused():
    slots = table(4)
    slots.take("A", SlotRequest(group=4))
    assert list(slots.take("B", SlotRequest(group=2, colocate_with=(0, 1, 2, 3)))) == [(0, 1), (2, 3)]
    with pytest.raises(SessionError, match=r"C requests 1 x 2 = 2 slots, but colocate_with has 4: \[0, 1, 2, 3\]"):
        slots.take("C", SlotRequest(group=2, groups=1, colocate_with=(0, 1, 2, 3)))
    with pytest.raises(SessionError, match="groups of 3 slots, but colocate_with has 4"):
        slots.take("C", SlotRequest(group=3, colocate_with=(0, 1, 2, 3)))
    slots.give_back("A")
    assert slots.free == (), "B still has them"
    slots.give_back("B")
    assert slots.free == (0, 1, 2, 3)


@pytest.mark.feature(9)
def test_what_is_not_to_be_shared_is_not():
    slots = table(4)
    slots.take("A", SlotRequest(group=2, groups=1))
    assert list(slots.take("B", SlotRequest(group=2, groups=1, apart_from=frozenset({0, 1})))) == [(2, 3)]
    with pytest.raises(SessionError, match="apart from not_colocate_with"):
        slots.take("C", SlotRequest(group=1, apart_from=frozenset({0, 1})))
    with pytest.raises(SessionError, match="cannot be shared and not be shared"):
        slots.take("C", SlotRequest(group=1, colocate_with=(0, 1), apart_from=frozenset({1})))


# -- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.feature(10)
def test_nodes_can_be_chosen_and_an_unknown_one_is_refused():
    slots = table(2, 2)
    assert list(slots.take("A", SlotRequest(group=1, nodes=("10.0.0.1",)))) == [(2,), (3,)]
    assert list(slots.take("B", SlotRequest(group=1, groups=1, nodes=("id0",)))) == [(0,)]
    with pytest.raises(SessionError, match=r"no node '10.0.0.7'; did you mean '10.0.0.[01]'"):
        slots.take("C", SlotRequest(group=1, nodes=("10.0.0.7",)))
    with pytest.raises(SessionError, match=r"slots \[0\] of colocate_with are not on the nodes 10.0.0.1"):
        slots.take("C", SlotRequest(group=1, colocate_with=(0,), nodes=("10.0.0.1",)))


def test_groups_that_have_to_be_on_one_node_are():
    assert list(table(3, 3).take("A", SlotRequest(group=2, one_node=True))) == [(0, 1), (3, 4)]
    assert list(table(3, 3).take("A", SlotRequest(group=2))) == [(0, 1), (2, 3), (4, 5)]
    with pytest.raises(SessionError, match="with each group on one node"):
        table(3, 3).take("A", SlotRequest(group=4, one_node=True))


@pytest.mark.feature(11)
def test_slots_come_back_however_often_they_are_taken():
    slots = table(2, 2)
    for _ in range(20):
        slots.take("A", SlotRequest(group=1, groups=3))
        slots.take("B", SlotRequest(group=3, colocate_with=(0, 1, 2)))
        slots.give_back("A")
        slots.give_back("B")
        slots.give_back("B")
        assert slots.free == (0, 1, 2, 3)


def test_an_engine_takes_its_slots_once():
    slots = table(4)
    slots.take("A", SlotRequest(group=1, groups=1))
    with pytest.raises(SessionError, match=r"A holds the slots \[0\] already"):
        slots.take("A", SlotRequest(group=1, groups=1))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(1, 4), st.booleans()), max_size=6),
)
def test_no_slot_is_given_twice_and_none_is_lost(per_node, requestes):
    slots = table(*per_node)
    taken = {}
    for number, (group, groups, one_node) in enumerate(requestes):
        owner = f"E{number}"
        before = set(slots.free)
        try:
            found = slots.take(owner, SlotRequest(group, groups, one_node))
        except SessionError:
            assert set(slots.free) == before
            continue
        taken[owner] = {slot for part in found for slot in part}
        assert all(len(part) == group for part in found)
        assert groups is None or len(found) == groups
        assert taken[owner] <= before
        assert set(slots.free) == before - taken[owner]
        if one_node:
            assert all(len({slots.devices[slot].node for slot in part}) == 1 for part in found)
    for owner in taken:
        slots.give_back(owner)
    assert slots.free == tuple(range(sum(per_node)))
