# SPDX-License-Identifier: Apache-2.0
"""The verbs against a service whose jobs only do what the test reports, and the service's own command."""

import asyncio
import hashlib
import io
import json
import os
import re
import socket
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from dlrover.python.rl.cli import serve
from dlrover.python.rl.cli.commands import cli
from dlrover.python.rl.cli.remote import check_submitted, enqueue
from dlrover.python.rl.common.errors import ClusterUnavailable, InvalidJob, JobConflict, QuotaReached
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.client.explain import _REMEDIES
from dlrover.python.rl.master.process.status import RunningProcess
from dlrover.python.rl.service import server as server_module
from dlrover.python.rl.service.auth import AccessRole, TokenFile, add_token, prepare
from dlrover.python.rl.service.client import connected
from dlrover.python.rl.service.jobs.records import JobPhase, Observed, Schedule
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.runner import MemoryRunner
from dlrover.python.rl.service.server import JobServer
from tests.support.commands import CLI
from tests.support.commands import run as run_command
from tests.support.run_folder import write_run
from tests.support.served import JOB, serving, until

pytestmark = pytest.mark.usefixtures("kept_logger")

MEMBERS = (
    RunningProcess("ACTOR[0]", "left", 11, "0,1"),
    RunningProcess("ROLLOUT[0]", "right", 12, "0"),
    RunningProcess("ROLLOUT[1]", "right", 13, "0"),
    RunningProcess("trainer", "left", 14),
)


class FirstRunner(MemoryRunner):
    """Reports ``first`` of each run, and then what the test reports."""

    first = ({"phase": JobPhase.RUNNING},)

    def run(self, record, description):
        self.begun.append(record.run)
        for values in self.first:
            self._sink(Observed(record.name, record.run, **values))


class Desk:
    """A service in a thread, and the command line of a machine that has its address and a token only."""

    def __init__(self, folder):
        self.runner, self.folder = FirstRunner(), folder
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
        output = f"{done.output}{done.exception or ''}"
        assert code is None or (done.exit_code == 0) == (code == 0), output
        return output

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


@pytest.fixture
def desk(tmp_path, monkeypatch):
    desk = Desk(tmp_path)
    monkeypatch.setenv("DLROVER_RL_TOKEN_FILE", str(desk.token))
    (tmp_path / "laptop").mkdir()
    monkeypatch.chdir(tmp_path / "laptop")
    yield desk
    desk.close()


# -- status and explain -----------------------------------------------------------------------------------------------


def test_status_has_processes_devices_and_pace(desk):
    lost = {"recoveries": {"ROLLOUT": 1}, "last_failure": "ROLLOUT[1]: process_died: it is gone"}
    run = desk.begin(step=10, total_steps=100, members=MEMBERS, step_s=2.0, **lost)
    output = desk("status", "job")
    words = ("2 s a step", "about 0:03:00 left", "4 processes on 2 nodes, 3 devices", "ROLLOUT recovered 1 time")
    assert [word for word in (*words, "left pid 11 devices 0,1") if word not in output] == []
    assert output.splitlines()[-1].endswith("left pid 14")
    view = json.loads(desk("status", "job", "--json"))
    assert view["members"][1] == {"process": "ROLLOUT[0]", "node": "right", "pid": 12, "devices": "0"}
    assert (view["nodes"], view["devices"], view["step_s"], view["eta_s"]) == (2, 3, 2.0, 180.0)
    assert json.loads(desk("list", "--json"))[0]["members"] == []
    (saved,) = desk.store.load()[0]
    assert (saved.members, saved.step_s, saved.recoveries) == (MEMBERS, 2.0, {"ROLLOUT": 1})
    desk.report("job", run, JobPhase.FINISHED)
    assert json.loads(desk("status", "job", "--json"))["members"] == []


