# SPDX-License-Identifier: Apache-2.0
"""1,000 nodes and 8,000 members: what a mass failure costs the machine itself."""

import time

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
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState, Phase

NODES, PER_NODE = 1000, 8
GROUP = 2000
WITHIN_S = 1.0


def running():
    """A job of 8,000 members, 2,000 of them one group, that does steps."""
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
