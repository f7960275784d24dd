# SPDX-License-Identifier: Apache-2.0
"""The service over jobs on real Ray: they do not notice when it ends, and its next process finds them."""

import asyncio
import os
import secrets
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from dlrover.python.rl.cli.operate import EXIT_NO_CLUSTER
from dlrover.python.rl.common.errors import MasterLost, ServiceError
from dlrover.python.rl.common.names import master_name
from dlrover.python.rl.master.client import on_ray
from dlrover.python.rl.runtime.ray.processes.actors import end, find
from dlrover.python.rl.service import ray_runner
from dlrover.python.rl.service.client import ServiceClient, phase_of
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord, StopJob, SubmitJob
from dlrover.python.rl.service.ray_runner import RayJobRunner
from tests.support import service_stage, toy_job
from tests.support.async_tests import until
from tests.support.commands import ROOT, Desk, processes_below, wait_for
from tests.support.manual_clock import within
from tests.support.toy_job import toy_text

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

WITHIN_S = 60.0


def serving(folder):
    return service_stage.serving(folder / "state", RayJobRunner())


def submission(name, text):
    description = JobDescription(text, folder=str(ROOT))
    job = JobRecord(name, "", "ann", f"token-{name}", resources={"cpu": 2.0}, roles={"ACTOR": 1})
    return SubmitJob(job, description)


