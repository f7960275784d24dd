# SPDX-License-Identifier: Apache-2.0
"""The executor on a cluster in memory: slots of members and standbys, and what a release ends."""

import asyncio

from memory_cluster import MemoryCluster

from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.commands import KillStandby, Place, Release, StartMembers, StartStandby
from dlrover.python.rl.control.events import MemberStarted, Placed, Released, StandbyReady
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.runtime.ray.executor import RayExecutor
from dlrover.python.rl.runtime.ray.reservations import RunPlan

JOB = """
trainer: {{module: toys, class: Loop, device_per_node: 4, device_type: CPU}}
workload:
  actor: {{module: toys, class: Policy, num: 1, standby: {standby}}}
"""


class Stage:
    """An executor that runs commands one after the other; a started process answers, a killed one is gone."""

    def __init__(self, standby):
        job = load_job_text(JOB.format(standby=standby), "job")
        self.cluster = MemoryCluster(("a",))
        self._plan = RunPlan(job, "run", plan(job)[0])
        self.events = []

    def run(self, *commands):
        asyncio.run(self._execute(Place(1), *commands))
        return self.cluster.started

    async def _execute(self, *commands):
        executor = RayExecutor(self._plan, None, self.cluster)
        for command in commands:
            answers, kills = len(self.events), len(self.cluster.killed)
            executor.execute(command, self.events.append)
            async with asyncio.timeout(20):
                while len(self.events) == answers and not (
                    isinstance(command, KillStandby) and len(self.cluster.killed) > kills
                ):
                    await asyncio.sleep(0.001)


def member(number, **standbys):
    return StartMembers("ACTOR", ((0, number),), standbys={0: standbys["standby"]} if standbys else {})


def test_the_slot_of_a_lost_standby_is_free_for_the_next():
    stage = Stage(standby=1)
    started = stage.run(
        member(1),
        StartStandby("ACTOR", 0),
        KillStandby("ACTOR", 0),
        StartStandby("ACTOR", 1),
        member(2, standby=1),
        StartStandby("ACTOR", 2),
        member(3),
    )
    assert started == [
        ("ACTOR[0]", 0),
        ("ACTOR-standby[0]", 1),
        ("ACTOR-standby[1]", 1),
        ("ACTOR-standby[2]", 0),
        ("ACTOR[0]", 1),
    ]
    assert stage.cluster.killed == ["ACTOR-standby[0]", "ACTOR[0]", "ACTOR-standby[1]"]
    kinds = [type(event) for event in stage.events]
    assert kinds == [Placed, MemberStarted, StandbyReady, StandbyReady, MemberStarted, StandbyReady, MemberStarted]


def test_two_standbys_have_slots_of_their_own():
    stage = Stage(standby=2)
    started = stage.run(member(1), StartStandby("ACTOR", 0), StartStandby("ACTOR", 1))
    assert [slot for _, slot in started] == [0, 1, 2]
    assert stage.cluster.killed == []


def test_a_release_ends_the_processes_before_it_removes_their_memory():
    """A killed actor's name is free before its process has ended, which may still write."""
    stage = Stage(standby=1)
    stage.run(member(1), StartStandby("ACTOR", 0), Release(1, final=True))
    assert isinstance(stage.events[-1], Released)
    assert stage.cluster.actors == stage.cluster.reserved() == {}
    assert stage.cluster.calls == [("a", "_end_and_forget", [100, 101], "job", "run")]
