# SPDX-License-Identifier: Apache-2.0
"""The verbs against a service whose jobs only do what the test reports: nothing of its disk is read."""

import asyncio
import json
import logging
import threading

import pytest
from click.testing import CliRunner

from dlrover.python.rl.cli.commands import cli
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.process.status import RunningProcess
from dlrover.python.rl.service import server as server_module
from dlrover.python.rl.service.auth import TokenFile, prepare
from dlrover.python.rl.service.client import connected
from dlrover.python.rl.service.jobs.records import JobPhase, Observed, Schedule
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.runner import MemoryRunner
from dlrover.python.rl.service.server import JobServer
from tests.support.served import JOB, until


@pytest.fixture(autouse=True)
def log_as_before():
    """A command sets it up for its own process."""
    logger = logging.getLogger("dlrover")
    kept = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = kept


MEMBERS = (
    RunningProcess("ACTOR[0]", "left", 11, "0,1"),
    RunningProcess("ROLLOUT[0]", "right", 12, "0"),
    RunningProcess("ROLLOUT[1]", "right", 13, "0"),
    RunningProcess("trainer", "left", 14),
)


class Runner(MemoryRunner):
    """Reports ``first`` of each run, and then what the test says."""

    def __init__(self):
        super().__init__()
        self.first = [{"phase": JobPhase.RUNNING}]

    def run(self, record, description):
        self.begun.append(record.run)
        for values in self.first:
            self._sink(Observed(record.name, record.run, **values))


class Desk:
    """A service in a thread, and the command line of a machine that has its address and a token only."""

    def __init__(self, folder):
        self.runner, self.folder = Runner(), folder
        (folder / "root").mkdir()
        self.token = prepare(folder / "state")
        self._loop, self._began = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._began.wait(20)

    async def _serve(self):
        self._ending = asyncio.Event()
        self.store = SqliteJobStore(self.folder / "state")
        self.manager = JobManager(self.store, self.runner)
        await self.manager.start()
        server = JobServer(self.manager, TokenFile(self.folder / "state"), self.folder / "root")
        self.address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        self._began.set()
        await self._ending.wait()
        await server.close(0.1)
        await self.manager.close()

    def close(self):
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(20)
        self._loop.close()

    def __call__(self, *arguments, code=0):
        done = CliRunner().invoke(cli, [*arguments, "--server", self.address])
        said = f"{done.output}{done.exception or ''}"
        assert code is None or (done.exit_code == 0) == (code == 0), said
        return said

    def begin(self, name="job", **values):
        """Submit a job, and report ``values`` of it."""
        with connected(self.address) as client:
            run = client.submit(JOB, name=name).run
        until(lambda: self.manager.get(name).phase is JobPhase.RUNNING)
        self.report(name, run, **values)
        return run

    def report(self, name, run, phase=JobPhase.RUNNING, **values):
        async def report():
            self.runner._sink(Observed(name, run, phase, **values))
            await self.manager._put(Schedule())  # after it

        asyncio.run_coroutine_threadsafe(report(), self._loop).result(20)

    def description(self, name):
        return self.store.description(self.manager.get(name).run)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    made = Desk(tmp_path)
    monkeypatch.setenv("DLROVER_RL_TOKEN_FILE", str(made.token))
    (tmp_path / "laptop").mkdir()
    monkeypatch.chdir(tmp_path / "laptop")
    yield made
    made.close()


# -- status and explain -----------------------------------------------------------------------------------------------


