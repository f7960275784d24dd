# SPDX-License-Identifier: Apache-2.0
"""The master of a job beside its executor: its answers, its orders, its hold on the folder, and its end."""

import asyncio
import errno
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.secrets import seal
from dlrover.python.rl.config.spec import LivenessSpec
from dlrover.python.rl.control.commands import Release
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    MasterStarted,
    MemberLost,
    Process,
    RecoveryScope,
    Released,
    Resized,
    RoleSettings,
    StopRequested,
)
from dlrover.python.rl.control.state import JobState, Phase
from dlrover.python.rl.master.process import rl_master
from dlrover.python.rl.master.process.brain import Brain, fresh_journal, submission
from dlrover.python.rl.master.process.rl_master import JobObserver, MasterRun, RLMaster, find_up, replacement
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore, StateStore
from dlrover.python.rl.runtime.member.heartbeat import BeatAnswer, Heartbeat, OomKills
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.run.folder import in_use
from dlrover.python.rl.trainer.trainer import StepReport
from tests.support import control_runs as runs
from tests.support.toy_jobs import toy_job

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


async def test_beat_asks_for_secrets_until_they_are_revealed(make_master):
    master, beat = make_master(*runs.OPEN, sealed=True), Heartbeat(FIRST, 1)
    await has_begun(master)
    assert await master.beat(beat) is BeatAnswer.WITHOUT_SECRETS
    await master.reveal(seal(load_job_text(JOB.format(folder="x"), "job"))[1])
    assert await master.beat(beat) is BeatAnswer.CURRENT


async def test_beat_of_a_kept_member_names_its_lost_peer(make_master):
    master = make_master()
    await has_begun(master)
    state = runs.Run(*runs.OPEN).state
    member = replace(state.members[FIRST], incarnation=2, born=1)
    master._run.brain.state = replace(state, members={**state.members, FIRST: member})
    answers = [await master.beat(Heartbeat(FIRST, number)) for number in (1, 2)]
    assert answers == [BeatAnswer.PEER_LOST, BeatAnswer.CURRENT]


async def test_master_without_its_journal_fails_and_releases_all(make_master, monkeypatch):
    monkeypatch.setattr(rl_master, "_JOURNAL_S", -1.0)
    master = make_master()
    assert await master.beat(Heartbeat(FIRST, 1)) is BeatAnswer.CURRENT
    await settle(master)
    assert master._executor.commands == [Release(1, final=True)]
    assert master._state.phase is Phase.FAILED and errors.JournalCorrupt.__name__ in master._state.failure.message
    assert master.notes == ["failed", "ends"]


async def test_master_restarted_after_the_end_adopts_nothing(make_master):
    master = make_master(*runs.OPEN, StopRequested("enough"), Released(1))
    await master._resume_job()
    await settle(master)
    assert (master._executor.adopted, master._executor.commands) == ([], [])
    assert "stopped" in master.notes


async def test_replaced_master_leaves(make_master):
    def refuse(events):
        raise errors.StaleEpoch("another process writes the journal")

    master = make_master(*runs.OPEN)
    master._run.brain.handle_all = refuse
    master._events.put_nowait(StopRequested("enough"))
    master._spawn(master._handle_events())
    await settle(master)
    assert master.notes == ["replaced"] and master._executor.commands == []


async def test_hung_member_is_killed_and_its_successor_knows_why(make_master):
    master, process = make_master(*runs.OPEN), Process("a", 7)
    event = runs.lost("ROLLOUT", 0, kind=CauseKind.HUNG)
    for hung in (event, runs.lost("ROLLOUT", 1, incarnation=9)):  # the second one changes nothing
        master._hang_detector.condemned[hung] = process
        for handled in master._run.brain.handle_all([hung]):
            master._carry_out(handled)
    await settle(master)
    assert master.notes == [process]
    assert master._executor.last_causes == {ProcessId("ROLLOUT", 0): "hung: it is gone"}


