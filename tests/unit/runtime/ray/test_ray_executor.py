# SPDX-License-Identifier: Apache-2.0
"""The executor on a cluster in memory: where members and standbys are, which deaths it tells, what a release ends."""

import asyncio
import gc
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from memory_cluster import PENDING, MemoryActor, MemoryCluster
from ray.exceptions import ActorUnavailableError

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.commands import KillStandby, Place, Release, StartMembers, StartStandby
from dlrover.python.rl.control.events import (
    CauseKind,
    MemberLost,
    MemberStarted,
    Placed,
    Released,
    StandbyLost,
    StandbyReady,
)
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.master.process.brain import Brain, submission
from dlrover.python.rl.runtime.checkpoint.storage.journal_store import MemoryStateStore
from dlrover.python.rl.runtime.process.heartbeat import Heartbeat
from dlrover.python.rl.runtime.process.inspection import Inspection
from dlrover.python.rl.runtime.ray.executor import RayExecutor
from dlrover.python.rl.runtime.ray.processes import actors, process_table
from dlrover.python.rl.runtime.ray.reservations import Reservations, RunPlan

JOB = """
trainer: {{module: toys, class: Loop, device_per_node: 4, device_type: CPU}}
workload:
  actor: {{module: toys, class: Policy, num: 1, standby: {standby}}}
"""
TWO_NODES = """
trainer: {{module: toys, class: Loop, node_number: 2, device_per_node: 4, device_type: CPU}}
workload:
  actor: {{module: toys, class: Policy, num: 4, per_node: 2, standby: {standby}}}
"""


class Stage:
    """An executor that runs commands one after the other; a started process answers, a killed one is gone."""

    def __init__(self, standby=0, text=JOB, nodes=("a",)):
        self.job = load_job_text(text.format(standby=standby), "job")
        self.cluster = MemoryCluster(nodes)
        self._plan = RunPlan(self.job, "run", plan(self.job)[0])
        self.events = []

    def run(self, *commands):
        asyncio.run(self.execute(Place(1), *commands))
        return self.cluster.started

    def new_executor(self):
        return RayExecutor(self._plan, None, self.cluster)

    async def execute(self, *commands):
        executor = self.new_executor()
        for command in commands:
            kills = len(self.cluster.killed)
            answers = len(self.events) + (len(command.members) if isinstance(command, StartMembers) else 1)
            executor.execute(command, self.events.append)
            async with asyncio.timeout(20):
                while len(self.events) < answers and not (
                    isinstance(command, KillStandby) and len(self.cluster.killed) > kills
                ):
                    await asyncio.sleep(0.001)

    async def lose(self, events):
        """The only process dies by itself; returns the event that is then emitted to ``events``."""
        (actor,) = self.cluster.actors.values()
        before = len(events)
        self.cluster.end(actor)
        async with asyncio.timeout(5):
            while len(events) == before:
                await asyncio.sleep(0.001)
        return events[-1]

    def state(self):
        """What a master that comes back reads in the journal."""
        brain = Brain(MemoryStateStore())
        for event in (submission(self.job, "run", Inspection(), brain), *self.events):
            brain.handle(event)
        return brain.state


@pytest.fixture
def without_logs(monkeypatch):
    monkeypatch.setattr(actors, "session_folder", lambda: "/nonexistent")


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


def test_a_standby_without_a_place_is_lost_and_the_job_goes_on(monkeypatch):
    async def full(self, role, slot, excluded):
        raise PlacementTimeout("the cluster is full")

    stage = Stage(standby=1)
    stage.run(member(1))
    monkeypatch.setattr(Reservations, "place", full)
    stage.events.clear()
    stage.run(StartStandby("ACTOR", 0))
    assert [type(event) for event in stage.events] == [Placed, StandbyLost]
    assert stage.events[1].cause.kind is CauseKind.NO_RESOURCES


def test_two_standbys_have_slots_of_their_own():
    stage = Stage(standby=2)
    started = stage.run(member(1), StartStandby("ACTOR", 0), StartStandby("ACTOR", 1))
    assert [slot for _, slot in started] == [0, 1, 2]
    assert stage.cluster.killed == []


def test_work_that_a_release_cancels_before_its_turn_leaves_no_warning():
    stage = Stage()

    async def release_at_once():
        executor = stage.new_executor()
        executor.execute(member(1), stage.events.append)
        executor.execute(Release(1, final=False), stage.events.append)
        async with asyncio.timeout(5):
            while not stage.events:
                await asyncio.sleep(0.001)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(release_at_once())
        gc.collect()
    assert stage.events == [Released(1)]


