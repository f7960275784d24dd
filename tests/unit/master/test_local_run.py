# SPDX-License-Identifier: Apache-2.0
"""A whole job in one process: how each ending looks."""

import socket
import sys
import threading
from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import JobConflict
from dlrover.python.rl.config.spec import RestartSpec
from dlrover.python.rl.control.commands import Release, StartMembers
from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here
from dlrover.python.rl.master.process.brain import run_local
from dlrover.python.rl.runtime.checkpoint.journal_store import StateStore
from dlrover.python.rl.runtime.local import LocalExecutor
from dlrover.python.rl.runtime.run.folder import in_use
from dlrover.python.rl.trainer.trainer import StepReport
from tests.support import toy_jobs
from tests.support.toy_jobs import toy_job

MEMBERS = ["ACTOR-0", "ACTOR-1", "REWARD-0", "REWARD-1"]
NAMES = [f"{member}/1" for member in MEMBERS]


@pytest.fixture
def run(tmp_path):
    """Run a toy job; gives its status. ``run.reports``, ``run.events()`` and ``run.closed()`` say what else happened.

    The names of what was closed are told without ``toy/<run>/``, which differs from run to run.
    """

    def go(trainer="Loop", actor="Adder", restart=None, **config):
        job = toy_job(tmp_path, trainer, actor, **config)
        if restart is not None:
            job = replace(job, restart=restart)
        placement, problems = plan(job)
        assert not problems
        go.store = StateStore()
        return run_local(job, placement, go.reports.append, go.store)

    def events():
        return [event for _, event in decode(go.store.read())]

    def closed():
        prefix = f"toy/{events()[0].run}/"
        assert all(name.startswith(prefix) for name in toy_jobs.CLOSED)
        return [name.removeprefix(prefix) for name in toy_jobs.CLOSED]

    go.reports, go.events, go.closed = [], events, closed
    toy_jobs.CLOSED.clear()
    return go


def test_a_job_finishes(run):
    status = run(steps=3)
    assert (status.phase, status.reason, status.cause) == (Phase.FINISHED, "the trainer returned", None)
    assert (status.step, status.total_steps, status.restarts, status.members) == (3, 3, 0, ())
    assert run.reports == [StepReport(step, 3, {"loss": total}) for step, total in ((1, 2.0), (2, 6.0), (3, 12.0))]
    assert run.closed() == NAMES
    assert [type(event).__name__ for event in run.events()] == [
        "Submitted",
        "Placed",
        *["MemberStarted"] * 4,
        "TrainerStarted",
        "StepsOpened",
        "Progressed",
        "TrainerFinished",
        "Released",
    ]


def test_an_error_in_the_trainer_is_the_cause(run):
    status = run("FailingInit")
    assert (status.phase, status.restarts) == (Phase.FAILED, 0)
    assert (status.cause.kind, status.cause.who) == (CauseKind.USER_ERROR, "trainer")
    assert status.cause.message == "ValueError: the user's own words"
    assert "in init" in status.cause.detail
    assert status.reason == "trainer: ValueError: the user's own words (user_error is not retried)"
    assert run.closed() == NAMES


def test_an_error_in_a_workload_names_role_rank_and_method(run):
    status = run("CallsFail")
    assert (status.phase, status.cause.who) == (Phase.FAILED, "ACTOR[1]")
    assert status.cause.message.startswith("ACTOR[1].fail on ")
    assert status.cause.message.endswith("ValueError: the user's own words")
    assert "in fail" in status.cause.detail


def test_a_call_that_the_trainer_has_not_waited_for_is_waited_for_at_the_end(run):
    status = run("LeavesCalls")
    assert (status.phase, status.cause.who) == (Phase.FAILED, "ACTOR[1]")
    assert status.cause.message.endswith("ValueError: the user's own words")


def test_a_call_that_its_method_does_not_take_shows_the_trainers_line(run):
    status = run("CallsWrongly")
    assert "add() takes" in status.cause.message
    assert "self.RG_ACTOR.add(1, 2, 3)" in status.cause.detail
    assert "dlrover/python/rl" not in status.cause.detail


@pytest.mark.parametrize(
    ("actor", "message"), [("FailingStart", "ValueError: no such model"), ("ExitingStart", "SystemExit: gone")]
)
def test_a_failing_constructor_ends_the_job_before_the_trainer_starts(run, actor, message):
    status = run(actor=actor)
    assert (status.phase, status.cause.kind) == (Phase.FAILED, CauseKind.START_FAILED)
    assert status.cause.message == message
    assert status.cause.who == ("ACTOR[1]" if actor == "FailingStart" else "ACTOR[0]")
    assert "__init__" in status.cause.detail
    assert run.closed() == (NAMES[:1] if actor == "FailingStart" else [])