@pytest.fixture
def folder(tmp_path, monkeypatch, ray_session):
    """The working directory, beside a cluster."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_next_manager_finds_a_running_job(folder):
    async with serving(folder) as manager:
        await manager.ask(submission("served", toy_text(folder / "notes", steps=60, step_s=0.1)))
        await until(lambda: manager.get("served").step >= 2)
        left = manager.get("served").step
    async with serving(folder) as manager:
        await until(lambda: manager.get("served").step > left)
        ended = await manager.wait("served", WITHIN_S)
        assert (ended.phase, ended.step, ended.total_steps, ended.restarts) == (JobPhase.FINISHED, 60, 60, 0)
        events = [event async for page in manager.watch("served", follow=False) for event in page]
        assert [event.step for event in events if event.kind == "step"] == list(range(1, 61))
        assert events[-1].metrics == {} and events[-2].metrics["reward"] == sum(range(1, 61))
        assert Path(ended.results).parent == folder / "runs" / "served"
    assert (folder / "notes/starts").read_text() == "started\n"
    assert find(master_name("served")) is None


async def test_next_manager_starts_a_launched_master(folder, monkeypatch):
    """Pretend that the service was killed in between."""
    launched = []

    def unanswered(make_call, timeout_s):
        launched.append(make_call)
        raise MasterLost("the service is killed here")

    with monkeypatch.context() as patch:
        patch.setattr(on_ray, "ask", unanswered)
        patch.setattr(ray_runner, "_REVIVALS", 0)
        patch.setattr(RayJobRunner, "_kill_all", lambda *_: asyncio.sleep(WITHIN_S))
        async with serving(folder) as manager:
            await manager.ask(submission("unbegun", toy_text(folder / "notes", steps=3)))
            await until(lambda: launched)
    async with serving(folder) as manager:
        ended = await manager.wait("unbegun", WITHIN_S)
        assert (ended.phase, ended.step) == (JobPhase.FINISHED, 3)
    assert (folder / "notes/starts").read_text() == "started\n"


async def stop_quickly(manager, name, hard=False):
    with within(5.0):
        await manager.ask(StopJob(name, manager.get(name).run, "by the test", hard))
        ended = await manager.wait(name, WITHIN_S)
        assert ended.phase is JobPhase.STOPPED, ended


async def test_stop_takes_five_seconds_at_most_in_each_state(folder):
    states = (("s-starting", JobPhase.STARTING), ("s-running", JobPhase.RUNNING), ("s-hard", JobPhase.RUNNING))
    async with serving(folder) as manager:
        for name, phase in states:
            await manager.ask(submission(name, toy_text(folder / name, steps=10_000)))
            await until(lambda name=name, phase=phase: manager.get(name).phase is phase, within_s=120.0)
            await stop_quickly(manager, name, hard=name == "s-hard")
            await until(lambda name=name: find(master_name(name)) is None, 10)


async def test_stop_takes_five_seconds_while_the_master_starts(folder, monkeypatch):
    launched, ask = threading.Event(), on_ray.ask

    def slow(request, timeout_s):
        launched.set()
        wait_for(lambda: find(master_name("slow")) is None, WITHIN_S)
        return ask(request, timeout_s)

    monkeypatch.setattr(on_ray, "ask", slow)
    async with serving(folder) as manager:
        await manager.ask(submission("slow", toy_text(folder / "notes", steps=10_000)))
        await until(launched.is_set)
        await stop_quickly(manager, "slow")
    assert not (folder / "notes/starts").exists()


@pytest.mark.slow
async def test_job_whose_master_is_lost_resumes_at_its_last_commit(folder):
    async with serving(folder) as manager:
        await manager.ask(submission("lost", toy_text(folder / "notes", steps=40, step_s=0.1)))
        await until(lambda: manager.get("lost").step >= 5)
        end(find(master_name("lost")))
        ended = await manager.wait("lost", WITHIN_S)
        assert (ended.phase, ended.step, ended.reward) == (JobPhase.FINISHED, 40, sum(range(1, 41))), ended


async def test_failed_job_gives_its_cause(folder):
    async with serving(folder) as manager:
        await manager.ask(submission("wrong", toy_text(folder / "no-such-folder" / "notes")))
        ended = await manager.wait("wrong", WITHIN_S)
        assert (ended.phase, ended.cause) == (JobPhase.FAILED, "user_error"), ended
        assert "FileNotFoundError" in ended.detail
        await manager.ask(submission("unknown", toy_text(folder / "unknown").replace("Loop", "Lop")))
        ended = await manager.wait("unknown", WITHIN_S)
        assert ended.phase is JobPhase.FAILED and "Lop" in ended.detail and "Loop" in ended.detail


class Service:
    """``dlrover-rl serve``, started again and again; jobs may use ``folder``, which is its root."""

    def __init__(self, folder, *options, **env):
        self.state, self.options, self.port = folder.with_name(f"{folder.name}-state"), options, 0
        self.desk = Desk(folder, DLROVER_RL_STATE=str(self.state), **env)
        shutil.copy(toy_job.__file__, folder)

    def start(self, **env):
        (self.state / "address").unlink(missing_ok=True)
        self.process = self.desk.start("serve", "--port", str(self.port), *self.options, **env)
        wait_for(lambda: (self.state / "address").exists() or self.process.poll() is not None, within_s=240.0)
        self.port = int((self.state / "address").read_text().rpartition(":")[2])

    def kill(self):
        self.process.kill()
        self.process.wait(20)

    def client(self, patience_s=120.0):
        token = (self.state / "token").read_text().strip()
        return ServiceClient(f"127.0.0.1:{self.port}", token, patience_s=patience_s)

    def close(self):
        self.process.terminate()
        assert self.process.wait(60) == 0


def small_job(folder, steps, step_s, **keys):
    return toy_text(folder, module="toy_job", steps=steps, step_s=step_s, master={"cpu": 0.1}, **keys)


def test_service_without_its_raylet_ends_and_the_next_resumes(tmp_path, request):
    notes, steps = tmp_path / "notes", 6
    service = Service(tmp_path, "--cpus", "4", DLROVER_RL_MEMORY=str(tmp_path / "memory"))
    request.addfinalizer(service.desk.kill_all)
    service.start(TZ="UTC")
    text = small_job(notes, steps, 0.3, checkpoint={"commit_to": "job_dir"})
    with service.client() as client:
        client.submit(text, name="job", client_token="one")
        wait_for(lambda: client.get("job").step >= 2)
        (notes / "hang").touch()
        folder = client.get("job").folder
    programs = {line.split(" ")[0]: pid for pid, line in processes_below(service.process.pid).items()}
    (raylet,) = [pid for program, pid in programs.items() if program.endswith("raylet/raylet")]
    os.kill(raylet, signal.SIGKILL)
    message = "the raylet of the service's Ray cluster has died: start the service"
    assert message in service.process.end(EXIT_NO_CLUSTER)
    (notes / "hang").unlink()
    service.start(TZ="Asia/Tokyo")
    with service.client() as client:
        job = client.wait("job", 90)
        assert (phase_of(job), job.step, job.folder) == (JobPhase.FINISHED, steps, folder), job
        assert job.reward == sum(range(1, steps + 1))
        numbers = [event.step for event in client.watch("job", follow=False) if event.kind == "step"]
        assert numbers == list(range(1, steps + 1))
    assert (notes / "starts").read_text() == "started\n" * 2
    assert [path.name for path in Path(folder).parent.iterdir() if not path.is_symlink()] == [Path(folder).name]
    service.close()


@pytest.fixture
def service_on_session(tmp_path, monkeypatch, ray_session):
    """A service on a cluster that is not its own."""
    service = Service(tmp_path, "--address", ray.get_runtime_context().gcs_address)
    monkeypatch.setenv("DLROVER_RL_STATE", str(service.state))
    service.start()
    yield service
    service.close()


class Watcher(threading.Thread):
    """Watches all jobs from the first event on, over all lives of the service."""

    def __init__(self, service):
        super().__init__(daemon=True)
        self.service, self.events, self.over = service, [], False

    def run(self):
        while not self.over:
            with suppress(ServiceError), self.service.client() as client:
                self.events.extend(client.watch(after=len(self.events)))
            time.sleep(0.2)

    def ended(self):
        return sum(phase_of(event).ended for event in list(self.events))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_kills_of_a_service_change_no_job_and_no_watch(service_on_session, tmp_path):
    service, steps = service_on_session, 120
    texts = [small_job(tmp_path / f"notes-{number}", steps, 0.3) for number in range(3)]
    with service.client() as client:
        tokens = [secrets.token_hex(8) for _ in texts]
        for number, (text, token) in enumerate(zip(texts, tokens, strict=True)):
            client.submit(text, name=f"job-{number}", client_token=token)
        watcher = Watcher(service)
        watcher.start()
        for number in range(3):
            wait_for(lambda number=number: client.get(f"job-{number}").step > 2, 90)
    for _ in range(5):
        service.kill()
        time.sleep(1)
        service.start()
        with service.client() as client:  # the same submission, again
            assert client.submit(texts[0], name="job-0", client_token=tokens[0]).name == "job-0"
        time.sleep(2)
    with service.client() as client:
        for number in range(3):
            job = client.wait(f"job-{number}", 120)
            assert (phase_of(job), job.step, job.restarts) == (JobPhase.FINISHED, steps, 0), job
            assert job.reward == sum(range(1, steps + 1))
            assert (tmp_path / f"notes-{number}/starts").read_text() == "started\n"
        wait_for(lambda: watcher.ended() == 3, 20)
        events = list(client.watch(follow=False))
    watcher.over = True
    assert [event.number for event in watcher.events] == list(range(1, len(events) + 1))
    assert [event.SerializeToString() for event in watcher.events] == [event.SerializeToString() for event in events]
    assert sum(event.kind == "submitted" for event in events) == 3


READING = """
from pathlib import Path

