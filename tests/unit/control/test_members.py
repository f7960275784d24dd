# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control.state import Member, MemberMap, MemberPhase


def made(sizes):
    return {ProcessId(role, rank): Member(1) for role, size in sizes.items() for rank in range(size)}


def test_changes_give_the_members_that_a_dict_would_have_and_leave_the_former_ones():
    chance, plain = random.Random(0), made({"ACTOR": 3, "ROLLOUT": 150, "REWARD": 64})
    members = MemberMap(plain)
    for number in range(200):
        ids = chance.sample(list(plain), chance.randrange(1, 40))
        changes = {each: Member(number, chance.choice(list(MemberPhase))) for each in ids}
        before, plain = members, {**plain, **changes}
        members = members.replacing(changes)
        assert members == plain and list(members.items()) == list(plain.items())
        assert members.up == sum(member.phase is MemberPhase.UP for member in plain.values())
        assert set(members.changed_since(before)) >= {each for each in plain if members[each] != before[each]}
        assert set(members) == set(before) and before == MemberMap(dict(before))


def test_what_may_have_changed_is_near_what_has():
    members = MemberMap(made({"ROLLOUT": 1000}))
    after = members.replacing({ProcessId("ROLLOUT", 500): Member(2)})
    assert len(list(after.changed_since(members))) <= 64
    assert list(members.changed_since(members)) == []


def test_members_that_are_gone_have_changed():
    members = MemberMap(made({"ROLLOUT": 70, "ACTOR": 1}))
    fewer = MemberMap({each: member for each, member in members.items() if each.rank < 60})
    assert ProcessId("ROLLOUT", 65) in set(fewer.changed_since(members))
    assert ProcessId("ACTOR", 0) in set(MemberMap().changed_since(members))


@pytest.mark.parametrize(
    "stranger",
    [ProcessId("ACTOR", 2), ProcessId("ACTOR", 64), ProcessId("JUDGE", 0), ProcessId.standby("ACTOR", 0), TRAINER_ID],
)
def test_a_stranger_is_no_member(stranger):
    members = MemberMap(made({"ACTOR": 2}))
    assert stranger not in members and members.get(stranger) is None
    with pytest.raises(KeyError):
        members[stranger]
    with pytest.raises(KeyError):
        members.replacing({stranger: Member(1)})


def test_ranks_count_from_0():
    with pytest.raises(ValueError, match=r"\[0, 2\]"):
        MemberMap({ProcessId("ACTOR", 0): Member(1), ProcessId("ACTOR", 2): Member(1)})
