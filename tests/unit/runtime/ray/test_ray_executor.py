# SPDX-License-Identifier: Apache-2.0
"""The executor on a cluster in memory: places of workers and standbys, deaths that it reports, and releases."""

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
from dlrover.python.rl.control.events import CauseKind, MemberLost, Released, Unplaced
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.master.process.brain import Brain, submission
from dlrover.python.rl.runtime.checkpoint.journal_store import StateStore
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow, NodeWatch
from dlrover.python.rl.runtime.ray.executor import RayExecutor
from dlrover.python.rl.runtime.ray.placement import Reservations, RunPlan
from dlrover.python.rl.runtime.ray.processes import actors, process_table
from tests.support.async_tests import until
from tests.support.memory_cluster import PENDING, MemoryActor, MemoryCluster, Method

JOB = """
trainer: {{module: toys, class: Loop, device_per_node: 4, device_type: CPU}}
workload: {{actor: {{module: toys, class: Policy, num: 1, standby: {standby}}}}}
"""
TWO_NODES = """
trainer: {{module: toys, class: Loop, node_number: 2, device_per_node: 4, device_type: CPU}}
workload: {{actor: {{module: toys, class: Policy, num: 4, per_node: 2, standby: {standby}}}}}
"""
FIRST, LOST = ProcessId("ACTOR", 0), ProcessId("ACTOR", 2)


async def hang(*arguments):
    await asyncio.Event().wait()


class Stage:
    """An executor that runs commands one after the other; a started process answers, a killed one is gone."""

    def __init__(self, standby=0, text=JOB, nodes=("a",)):
        self.job = load_job_text(text.format(standby=standby), "job")
        self.cluster = MemoryCluster(nodes)
        self._plan = RunPlan(self.job, "run", plan(self.job)[0])
        self.events = []

    def new_executor(self):
        return RayExecutor(self._plan, None, self.cluster)

    async def execute(self, *commands):
        """A new executor after a placement and these commands."""
        executor = self.new_executor()
        await self.continue_with(executor, Place(1), *commands)
        return executor

    async def continue_with(self, executor, *commands):
        for command in commands:
            kills = len(self.cluster.killed)
            answers = len(self.events) + (len(command.members) if isinstance(command, StartMembers) else 1)
            executor.execute(command, self.events.append)
            while len(self.events) < answers and not (isinstance(command, Kill) and len(self.cluster.killed) > kills):
                await asyncio.sleep(0.001)

    async def lose(self, events):
        """The only process dies by itself; returns the event that is then emitted to ``events``."""
        (actor,) = self.cluster.actors.values()
        before = len(events)
        self.cluster.end(actor)
        await until(lambda: len(events) > before)
        return events[-1]

    def state(self):
        """The state in the journal, for a master that comes back."""
        brain = Brain(StateStore())
        for event in (submission(self.job, "run", Inspection(), brain), *self.events):
            brain.handle(event)
        return brain.state

    def kinds(self):
        return [type(event).__name__ for event in self.events]


@pytest.fixture
def without_logs(monkeypatch):
    monkeypatch.setattr(actors, "session_folder", lambda: "/nonexistent")


@pytest.fixture
def full_cluster(monkeypatch):
    """Leaves no member a place, once it is called."""

    async def find_no_place(self, role, slot, excluded):
        raise PlacementTimeout("the cluster is full")

    return lambda: monkeypatch.setattr(Reservations, "place", find_no_place)


def member(number, **standbys):
    return StartMembers("ACTOR", ((0, number),), standbys={0: standbys["standby"]} if standbys else {})


def four_members(number=1, **terms):
    return StartMembers("ACTOR", tuple((rank, number) for rank in range(4)), **terms)


async def test_slot_of_a_lost_standby_is_free_for_the_next():
    stage = Stage(standby=1)
    standbys = [StartStandby("ACTOR", number) for number in range(3)]
    lost = Kill(ProcessId.standby("ACTOR", 0))
    await stage.execute(member(1), standbys[0], lost, standbys[1], member(2, standby=1), standbys[2], member(3))
    processes = ("ACTOR[0]", "ACTOR-standby[0]", "ACTOR-standby[1]", "ACTOR-standby[2]", "ACTOR[0]")
    assert stage.cluster.started == list(zip(processes, (0, 1, 1, 0, 1), strict=True))
    assert stage.cluster.killed == ["ACTOR-standby[0]", "ACTOR[0]", "ACTOR-standby[1]"]
    ready = ["StandbyReady", "StandbyReady", "MemberStarted"]
    assert stage.kinds() == ["Placed", "MemberStarted", *ready, "StandbyReady", "MemberStarted"]


