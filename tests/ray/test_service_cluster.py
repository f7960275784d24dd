# SPDX-License-Identifier: Apache-2.0
"""A service whose own cluster is lost ends with an error, and its next start resumes the jobs."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dlrover.python.rl.cli.operate import EXIT_NO_CLUSTER
from dlrover.python.rl.service.client import ServiceClient, phase_of
from dlrover.python.rl.service.jobs.records import JobPhase
from tests.support.served import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

WITHIN_S = 90.0
STEPS = 6


@pytest.fixture
def start(tmp_path):
    """A function that starts a service with its own cluster, in a time zone."""
    state, started = tmp_path.with_name(f"{tmp_path.name}-state"), []
    shutil.copy(Path(__file__).with_name("service_jobs.py"), tmp_path)

    def begin(zone):
        (state / "address").unlink(missing_ok=True)
        command = [sys.executable, "-m", "dlrover.python.rl.cli", "serve", "--cpus", "4", "--port", "0"]
        environment = {
            **os.environ,
            "DLROVER_RL_STATE": str(state),
            "DLROVER_RL_MEMORY": str(tmp_path / "memory"),
            "TZ": zone,
        }
        with open(tmp_path / "service.log", "a") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        started.append(process)
        until(lambda: (state / "address").exists() or process.poll() is not None, WITHIN_S)
        token = (state / "token").read_text().strip()
        return process, ServiceClient((state / "address").read_text().strip(), token, patience_s=0.0)

    yield begin
    for process in started:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait(20)


def raylet_of(pid):
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    (raylet,) = [child for child in children if "raylet/raylet" in Path(f"/proc/{child}/cmdline").read_text()]
    return int(raylet)


def test_a_service_that_has_lost_its_raylet_ends_and_the_next_start_goes_on_with_its_jobs(tmp_path, start):
    notes, hang = tmp_path / "notes", tmp_path / "notes.hang"
    text = f"""
trainer: {{module: service_jobs, class: PacedTrainer, device_type: CPU, device_per_node: 2}}
workload: {{actor: {{module: service_jobs, class: Adder}}}}
master: {{cpu: 0.1}}
checkpoint: {{commit_to: job_dir}}
config: {{notes: {notes}, steps: {STEPS}, step_s: 0.3}}
"""
    service, client = start("UTC")
    with client:
        client.submit(text, name="job", client_token="one")
        until(lambda: client.get("job").step >= 2, WITHIN_S)
        hang.touch()
        folder = client.get("job").folder
    os.kill(raylet_of(service.pid), signal.SIGKILL)
    assert service.wait(WITHIN_S) == EXIT_NO_CLUSTER, (tmp_path / "service.log").read_text()
    assert (
        "the raylet of the service's Ray cluster has died: start the service" in (tmp_path / "service.log").read_text()
    )
    hang.unlink()
    service, client = start("Asia/Tokyo")
    with client:
        job = client.wait("job", WITHIN_S)
        assert (phase_of(job), job.step, job.folder) == (JobPhase.FINISHED, STEPS, folder), job
        assert job.reward == sum(range(1, STEPS + 1))
        steps = [event.step for event in client.watch("job", follow=False) if event.kind == "step"]
        assert steps == list(range(1, STEPS + 1))
    assert notes.read_text() == "started\n" * 2
    assert [path.name for path in Path(folder).parent.iterdir() if not path.is_symlink()] == [Path(folder).name]