def test_explain_has_the_time_failures_and_log_of_a_job(desk):
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
    output = desk("explain", "job").splitlines()
    assert output[0].startswith("job: It has failed since 20")
    first = output.index("Failures, the first one first:") + 1
    words = ["ROLLOUT[1]: process_died: it is gone", "trainer: hung: no step", ended["reason"]]
    assert [line.split(maxsplit=2)[2] for line in output[first : first + 3]] == words
    assert f"Its log: dlrover-rl logs job@{run} rollout-1" in output and "  Traceback: malloc" in output
    assert any(line.startswith("What to try: Use smaller batches") for line in output)
    assert "did you mean 'job'" in desk("explain", "jb", code=1)
    state = json.loads(desk("explain", "job", "--json"))
    assert [each["message"] for each in state["failures"]] == words
    assert (state["phase"], state["marks"]) == ("failed", []), "the folder is the service's"
    assert json.loads(desk("wait", "job", "--json", code=1).splitlines()[0])["phase"] == "failed"


def test_list_counts_the_older_jobs_left_out(desk, monkeypatch):
    monkeypatch.setattr(server_module, "_LISTED", 2)
    desk.begin("long-runner")
    for name in ("first", "second", "third"):
        desk.report(name, desk.begin(name), JobPhase.FINISHED)
    listed = desk("list")
    assert [name in listed for name in ("long-runner", "third", "second", "first")] == [True, True, True, False]
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
    output = desk("run", "toy.yaml", "--detach", "--priority", "7", "workload.rollout.num=1")
    assert "dlrover-rl attach" in output
    (record,) = desk.manager.list_jobs()
    assert (record.name, record.priority, record.roles["ROLLOUT"]) == ("toy", 7, 1)
    results = desk.folder / "root/results"
    results.mkdir()
    (results / "summary.json").write_text('{"best reward": 0.75}')
    common = {"results": str(results), "step": 1, "total_steps": 1}
    desk.runner.first = [{"phase": JobPhase.RUNNING, **common}, {"phase": JobPhase.FINISHED, **common}]
    output = desk("run", "toy.yaml", "name=second")
    assert "second: finished, step 1/1" in output and "best reward" in output and "0.75" in output
    desk.runner.first = [{"phase": JobPhase.FAILED, "reason": "it broke"}]
    assert "it broke" in desk("run", "toy.yaml", "name=third", code=1)


def test_attach_shows_nothing_of_earlier_runs_of_the_name(desk):
    first = desk.begin(step=1, total_steps=7)
    desk.report("job", first, JobPhase.FAILED, step=2, reason="it broke in the first run")
    second = desk.begin(step=1, total_steps=9)
    desk.report("job", second, JobPhase.FINISHED, step=1, reason="all steps done")
    output = desk("attach", "job")
    assert "job: finished, step 1/9" in output and "all steps done" in output
    assert not [word for word in ("first run", "failed", "2/7") if word in output]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run toy.yaml --address auto", "--address: cannot be used with --server"),
        ("run toy.yaml --local", "--local: cannot be used with --server"),
        ("run toy.yaml workload.rolout.num=3 --detach", "rollout"),
        ("run toy.yaml --folder ../other --detach", "outside the service's root"),
        ("eval job", "has no model yet: pass config.model=FOLDER for another one"),
        ("submit --job_name x --rl_config toy.yaml --workload_max_restart {'rolout':1}", "ROLLOUT"),
    ],
)
def test_wrong_argument_is_answered_with_the_right_name(desk, line, message):
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    results = desk.folder / "root"
    (results / "job.yaml").write_text(JOB)
    desk.begin(results=str(results), step=1)
    assert message in desk(*line.split(), code=1)
    assert [record.name for record in desk.manager.list_jobs()] == ["job"]


def test_options_for_a_service_need_one(desk):
    for line in ("run toy.yaml --priority=3", "run toy.yaml --folder=x", "eval job --detach"):
        assert "needs --server" in str(CliRunner().invoke(cli, line.split()).exception)