def test_a_release_ends_the_processes_before_it_removes_their_memory():
    """A killed actor's name is free before its process has ended, which may still write."""
    stage = Stage(standby=1)
    stage.run(member(1), StartStandby("ACTOR", 0), Release(1, final=True))
    assert isinstance(stage.events[-1], Released)
    assert stage.cluster.actors == stage.cluster.reserved() == {}
    assert stage.cluster.calls == [
        ("a", "_end_and_list", [100, 101], "job", "run"),
        ("a", "_forget", "job", "run"),
    ]


def assert_the_member_has_died(event):
    assert (type(event), event.role, event.rank, event.incarnation, event.node) == (MemberLost, "ACTOR", 0, 1, "a")
    assert (event.cause.kind, event.cause.who) == (CauseKind.PROCESS_DIED, "ACTOR[0]")


@pytest.mark.usefixtures("without_logs")
def test_the_death_of_an_idle_member_is_told_at_once():
    stage = Stage()

    async def scenario():
        await stage.execute(Place(1), member(1))
        assert_the_member_has_died(await stage.lose(stage.events))

    asyncio.run(scenario())


@pytest.mark.usefixtures("without_logs")
def test_a_master_that_comes_back_notices_the_deaths_of_the_processes_that_it_finds():
    stage, events = Stage(), []

    async def scenario():
        await stage.execute(Place(1), member(1))
        assert await stage.new_executor().adopt(stage.state(), events.append) == 1
        assert events == stage.cluster.killed == []
        assert_the_member_has_died(await stage.lose(events))

    asyncio.run(scenario())


@pytest.mark.usefixtures("without_logs")
def test_a_member_lost_to_the_oom_killer_has_that_cause():
    """Its last heartbeat came before the kill, and one of a neighbour after it."""
    stage = Stage()

    async def scenario():
        executor, events = stage.new_executor(), stage.events
        for command, answer in ((Place(1), Placed), (member(1), MemberStarted)):
            executor.execute(command, events.append)
            async with asyncio.timeout(20):
                while not any(isinstance(event, answer) for event in events):
                    await asyncio.sleep(0.001)
        lost, neighbour = ProcessId("ACTOR", 0), ProcessId("ROLLOUT", 0)
        executor.take_beat(Heartbeat(lost, 1, oom_kills=3))
        executor.nodes.oom_kills.note(neighbour, executor.process_of(lost), 4)
        return await stage.lose(events)

    event = asyncio.run(scenario())
    assert (event.cause.kind, event.cause.who) == (CauseKind.OUT_OF_MEMORY, "ACTOR[0]")
    assert event.cause.message.startswith("the kernel's OOM killer has ended a process of its host: ")


@pytest.mark.usefixtures("without_logs")
def test_a_process_that_was_gone_when_the_master_came_back_is_lost():
    stage, events = Stage(), []

    async def scenario():
        await stage.execute(Place(1), member(1))
        state = stage.state()
        await stage.lose(stage.events)
        assert not stage.cluster.actors
        assert await stage.new_executor().adopt(state, events.append) == 0

    asyncio.run(scenario())
    (lost,) = events
    assert isinstance(lost, MemberLost) and (lost.role, lost.rank, lost.incarnation) == ("ACTOR", 0, 1)
    assert lost.cause.kind == CauseKind.PROCESS_DIED
    assert lost.cause.message == "it was gone when the master came back"


@pytest.mark.usefixtures("without_logs")
def test_a_process_that_the_journal_does_not_have_ends_when_the_master_comes_back():
    stage, events = Stage(), []

    async def scenario():
        await stage.execute(Place(1), member(1))
        del stage.events[1:]
        assert await stage.new_executor().adopt(stage.state(), events.append) == 0

    asyncio.run(scenario())
    assert stage.cluster.killed == ["ACTOR[0]"]
    assert events == []


def test_members_that_start_together_all_know_their_first_rank_and_who_shares_their_node():
    stage = Stage(text=TWO_NODES, nodes=("a", "b"))
    stage.run(StartMembers("ACTOR", tuple((rank, 1) for rank in range(4))))
    by_rank = sorted(stage.cluster.actors.values(), key=lambda actor: actor.process_id.rank)
    assert len({actor.node for actor in by_rank[:2]}) == len({actor.node for actor in by_rank[2:]}) == 1
    contexts = [actor.context for actor in by_rank]
    assert [(each.local_rank, each.local_world_size) for each in contexts] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    first = by_rank[0]
    assert {(each.master_addr, each.master_port) for each in contexts} == {(f"address of {first.node}", first.pid)}


