# SPDX-License-Identifier: Apache-2.0
"""1,000 nodes and 10,000 workers: what starts, failures and heartbeats cost the machine itself."""

import time

from dlrover.python.rl.common.names import ProcessId
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
from dlrover.python.rl.control.state import JobState, Phase
from dlrover.python.rl.master.process.hang_detector import HangDetector
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat
from tests.support.toy_jobs import toy_job

NODES, PER_NODE = 1000, 8
GROUP = 2000
WITHIN_S = 1.0


def running():
    """A job of 8,000 workers, 2,000 of them one group, that does steps."""
    members = NODES * PER_NODE
    roles = {
        "ACTOR": RoleSettings(GROUP, RecoveryScope.GROUP, max_restart=10_000),
        "ROLLOUT": RoleSettings(members - GROUP, max_restart=10_000),
    }
    ranks = [("ACTOR", rank) for rank in range(GROUP)] + [("ROLLOUT", rank) for rank in range(members - GROUP)]
    where = {who: f"n{number // PER_NODE}" for number, who in enumerate(reversed(ranks))}
    state, _ = step(JobState(), Submitted("big", roles), 0.0)
    state, _ = step(state, Placed(1), 0.0)
    for (role, rank), node in where.items():
        state, _ = step(state, MemberStarted(role, rank, 1, Process(node, rank + 1)), 1.0)
    for event in (TrainerStarted(1, Process("head", 1)), StepsOpened(1)):
        state, _ = step(state, event, 2.0)
    return state, where


def test_a_tenth_of_8000_members_and_100_nodes_lost_take_less_than_a_second():
    state, where = running()
    lost_nodes = {f"n{10 * number}" for number in range(NODES // 10)}
    died = Cause(CauseKind.PROCESS_DIED, "job", "gone")
    events = [MemberLost(role, rank, 1, died) for (role, rank), node in where.items() if node in lost_nodes]
    events += [NodeLost(node, Cause(CauseKind.NODE_LOST, "job", "gone")) for node in sorted(lost_nodes)]
    assert len(events) == 900
    started, began_s = 0, time.process_time()
    for event in events:
        state, commands = step(state, event, 3.0)
        started += sum(len(command.members) for command in commands if isinstance(command, StartMembers))
    took_s = time.process_time() - began_s
    assert (state.phase, state.recoveries["ACTOR"]) == (Phase.RUNNING, 1)
    assert started == GROUP + state.recoveries["ROLLOUT"]
    assert set(state.excluded) == lost_nodes
    assert took_s < WITHIN_S


def of_size(members):
    """The events of a start with this number of workers, a quarter of them one group."""
    group = max(members // 4, 1)
    roles = {"ACTOR": RoleSettings(group, RecoveryScope.GROUP), "ROLLOUT": RoleSettings(members - group)}
    ranks = [(role, rank) for role, settings in roles.items() for rank in range(settings.num)]
    started = [MemberStarted(role, rank, 1, Process(f"n{at // PER_NODE}", at)) for at, (role, rank) in enumerate(ranks)]
    return [Submitted("big", roles), Placed(1), *started, TrainerStarted(1, Process("head", 1)), StepsOpened(1)]


def fastest(work, tries=3):
    """The least processor time of some tries, in seconds, and the last result."""
    times = []
    for _ in range(tries):
        began_s = time.process_time()
        result = work()
        times.append(time.process_time() - began_s)
    return min(times), result


def test_the_start_of_10000_members_is_replayed_in_a_second():
    events = [(0.0, event) for event in of_size(10_000)]
    took_s, state = fastest(lambda: replay(events), tries=2)
    assert state.opened and state.members.up == 10_000
    assert took_s < WITHIN_S


def test_an_event_costs_about_the_same_with_10_and_with_10000_members():
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


def test_a_heartbeat_takes_the_master_20_microseconds_with_10000_members(tmp_path):
    state = replay((0.0, event) for event in of_size(10_000))
    detector = HangDetector(toy_job(tmp_path), LivenessSpec(0.5, 60.0), lambda process_id: None, read_nothing)
    beats = [Heartbeat(process_id, 1, "", 0.0, 0) for process_id in state.members]
    took_s, taken = fastest(lambda: sum(detector.take(beat, state) for beat in beats))
    assert taken == len(beats) == 10_000
    assert took_s / len(beats) < 20e-6


async def read_nothing(process):
    return ""
