# SPDX-License-Identifier: Apache-2.0
"""The brain: saved before ordered, replayed after a restart, silent about what changes nothing; its status."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import JobConflict, JournalCorrupt
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.spec import RestartSpec
from dlrover.python.rl.control.commands import Place, StartMembers, StartTrainer
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    MasterStarted,
    MemberLost,
    MemberStarted,
    Placed,
    Process,
    Progressed,
    RecoveryScope,
    Released,
    RoleSettings,
    StandbyReady,
    StepsOpened,
    Submitted,
    TrainerLost,
    TrainerStarted,
    WaitOver,
)
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import outstanding
from dlrover.python.rl.control.state import JobState, Member, MemberPhase, Phase, Standby, StandbyPhase
from dlrover.python.rl.master.process.brain import Brain, earlier_journal, fresh_journal, submission
from dlrover.python.rl.master.process.status import recoveries, status_of
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore, StateStore
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.run.folder import new_run
from dlrover.python.rl.trainer.trainer import StepReport
from tests.support.manual_clock import ManualClock
from tests.support.toy_jobs import toy_job

SUBMITTED = Submitted("toy", {"ACTOR": RoleSettings(1)}, "run", 3, 3, backoff_s=0.5)
GONE = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone")
LOST = MemberLost("ACTOR", 0, 1, GONE)
HERE = Process("node", 7, "host", "127.0.0.1", 1234, 0, "2,3")
RUNNING = (SUBMITTED, Placed(1), MemberStarted("ACTOR", 0, 1, HERE), TrainerStarted(1, Process("node", 8, "host")))


class FullDisk(StateStore):
    def append(self, *lines):
        raise OSError("no space left on device")


def saved(store):
    """The events of a journal, without their times."""
    return [event for _, event in decode(store.read())]


def test_event_is_saved_with_its_time_before_its_commands():
    store, clock = StateStore(), ManualClock(12.5)
    brain = Brain(store, clock, clock)
    assert brain.handle(SUBMITTED) == (Place(1),)
    clock.advance(0.25)
    brain.handle(Placed(1))
    assert decode(store.read()) == [(12.5, SUBMITTED), (12.75, Placed(1))]


def test_handle_all_decides_one_by_one_and_saves_at_once():
    class Counting(StateStore):
        appends = 0

        def append(self, *lines):
            self.appends += 1
            super().append(*lines)

    store = Counting()
    brain = Brain(store)
    handled = brain.handle_all([*RUNNING, RUNNING[-1]])
    events, before, after, commands = zip(*handled, strict=True)
    assert events == (*RUNNING, RUNNING[-1])
    assert commands[1] == (StartMembers("ACTOR", ((0, 1),)),) and not commands[-1]
    assert all(later is earlier for earlier, later in zip(after, before[1:], strict=False)) and brain.state is after[-1]
    assert store.appends == 1 and saved(store) == list(RUNNING)


@pytest.mark.parametrize("events", [[SUBMITTED], RUNNING], ids=["one", "several"])
def test_unsaved_events_have_no_effect(events):
    brain = Brain(FullDisk())
    with pytest.raises(OSError, match="no space"):
        brain.handle_all(events)
    assert brain.state == JobState()


def test_event_without_effect_is_not_saved():
    store = StateStore()
    brain = Brain(store)
    for event in (SUBMITTED, SUBMITTED, Placed(7), WaitOver("job#2"), Placed(1), Placed(1), Released(1)):
        brain.handle(event)
    assert saved(store) == [SUBMITTED, Placed(1)]


DAY_S = 86400.0


@pytest.mark.parametrize("is_restarted", [False, True], ids=["same master", "restarted"])
@pytest.mark.parametrize("set_by_s", [-DAY_S, 0.0, DAY_S])
@pytest.mark.parametrize(("later_s", "phase"), [(1.0, Phase.ENDING), (61.0, Phase.RESTARTING)])
def test_brain_after_clock_was_set_counts_the_same_window(is_restarted, set_by_s, later_s, phase):
    wall, steady, store = ManualClock(10 * DAY_S), ManualClock(5.0), StateStore()
    brain = Brain(store, wall, steady)
    brain.handle_all([replace(SUBMITTED, job_max_restart=1, window_s=60.0), Placed(1), LOST, Released(1), Placed(2)])
    wall.advance(set_by_s)
    brain = Brain(store, wall, steady) if is_restarted else brain
    for clock in (wall, steady):
        clock.advance(later_s)
    brain.handle(replace(LOST, incarnation=2))
    is_forgiven = is_restarted and set_by_s > 0  # nothing tells a restarted master that no day has passed
    assert brain.state.phase is (Phase.RESTARTING if is_forgiven else phase)


# -- submissions ------------------------------------------------------------------------------------------------------


def test_submission_has_scopes_standbys_limits_and_its_run(tmp_path):
    brain, run, job = Brain(StateStore()), new_run(), toy_job(tmp_path)
    workloads = {role: replace(spec, standby=int(role == "REWARD")) for role, spec in job.workloads.items()}
    job = replace(job, workloads=workloads, restart=RestartSpec(2, 3, {"reward": 4}, 0.5, 60.0, 5))
    event = submission(job, run, Inspection(collectives=("ACTOR",)), brain)
    roles = {"ACTOR": RoleSettings(2, RecoveryScope.GROUP), "REWARD": RoleSettings(2, standby=1, max_restart=4)}
    assert event == Submitted(
        "toy", roles, run, job_max_restart=2, trainer_max_restart=3, backoff_s=0.5, window_s=60.0, node_max_failures=5
    )
    brain.handle(event)
    with pytest.raises(JobConflict, match="already holds a run of 'toy'"):
        submission(job, run, Inspection(), brain)


# -- a restarted master -----------------------------------------------------------------------------------------------


def submitted(job, run="run"):
    """A job whose master has got as far as its submission."""
    brain = Brain(FileStateStore(fresh_journal(job)))
    brain.handle(MasterStarted(pid=7))
    brain.handle(submission(job, run, Inspection(), brain))
    brain.store.close()
    return brain.state


def test_restarted_master_finds_its_journal(tmp_path):
    job = toy_job(tmp_path / "out")
    assert earlier_journal(job, "run") is None
    state = submitted(job)
    back = earlier_journal(job, "run")
    assert back.state == state
    assert outstanding(back.state) == (Place(1),)
    back.handle(MasterStarted(pid=8))
    assert back.state.master_starts == 2
    back.store.close()


def test_restarted_run_numbers_its_processes_higher(tmp_path):
    job = toy_job(tmp_path / "out")
    assert (submitted(job).epoch, submitted(job).epoch, submitted(job).epoch) == (1, 2, 3)
    brain = Brain(FileStateStore(tmp_path / "out" / "journal.jsonl"))
    brain.handle(Placed(1))
    brain.handle(MemberLost("ACTOR", 0, 3, GONE))
    assert brain.state.members[ProcessId("ACTOR", 0)].incarnation == 4
    brain.store.close()
    again = submitted(job)
    assert {member.incarnation for member in again.members.values()} == {again.epoch} == {5}
    assert submitted(job, "another").epoch == 1


def test_journals_of_all_earlier_starts_stay(tmp_path):
    job = toy_job(tmp_path / "out")
    for run in ("first", "second", "third"):
        submitted(job, run)
    for number, run in ((".1", "first"), (".2", "second"), ("", "third")):
        assert f'"{run}"' in (tmp_path / "out" / f"journal{number}.jsonl").read_text()


def test_the_journal_of_another_run_is_not_its_own(tmp_path):
    job = toy_job(tmp_path / "out")
    submitted(job, "earlier")
    assert earlier_journal(job, "run") is None
    assert fresh_journal(job) == tmp_path / "out" / "journal.jsonl"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"journal.1.jsonl"}


def test_restarted_master_refuses_a_damaged_journal(tmp_path):
    job = toy_job(tmp_path / "out")
    submitted(job)
    journal = tmp_path / "out" / "journal.jsonl"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    with pytest.raises(JournalCorrupt, match=str(journal)):
        earlier_journal(job, "run")
    assert journal.read_bytes() == content


# -- the status -------------------------------------------------------------------------------------------------------


def test_the_status_of_a_job():
    brain = Brain(StateStore())
    assert status_of(toy_job(Path("out")), brain.state, None).phase is Phase.CREATED
    brain.handle(MasterStarted(pid=6))
    for event in RUNNING:
        brain.handle(event)
    status = status_of(toy_job(Path("out")), brain.state, StepReport(3, 10, {}))
    assert (status.phase, status.incarnation, status.restarts, status.masters) == (Phase.RUNNING, 1, 0, 1)
    assert status.members == (("ACTOR[0]", "host", 7, "2,3"), ("trainer", "host", 8, ""))
    assert (status.step, status.total_steps, status.cause, status.recoveries) == (3, 10, None, {})
    brain.handle(StepsOpened(1))
    brain.handle(Progressed(1, 2))
    assert status_of(toy_job(Path("out")), brain.state, None).step == 2, "after a restart of the master"
    for event in (TrainerLost(1, Cause(CauseKind.USER_ERROR, "trainer", "words")), Released(1)):
        brain.handle(event)
    status = status_of(toy_job(Path("out")), brain.state, None)
    assert (status.phase, status.cause.who, status.members) == (Phase.FAILED, "trainer", ())
    assert status.reason == "trainer: words (user_error is not retried)"


def test_status_counts_recoveries_and_names_the_standbys():
    roles = {"ACTOR": RoleSettings(1, standby=1)}
    brain = Brain(StateStore())
    for event in (replace(SUBMITTED, roles=roles), *RUNNING[1:], StepsOpened(1), LOST):
        brain.handle(event)
    brain.handle(StandbyReady("ACTOR", 0, Process("node", 9, "host")))
    dead = TrainerLost(1, Cause(CauseKind.PROCESS_DIED, "trainer", "gone"))
    assert any(isinstance(command, StartTrainer) for command in brain.handle(dead))
    status = status_of(toy_job(Path("out")), brain.state, None)
    assert (status.phase, status.restarts, status.recoveries) == (Phase.RUNNING, 0, {"ACTOR": 1, "trainer": 1})
    assert status.last_failure == "trainer: process_died: gone"
    assert status.members == (("ACTOR-standby[0]", "host", 9, ""),)


DIED = Cause(CauseKind.PROCESS_DIED, "ROLLOUT[1]", "the process is gone")
HUNG = replace(DIED, kind=CauseKind.HUNG, who="trainer", message="no sign of life for 3.2 s")


@pytest.mark.parametrize(
    ("event", "lines"),
    [
        (MemberLost("ROLLOUT", 1, 1, DIED), ["ROLLOUT[1]: process_died: the process is gone"]),
        (TrainerLost(1, HUNG), ["trainer: hung: no sign of life for 3.2 s"]),
        (MemberStarted("ROLLOUT", 1, 2), ["ROLLOUT[1] is back: attempt 2 (a new process)"]),
        (MemberStarted("ROLLOUT", 1, 2, standby=0), ["ROLLOUT[1] is back: attempt 2 (standby 0)"]),
        (TrainerStarted(2), ["the trainer is back: attempt 2"]),
        (MemberStarted("ROLLOUT", 1, 1), []),
        (TrainerStarted(1), []),
    ],
)
def test_recoveries_of_an_event_are_lines_of_the_log(event, lines):
    before = JobState()
    assert list(recoveries(before, replace(before, incarnation=1), event)) == lines
    assert list(recoveries(before, before, event)) == [], "it changed nothing"


def test_status_shows_a_standby_taking_over_once(tmp_path):
    process = Process("a", 7, "host")
    members = {ProcessId("ACTOR", 0): Member(2, MemberPhase.UP, process, standby=0)}
    standbys = {
        "ACTOR": {0: Standby(StandbyPhase.TAKING, process), 1: Standby(StandbyPhase.READY, replace(process, pid=8))}
    }
    status = status_of(toy_job(tmp_path), JobState(members=members, standbys=standbys), None)
    assert [(each.process, each.pid) for each in status.members] == [("ACTOR[0]", 7), ("ACTOR-standby[1]", 8)]
