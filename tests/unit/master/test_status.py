# SPDX-License-Identifier: Apache-2.0
"""What is said of a job: in the log when something is recovered, and to those who follow its reports."""

from dataclasses import replace

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    MasterStarted,
    MemberLost,
    MemberStarted,
    Process,
    TrainerLost,
    TrainerStarted,
)
from dlrover.python.rl.control.state import JobState, Member, MemberPhase, Standby, StandbyPhase
from dlrover.python.rl.master.process import rl_master
from dlrover.python.rl.master.process.brain import Brain, fresh_journal, submission
from dlrover.python.rl.master.process.rl_master import JobObserver
from dlrover.python.rl.master.process.status import recoveries, status_of
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.trainer.trainer import StepReport
from tests.support.toy_jobs import toy_job

BEFORE = JobState()
AFTER = replace(BEFORE, incarnation=1)
GONE = Cause(CauseKind.PROCESS_DIED, "ROLLOUT[1]", "the process is gone")


def said(event, after=AFTER):
    return list(recoveries(BEFORE, after, event))


def test_a_loss_is_said_with_its_cause():
    assert said(MemberLost("ROLLOUT", 1, 1, GONE)) == ["ROLLOUT[1]: process_died: the process is gone"]
    cause = replace(GONE, kind=CauseKind.HUNG, who="trainer", message="no sign of life for 3.2 s")
    assert said(TrainerLost(1, cause)) == ["trainer: hung: no sign of life for 3.2 s"]


def test_who_is_back_is_said_and_how():
    assert said(MemberStarted("ROLLOUT", 1, 2)) == ["ROLLOUT[1] is back: attempt 2 (a new process)"]
    assert said(MemberStarted("ROLLOUT", 1, 2, standby=0)) == ["ROLLOUT[1] is back: attempt 2 (standby 0)"]
    assert said(TrainerStarted(2)) == ["the trainer is back: attempt 2"]


def test_a_first_start_and_what_changes_nothing_are_not_worth_a_line():
    assert said(MemberStarted("ROLLOUT", 1, 1)) == said(TrainerStarted(1)) == []
    assert said(MemberLost("ROLLOUT", 1, 1, GONE), after=BEFORE) == []


def test_position_of_another_boot_counts_from_zero(tmp_path):
    observer = JobObserver(toy_job(tmp_path))
    _, _, (boot, _) = observer.update(AFTER, 0)
    assert observer.count_at(("", 0)) == 0
    assert observer.count_at((boot, 7)) == 7
    assert observer.count_at(("another", 7)) == 0


def test_update_after_reports_were_dropped_has_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_master, "_MAX_REPORTS", 2)
    observed = JobObserver(toy_job(tmp_path))
    for step in range(1, 5):
        observed.report(StepReport(step, 4, {}))
    fresh = [[report.step for report in observed.update(AFTER, since)[1]] for since in range(5)]
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


def test_status_shows_a_standby_that_takes_over_once(tmp_path):
    process = Process("a", 7, "host")
    members = {ProcessId("ACTOR", 0): Member(2, MemberPhase.UP, process, standby=0)}
    standbys = {
        "ACTOR": {0: Standby(StandbyPhase.TAKING, process), 1: Standby(StandbyPhase.READY, replace(process, pid=8))}
    }
    status = status_of(toy_job(tmp_path), JobState(members=members, standbys=standbys), None)
    assert [(each.process, each.pid) for each in status.members] == [("ACTOR[0]", 7), ("ACTOR-standby[1]", 8)]