def make_another(executor, events):
    executor.execute(StartMembers("ACTOR", ((2, 2),)), events.append)
    return 4


def go_on_without_it(executor, events):
    sizes = SimpleNamespace(wanted={}, settings=SimpleNamespace(roles={}), most={"ACTOR": 4}, retired=[LOST])
    executor.resize(sizes)
    return 3


LOST = ProcessId("ACTOR", 2)


@pytest.mark.parametrize("act", [make_another, go_on_without_it])
def test_members_that_start_together_do_not_wait_for_one_that_has_gone(monkeypatch, act):
    locate = MemoryActor._locate

    async def locate_the_others(actor, ports):
        if actor.request.arguments[:2] == (LOST, 1):
            raise await actor.until_ended()
        return await locate(actor, ports)

    monkeypatch.setattr(MemoryActor, "_locate", locate_the_others)
    stage = Stage(text=TWO_NODES, nodes=("a", "b"))

    async def until(holds):
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.001)

    async def scenario():
        executor = stage.new_executor()
        executor.execute(Place(1), stage.events.append)
        await until(lambda: stage.events)
        executor.execute(StartMembers("ACTOR", tuple((rank, 1) for rank in range(4))), stage.events.append)
        await until(lambda: len(stage.cluster.started) == 4)
        await asyncio.sleep(0.05)
        assert len(stage.events) == 1
        members = act(executor, stage.events)
        await until(lambda: len(stage.events) == 1 + members)

    asyncio.run(scenario())
    assert {type(event) for event in stage.events[1:]} == {MemberStarted}


def test_members_that_have_a_place_wait_for_those_that_have_none_yet(without_logs):
    text = f"{TWO_NODES}liveness: {{{{start_timeout_s: 0.2}}}}\nplacement_timeout_s: 10\n"
    stage = Stage(text=text, nodes=("a", "b"))

    async def lose_a_node_and_get_another():
        executor = stage.new_executor()
        executor.execute(Place(1), stage.events.append)
        await until(lambda: stage.events)
        cluster = stage.cluster
        (lost,) = (row for row in cluster.groups.values() if "b" in row.nodes)
        cluster.nodes, cluster.groups[lost.id] = ("a",), replace(lost, state=PENDING, nodes=frozenset())
        executor.execute(
            StartMembers("ACTOR", tuple((rank, 2) for rank in range(4)), excluded=("b",)), stage.events.append
        )
        await asyncio.sleep(0.5)  # longer than a start may take
        assert [type(event) for event in stage.events] == [Placed]
        cluster.nodes = ("a", "c")
        cluster._schedule()
        await until(lambda: len(stage.events) == 5)

    asyncio.run(lose_a_node_and_get_another())
    assert [type(event) for event in stage.events] == [Placed, *[MemberStarted] * 4]


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def test_one_that_two_groups_wait_for_may_be_located_twice_at_once():
    async def scenario():
        table = process_table.ProcessTable(Stage().job)
        for _ in range(2):
            table.start_together([process_table.ProcessEntry(LOST)])
        await asyncio.gather(table.note_located(LOST), table.note_located(LOST))

    asyncio.run(scenario())


@pytest.mark.parametrize(("devices", "limit"), [("CPU", "_LEAVE_S"), ("GPU", "_LEAVE_DEVICES_S")])
def test_let_leave_gives_up_on_a_member_that_hangs(monkeypatch, devices, limit):
    for name in ("_LEAVE_S", "_LEAVE_DEVICES_S"):
        monkeypatch.setattr(process_table, name, 0.01 if name == limit else 60.0)

    async def scenario():
        pool = Stage(text=JOB.replace("CPU", devices)).new_executor()._pool
        handle = SimpleNamespace(dlrover_leave=SimpleNamespace(remote=asyncio.Event().wait))
        async with asyncio.timeout(30):
            return await pool.let_leave(process_table.ProcessEntry(LOST, 2, handle=handle))

    assert asyncio.run(scenario()) is False


def test_a_trainer_is_asked_for_its_outcome_again_after_a_broken_connection(monkeypatch):
    monkeypatch.setattr(process_table, "_ASK_AGAIN_S", 0.001)
    answers = iter([ActorUnavailableError("for a moment", bytes(16)), ActorUnavailableError("again", bytes(16)), "why"])

    async def run():
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    async def scenario():
        stage = Stage()
        trainer = SimpleNamespace(run=SimpleNamespace(remote=run))
        return await stage.new_executor()._pool.outcome_of(trainer)

    assert asyncio.run(scenario()) == "why"