def test_submit_sends_the_job_with_its_options(desk):
    options = ("--job_max_restart", "0", "--workload_max_restart", "{'rollout': 2}", "--detach")
    desk("submit", "--job_name", "mine", "--rl_config", JOB, *options)
    job = load_job_text(desk.store.description(desk.manager.get("mine").run).text, "")
    assert (job.name, job.restart.job_max_restart, job.restart.workload_max_restart) == ("mine", 0, {"ROLLOUT": 2})


def test_eval_submits_an_evaluation_of_the_newest_run_of_a_name(desk):
    results = desk.folder / "root/runs/job/1"
    (results / "model").mkdir(parents=True)
    (results / "model/config.json").write_text("{}")
    (results / "job.yaml").write_text(f"job_dir: {results}\nconfig: {{model: old, eval_only: false, seed: 1}}\n{JOB}")
    desk.report("job", desk.begin(results=str(results)), JobPhase.FINISHED)
    desk("eval", "job", "seed=5", "--detach")
    described = desk.store.description(desk.manager.get("job-eval").run)
    job = load_job_text(described.text, "job-eval", described.overrides)
    assert job.config == {"model": str(results / "model"), "eval_only": True, "seed": 5}
    assert job.job_dir != results and job.checkpoint.resume == "never"


# -- runs by id, and a service that finishes what it starts -----------------------------------------------------------


def ended_run(desk, number, phase=JobPhase.STOPPED, **values):
    """End a run of 'job' that has files, and return its id."""
    results = desk.folder / f"root/runs/job/{number}"
    (results / "model").mkdir(parents=True)
    (results / "model/config.json").write_text("{}")
    (results / "job.yaml").write_text(f"name: job\nconfig: {{seed: {number}, model: old}}\n{JOB}")
    run = desk.begin(results=str(results), step=number, total_steps=9)
    desk.report("job", run, phase, step=number, results=str(results), **values)
    return run


def test_run_of_a_name_is_reached_by_its_id(desk):
    first, second = ended_run(desk, 1, reason="first reason"), ended_run(desk, 2)
    assert [view["run"] for view in json.loads(desk("list", "--json"))] == [second, first]
    assert "step 2/9" in desk("status", "job") and "step 1/9" in desk("status", f"job@{first}")
    assert "first reason" in desk("explain", f"job@{first}")
    desk("fetch", f"job@{first}", "job.yaml")
    assert "seed: 1" in Path("job.yaml").read_text()
    assert "job' has no run 'abc'; it has " in desk("status", "job@abc", code=1)
    assert first in desk("list") and second in desk("list")
    assert "is already" not in desk("stop", f"job@{first}")


def test_resume_continues_a_run_of_the_service_in_its_folder(desk):
    (desk.folder / "root/mine").mkdir()
    first = ended_run(desk, 1)
    ended_run(desk, 2)
    desk("resume", f"job@{first}", "seed=5", "--detach")
    record = desk.manager.get("job")
    described = desk.store.description(record.run)
    job = load_job_text(described.text, "job", described.overrides)
    assert (job.config["seed"], job.checkpoint.resume) == (5, "latest")
    assert str(job.job_dir) == record.folder == str(desk.folder / "root/runs/job/1")
    until(lambda: desk.manager.get("job").phase is JobPhase.RUNNING)
    assert "is running, and has nothing to continue" in desk("resume", "job", code=1)
    assert "cannot be changed" in desk("resume", f"job@{first}", "name=other", code=1)


def test_resume_and_eval_look_where_the_job_was_submitted(desk):
    (desk.folder / "root/mine").mkdir()
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    desk("enqueue", "toy.yaml", "--name", "job", "--folder", "mine")
    results = desk.folder / "root/runs/job/1"
    (results / "model").mkdir(parents=True)
    (results / "model/config.json").write_text("{}")
    (results / "job.yaml").write_text(f"config: {{model: old}}\n{JOB}")
    desk.report("job", desk.manager.get("job").run, JobPhase.STOPPED, results=str(results), step=1)
    desk("resume", "job", "--detach")
    desk("eval", f"job@{desk.manager.list_jobs(ended=True)[-1].run}", "--detach")
    folders = {desk.store.description(desk.manager.get(name).run).folder for name in ("job", "job-eval")}
    assert folders == {str(desk.folder / "root/mine")}