def test_status_has_every_process_with_its_devices_and_the_pace_of_the_last_steps(desk):
    lost = {"recoveries": {"ROLLOUT": 1}, "last_failure": "ROLLOUT[1]: process_died: it is gone"}
    run = desk.begin(step=10, total_steps=100, members=MEMBERS, step_s=2.0, **lost)
    said = desk("status", "job")
    assert "2 s a step" in said and "about 0:03:00 left" in said
    assert "4 processes on 2 nodes, 3 devices" in said and "ROLLOUT recovered 1 time" in said
    assert "left pid 11 devices 0,1" in said and said.splitlines()[-1].endswith("left pid 14")
    view = json.loads(desk("status", "job", "--json"))
    assert view["members"][1] == {"process": "ROLLOUT[0]", "node": "right", "pid": 12, "devices": "0"}
    assert (view["nodes"], view["devices"], view["step_s"], view["eta_s"]) == (2, 3, 2.0, 180.0)
    assert json.loads(desk("list", "--json"))[0]["members"] == []
    (saved,) = desk.store.load()[0]
    assert (saved.members, saved.step_s, saved.recoveries) == (MEMBERS, 2.0, {"ROLLOUT": 1})
    desk.report("job", run, JobPhase.FINISHED)
    assert json.loads(desk("status", "job", "--json"))["members"] == []


def test_explain_has_since_when_the_failures_and_the_log_from_the_service(desk):
    results = desk.folder / "root/results"
    (results / "logs").mkdir(parents=True)
    (results / "logs/rollout-1.log").write_text("a line\n")
    run = desk.begin(results=str(results), step=1)
    assert "It is running since 20" in desk("explain", "job")
    desk.report("job", run, recoveries={"ROLLOUT": 1}, last_failure="ROLLOUT[1]: process_died: it is gone")
    desk.report("job", run, restarts=1, recoveries={"ROLLOUT": 1}, last_failure="trainer: hung: no step")
    ended = {"reason": "ACTOR[0]: out of memory (again)", "cause": "out_of_memory", "detail": "Traceback: malloc"}
    desk.report("job", run, JobPhase.FAILED, **ended)
    (results / "journal.jsonl").write_text("none of its business")
    said = desk("explain", "job").splitlines()
    assert said[0].startswith("job: It has failed since 20")
    first = said.index("Failures, the first one first:") + 1
    words = ["ROLLOUT[1]: process_died: it is gone", "trainer: hung: no step", ended["reason"]]
    assert [line.split(maxsplit=2)[2] for line in said[first : first + 3]] == words
    assert "Its log: dlrover-rl logs job rollout-1" in said and "  Traceback: malloc" in said
    assert any(line.startswith("What to try: Use smaller batches") for line in said)
    assert "did you mean 'job'" in desk("explain", "jb", code=1)


def test_list_has_all_that_run_and_says_how_many_older_ones_it_leaves_out(desk, monkeypatch):
    monkeypatch.setattr(server_module, "_LISTED", 2)
    desk.begin("long-runner")
    for name in ("first", "second"):
        desk.report(name, desk.begin(name), JobPhase.FINISHED)
    assert [view["name"] for view in json.loads(desk("list", "--json"))] == ["long-runner", "second", "first"]
    desk.report("third", desk.begin("third"), JobPhase.FINISHED)
    listed = desk("list")
    assert "long-runner" in listed and "third" in listed and "first" not in listed
    assert "1 older ended jobs are not listed" in listed


def test_the_doctor_asks_the_service(desk, monkeypatch):
    desk.begin()
    assert f"ok   {desk.address}: answers; 1 of its jobs have not ended" in desk("doctor", code=None)
    (desk.folder / "wrong").write_text("x" * 43)
    (desk.folder / "wrong").chmod(0o600)
    monkeypatch.setenv("DLROVER_RL_TOKEN_FILE", str(desk.folder / "wrong"))
    assert f"BAD  {desk.address}: " in desk("doctor", code=1)


# -- run, submit, eval ------------------------------------------------------------------------------------------------