async def test_renew_for_a_replaced_trainer_is_refused(make_master):
    master = make_master(*runs.OPEN, runs.trainer_lost())
    await has_begun(master)
    with pytest.raises(errors.JobFailed, match="this trainer has been replaced by a later one"):
        await master.renew(1, "ROLLOUT", 0, 1, runs.cause(), 0.0)


async def test_renew_after_a_failed_link_blames_the_dead_rank(make_master):
    master = make_master(*runs.OPEN)
    await has_begun(master)
    renewing = asyncio.create_task(master.renew(1, "ACTOR", 0, 1, LINK, 0.0))
    await asyncio.sleep(0)
    master._run.brain.handle(runs.lost("ACTOR", 1))
    await master._notify_followers()
    assert await renewing is None
    assert master._events.empty()


async def test_renew_names_the_oom_killer_of_the_members_host(make_master):
    master = make_master(*runs.OPEN)
    await has_begun(master)
    kills, member = master._executor.nodes.oom_kills, master._state.members[ProcessId("ROLLOUT", 0)]
    kills.note(ProcessId("ROLLOUT", 0), member.process, 1)
    kills.note(ProcessId("ROLLOUT", 1), member.process, 2)
    await master.renew(1, "ROLLOUT", 0, 1, runs.cause(), 0.0)
    event = master._events.get_nowait()
    assert isinstance(event, MemberLost) and event.cause.kind is CauseKind.OUT_OF_MEMORY


# -- other sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "error"),
    [("done", None), ("restarted", "'job' was restarted"), ("no place", "stays as it is: the cluster is full")],
)
async def test_refused_resize_is_an_error(make_master, monkeypatch, outcome, error):
    monkeypatch.setattr(rl_master, "inspect_in_child", lambda job: Inspection())
    monkeypatch.setattr(rl_master, "_NEXT_STEP_S", 0.0)

    async def enlarge(*arguments):
        if outcome == "no place":
            raise errors.PlacementTimeout("the cluster is full")

    master = make_master(*runs.OPEN)
    await has_begun(master)
    master._executor.reservations = SimpleNamespace(enlarge=enlarge)
    resizing = asyncio.create_task(master.resize("ROLLOUT", 3))
    if outcome != "no place":
        event = await master._events.get()
        assert event == Resized("ROLLOUT", 3)
        master._run.brain.handle(event if outcome == "done" else StopRequested("restarted"))
        await master._notify_followers()
    with pytest.raises(errors.CallError, match=error) if error else nullcontext():
        await resizing


# -- its reports ------------------------------------------------------------------------------------------------------


def test_position_of_another_boot_counts_from_zero(tmp_path):
    observer = JobObserver(toy_job(tmp_path))
    boot, _ = observer.update(JobState(incarnation=1), 0).position
    assert observer.count_at(("", 0)) == 0
    assert observer.count_at((boot, 7)) == 7
    assert observer.count_at(("another", 7)) == 0


def test_update_after_reports_were_dropped_has_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_master, "_MAX_REPORTS", 2)
    observed = JobObserver(toy_job(tmp_path))
    for step in range(1, 5):
        observed.report(StepReport(step, 4, {}))
    fresh = [[report.step for report in observed.update(JobState(incarnation=1), since).reports] for since in range(5)]
    assert fresh == [[3, 4], [3, 4], [3, 4], [4], []]


def test_observer_of_a_resumed_master_replays_the_journal(tmp_path):
    job = toy_job(tmp_path)
    brain = Brain(FileStateStore(fresh_journal(job)))
    for event in (MasterStarted(pid=7), submission(job, "run", Inspection(), brain)):
        brain.handle(event)
    brain.store.close()
    observed = JobObserver(job)
    observed.open(0.0, resumed=True)
    assert observed.metrics._state == brain.state


# -- the folder of its run --------------------------------------------------------------------------------------------


def hold_of(folder, claims=True):
    job = load_job_text(JOB.format(folder=folder), "job")
    return MasterRun(replace(job, run="1"), claims=claims)