def test_options_of_a_resumption_replace_what_the_run_had(desk):
    (desk.folder / "mine").mkdir()
    (desk.folder / "mine/rewards.py").touch()
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    run = ended_run(desk, 1)
    earlier = replace(desk.manager._ledger.records[run], work_dir="old", priority=5)
    desk.manager._ledger._put(earlier)
    desk("resume", f"job@{run}", "--working-dir", "../mine", "--priority", "0", "--detach")
    record = desk.manager.get("job")
    assert record.work_dir.startswith("working-dirs/") and record.priority == 0
    desk("eval", f"job@{run}", "--working-dir", "../mine", "--detach")
    assert desk.manager.get("job-eval").work_dir == record.work_dir


def test_run_of_an_earlier_version_needs_a_folder(desk):
    run = ended_run(desk, 1)
    desk.manager._ledger._put(replace(desk.manager._ledger.records[run], work_dir=""))
    for verb in ("resume", "eval"):
        assert "was submitted to an earlier version" in desk(verb, f"job@{run}", code=1)
        desk(verb, f"job@{run}", "--folder", ".", "--detach")


def test_run_of_another_owner_is_not_resumed(desk, monkeypatch):
    run = ended_run(desk, 1)
    tokens = {name: desk.folder / f"{name}.token" for name in ("bob", "root")}
    for name, role in (("bob", AccessRole.SUBMIT), ("root", AccessRole.ADMIN)):
        add_token(desk.folder / "state", name, role, tokens[name])
    monkeypatch.setenv("DLROVER_RL_TOKEN_FILE", str(tokens["bob"]))
    assert "'bob' has the role 'submit', which may not do this" in desk("resume", f"job@{run}", "--detach", code=1)
    desk("eval", f"job@{run}", "--detach")
    monkeypatch.setenv("DLROVER_RL_TOKEN_FILE", str(tokens["root"]))
    desk("resume", f"job@{run}", "--detach")
    assert desk.manager.get("job").owner == "root"


def test_finished_run_needs_a_change_to_be_resumed(desk):
    ended_run(desk, 9, JobPhase.FINISHED)
    assert "the run has finished; to continue it" in desk("resume", "job")
    assert len(desk.manager.list_jobs(ended=True)) == 1


def test_service_of_the_environment_is_used_or_refused(desk, monkeypatch):
    """The variable has the effect of --server; what names this machine is stronger, or refused with the reason."""
    monkeypatch.setenv("DLROVER_RL_SERVER", desk.address)
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    run_command(desk.folder / "laptop", *CLI, "run", "toy.yaml", "--detach")
    assert desk.manager.get("toy").phase is JobPhase.RUNNING

    def refused(*line):
        done = CliRunner().invoke(cli, line)
        assert done.exit_code
        return f"{done.output}{done.exception}"

    monkeypatch.chdir(desk.folder / "laptop")
    assert "runs/toy/latest: is no job's name, as --server" in refused("resume", "runs/toy/latest")
    assert "is no job's name, as --server" in refused("eval", "./toy")
    local = run_command(desk.folder / "laptop", *CLI, "run", "toy.yaml", "--local", code=2).stderr
    assert "some_module" in local, "it is checked here"
    assert "neither the folder of a run nor a name" in refused("status", "runs/toy/latest")
    write_run(desk.folder / "laptop/runs/ended", steps=20)
    for verb, words in (("status", "finished, step 20"), ("explain", "ROLLOUT[1]"), ("logs", "step 1")):
        assert words in run_command(desk.folder / "laptop", *CLI, verb, "runs/ended").stdout, "of this machine"
    for verb in ("samples", "trace", "events", "stacks", "view"):
        assert f"'{verb}' reads folders of this machine, and DLROVER_RL_SERVER names a service" in refused(verb, "toy")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("list", "job"),
        ("status job", "step 1/9"),
        ("attach job", "finished, step 1/9"),
        ("wait job", "step 1/9"),
        ("logs job", "there is no log"),
        ("explain job", "It has finished since"),
        ("fetch job", "job.yaml"),
        ("stop job", "finished"),
        ("resize job rollout 3", "finished"),
        ("resume job seed=2 --detach", "dlrover-rl attach job"),
        ("eval job --detach", "dlrover-rl attach job-eval"),
        ("enqueue toy.yaml", "dlrover-rl attach toy"),
        ("submit --job_name mine --rl_config toy.yaml --detach", "dlrover-rl attach mine"),
        ("doctor", "answers"),
    ],
)
def test_verb_asks_the_service_of_the_environment(desk, monkeypatch, line, words):
    ended_run(desk, 1, JobPhase.FINISHED)
    monkeypatch.setenv("DLROVER_RL_SERVER", desk.address)
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    done = CliRunner().invoke(cli, line.split())
    assert words in f"{done.output}{done.exception or ''}"