async def test_standby_without_a_place_is_lost(full_cluster):
    stage = Stage(standby=1)
    executor = await stage.execute(member(1))
    full_cluster()
    await stage.continue_with(executor, StartStandby("ACTOR", 0))
    assert stage.kinds() == ["Placed", "MemberStarted", "StandbyLost"]
    assert stage.events[-1].cause.kind is CauseKind.NO_RESOURCES


def test_work_cancelled_by_a_release_leaves_no_warning():
    stage = Stage()

    async def release_at_once():
        executor = stage.new_executor()
        for command in (member(1), Release(1, final=False)):
            executor.execute(command, stage.events.append)
        await until(lambda: stage.events)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(release_at_once())
        gc.collect()
    assert stage.events == [Released(1)]


async def test_release_ends_the_processes_before_their_memory():
    """A killed actor's name is free before its process has ended, which may still write."""
    stage = Stage(standby=1)
    await stage.execute(member(1), StartStandby("ACTOR", 0), Release(1, final=True))
    assert isinstance(stage.events[-1], Released)
    assert stage.cluster.actors == stage.cluster.reserved() == {}
    assert stage.cluster.calls == [("a", "_end_and_list", [100, 101], "job", "run"), ("a", "_forget", "job", "run")]


async def test_release_before_a_restart_leaves_the_commits():
    stage = Stage()
    await stage.execute(member(1), Release(1, final=False))
    assert stage.events[-1] == Released(1) and stage.cluster.calls == []


@pytest.mark.usefixtures("without_logs")
@pytest.mark.parametrize("is_adopted", [False, True])
async def test_death_of_an_idle_member_is_reported_at_once(is_adopted):
    stage, events = Stage(), []
    await stage.execute(member(1))
    if is_adopted:
        executor = stage.new_executor()
        assert await executor.adopt(stage.state(), events.append) == 1
        assert events == stage.cluster.killed == []
        assert "a" in executor.reservations.nodes, "its node is watched"
    lost = await stage.lose(events if is_adopted else stage.events)
    assert lost == MemberLost("ACTOR", 0, 1, lost.cause, "a")
    assert (lost.cause.kind, lost.cause.who) == (CauseKind.PROCESS_DIED, "ACTOR[0]")


@pytest.mark.usefixtures("without_logs")
async def test_member_lost_to_the_oom_killer_has_its_cause():
    stage = Stage()
    executor = await stage.execute(member(1))
    executor.take_beat(Heartbeat(FIRST, 1, oom_kills=3))
    executor.nodes.oom_kills.note(ProcessId("ROLLOUT", 0), executor.process_of(FIRST), 4)
    event = await stage.lose(stage.events)
    assert (event.cause.kind, event.cause.who) == (CauseKind.OUT_OF_MEMORY, "ACTOR[0]")
    assert event.cause.message.startswith("the kernel's OOM killer has ended a process of its host: ")


@pytest.mark.usefixtures("without_logs")
async def test_process_gone_before_the_master_came_back_is_lost():
    stage, events = Stage(), []
    await stage.execute(member(1))
    state = stage.state()
    await stage.lose(stage.events)
    assert not stage.cluster.actors
    assert await stage.new_executor().adopt(state, events.append) == 0
    (lost,) = events
    assert lost == MemberLost("ACTOR", 0, 1, lost.cause, lost.node)
    assert lost.cause.kind == CauseKind.PROCESS_DIED
    assert lost.cause.message == "it was gone when the master came back"


@pytest.mark.usefixtures("without_logs")
async def test_process_unknown_to_the_journal_ends():
    stage, events = Stage(), []
    await stage.execute(member(1))
    del stage.events[1:]
    assert await stage.new_executor().adopt(stage.state(), events.append) == 0
    assert (stage.cluster.killed, events) == (["ACTOR[0]"], [])


@pytest.mark.usefixtures("without_logs")
async def test_node_of_a_departure_notice_is_preempted():
    stage = Stage(nodes=("a", "b"))
    executor = await stage.execute(member(1))
    executor.nodes = NodeWatch(lambda: [NodeRow(node, True, "", 1) for node in ("a", "b", "c")], hang)
    executor.take_beat(Heartbeat(FIRST, 1, step=7, notice="it was sent SIGTERM"))
    executor.nodes.take_notice("b", "no process of this run is there")
    watching = asyncio.create_task(executor.watch_nodes(stage.events.append))
    await until(lambda: len(stage.events) > 2)
    watching.cancel()
    (lost,) = stage.events[2:]
    assert (lost.node, lost.cause.kind, executor.open_step) == ("a", CauseKind.PREEMPTED, 0)
    assert type(lost).__name__ == "NodeLost" and "it was sent SIGTERM" in lost.cause.message