from toy_job import Loop, Worker

class Reader(Loop):
    def init(self):
        super().init()
        with open(Path(self.config.folder) / "sizes", "a") as sizes:
            print(len(Path(__file__).with_name("data.bin").read_bytes()), file=sizes)
"""


@pytest.mark.slow
def test_service_runs_and_resumes_a_job_with_its_working_dir(tmp_path):
    """The folder of 50 MB is gone before the job has begun."""
    for name in ("root", "mine", "laptop"):
        (tmp_path / name).mkdir()
    shutil.copy(toy_job.__file__, tmp_path / "mine")
    (tmp_path / "mine/reading.py").write_text(READING)
    (tmp_path / "mine/data.bin").write_bytes(bytes(range(256)) * 200_000)
    text = toy_text(tmp_path / "notes", trainer="Reader", module="reading", steps=60, step_s=0.2)
    (tmp_path / "laptop/job.yaml").write_text(text)
    address = tmp_path / ".dlrover-rl/service/address"
    with Desk(tmp_path, HOME=str(tmp_path)) as desk:
        desk.start("serve", "--root", "root", "--cpus", "4", "--port", "0")
        wait_for(address.exists)
        with Desk(tmp_path / "laptop", HOME=str(tmp_path), DLROVER_RL_SERVER=address.read_text().strip()) as client:
            client.run("enqueue", "job.yaml", "--name", "job", "--working-dir", "../mine")
            shutil.rmtree(tmp_path / "mine")
            wait_for(lambda: client.status("job")["step"] >= 2)
            client.run("stop", "job")
            first = client.status("job")
            assert 2 <= first["step"] < 60
            client.run("resume", "job", "--detach")
            client.run("wait", "job")
            second = client.status("job")
    assert second["run"] != first["run"] and second["folder"] == first["folder"] and second["step"] == 60
    assert second["reward"] == sum(range(1, 61)), "each step once"
    assert (tmp_path / "notes/sizes").read_text().split() == ["51200000"] * 2