@pytest.mark.parametrize(
    ("trainer", "who", "said"), [("ExitingFit", "trainer", "SystemExit: 0"), ("CallsExit", "ACTOR[0]", "SystemExit: 3")]
)
def test_leaving_the_process_is_a_failure_never_a_finish(run, trainer, who, said):
    status = run(trainer)
    assert (status.phase, status.cause.who) == (Phase.FAILED, who)
    assert status.cause.message.endswith(said)
    assert run.closed() == NAMES


def test_ctrl_c_stops_in_good_order(run):
    status = run("InterruptedFit")
    assert (status.phase, status.reason, status.cause) == (Phase.STOPPED, "interrupted", None)
    assert run.closed() == NAMES


@pytest.mark.parametrize(
    ("trainer", "outcomes"),
    [("InterruptedFit", ["stopped"]), ("DataFault", ["failed"]), ("ExitingFit", ["failed"]), ("Loop", [])],
)
def test_a_trainer_is_told_that_it_has_failed_or_was_stopped(run, monkeypatch, trainer, outcomes):
    told = []
    monkeypatch.setattr(toy_jobs.Loop, "on_end", lambda self, outcome: told.append(outcome))
    run(trainer)
    assert told == outcomes


def test_what_a_trainer_raises_when_it_is_told_of_its_end_does_not_hide_its_error(run, monkeypatch):
    monkeypatch.setattr(toy_jobs.Loop, "on_end", lambda self, outcome: self.nothing)
    assert run("DataFault").cause.message == "DataError: data: row 3 is empty"


def test_a_workload_that_cannot_close_does_not_keep_the_others_from_it(run):
    status = run(actor="FailingClose")
    assert status.phase is Phase.FINISHED
    assert run.closed() == NAMES


def test_a_member_that_is_lost_outside_of_steps_restarts_the_job(run):
    status = run("LosesMember")
    assert (status.phase, status.restarts, status.incarnation) == (Phase.FINISHED, 1, 2)
    left = [name for name in NAMES if name != "ACTOR-1/1"]
    assert run.closed() == [*left, *(f"{member}/2" for member in MEMBERS)]


def test_a_member_that_is_lost_inside_of_steps_is_replaced_alone(run):
    status = run("LosesMemberInAStep")
    assert (status.phase, status.restarts, status.incarnation) == (Phase.FINISHED, 0, 1)
    assert [report.metrics["loss"] for report in run.reports] == [2.0, 6.0, 12.0]
    assert run.closed() == ["ACTOR-0/2", "ACTOR-1/2", "REWARD-0/1", "REWARD-1/1"]


def test_members_know_that_they_share_a_process(run, monkeypatch):
    known, true = [], toy_jobs.Adder.__init__

    def init(self, *arguments):
        true(self, *arguments)
        known.append(self._member.shares_process)

    monkeypatch.setattr(toy_jobs.Adder, "__init__", init)
    run()
    assert known
    assert all(known)


def test_a_crash_loop_ends_with_its_cause(run):
    status = run("AlwaysLosesMember", restart=RestartSpec(job_max_restart=2))
    assert (status.phase, status.restarts, status.cause.kind) == (Phase.FAILED, 2, CauseKind.PROCESS_DIED)
    assert status.cause.who == "ACTOR[1]"
    assert "the limit of 2 restarts" in status.reason


def test_a_breakpoint_in_a_workload_is_reached_in_the_callers_thread(run, monkeypatch):
    reached = []

    def hook(*args, **kwargs):
        frame = sys._getframe(1)
        reached.append((frame.f_code.co_name, frame.f_locals["self"].rank, threading.current_thread()))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    assert run("Stopper").phase is Phase.FINISHED
    assert reached == [("stop_here", rank, threading.current_thread()) for rank in (0, 1)]


def test_each_role_gets_its_own_preferred_port(tmp_path):
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        wanted = (first.getsockname()[1], second.getsockname()[1])
    job = toy_job(tmp_path)
    job = replace(job, trainer=replace(job.trainer, torch_master_port=wanted))
    placement, _ = plan(job)
    executor = LocalExecutor(job, placement, print)
    started = []
    for role in job.workloads:
        executor.execute(StartMembers(role, ((0, 1), (1, 1))), started.append)
    assert [(event.role, event.rank) for event in started] == list(job.members())
    ports = [{member.host.workload.torch_master_port for member in group} for group in executor._members.values()]
    assert ports == [{wanted[0]}, {wanted[1]}]
    executor.execute(Release(1, final=True), started.append)


def test_the_opening_is_announced_once_the_folder_is_held(tmp_path):
    job = toy_job(tmp_path, "Loop", "Adder", steps=1)
    checked, said = replace(check_job(job, local=True), opening="going on"), []

    def hear(line):
        said.append((line, in_use(job.job_dir)))

    assert run_here(checked, announce=hear).phase is Phase.FINISHED
    assert said[0] == ("going on", True)
    said.clear()
    with pytest.raises(JobConflict, match="has the results of"):
        run_here(checked, announce=hear)
    assert said == []