def test_quota_has_an_exit_code_of_its_own_and_no_retry(tmp_path):
    (tmp_path / "toy.yaml").write_text(JOB)
    with serving(tmp_path, cpus=1, limits={"max_queued_per_owner": 2}) as service:
        env = {"DLROVER_RL_TOKEN_FILE": str(tmp_path / "state/token"), "DLROVER_RL_SERVER": service.address}
        with service.client() as client:
            for name in ("first", "second"):
                client.submit(JOB, name=name)
        began_s = time.monotonic()
        done = run_command(tmp_path, *CLI, "run", "toy.yaml", "--detach", code=6, **env)
        assert done.stderr.splitlines()[-1] == "'admin' has 2 jobs in the queue, the limit"
        assert time.monotonic() - began_s < 10
        with service.client(patience_s=60) as client, pytest.raises(QuotaReached):
            began_s = time.monotonic()
            client.submit(JOB, name="third")
        assert time.monotonic() - began_s < 10


# -- working directories ----------------------------------------------------------------------------------------------


def test_folder_of_a_job_is_sent_once_and_kept(desk):
    """50 MB from another folder; what is ignored stays here, and the run resumes with the same files."""
    mine = desk.folder / "mine"
    (mine / "pkg/__pycache__").mkdir(parents=True)
    (mine / "pkg/rewards.py").write_text("A = 1\n")
    (mine / "pkg/__pycache__/rewards.pyc").write_text("x")
    (mine / "data.bin").write_bytes(bytes(range(256)) * 200_000)
    (mine / "secret.txt").write_text("key")
    (mine / ".dlrover-rl-ignore").write_text("# not for the service\nsecret.txt\n")
    (mine / "link.py").symlink_to("pkg/rewards.py")
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    folders = []
    for name in ("first", "second"):
        desk("enqueue", "toy.yaml", "--name", name, "--working-dir", "../mine")
        folders.append(desk.store.description(desk.manager.get(name).run).folder)
    stored = Path(folders[0])
    assert folders[0] == folders[1] and stored.parent == desk.folder / "root/working-dirs"
    names = {path.relative_to(stored).as_posix() for path in stored.rglob("*") if path.is_file()}
    assert names == {"pkg/rewards.py", "data.bin", "link.py", ".dlrover-rl-ignore"}
    assert (stored / "data.bin").read_bytes() == (mine / "data.bin").read_bytes()
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]
    assert desk.manager.get("first").work_dir == f"working-dirs/{stored.name}"


