# SPDX-License-Identifier: Apache-2.0
"""The service on Ray is killed while its jobs run: they do not notice, and no watcher misses anything."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from dlrover.python.rl.common.errors import ServiceError
from dlrover.python.rl.service.client import ServiceClient, phase_of
from dlrover.python.rl.service.jobs.records import JobPhase
from tests.support.served import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "dlrover.python.rl.cli"]


def state_beside(folder):
    """Jobs may use ``folder``, which is the service's root."""
    return folder.with_name(f"{folder.name}-state")


class Service:
    """``dlrover-rl serve`` on a cluster that is not its own."""

    def __init__(self, folder, address):
        self.folder, self.state, self.address, self.port = folder, state_beside(folder), address, 0
        shutil.copy(ROOT / "tests/ray/service_jobs.py", folder)
        self.environment = {
            **os.environ,
            "DLROVER_RL_STATE": str(self.state),
        }

    def start(self):
        (self.state / "address").unlink(missing_ok=True)
        with open(self.folder / "service.log", "a") as log:
            self.process = subprocess.Popen(
                [*CLI, "serve", "--address", self.address, "--port", str(self.port)],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until((self.state / "address").exists, 60)
        self.port = int((self.state / "address").read_text().rpartition(":")[2])

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def client(self):
        token = (self.state / "token").read_text().strip()
        return ServiceClient(f"127.0.0.1:{self.port}", token, patience_s=120.0)


@pytest.fixture
def service(tmp_path, monkeypatch, ray_session):
    monkeypatch.setenv("DLROVER_RL_STATE", str(state_beside(tmp_path)))
    running = Service(tmp_path, ray.get_runtime_context().gcs_address)
    running.start()
    yield running
    running.process.terminate()
    assert running.process.wait(60) == 0


def job_text(notes, steps, step_s):
    return f"""
trainer: {{module: service_jobs, class: PacedTrainer, device_type: CPU, device_per_node: 2}}
workload:
  actor: {{module: service_jobs, class: Adder}}
master: {{cpu: 0.1}}
config: {{notes: {notes}, steps: {steps}, step_s: {step_s}}}
"""


class Watcher(threading.Thread):
    """Watches all jobs from the first event on, over all lives of the service."""

    def __init__(self, service, count):
        super().__init__(daemon=True)
        self.service, self.count, self.events, self.over = service, count, [], False

    def run(self):
        while not self.over:
            with suppress(ServiceError), self.service.client() as client:
                self.events.extend(client.watch(after=len(self.events)))
            time.sleep(0.2)

    def ended(self):
        return sum(phase_of(event).ended for event in list(self.events))


def test_five_kills_of_the_service_are_noticed_by_no_job_and_no_watcher(service, tmp_path):
    steps = 120
    with service.client() as client:
        tokens = [secrets.token_hex(8) for _ in range(3)]
        for number, token in enumerate(tokens):
            text = job_text(tmp_path / f"notes-{number}", steps, 0.3)
            client.submit(text, name=f"job-{number}", client_token=token)
        watcher = Watcher(service, 3)
        watcher.start()
        for number in range(3):
            until(lambda number=number: client.get(f"job-{number}").step > 2, 90)
    for _ in range(5):
        service.kill()
        time.sleep(1)
        service.start()
        with service.client() as client:  # the same submission, again
            text = job_text(tmp_path / "notes-0", steps, 0.3)
            assert client.submit(text, name="job-0", client_token=tokens[0]).name == "job-0"
        time.sleep(2)
    with service.client() as client:
        for number in range(3):
            job = client.wait(f"job-{number}", 120)
            assert (phase_of(job), job.step, job.restarts) == (JobPhase.FINISHED, steps, 0), job
            assert job.reward == sum(range(1, steps + 1))
            assert (tmp_path / f"notes-{number}").read_text() == "started\n"
        until(lambda: watcher.ended() == 3)
        events = list(client.watch(follow=False))
    watcher.over = True
    assert [event.number for event in watcher.events] == list(range(1, len(events) + 1))
    assert [event.SerializeToString() for event in watcher.events] == [event.SerializeToString() for event in events]
    assert sum(event.kind == "submitted" for event in events) == 3


def test_twenty_jobs_with_a_kill_in_between_each_run_once(service, tmp_path):
    with service.client() as client:
        for number in range(20):
            client.submit(job_text(tmp_path / f"notes-{number}", 5, 0.1), name=f"job-{number}")
        until(lambda: phase_of(client.get("job-2")).ended, 300)  # ten jobs start at once, on a few cores
    service.kill()
    service.start()
    with service.client() as client:
        until(lambda: phase_of(client.get("job-8")) is JobPhase.RUNNING or phase_of(client.get("job-8")).ended, 200)
        began_s = time.monotonic()
        stopped = [client.stop(f"job-{number}").name for number in (17, 19)]
        for name in stopped:
            assert phase_of(client.wait(name, 20)).ended
        assert time.monotonic() - began_s < 5
        for number in range(20):
            job = client.wait(f"job-{number}", 300)
            if job.name not in stopped:
                assert (phase_of(job), job.step) == (JobPhase.FINISHED, 5), job
                assert (tmp_path / f"notes-{number}").read_text() == "started\n"
        events = list(client.watch(follow=False))
    assert sum(event.kind == "submitted" for event in events) == 20
    assert [event.number for event in events] == list(range(1, len(events) + 1))
