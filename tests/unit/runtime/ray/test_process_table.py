# SPDX-License-Identifier: Apache-2.0
"""The table of a run's processes, and how its actors are named, started, called and ended."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError

from dlrover.python.rl.common.errors import MasterLost
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.spec import LivenessSpec
from dlrover.python.rl.control.events import Cause, CauseKind, Process
from dlrover.python.rl.control.state import JobState, Member, MemberPhase
from dlrover.python.rl.runtime.ray.cluster.api import ActorPlacement
from dlrover.python.rl.runtime.ray.processes import actors
from dlrover.python.rl.runtime.ray.processes.process_table import ActorPool, ProcessEntry, ProcessTable, entries_of
from tests.support.memory_cluster import MemoryActor, MemoryCluster, Method

ROLES = """
actor: {module: toys, class: Policy, num: 2, env: {MEMBER_TOKEN: canary-1, LEVEL: "3"}},
rollout: {module: toys, class: Policy, num: 2}"""
TRAINER = "{module: toys, class: Loop, device_per_node: 4, device_type: CPU}"
JOB = load_job_text(f"{{trainer: {TRAINER}, workload: {{{ROLES}}}}}", "job")
FIRST, SECOND = ProcessId("ACTOR", 0), ProcessId("ACTOR", 1)


@pytest.fixture
def pool():
    cluster = MemoryCluster(("a",))
    return ActorPool(JOB, "run", {}, None, LivenessSpec(), cluster)


@pytest.mark.parametrize(
    ("process_id", "blamed", "culprit"),
    [(TRAINER_ID, "ACTOR[1]", "ACTOR[1]"), (TRAINER_ID, "job", "trainer"), (FIRST, "ACTOR[1]", "ACTOR[0]")],
)
def test_loss_of_a_trainer_may_blame_a_member(process_id, blamed, culprit):
    event = ProcessEntry(process_id, 1).loss(Cause(CauseKind.PROCESS_DIED, blamed, "it is gone"))
    assert event.cause.who == culprit


def test_kept_process_has_its_name_until_it_is_forgotten(pool):
    entry = ProcessEntry(FIRST, 1, slot=0, process=Process("a", 7)).follow(2).follow(3)
    assert pool.name_of(entry) == "job/run/ACTOR-0/1"
    table = ProcessTable()
    table.put(entry)
    entry.former.process = Process("a", 7)
    assert table.clear() == [Process("a", 7)]
    entry.forget_process()
    assert (pool.name_of(entry), entry.located) == ("job/run/ACTOR-0/3", None)


def test_adopted_process_keeps_its_first_name(pool):
    stayed = Member(3, MemberPhase.UP, born=1, process=Process("a", 7, slot=0))
    (entry,) = entries_of(replace(JobState(), members={FIRST: stayed}))
    assert pool.name_of(entry) == "job/run/ACTOR-0/1"


def test_take_slot_prefers_one_with_a_place():
    entry = ProcessEntry(FIRST, 1)
    ProcessTable().take_slot(entry, preferred=0, slots=2, lacking=[0])
    assert entry.slot == 1


def test_neighbours_are_members_of_one_role():
    table = ProcessTable()
    for process_id in (FIRST, SECOND, ProcessId("ROLLOUT", 0)):
        table.put(ProcessEntry(process_id, 1, process=Process("a", 7, address=str(process_id))))
    context = table.neighbours("ACTOR").context(JOB, SECOND, "name")
    assert (context.master_addr, context.local_rank, context.local_world_size) == ("ACTOR[0]", 1, 2)


async def test_second_start_of_a_member_ends_the_first(pool):
    group = pool.cluster.create_group([{}], "job/run/1/node-0")
    entry = ProcessEntry(FIRST, 1, slot=0)
    for _ in range(2):
        await pool.start(entry, ActorPlacement(group=group, bundle=0))
    assert pool.cluster.killed == ["ACTOR[0]"]


def test_end_all_ends_the_trainer_before_members_close(pool):
    async def close():
        assert "trainer" in pool.cluster.killed
        closed.append(True)

    closed = []
    for name, process_id in (("job/run/ACTOR-0/1", FIRST), ("job/run/trainer/1", TRAINER_ID)):
        actor = MemoryActor(SimpleNamespace(name=name, arguments=(process_id,)), "a", 7)
        actor.dlrover_close = Method(close)
        pool.cluster.actors[name] = actor
    asyncio.run(pool.end_all())
    assert closed == [True] and pool.cluster.killed == ["trainer", "ACTOR[0]"]


def test_member_env_has_no_secrets_of_its_role():
    env = actors.member_env(JOB, "ACTOR")
    assert env["LEVEL"] == "3" and not {"MEMBER_TOKEN", "canary-1"} & {*env, *env.values()}


def test_classify_tells_the_memory_monitor_from_other_deaths():
    low = RayActorError(error_msg="killed by the node as it was running low on memory")
    deaths = (OutOfMemoryError("Task was killed"), low, ActorDiedError())
    kinds = [actors.classify(actors.MemberGone("ACTOR[0]", error)).kind for error in deaths]
    assert kinds == [CauseKind.OUT_OF_MEMORY, CauseKind.OUT_OF_MEMORY, CauseKind.PROCESS_DIED]


def test_retry_repeats_a_failed_end(monkeypatch):
    monkeypatch.setattr(actors, "_PAUSE_S", 0.0)
    errors = [ConnectionError("the head is away")]

    async def end():
        if errors:
            raise errors.pop()
        ended.append(True)

    ended = []
    asyncio.run(actors.Detached("job").retry(end))
    assert ended == [True]


async def test_settle_waits_for_a_cancelled_call():
    entered, release, ended = threading.Event(), threading.Event(), []

    def start():
        entered.set()
        ended.append(release.wait(30))

    threads = actors.Threads()
    call = asyncio.create_task(threads.run(start))
    await asyncio.to_thread(entered.wait, 30)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    asyncio.get_running_loop().call_soon(release.set)
    await threads.settle(30.0)
    assert ended == [True]


def calls_that_answer(answer):
    return actors.MasterCalls(SimpleNamespace(follow=SimpleNamespace(remote=lambda: answer)))


async def test_master_call_cancelled_as_its_answer_comes_is_cancelled():
    """A follower asks again and again: with a lost cancellation it would never end."""
    answer = asyncio.get_running_loop().create_future()
    following = asyncio.create_task(calls_that_answer(answer).call("follow", timeout_s=60.0))
    await asyncio.sleep(0.01)
    answer.set_result("update")
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_master_without_an_answer_in_time_is_lost():
    answer = asyncio.get_running_loop().create_future()
    with pytest.raises(MasterLost, match="did not answer within 0.01 s"):
        await calls_that_answer(answer).call("follow", timeout_s=0.01)
    assert answer.cancelled()