def make_huge(folder):
    (folder / "huge.bin").touch()
    os.truncate(folder / "huge.bin", 10**10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: (folder / "out").symlink_to("/etc/passwd"), "out: is a link out of ../mine"),
        (lambda folder: (folder / "up").symlink_to(".."), "up: is a link out of ../mine"),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe: is no plain file"),
        (
            lambda folder: (folder / "huge.bin").touch() or os.truncate(folder / "huge.bin", 10**10),
            "huge.bin: is the largest",
        ),
    ],
)
def test_file_that_cannot_be_sent_is_refused_by_name(desk, make, message):
    (desk.folder / "mine").mkdir()
    make(desk.folder / "mine")
    desk.folder.joinpath("laptop/toy.yaml").write_text(JOB)
    assert message in desk("run", "toy.yaml", "--detach", "--working-dir", "../mine", code=1)
    assert desk.manager.list_jobs(ended=True) == []
    assert "needs --server" in str(CliRunner().invoke(cli, ["run", "toy.yaml", "--working-dir", "."]).exception)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("../../escaped", tarfile.REGTYPE, "escaped: is refused"),
        ("link", tarfile.SYMTYPE, "link: is no plain file"),
        ("device", tarfile.CHRTYPE, "device: is no plain file"),
    ],
)
def test_service_refuses_a_hostile_archive_by_its_member(desk, name, kind, message):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "/etc/passwd"
        tar.addfile(entry, io.BytesIO())
    digest = hashlib.sha256(archive.getvalue()).hexdigest()
    with connected(desk.address) as client:
        with pytest.raises(InvalidJob, match=message):
            client.upload(archive, digest)
        with pytest.raises(InvalidJob, match="was not uploaded"):
            client.submit(JOB, name="toy", working_dir=digest)
        with pytest.raises(InvalidJob, match="differs from its digest"):
            client.upload(archive, "0" * 64)
    assert not list(desk.folder.rglob("escaped")) and not list((desk.folder / "root/working-dirs").iterdir())


# -- a stuck job ------------------------------------------------------------------------------------------------------


def test_stuck_job_differs_from_a_healthy_one(desk):
    healthy = desk.begin("healthy", step=10, total_steps=100, step_s=2.0, members=MEMBERS)
    stuck = desk.begin("stuck", step=49, total_steps=100_000, step_s=0.3, recoveries={"ROLLOUT": 7}, members=MEMBERS)
    long_ago_s = time.time() - 250
    unbegun, loading = desk.begin("unbegun"), desk.begin("loading")
    for run, changes in (
        (stuck, {"last_step_s": long_ago_s}),
        (healthy, {}),
        (unbegun, {"started_s": long_ago_s - 1000}),
        (loading, {"started_s": long_ago_s}),
    ):
        desk.manager._ledger._put(replace(desk.manager._ledger.records[run], **changes))
    views = {view["name"]: view for view in json.loads(desk("list", "--json"))}
    assert views["healthy"]["eta_s"] == 180.0 and views["stuck"]["eta_s"] == 0.0
    assert 240 < views["stuck"]["step_age_s"] < 300 and views["stuck"]["recoveries"] == {"ROLLOUT": 7}
    assert views["healthy"]["devices"] == views["stuck"]["devices"] == 3
    lines = {line.split()[0]: line for line in desk("list").splitlines()}
    assert "no progress" in lines["unbegun"] and "no progress" not in lines["loading"]
    assert "running, no progress" in lines["stuck"] and "0:04:1" in lines["stuck"]
    assert "no progress" not in lines["healthy"] and "admin" in lines["healthy"]
    status = desk("status", "stuck")
    assert "running, no progress" in status and "left," not in status and "last step 0:04:1" in status
    desk.report("loading", loading, JobPhase.STARTING, step=3, total_steps=100, step_s=2.0)
    assert "left" not in desk("status", "loading"), "it is starting again"
    desk.report("healthy", healthy, activity="resizing ROLLOUT to 3", step_s=2.0, members=MEMBERS)
    status = desk("status", "healthy")
    assert "resizing ROLLOUT to 3" in status and "left," not in status
    assert "resizing ROLLOUT to 3" in desk("list")