async def test_members_know_their_first_rank_and_their_node():
    stage = Stage(text=TWO_NODES, nodes=("a", "b"))
    await stage.execute(four_members())
    by_rank = sorted(stage.cluster.actors.values(), key=lambda actor: actor.process_id.rank)
    assert len({actor.node for actor in by_rank[:2]}) == len({actor.node for actor in by_rank[2:]}) == 1
    contexts = [actor.context for actor in by_rank]
    assert [(each.local_rank, each.local_world_size) for each in contexts] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    first = by_rank[0]
    assert {(each.master_addr, each.master_port) for each in contexts} == {(f"address of {first.node}", first.pid)}


def make_another(executor, events):
    executor.execute(StartMembers("ACTOR", ((2, 2),)), events.append)
    return 4


def retire(executor, events):
    sizes = SimpleNamespace(wanted={}, settings=SimpleNamespace(roles={}), most={"ACTOR": 4}, retired=[LOST])
    executor.resize(sizes)
    return 3


@pytest.mark.parametrize("act", [make_another, retire])
async def test_members_do_not_wait_for_a_gone_one(monkeypatch, act):
    locate = MemoryActor._locate

    async def locate_the_others(actor, ports):
        if actor.request.arguments[:2] == (LOST, 1):
            raise await actor.until_ended()
        return await locate(actor, ports)

    monkeypatch.setattr(MemoryActor, "_locate", locate_the_others)
    stage = Stage(text=TWO_NODES, nodes=("a", "b"))
    executor = await stage.execute()
    executor.execute(four_members(), stage.events.append)
    await until(lambda: len(stage.cluster.started) == 4)
    await asyncio.sleep(0.05)
    assert len(stage.events) == 1
    members = act(executor, stage.events)
    await until(lambda: len(stage.events) == 1 + members)
    assert set(stage.kinds()[1:]) == {"MemberStarted"}


@pytest.mark.usefixtures("without_logs")
async def test_placed_members_wait_for_those_without_a_place():
    text = f"{TWO_NODES}liveness: {{{{start_timeout_s: 0.2}}}}\nplacement_timeout_s: 10\n"
    stage = Stage(text=text, nodes=("a", "b"))
    executor, cluster = await stage.execute(), stage.cluster
    (lost,) = (row for row in cluster.groups.values() if "b" in row.nodes)
    cluster.nodes, cluster.groups[lost.id] = ("a",), replace(lost, state=PENDING, nodes=frozenset())
    executor.execute(four_members(2, excluded=("b",)), stage.events.append)
    await asyncio.sleep(0.5)  # longer than a start may take
    assert stage.kinds() == ["Placed"]
    cluster.nodes = ("a", "c")
    cluster._schedule()
    await until(lambda: len(stage.events) == 5)
    assert stage.kinds() == ["Placed", *["MemberStarted"] * 4]


async def test_member_of_two_groups_may_be_located_twice_at_once():
    table = process_table.ProcessTable()
    for _ in range(2):
        process_table.StartingTogether(table, [process_table.ProcessEntry(LOST)])
    await asyncio.gather(table.note_located(LOST), table.note_located(LOST))


@pytest.mark.parametrize(("devices", "limit"), [("CPU", "_LEAVE_S"), ("GPU", "_LEAVE_DEVICES_S")])
async def test_let_leave_gives_up_on_a_hung_member(monkeypatch, devices, limit):
    for name in ("_LEAVE_S", "_LEAVE_DEVICES_S"):
        monkeypatch.setattr(process_table, name, 0.01 if name == limit else 60.0)
    pool = Stage(text=JOB.replace("CPU", devices)).new_executor()._pool
    handle = SimpleNamespace(dlrover_leave=SimpleNamespace(remote=hang))
    async with asyncio.timeout(30):
        assert await pool.let_leave(process_table.ProcessEntry(LOST, 2, handle=handle)) is False


async def test_trainer_is_asked_again_after_a_broken_connection(monkeypatch):
    monkeypatch.setattr(process_table, "_ASK_AGAIN_S", 0.001)
    answers = iter([ActorUnavailableError("for a moment", bytes(16)), ActorUnavailableError("again", bytes(16)), "why"])

    async def run():
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    trainer = SimpleNamespace(run=SimpleNamespace(remote=run))
    assert await Stage().new_executor()._pool.outcome_of(trainer) == "why"