def test_run_submits_and_returns_or_follows_the_job_to_its_end(desk):
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    said = desk("run", "toy.yaml", "--detach", "--priority", "7", "workload.rollout.num=1")
    assert "dlrover-rl attach" in said
    (record,) = desk.manager.list_jobs()
    assert (record.name, record.priority, record.roles["ROLLOUT"]) == ("toy", 7, 1)
    results = desk.folder / "root/results"
    results.mkdir()
    (results / "summary.json").write_text('{"best reward": 0.75}')
    common = {"results": str(results), "step": 1, "total_steps": 1}
    desk.runner.first = [{"phase": JobPhase.RUNNING, **common}, {"phase": JobPhase.FINISHED, **common}]
    said = desk("run", "toy.yaml", "name=second")
    assert "second: finished, step 1/1" in said and "best reward" in said and "0.75" in said
    desk.runner.first = [{"phase": JobPhase.FAILED, "reason": "it broke"}]
    assert "it broke" in desk("run", "toy.yaml", "name=third", code=1)


def test_attach_shows_nothing_of_earlier_runs_of_the_name(desk):
    first = desk.begin(step=1, total_steps=7)
    desk.report("job", first, JobPhase.FAILED, step=2, reason="it broke in the first run")
    second = desk.begin(step=1, total_steps=9)
    desk.report("job", second, JobPhase.FINISHED, step=1, reason="all steps done")
    said = desk("attach", "job")
    assert "job: finished, step 1/9" in said and "all steps done" in said
    assert "first run" not in said and "failed" not in said and "2/7" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "toi.yaml"), "no such job file; did you mean 'toy.yaml'?"),
        (("run", "toy.yaml", "--address", "auto"), "--address: cannot be used with --server"),
        (("run", "toy.yaml", "--local"), "--local: cannot be used with --server"),
        (("run", "toy.yaml", "workload.rolout.num=3", "--detach"), "rollout"),
        (("run", "toy.yaml", "--folder", "../other", "--detach"), "outside the service's root"),
        (("eval", "jb"), "did you mean 'job'?"),
        (("eval", "job"), "has no model yet: pass config.model=FOLDER for another one"),
        (("submit", "--job_name", "x", "--rl_config", JOB, "--workload_max_restart", "{'rolout': 1}"), "ROLLOUT"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_right_name(desk, arguments, said):
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    results = desk.folder / "root"
    (results / "job.yaml").write_text(JOB)
    desk.begin(results=str(results), step=1)
    assert said in desk(*arguments, code=1)
    assert [record.name for record in desk.manager.list_jobs()] == ["job"]


def test_options_for_a_service_need_one(desk):
    for option in ("--priority=3", "--folder=x"):
        done = CliRunner().invoke(cli, ["run", "toy.yaml", option])
        assert done.exit_code and "needs --server" in str(done.exception)
    assert "needs --server" in str(CliRunner().invoke(cli, ["eval", "job", "--detach"]).exception)


def test_submit_sends_the_job_with_its_options(desk):
    options = ("--job_max_restart", "0", "--workload_max_restart", "{'rollout': 2}", "--detach")
    desk("submit", "--job_name", "mine", "--rl_config", JOB, *options)
    job = load_job_text(desk.description("mine").text, "")
    assert (job.name, job.restart.job_max_restart, job.restart.workload_max_restart) == ("mine", 0, {"ROLLOUT": 2})


def test_eval_submits_an_evaluation_of_the_newest_run_of_a_name(desk):
    results = desk.folder / "root/runs/job/1"
    (results / "model").mkdir(parents=True)
    (results / "model/config.json").write_text("{}")
    (results / "job.yaml").write_text(f"job_dir: {results}\nconfig: {{model: old, eval_only: false, seed: 1}}\n{JOB}")
    desk.report("job", desk.begin(results=str(results)), JobPhase.FINISHED)
    desk("eval", "job", "seed=5", "--detach")
    described = desk.description("job-eval")
    job = load_job_text(described.text, "job-eval", described.overrides)
    assert job.config == {"model": str(results / "model"), "eval_only": True, "seed": 5}
    assert job.job_dir != results and job.checkpoint.resume == "never"
