# SPDX-License-Identifier: Apache-2.0
"""The map of members, and the costs of 1,000 nodes and 10,000 workers."""

import gc
import random
import time

import pytest

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.config.spec import LivenessSpec
from dlrover.python.rl.control.commands import StartMembers
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    MemberLost,
    MemberStarted,
    NodeLost,
    Placed,
    Process,
    RecoveryScope,
    RoleSettings,
    StepsOpened,
    Submitted,
    TrainerStarted,
)
from dlrover.python.rl.control.machine import replay, step
from dlrover.python.rl.control.state import Member, MemberMap, MemberPhase, Phase
from dlrover.python.rl.master.process.hang_detector import HangDetector
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat
from tests.support.toy_jobs import toy_job


def made(sizes):
    return {ProcessId(role, rank): Member(1) for role, size in sizes.items() for rank in range(size)}


def test_member_map_replacing_is_like_a_dict():
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


def test_changed_since_is_near_the_change():
    members = MemberMap(made({"ROLLOUT": 1000}))
    after = members.replacing({ProcessId("ROLLOUT", 500): Member(2)})
    assert len(list(after.changed_since(members))) <= 64
    assert list(members.changed_since(members)) == []


def test_removed_members_have_changed():
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


# -- starts, failures and heartbeats of many --------------------------------------------------------------------------


NODES, PER_NODE = 1000, 8
WITHIN_S = 3.0


def of_size(members, **limits):
    """The events of a start with this number of workers, a quarter of them one group."""
    group = max(members // 4, 1)
    roles = {
        "ACTOR": RoleSettings(group, RecoveryScope.GROUP, **limits),
        "ROLLOUT": RoleSettings(members - group, **limits),
    }
    ranks = [(role, rank) for role, settings in roles.items() for rank in range(settings.num)]
    started = [MemberStarted(role, rank, 1, Process(f"n{at // PER_NODE}", at)) for at, (role, rank) in enumerate(ranks)]
    return [Submitted("big", roles), Placed(1), *started, TrainerStarted(1, Process("head", 1)), StepsOpened(1)]


def fastest(work, tries=3):
    """The least processor time of some tries without garbage collection, in seconds, and the last result."""
    times = []
    gc.disable()
    try:
        for _ in range(tries):
            began_s = time.process_time()
            result = work()
            times.append(time.process_time() - began_s)
    finally:
        gc.enable()
    return min(times), result


def test_800_members_and_100_nodes_lost_take_under_three_seconds():
    state = replay((0.0, event) for event in of_size(NODES * PER_NODE, max_restart=10_000))
    lost_nodes = {f"n{10 * number}" for number in range(NODES // 10)}
    died = Cause(CauseKind.PROCESS_DIED, "job", "gone")
    lost = [each for each, member in state.members.items() if member.process.node in lost_nodes]
    events = [MemberLost(each.role, each.rank, 1, died) for each in lost]
    events += [NodeLost(node, Cause(CauseKind.NODE_LOST, "job", "gone")) for node in sorted(lost_nodes)]
    assert len(events) == 900

    def recover():
        recovered, started = state, 0
        for event in events:
            recovered, commands = step(recovered, event, 3.0)
            started += sum(len(command.members) for command in commands if isinstance(command, StartMembers))
        return recovered, started

    took_s, (after, started) = fastest(recover)
    assert (after.phase, after.recoveries["ACTOR"]) == (Phase.RUNNING, 1)
    assert started == NODES * PER_NODE // 4 + after.recoveries["ROLLOUT"]
    assert set(after.excluded) == lost_nodes
    assert took_s < WITHIN_S


def test_the_start_of_10000_members_is_replayed_in_three_seconds():
    events = [(0.0, event) for event in of_size(10_000)]
    took_s, state = fastest(lambda: replay(events), tries=2)
    assert state.opened and state.members.up == 10_000
    assert took_s < WITHIN_S


def test_event_of_10000_members_costs_as_with_10():
    cost_s = {}
    for size in (10, 10_000):
        state = replay((0.0, event) for event in of_size(size))
        lost = MemberLost("ROLLOUT", 3, 1, Cause(CauseKind.PROCESS_DIED, "ROLLOUT[3]", "gone"))
        back = MemberStarted("ROLLOUT", 3, 2, Process("n0", 7))

        def both(state=state, lost=lost, back=back):
            for _ in range(100):
                after, _ = step(state, lost, 1.0)
                after, _ = step(after, back, 2.0)
            return after

        cost_s[size], after = fastest(both)
        assert after.members[ProcessId("ROLLOUT", 3)].incarnation == 2
    assert cost_s[10_000] < 4 * cost_s[10], cost_s


def test_heartbeat_with_10000_members_takes_20_microseconds(tmp_path):
    state = replay((0.0, event) for event in of_size(10_000))
    detector = HangDetector(toy_job(tmp_path), LivenessSpec(0.5, 60.0), lambda process_id: None, read_nothing)
    beats = [Heartbeat(process_id, 1, "", 0.0, 0) for process_id in state.members]
    took_s, taken = fastest(lambda: sum(detector.take(beat, state) for beat in beats))
    assert taken == len(beats) == 10_000
    assert took_s / len(beats) < 20e-6


async def read_nothing(process):
    return ""
