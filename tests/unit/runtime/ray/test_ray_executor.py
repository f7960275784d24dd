# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: each command of the brain and each loss, on one stage.
"""The executor on a cluster in memory: where workers and standbys are, which deaths it tells, what a release ends."""

import asyncio
import gc
import threading
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.secrets import seal
from dlrover.python.rl.control.commands import Kill, Place, Release, StartMembers, StartStandby
from dlrover.python.rl.control.events import (
    CauseKind,
    MemberLost,
    MemberStarted,
    NodeLost,
    Placed,
    Released,
    StandbyLost,
    StandbyReady,
    Unplaced,
)
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.master.process.brain import Brain, submission
from dlrover.python.rl.runtime.checkpoint.journal_store import StateStore
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow, NodeWatch
from dlrover.python.rl.runtime.ray.executor import RayExecutor
from dlrover.python.rl.runtime.ray.placement import Reservations, RunPlan
from dlrover.python.rl.runtime.ray.processes import actors, process_table
from tests.support.memory_cluster import PENDING, MemoryActor, MemoryCluster, Method

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
        await self.continue_with(executor, *commands)
        return executor

    async def continue_with(self, executor, *commands):
        for command in commands:
            kills = len(self.cluster.killed)
            answers = len(self.events) + (len(command.members) if isinstance(command, StartMembers) else 1)
            executor.execute(command, self.events.append)
            async with asyncio.timeout(20):
                while len(self.events) < answers and not (
                    isinstance(command, Kill) and len(self.cluster.killed) > kills
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
        brain = Brain(StateStore())
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
        Kill(ProcessId.standby("ACTOR", 0)),
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
async def test_the_death_of_an_idle_member_is_told_at_once():
    stage = Stage()
    await stage.execute(Place(1), member(1))
    assert_the_member_has_died(await stage.lose(stage.events))


@pytest.mark.usefixtures("without_logs")
async def test_a_master_that_comes_back_notices_the_deaths_of_the_processes_that_it_finds():
    stage, events = Stage(), []
    await stage.execute(Place(1), member(1))
    assert await stage.new_executor().adopt(stage.state(), events.append) == 1
    assert events == stage.cluster.killed == []
    assert_the_member_has_died(await stage.lose(events))


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
async def test_a_process_that_was_gone_when_the_master_came_back_is_lost():
    stage, events = Stage(), []
    await stage.execute(Place(1), member(1))
    state = stage.state()
    await stage.lose(stage.events)
    assert not stage.cluster.actors
    assert await stage.new_executor().adopt(state, events.append) == 0
    (lost,) = events
    assert isinstance(lost, MemberLost) and (lost.role, lost.rank, lost.incarnation) == ("ACTOR", 0, 1)
    assert lost.cause.kind == CauseKind.PROCESS_DIED
    assert lost.cause.message == "it was gone when the master came back"


@pytest.mark.usefixtures("without_logs")
async def test_a_process_that_the_journal_does_not_have_ends_when_the_master_comes_back():
    stage, events = Stage(), []
    await stage.execute(Place(1), member(1))
    del stage.events[1:]
    assert await stage.new_executor().adopt(stage.state(), events.append) == 0
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
async def test_members_that_start_together_do_not_wait_for_one_that_has_gone(monkeypatch, act):
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

    executor = stage.new_executor()
    executor.execute(Place(1), stage.events.append)
    await until(lambda: stage.events)
    executor.execute(StartMembers("ACTOR", tuple((rank, 1) for rank in range(4))), stage.events.append)
    await until(lambda: len(stage.cluster.started) == 4)
    await asyncio.sleep(0.05)
    assert len(stage.events) == 1
    members = act(executor, stage.events)
    await until(lambda: len(stage.events) == 1 + members)
    assert {type(event) for event in stage.events[1:]} == {MemberStarted}


async def test_members_that_have_a_place_wait_for_those_that_have_none_yet(without_logs):
    text = f"{TWO_NODES}liveness: {{{{start_timeout_s: 0.2}}}}\nplacement_timeout_s: 10\n"
    stage = Stage(text=text, nodes=("a", "b"))
    executor = stage.new_executor()
    executor.execute(Place(1), stage.events.append)
    await until(lambda: stage.events)
    cluster = stage.cluster
    (lost,) = (row for row in cluster.groups.values() if "b" in row.nodes)
    cluster.nodes, cluster.groups[lost.id] = ("a",), replace(lost, state=PENDING, nodes=frozenset())
    executor.execute(StartMembers("ACTOR", tuple((rank, 2) for rank in range(4)), excluded=("b",)), stage.events.append)
    await asyncio.sleep(0.5)  # longer than a start may take
    assert [type(event) for event in stage.events] == [Placed]
    cluster.nodes = ("a", "c")
    cluster._schedule()
    await until(lambda: len(stage.events) == 5)
    assert [type(event) for event in stage.events] == [Placed, *[MemberStarted] * 4]


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


async def test_one_that_two_groups_wait_for_may_be_located_twice_at_once():
    table = process_table.ProcessTable()
    for _ in range(2):
        process_table.StartingTogether(table, [process_table.ProcessEntry(LOST)])
    await asyncio.gather(table.note_located(LOST), table.note_located(LOST))


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


# -- what a recovery must not lose or leave ---------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "event"), [("", "Failed"), (", min: 1", "Unplaced")])
def test_member_without_a_place_ends_only_a_job_that_needs_it(monkeypatch, least, event):
    async def find_no_place(self, role, slot, excluded):
        raise PlacementTimeout("the cluster is full")

    monkeypatch.setattr(Reservations, "place", find_no_place)
    stage = Stage(text=JOB.replace("num: 1", f"num: 1{least}"))
    stage.run(member(1))
    assert type(stage.events[-1]).__name__ == event
    if least:
        assert stage.events[-1] == Unplaced("ACTOR", 0, 1, stage.events[-1].cause)
    assert stage.events[-1].cause.kind is CauseKind.NO_RESOURCES


@pytest.mark.usefixtures("without_logs")
async def test_node_that_a_member_says_will_go_is_preempted():
    async def stay_open(host, port):
        await asyncio.Event().wait()

    stage = Stage(nodes=("a", "b"))
    executor = await stage.execute(Place(1), member(1))
    executor.nodes = NodeWatch(lambda: [NodeRow(node, True, "", 1) for node in ("a", "b", "c")], stay_open)
    executor.take_beat(Heartbeat(ProcessId("ACTOR", 0), 1, step=7, notice="it was sent SIGTERM"))
    executor.nodes.take_notice("b", "no process of this run is there")
    watching = asyncio.create_task(executor.watch_nodes(stage.events.append))
    await until(lambda: len(stage.events) > 2)
    watching.cancel()
    (lost,) = stage.events[2:]
    assert (lost.node, lost.cause.kind, executor.open_step) == ("a", CauseKind.PREEMPTED, 0)
    assert isinstance(lost, NodeLost) and "it was sent SIGTERM" in lost.cause.message


async def test_members_after_a_resize_get_the_revealed_secrets(monkeypatch):
    starts = []
    start = MemoryActor._start

    async def note_job(actor, job, *arguments):
        starts.append(job)
        await start(actor, job, *arguments)

    monkeypatch.setattr(MemoryActor, "_start", note_job)
    stage = Stage(text=f"{JOB}env: {{{{API_KEY: canary-1}}}}\n")
    sealed, secrets = seal(stage.job)
    stage._plan = replace(stage._plan, job=sealed)
    executor = await stage.execute(Place(1))
    executor.reveal(secrets)
    settings = SimpleNamespace(roles={"ACTOR": SimpleNamespace(num=1)})
    sizes = SimpleNamespace(wanted={}, settings=settings, most={"ACTOR": 1}, retired=[])
    await stage.continue_with(executor, member(1))
    executor.resize(sizes)
    await stage.continue_with(executor, member(2))
    assert [job.env["API_KEY"] for job in starts] == ["canary-1", "canary-1"]


async def test_retired_member_ends():
    stage = Stage(text=TWO_NODES, nodes=("a", "b"))
    executor = await stage.execute(Place(1), StartMembers("ACTOR", tuple((rank, 1) for rank in range(4))))
    go_on_without_it(executor, stage.events)
    await until(lambda: stage.cluster.killed == [str(LOST)])


async def hang(*arguments):
    await asyncio.Event().wait()


async def answer_at_once(*arguments):
    return None


@pytest.mark.parametrize("is_up", [False, True], ids=["never up", "does not leave"])
async def test_kept_rank_that_cannot_stay_gets_another_process(monkeypatch, is_up):
    monkeypatch.setattr(process_table, "_LEAVE_S", 0.01)
    start = MemoryActor._start

    async def start_later_ones(actor, *arguments):
        await (start(actor, *arguments) if is_up or actor.pid > 100 else hang())

    monkeypatch.setattr(MemoryActor, "_start", start_later_ones)
    monkeypatch.setattr(MemoryActor, "dlrover_leave", Method(hang if is_up else answer_at_once), raising=False)
    stage = Stage(standby=1)
    executor = await stage.execute(Place(1))
    executor.execute(member(1), stage.events.append)
    await until(lambda: len(stage.events) > 1 if is_up else stage.cluster.started)
    executor.execute(replace(member(2), rejoining=(0,)), stage.events.append)
    await until(lambda: getattr(stage.events[-1], "incarnation", 0) == 2 and stage.cluster.killed)
    assert type(stage.events[-1]) is MemberStarted and stage.cluster.killed == ["ACTOR[0]"]
    assert list(stage.cluster.actors) == ["job/run/ACTOR-0/2"]


async def test_actor_whose_start_was_cancelled_ends_once_it_is_there():
    stage, may_start = Stage(), threading.Event()
    start, find, lookups = stage.cluster.start_actor, stage.cluster.find_actor, []

    def note_lookup(name):
        lookups.append(actor := find(name))
        return actor

    stage.cluster.start_actor = lambda request: may_start.wait(30) and start(request)
    stage.cluster.find_actor = note_lookup
    executor = await stage.execute(Place(1))
    executor.execute(member(1), stage.events.append)
    await until(lambda: executor._pool._threads._running)
    before = len(lookups)
    executor.execute(Kill(ProcessId("ACTOR", 0), 1), stage.events.append)
    await until(lambda: len(lookups) > before)  # the kill finds nothing yet
    may_start.set()
    await until(lambda: stage.cluster.killed)
    assert stage.cluster.actors == {}


async def test_new_member_knows_the_last_step_and_why_it_replaces():
    stage = Stage()
    executor = await stage.execute(Place(1), member(1))
    executor.take_beat(Heartbeat(process_table.TRAINER_ID, 1, step=5))
    executor.last_causes[ProcessId("ACTOR", 0)] = "hung: no progress"
    for number, reason in ((2, "hung: no progress"), (3, "other processes had to restart")):
        await stage.continue_with(executor, member(number))
        (actor,) = stage.cluster.actors.values()
        restart = actor.context.restart
        assert (restart.count, restart.reason, restart.step) == (number - 1, reason, 4)


async def test_late_kill_of_a_replaced_member_spares_its_successor():
    stage = Stage()
    executor = await stage.execute(Place(1), member(1), member(2))
    await until(lambda: stage.cluster.killed == ["ACTOR[0]"])
    executor.execute(Kill(ProcessId("ACTOR", 0), 1), stage.events.append)
    await until(lambda: not executor._detached._running)
    assert list(stage.cluster.actors) == ["job/run/ACTOR-0/2"]


def test_release_before_a_restart_leaves_the_commits():
    stage = Stage()
    stage.run(member(1), Release(1, final=False))
    assert stage.events[-1] == Released(1) and stage.cluster.calls == []


async def test_nodes_of_adopted_processes_are_watched():
    stage = Stage()
    await stage.execute(Place(1), member(1))
    executor = stage.new_executor()
    await executor.adopt(stage.state(), stage.events.append)
    assert "a" in executor.reservations.nodes