@pytest.mark.parametrize(("activity", "is_stuck"), [("step 1", True), ("evaluating", False)])
def test_evaluation_without_steps_is_not_stuck(desk, activity, is_stuck):
    """A first step of half an hour is."""
    run = desk.begin(activity=activity)
    desk.manager._ledger._put(replace(desk.manager._ledger.records[run], started_s=time.time() - 1800))
    for verb in ("list", "status job"):
        assert ("running, no progress" in desk(*verb.split())) is is_stuck


def test_status_of_1000_workers_is_a_summary(desk):
    members = [RunningProcess(f"ROLLOUT[{rank}]", f"node-{rank // 8}", rank) for rank in range(1000)]
    run = desk.begin(step=1, members=(*members, RunningProcess("trainer", "node-0", 7)))
    desk.report("job", run, members=(*members, RunningProcess("trainer", "node-0", 7)), roles={"ROLLOUT": 1001})
    lines = desk("status", "job").splitlines()
    assert len(lines) < 12 and any(
        line.split() == ["ROLLOUT", "1000", "of", "1001", "on", "125", "nodes"] for line in lines
    )
    assert len(json.loads(desk("status", "job", "--json"))["members"]) == 1001


def test_attach_takes_its_rate_from_the_time_of_steps(desk):
    """Steps that are an hour old arrive in a burst, which is not their rate."""
    run = desk.begin()
    for step in range(1, 6):
        desk.report("job", run, step=step, total_steps=10)
    for number, event in enumerate(steps := [event for event in desk.manager._feed._recent if event.kind == "step"]):
        position = desk.manager._feed._recent.index(event)
        desk.manager._feed._recent[position] = replace(event, at_s=time.time() - 100 * (len(steps) - number))
    desk.report("job", run, JobPhase.FINISHED, step=5)
    output = desk("attach", "job")
    rates = [float(rate) for rate in re.findall(r"([\d.]+) steps/s", output)]
    assert rates and max(rates) < 0.011, output


def test_remedies_name_keys_of_job_files():
    keys = {key for text in _REMEDIES.values() for key in re.findall(r"[a-z_]+(?:\.[a-z_<>]+)+|\w+_timeout_s", text)}
    assert {"workload.<role>.hang_after_s", "trainer.hang_after_s", "placement_timeout_s"} <= keys
    for key in keys:
        value = "{ROLLOUT: 3}" if key.endswith("workload_max_restart") else "3"
        load_job_text(JOB, "job", [f"{key.replace('<role>', 'rollout')}={value}"])
    assert not re.search(r"\b\w+\.\*|hang_after_s of", " ".join(_REMEDIES.values()))


# -- serve and enqueue ------------------------------------------------------------------------------------------------


def test_taken_metrics_port_is_refused_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobConflict, match=f"^cannot serve metrics at 127.0.0.1:{port}: Address already in use$"):
            serve._metrics(CollectorRegistry(), ("127.0.0.1", port), "", None, None)
    served = serve._metrics(CollectorRegistry(), ("127.0.0.1", 0), "", None, None)
    served.close()


def test_service_ends_with_its_raylet_and_not_with_a_gcs(monkeypatch):
    monkeypatch.setattr(serve, "_LOOK_S", 0.01)
    looks = iter(["", "gcs_server", "", "raylet", "raylet"])
    with pytest.raises(ClusterUnavailable, match="^the raylet of the service's Ray cluster has died: start the ser"):
        asyncio.run(serve._wait_for_the_end(asyncio.Event(), lambda: next(looks)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--root root --state state", ""),
        ("--root root --state root/state", "root/state is inside "),
        ("--root root --state link/state", "link/state is inside "),
        ("--state .", "choose another --state or --root"),
    ],
)
def test_serve_takes_paths_from_its_working_directory(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).touch()
    paths = []

    async def note_paths(address, state, tls, options):
        paths.extend([Path.cwd(), state, *tls[:2], options["metrics_token_file"]])

    monkeypatch.setattr(serve, "_serve", note_paths)
    files = "--tls-cert tls.crt --tls-key tls.key --metrics-token-file metrics"
    done = CliRunner().invoke(serve.serve, f"{line} {files}".split())
    assert message in str(done.exception or "")
    names = [] if message else ["root", "state", "tls.crt", "tls.key", "metrics"]
    assert paths == [tmp_path / name for name in names]


