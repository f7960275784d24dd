# SPDX-License-Identifier: Apache-2.0
"""A whole job in one process: its endings; and RLJobBuilder."""

import re
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import CallError, InvalidJob, JobConflict, JobFailed
from dlrover.python.rl.config.spec import CheckpointSpec, RestartSpec
from dlrover.python.rl.control.commands import Release, StartMembers
from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import RLJobBuilder, check_job, run_here
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
    """Run a toy job; gives its status. ``run.closed()`` has the names of its closed workloads, without its run."""

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
    kinds = ["Submitted", "Placed", *["MemberStarted"] * 4, "TrainerStarted", "StepsOpened", "Progressed"]
    assert [type(event).__name__ for event in run.events()] == [*kinds, "TrainerFinished", "Released"]


@pytest.mark.parametrize(
    ("classes", "kind", "process", "message", "detail"),
    [
        ({"trainer": "FailingInit"}, "USER_ERROR", "trainer", r"ValueError: the user's own words$", "in init"),
        ({"trainer": "CallsFail"}, "USER_ERROR", "ACTOR[1]", r"ACTOR\[1\].fail on .*ValueError: the user's", "in fail"),
        ({"trainer": "LeavesCalls"}, "USER_ERROR", "ACTOR[1]", r".*ValueError: the user's own words$", "in fail"),
        ({"trainer": "CallsWrongly"}, "USER_ERROR", "ACTOR[0]", r".*add\(\) takes", "self.RG_ACTOR.add(1, 2, 3)"),
        ({"trainer": "ExitingFit"}, "USER_ERROR", "trainer", r"SystemExit: 0$", "in fit"),
        ({"trainer": "CallsExit"}, "USER_ERROR", "ACTOR[0]", r".*SystemExit: 3$", "in leave"),
        ({"actor": "FailingStart"}, "START_FAILED", "ACTOR[1]", r"ValueError: no such model$", "__init__"),
        ({"actor": "ExitingStart"}, "START_FAILED", "ACTOR[0]", r"SystemExit: gone$", "__init__"),
    ],
)
def test_failure_has_its_process_message_and_line(run, classes, kind, process, message, detail):
    status = run(**classes)
    assert (status.phase, status.restarts) == (Phase.FAILED, 0)
    assert (status.cause.kind, status.cause.who) == (CauseKind[kind], process)
    assert re.match(message, status.cause.message), status.cause.message
    assert detail in status.cause.detail
    assert status.reason.startswith(f"{process}: ") and "is not retried)" in status.reason
    assert run.closed() == {"FailingStart": NAMES[:1], "ExitingStart": []}.get(classes.get("actor"), NAMES)
    assert not (process == "trainer" or "RG_ACTOR" in detail) or "dlrover/python/rl" not in status.cause.detail


def test_ctrl_c_stops_in_good_order(run):
    status = run("InterruptedFit")
    assert (status.phase, status.reason, status.cause) == (Phase.STOPPED, "interrupted", None)
    assert run.closed() == NAMES


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [("InterruptedFit", ["stopped"]), ("DataFault", ["failed"]), ("ExitingFit", ["failed"]), ("Loop", [])],
)
def test_on_end_has_the_outcome_of_an_unfinished_run(run, monkeypatch, trainer, expected):
    outcomes = []
    monkeypatch.setattr(toy_jobs.Loop, "on_end", lambda self, outcome: outcomes.append(outcome))
    run(trainer)
    assert outcomes == expected


def test_workload_failing_to_close_lets_the_others_close(run):
    status = run(actor="FailingClose")
    assert status.phase is Phase.FINISHED
    assert run.closed() == NAMES


def test_member_lost_outside_of_steps_restarts_the_job(run):
    status = run("LosesMember")
    assert (status.phase, status.restarts, status.incarnation) == (Phase.FINISHED, 1, 2)
    left = [name for name in NAMES if name != "ACTOR-1/1"]
    assert run.closed() == [*left, *(f"{member}/2" for member in MEMBERS)]


def test_member_lost_inside_of_steps_is_replaced_alone(run):
    status = run("LosesMemberInAStep")
    assert (status.phase, status.restarts, status.incarnation) == (Phase.FINISHED, 0, 1)
    assert [report.metrics["loss"] for report in run.reports] == [2.0, 6.0, 12.0]
    assert run.closed() == ["ACTOR-0/2", "ACTOR-1/2", "REWARD-0/1", "REWARD-1/1"]