def test_leave_with_a_failing_folder_ends_the_run(tmp_path, monkeypatch, caplog):
    def fail(folder):
        raise OSError(errno.EIO, "simulated", str(folder))

    monkeypatch.setattr(rl_master, "copy_all_rests", fail)
    hold, outcomes = hold_of(tmp_path, claims=False), []
    hold._claim = SimpleNamespace(end=outcomes.append)
    hold.leave("failed")
    assert outcomes == ["failed"]
    assert "the end of job could not be recorded in its folder" in caplog.text


async def test_begin_with_an_unusable_folder_names_it_and_frees_it(tmp_path, monkeypatch):
    def fail(job):
        assert in_use(tmp_path)
        raise OSError(errno.EACCES, "simulated")

    monkeypatch.setattr(rl_master, "current_address", lambda: "127.0.0.1:1")
    monkeypatch.setattr(rl_master.brain, "fresh_journal", fail)
    with pytest.raises(errors.InvalidJob, match="job_dir: the master cannot use it: .*simulated"):
        await hold_of(tmp_path).begin()
    assert not in_use(tmp_path)
    assert (tmp_path / "cluster").read_text() == "127.0.0.1:1"


@pytest.mark.parametrize(("owner", "leaves"), [("1", True), ("2", False)])
async def test_hold_of_a_run_taken_by_its_next_master_leaves(tmp_path, monkeypatch, owner, leaves):
    def refuse():
        raise errors.JobConflict("another process has the folder")

    departures, hold = [], hold_of(tmp_path)
    monkeypatch.setattr(rl_master.run_folder, "BEAT_S", 0.0)
    monkeypatch.setattr(rl_master, "leave", departures.append)
    monkeypatch.setattr(rl_master.run_folder, "newest_owner", lambda folder: SimpleNamespace(run=owner))
    hold._claim = SimpleNamespace(beat=refuse)
    with pytest.raises(errors.JobConflict):
        await hold.hold(lambda: False)
    assert bool(departures) is leaves


# -- replacements -----------------------------------------------------------------------------------------------------


ROLES = {"ACTOR": RoleSettings(2, RecoveryScope.GROUP), "ROLLOUT": RoleSettings(2)}


def after(*events):
    return runs.Run(*runs.OPEN, *events, terms=replace(runs.TERMS, roles=ROLES)).state


def replaced(state, role, rank, incarnation):
    def name_of(role, rank, first, standby):
        return f"{role}-{rank}.{first}.{standby}"

    return replacement(state, role, rank, incarnation, name_of)


def test_find_up_finds_the_current_incarnation_only():
    state, lost = after(), after(runs.lost("ROLLOUT", 0))
    assert find_up(state, "ROLLOUT", 0, 1) is state.members[ProcessId("ROLLOUT", 0)]
    missing = [(state, 0, 2), (state, 5, 1), (lost, 0, 1), (lost, 0, 2)]
    assert [find_up(state, "ROLLOUT", rank, number) for state, rank, number in missing] == [None] * 4


def test_replacement_of_a_member_is_known_once_it_is_up():
    assert replaced(after(), "ROLLOUT", 0, 1) is None
    assert replaced(after(runs.lost("ROLLOUT", 0)), "ROLLOUT", 0, 1) is None
    state = after(runs.lost("ROLLOUT", 0), runs.started("ROLLOUT", 0, 2))
    assert replaced(state, "ROLLOUT", 0, 1) == {0: (2, "ROLLOUT-0.2.-1"), 1: (1, "ROLLOUT-1.1.-1")}
    assert replaced(state, "ROLLOUT", 0, 2) is None


def test_replacement_of_a_group_is_known_once_all_are_up():
    events = [runs.lost("ACTOR", 1), runs.started("ACTOR", 1, 2)]
    assert replaced(after(*events), "ACTOR", 1, 1) is None
    assert set(replaced(after(*events, runs.started("ACTOR", 0, 2)), "ACTOR", 1, 1)) == {0, 1}


def test_replacement_in_an_ending_job_is_an_error():
    state = after(runs.lost("ROLLOUT", 0), StopRequested("enough"))
    with pytest.raises(errors.JobFailed, match=r"ROLLOUT\[0\] is not replaced: the job is ending. enough"):
        replaced(state, "ROLLOUT", 0, 1)