@pytest.mark.parametrize(("least", "event"), [("", "Failed"), (", min: 1", "Unplaced")])
async def test_member_without_a_place_ends_a_job_in_need_of_it(full_cluster, least, event):
    full_cluster()
    stage = Stage(text=JOB.replace("num: 1", f"num: 1{least}"))
    await stage.execute(member(1))
    last = stage.events[-1]
    assert (type(last).__name__, last.cause.kind) == (event, CauseKind.NO_RESOURCES)
    assert not least or last == Unplaced("ACTOR", 0, 1, last.cause)


async def test_members_after_a_resize_get_the_revealed_secrets(monkeypatch):
    jobs, start = [], MemoryActor._start

    async def note_job(actor, job, *arguments):
        jobs.append(job)
        await start(actor, job, *arguments)

    monkeypatch.setattr(MemoryActor, "_start", note_job)
    stage = Stage(text=f"{JOB}env: {{{{API_KEY: canary-1}}}}\n")
    sealed, secrets = seal(stage.job)
    stage._plan = replace(stage._plan, job=sealed)
    executor = await stage.execute()
    executor.reveal(secrets)
    settings = SimpleNamespace(roles={"ACTOR": SimpleNamespace(num=1)})
    await stage.continue_with(executor, member(1))
    executor.resize(SimpleNamespace(wanted={}, settings=settings, most={"ACTOR": 1}, retired=[]))
    await stage.continue_with(executor, member(2))
    assert [job.env["API_KEY"] for job in jobs] == ["canary-1", "canary-1"]


async def test_retired_member_ends():
    stage = Stage(text=TWO_NODES, nodes=("a", "b"))
    retire(await stage.execute(four_members()), stage.events)
    await until(lambda: stage.cluster.killed == [str(LOST)])


@pytest.mark.parametrize("is_up", [False, True], ids=["never up", "does not leave"])
async def test_rejoining_rank_without_its_process_gets_another(monkeypatch, is_up):
    monkeypatch.setattr(process_table, "_LEAVE_S", 0.01)
    start = MemoryActor._start

    async def start_later_ones(actor, *arguments):
        await (start(actor, *arguments) if is_up or actor.pid > 100 else hang())

    async def leave():
        if is_up:
            await hang()

    monkeypatch.setattr(MemoryActor, "_start", start_later_ones)
    monkeypatch.setattr(MemoryActor, "dlrover_leave", Method(leave), raising=False)
    stage = Stage(standby=1)
    executor = await stage.execute()
    executor.execute(member(1), stage.events.append)
    await until(lambda: len(stage.events) > 1 if is_up else stage.cluster.started)
    executor.execute(replace(member(2), rejoining=(0,)), stage.events.append)
    await until(lambda: getattr(stage.events[-1], "incarnation", 0) == 2 and stage.cluster.killed)
    assert stage.kinds()[-1] == "MemberStarted" and stage.cluster.killed == ["ACTOR[0]"]
    assert list(stage.cluster.actors) == ["job/run/ACTOR-0/2"]


async def test_actor_whose_start_was_cancelled_ends_once_it_is_there():
    stage, may_start = Stage(), threading.Event()
    start, find, lookups = stage.cluster.start_actor, stage.cluster.find_actor, []

    def note_lookup(name):
        lookups.append(actor := find(name))
        return actor

    stage.cluster.start_actor = lambda request: may_start.wait(30) and start(request)
    stage.cluster.find_actor = note_lookup
    executor = await stage.execute()
    executor.execute(member(1), stage.events.append)
    await until(lambda: executor._pool._threads._running)
    before = len(lookups)
    executor.execute(Kill(FIRST, 1), stage.events.append)
    await until(lambda: len(lookups) > before)  # the kill finds nothing yet
    may_start.set()
    await until(lambda: stage.cluster.killed)
    assert stage.cluster.actors == {}


async def test_new_member_knows_the_last_step_and_why_it_replaces():
    stage = Stage()
    executor = await stage.execute(member(1))
    executor.take_beat(Heartbeat(process_table.TRAINER_ID, 1, step=5))
    executor.last_causes[FIRST] = "hung: no progress"
    for number, reason in ((2, "hung: no progress"), (3, "other processes had to restart")):
        await stage.continue_with(executor, member(number))
        (actor,) = stage.cluster.actors.values()
        restart = actor.context.restart
        assert (restart.count, restart.reason, restart.step) == (number - 1, reason, 4)


async def test_late_kill_of_a_replaced_member_spares_its_successor():
    stage = Stage()
    executor = await stage.execute(member(1), member(2))
    await until(lambda: stage.cluster.killed == ["ACTOR[0]"])
    executor.execute(Kill(FIRST, 1), stage.events.append)
    await until(lambda: not executor._detached._running)
    assert list(stage.cluster.actors) == ["job/run/ACTOR-0/2"]
