# SPDX-License-Identifier: Apache-2.0
"""Detached jobs on a running cluster: every verb, by a process that knows the command line only."""

import json
import os
import signal
import subprocess
import time

import pytest
import ray
from test_cli_on_ray import CLI, actors_of, environment

from tests.ray.durable_jobs import wait_for
from tests.ray.service_jobs import job_text

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


class Desk:
    def __init__(self, folder):
        self.folder, self.address = folder, ray.get_runtime_context().gcs_address

    def start(self, *arguments):
        return subprocess.Popen(
            [*CLI, *arguments, "--address", self.address],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *arguments, code=0):
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code, output
        return output

    def status(self, name):
        return json.loads(self("status", name, "--json"))

    def detach(self, name, steps):
        (self.folder / f"{name}.yaml").write_text(job_text(self.folder / f"{name}.notes", steps, 0.1))
        began_s = time.monotonic()
        output = self("run", f"{name}.yaml", "--detach")
        assert name in output and time.monotonic() - began_s < 60


@pytest.fixture
def desk(tmp_path, ray_session):
    return Desk(tmp_path)


def test_a_detached_job_is_listed_followed_left_and_stopped(desk):
    desk.detach("alone", 10**6)
    wait_for(lambda: desk.status("alone")["step"] > 2, 60)
    assert "alone" in desk("list")
    view = desk.status("alone")
    assert view["phase"] == "running" and view["nodes"] == 1 and view["reward"] > 0 and view["step_s"] > 0.05
    attached = desk.start("attach", "alone")
    time.sleep(6)
    os.killpg(attached.pid, signal.SIGINT)
    output, _ = attached.communicate(timeout=30)
    assert attached.returncode == 0 and "step" in output and "alone goes on" in output
    began_s = time.monotonic()
    desk("wait", "alone", "--timeout", "1", code=124)
    assert time.monotonic() - began_s < 30
    explained = desk("explain", "alone")
    assert "It is running since" in explained and "starting" not in explained
    assert "did you mean 'alone'" in desk("status", "alnoe", code=2)
    desk("stop", "alone")
    assert not actors_of("alone") and desk.status("alone")["phase"] == "stopped"


def test_the_master_of_a_job_that_has_ended_gives_back_what_it_holds(desk):
    desk.detach("brief", 3)
    desk("wait", "brief")
    assert desk.status("brief")["phase"] == "finished"
    wait_for(lambda: not actors_of("brief"), 90)
    view = desk.status("brief")  # from its folder
    assert view["phase"] == "finished" and view["ended"]
    assert "finished" in desk("explain", "brief")


def test_what_a_killed_member_wrote_is_in_its_log_and_a_failure_is_explained(desk):
    text = job_text(desk.folder / "notes", 10**6, 0.1)
    (desk.folder / "failing.yaml").write_text(text + "restart: {workload_max_restart: {actor: 0}}\n")
    desk("run", "failing.yaml", "--detach")
    wait_for(lambda: desk.status("failing")["step"] > 2, 60)
    (pid,) = [it["pid"] for it in desk.status("failing")["members"] if it["process"] == "ACTOR[0]"]
    os.kill(pid, signal.SIGKILL)
    desk("wait", "failing", code=1)
    explained = desk("explain", "failing")
    assert "ACTOR[0]" in explained and "died" in explained and "dlrover-rl resume" in explained
    assert "ACTOR[0] attempt 1" in desk("logs", "failing", "actor-0")
    assert "did you mean 'actor-0'" in desk("logs", "failing", "acter-0", code=2)
    desk("stop", "failing")


def test_a_cluster_that_is_not_there_is_one_line(desk):
    desk.address = "127.0.0.1:1"
    began_s = time.monotonic()
    assert len(desk("list", code=4).strip().splitlines()) == 1
    assert time.monotonic() - began_s < 20
    desk.address = "auto"
    assert "../abc" in desk("status", "../abc", code=2)


def test_the_doctor_looks_at_every_node(desk):
    output = desk("doctor", "--folder", str(desk.folder / "runs"))
    assert (
        "1 of 1 answer" in output
        and "clocks: 0." in output
        and "nothing beyond loopback answers without a token" in output
    )
    assert "nothing to fix" in output