def test_members_of_a_local_run_share_its_process(run, monkeypatch):
    shares, init = [], toy_jobs.Adder.__init__

    def noting_init(self, *arguments):
        init(self, *arguments)
        shares.append(self._member.shares_process)

    monkeypatch.setattr(toy_jobs.Adder, "__init__", noting_init)
    run()
    assert shares == [True] * 4


def test_a_crash_loop_ends_with_its_cause(run):
    status = run("AlwaysLosesMember", restart=RestartSpec(job_max_restart=2))
    assert (status.phase, status.restarts, status.cause.kind) == (Phase.FAILED, 2, CauseKind.PROCESS_DIED)
    assert status.cause.who == "ACTOR[1]"
    assert "the limit of 2 restarts" in status.reason


def test_breakpoint_of_a_workload_is_in_the_callers_thread(run, monkeypatch):
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


def test_opening_is_announced_once_the_folder_is_held(tmp_path):
    job = toy_job(tmp_path, "Loop", "Adder", steps=1)
    checked, lines = replace(check_job(job, local=True), opening="resuming"), []

    def announce(line):
        lines.append((line, in_use(job.job_dir)))

    assert run_here(checked, announce=announce).phase is Phase.FINISHED
    assert lines[0] == ("resuming", True)
    lines.clear()
    with pytest.raises(JobConflict, match="has the results of"):
        run_here(checked, announce=announce)
    assert lines == []


# -- jobs described and checked in Python -----------------------------------------------------------------------------


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def builder(trainer="Loop"):
    draft = RLJobBuilder().device_type("CPU").device_per_node(4).config({"steps": 2})
    return draft.trainer("tests.support.toy_jobs", trainer).actor("tests.support.toy_jobs", "Adder").total(2)


def test_building_reports_every_error():
    with pytest.raises(InvalidJob, match="2 errors"):
        RLJobBuilder().trainer("m", "T").node_num(0).build()
    with pytest.raises(InvalidJob, match="impossible placement: ACTOR x 9"):
        builder().total(9).build()


def test_a_job_runs_in_this_process(empty_folder):
    status = builder().build().submit("my-job", local=True)
    assert (status.name, status.phase, status.step) == ("my-job", Phase.FINISHED, 2)


def test_a_failed_job_raises_with_its_cause_and_traceback(empty_folder):
    with pytest.raises(JobFailed, match=r"(?s)my-job failed: trainer: ValueError: the user's own words.*Traceback"):
        builder("FailingInit").build().submit("my-job", local=True)


def test_a_wrong_job_raises_and_starts_nothing(empty_folder):
    with pytest.raises(InvalidJob, match="did you mean 'Loop'"):
        builder("Lop").build().submit("my-job", local=True)
    with pytest.raises(InvalidJob, match="'My Job' is not a job name"):
        builder().build().submit("My Job", local=True)
    assert list(empty_folder.iterdir()) == []


def test_submit_without_options_keeps_those_of_the_job(empty_folder):
    job = builder().restart_limits(job_max_restart=3).build()
    job.submit("my-job", local=True)
    assert "job_max_restart: 3" in (empty_folder / "runs/my-job/latest/job.yaml").read_text()
    job.submit("my-job", local=True, job_max_restart=0, master_cpu=1)
    text = (empty_folder / "runs/my-job/latest/job.yaml").read_text()
    assert "job_max_restart: 0" in text
    assert "master:\n  cpu: 1.0\n  memory: 0.0" in text


def test_submit_without_waiting_needs_an_address():
    with pytest.raises(CallError, match=r"submit\(blocking=False\) needs address="):
        builder().build().submit("my-job", blocking=False)


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False])
def test_copy_of_other_members_is_not_resumed_and_stays(tmp_path, local):
    def job(steps, members):
        toy = toy_job(tmp_path / "out", members=members, steps=steps)
        return replace(toy, checkpoint=CheckpointSpec(resume="latest"), search_path=(str(Path(__file__).parents[3]),))

    def run(checked):
        reports = []
        status = run_local(checked.job, checked.placement, reports.append, StateStore())
        assert status.phase is Phase.FINISHED
        return [report.step for report in reports]

    assert run(check_job(job(2, 2), local=True)) == [1, 2]
    copies = sorted((tmp_path / "out" / "checkpoints").glob("*/step-*"))
    assert copies
    with pytest.raises(
        InvalidJob, match=r"checkpoint.resume: .*step-00000002.e1 holds the state of ACTOR x2, REWARD x2"
    ):
        check_job(job(3, 1), local)
    assert sorted((tmp_path / "out" / "checkpoints").glob("*/step-*")) == copies
    assert run(check_job(job(3, 2), local)) == [3]