REMOTE_JOB = """
trainer: {module: dlrover.python.rl.recipe.grpo, class: GRPOTrainer, device_type: CPU, device_per_node: 3}
workload: {actor: {module: of.another, class: Machine}}
config: {model: /of/another/machine, data: {train: /of/it.jsonl}, engine: {lora: {rank: 4}}}
"""


ALGORITHM = "algorithm={name: grpo, kl_coeff: 1}"
ENGINE = "engine={train_options: {x: 1}, rollout: torch, rollout_options: {y: 1}, weight_sync_options: {foldr: z}}"
OPTIONS = ("train_options.x", "rollout_options.y", "weight_sync_options.foldr")


@pytest.mark.parametrize(
    ("overrides", "beginnings"),
    [
        (
            ["steps=x", "workload.actor.num=0", "sead=1", "engine.lora.rank=true"],
            ["workload.actor.num", "config.steps", "config.engine.lora.rank", "config.sead"],
        ),
        (["name=second", "steps=true"], ["name: use the option --name", "config.steps: input should be a valid i"]),
        ([ALGORITHM, ENGINE], ["config.algorithm.kl_coeff", *(f"config.engine.{option}" for option in OPTIONS)]),
    ],
    ids=["types", "name", "options"],
)
def test_enqueue_checks_a_job_before_it_asks_a_service(tmp_path, overrides, beginnings):
    """An address where no service is: it is checked first."""
    (tmp_path / "job.yaml").write_text(REMOTE_JOB)
    done = CliRunner().invoke(enqueue, [str(tmp_path / "job.yaml"), *overrides, "--server", "127.0.0.1:1"])
    assert isinstance(done.exception, InvalidJob)
    errors = map(str, done.exception.errors)
    assert [error[: len(start)] for error, start in zip(errors, beginnings, strict=True)] == beginnings


EXTENSIONS = "algorithm={name: not_here:Mine}", "engine={train: acme, rollout: not.here:E, weight_sync: zebra}"
NEAR = "algorithm={name: my_grpo}", "engine={train: fsdp3, rollout: my_vllm, weight_sync: broadcast_rdma}"


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("dlrover.python.rl.recipe.grpo", ["steps=3", *EXTENSIONS]),
        ("dlrover.python.rl.recipe.grpo", NEAR),
        ("of.another", ["stps=x"]),
        ("broken_here", []),
    ],
)
def test_check_submitted_needs_nothing_of_another_machine(tmp_path, recipe, overrides):
    (tmp_path / "broken_here.py").write_text("import of_another_machine\n\nclass GRPOTrainer: ...\n")
    check_submitted(REMOTE_JOB.replace("dlrover.python.rl.recipe.grpo", recipe), "a-job", overrides, tmp_path)


# -- processor time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["list", "status job", "stop job", "fetch job", "enqueue none.yaml"])
def test_client_verb_starts_within_a_second_of_processor_time(desk, line):
    """The command line in a process, which tells its own time as it ends."""
    desk.begin()
    (desk.folder / "laptop/sitecustomize.py").write_text(
        "import atexit, os, sys\natexit.register(lambda: print(sum(os.times()[:2]), file=sys.stderr))\n"
    )
    command = [*CLI, *line.split(), "--server", desk.address]
    done = run_command(desk.folder / "laptop", *command, code=None)
    assert float(done.stderr.splitlines()[-1]) < 1.0, done.stderr
