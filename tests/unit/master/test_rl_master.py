# SPDX-License-Identifier: Apache-2.0
"""The master of a job beside its executor: what it answers, what it tells the executor, and how it ends."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common.errors import CallError, JobFailed, JournalCorrupt, PlacementTimeout, StaleEpoch
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.secrets import seal
from dlrover.python.rl.config.spec import LivenessSpec
from dlrover.python.rl.control.commands import Release
from dlrover.python.rl.control.events import Cause, CauseKind, MemberLost, Process, Released, Resized, StopRequested
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.process import rl_master
from dlrover.python.rl.master.process.brain import Brain
from dlrover.python.rl.master.process.rl_master import MasterRun, RLMaster
from dlrover.python.rl.runtime.checkpoint.journal_store import StateStore
from dlrover.python.rl.runtime.member.heartbeat import BeatAnswer, Heartbeat, OomKills
from dlrover.python.rl.runtime.member.inspection import Inspection
from tests.support import control_runs as runs

JOB = """
trainer: {{module: toys, class: Loop, device_per_node: 4, device_type: CPU}}
workload:
  actor: {{module: toys, class: Policy, num: 2}}
  rollout: {{module: toys, class: Policy, num: 2, standby: 1}}
env: {{API_KEY: canary-1}}
job_dir: {folder}
"""
FIRST = ProcessId("ACTOR", 0)
LINK = Cause(CauseKind.LINK_FAILED, "ACTOR[0]", "NCCL communicator was aborted")


class Executor:
    """An executor that notes what it is told; everything is released at once."""

    def __init__(self, plan, master, cluster):
        self.beats, self.last_causes, self.commands, self.adopted = LivenessSpec(), {}, [], []
        self.nodes = SimpleNamespace(oom_kills=OomKills("master's host"))
        self.open_step = 0

    def execute(self, command, emit):
        self.commands.append(command)
        if isinstance(command, Release):
            emit(Released(command.incarnation))

    def take_beat(self, beat):
        self.open_step = beat.step

    def process_of(self, process_id):
        return None

    def reveal(self, secrets):
        pass

    def name_of(self, role, rank, incarnation, standby):
        return f"job/0a1b/{role}-{rank}/{incarnation}"

    async def adopt(self, state, emit):
        self.adopted.append(state)
        return 0


@pytest.fixture
def make_master(tmp_path, monkeypatch):
    """Makes a master whose journal has some events; ``notes`` has what it did to processes, its own among them."""
    notes = []

    async def kill(cluster, process):
        notes.append(process)

    async def end_later(actor, after_s):
        notes.append("ends")

    stubs = {
        "configure_logging": lambda name: None,
        "RayExecutor": Executor,
        "current_actor": lambda: None,
        "was_restarted": lambda: False,
        "end_unless": lambda *of: None,
        "end_later": end_later,
        "kill_process": kill,
        "leave": lambda why: notes.append("replaced"),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(rl_master, name, stub)
    monkeypatch.setattr(MasterRun, "leave", lambda self, outcome: notes.append(outcome))

    def make(*events, sealed=False):
        job = load_job_text(JOB.format(folder=tmp_path), "job")
        job = replace(seal(job)[0] if sealed else job, run="0a1b")
        master = RLMaster(job, None, Inspection(collectives=("ACTOR",)), claims=False)
        master._run.brain = Brain(StateStore())
        for event in (runs.TERMS, *events):
            master._run.brain.handle(event)
        master.notes = notes
        return master

    return make


async def has_begun(master):
    master._tasks.append(asyncio.create_task(asyncio.sleep(0)))


async def settle(master):
    with suppress(TimeoutError):
        async with asyncio.timeout(20):
            await asyncio.gather(*master._tasks)


def test_beat_asks_for_secrets_until_they_are_revealed(make_master):
    async def scenario():
        master, beat = make_master(*runs.OPEN, sealed=True), Heartbeat(FIRST, 1)
        await has_begun(master)
        answers = [await master.beat(beat)]
        await master.reveal(seal(load_job_text(JOB.format(folder="x"), "job"))[1])
        return [*answers, await master.beat(beat)]

    assert asyncio.run(scenario()) == [BeatAnswer.WITHOUT_SECRETS, BeatAnswer.CURRENT]


def test_beat_of_a_member_whose_group_goes_on_says_so(make_master):
    async def scenario():
        master = make_master()
        await has_begun(master)
        stayed = replace(runs.Run(*runs.OPEN).state.members[FIRST], incarnation=2, born=1)
        state = runs.Run(*runs.OPEN).state
        master._run.brain.state = replace(state, members={**state.members, FIRST: stayed})
        return [await master.beat(Heartbeat(FIRST, number)) for number in (1, 2)]

    assert asyncio.run(scenario()) == [BeatAnswer.PEER_LOST, BeatAnswer.CURRENT]


def test_master_without_its_journal_fails_and_releases_all(make_master, monkeypatch):
    monkeypatch.setattr(rl_master, "_JOURNAL_S", -1.0)

    async def scenario():
        master = make_master()
        assert await master.beat(Heartbeat(FIRST, 1)) is BeatAnswer.CURRENT
        await settle(master)
        return master

    master = asyncio.run(scenario())
    assert master._executor.commands == [Release(1, final=True)]
    assert master._state.phase is Phase.FAILED and JournalCorrupt.__name__ in master._state.failure.message
    assert master.notes == ["failed", "ends"]


def test_master_that_is_back_after_the_end_adopts_nothing(make_master):
    async def scenario():
        master = make_master(*runs.OPEN, StopRequested("enough"), Released(1))
        await master._resume_job()
        await settle(master)
        return master

    master = asyncio.run(scenario())
    assert (master._executor.adopted, master._executor.commands) == ([], [])
    assert "stopped" in master.notes


def test_master_that_was_replaced_leaves(make_master):
    def refuse(events):
        raise StaleEpoch("another process writes the journal")

    async def scenario():
        master = make_master(*runs.OPEN)
        master._run.brain.handle_all = refuse
        master._events.put_nowait(StopRequested("enough"))
        master._spawn(master._handle_events())
        await settle(master)
        return master

    master = asyncio.run(scenario())
    assert master.notes == ["replaced"] and master._executor.commands == []


def test_hung_member_is_killed_and_its_successor_knows_why(make_master):
    async def scenario():
        master, process = make_master(*runs.OPEN), Process("a", 7)
        event = runs.lost("ROLLOUT", 0, kind=CauseKind.HUNG)
        for hung in (event, runs.lost("ROLLOUT", 1, incarnation=9)):  # the second one changes nothing
            master._hang_detector.condemned[hung] = process
            for handled in master._run.brain.handle_all([hung]):
                master._carry_out(handled)
        await settle(master)
        return master

    master = asyncio.run(scenario())
    assert master.notes == [Process("a", 7)]
    assert master._executor.last_causes == {ProcessId("ROLLOUT", 0): "hung: it is gone"}


def test_renew_for_a_replaced_trainer_is_refused(make_master):
    async def scenario():
        master = make_master(*runs.OPEN, runs.trainer_lost())
        await has_begun(master)
        await master.renew(1, "ROLLOUT", 0, 1, runs.cause(), 0.0)

    with pytest.raises(JobFailed, match="this trainer has been replaced by a later one"):
        asyncio.run(scenario())


def test_renew_after_a_failed_link_blames_the_rank_that_died(make_master):
    async def scenario():
        master = make_master(*runs.OPEN)
        await has_begun(master)
        renewing = asyncio.create_task(master.renew(1, "ACTOR", 0, 1, LINK, 0.0))
        await asyncio.sleep(0)
        master._run.brain.handle(runs.lost("ACTOR", 1))
        await master._notify_followers()
        assert await renewing is None
        return master._events

    assert asyncio.run(scenario()).empty()


def test_renew_names_the_oom_killer_of_the_members_host(make_master):
    async def scenario():
        master = make_master(*runs.OPEN)
        await has_begun(master)
        kills, member = master._executor.nodes.oom_kills, master._state.members[ProcessId("ROLLOUT", 0)]
        kills.note(ProcessId("ROLLOUT", 0), member.process, 1)
        kills.note(ProcessId("ROLLOUT", 1), member.process, 2)
        await master.renew(1, "ROLLOUT", 0, 1, runs.cause(), 0.0)
        return master._events.get_nowait()

    event = asyncio.run(scenario())
    assert isinstance(event, MemberLost) and event.cause.kind is CauseKind.OUT_OF_MEMORY


# -- other sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "error"),
    [("done", None), ("restarted", "'job' was restarted"), ("no place", "stays as it is: the cluster is full")],
)
def test_resize_says_when_it_was_not_done(make_master, monkeypatch, outcome, error):
    monkeypatch.setattr(rl_master, "inspect_in_child", lambda job: Inspection())
    monkeypatch.setattr(rl_master, "_NEXT_STEP_S", 0.0)

    async def enlarge(*arguments):
        if outcome == "no place":
            raise PlacementTimeout("the cluster is full")

    async def scenario():
        master = make_master(*runs.OPEN)
        await has_begun(master)
        master._executor.reservations = SimpleNamespace(enlarge=enlarge)
        resizing = asyncio.create_task(master.resize("ROLLOUT", 3))
        if outcome != "no place":
            event = await master._events.get()
            master._run.brain.handle(event if outcome == "done" else StopRequested("restarted"))
            await master._notify_followers()
        await resizing
        return event

    if error is None:
        assert asyncio.run(scenario()) == Resized("ROLLOUT", 3)
    else:
        with pytest.raises(CallError, match=error):
            asyncio.run(scenario())
