# SPDX-License-Identifier: Apache-2.0
"""A role is resized while its job runs, from the command line; committed steps stay as they are."""

import json
import os
import signal
import subprocess

import pytest
import ray
from test_cli_on_ray import CLI, environment

from tests.ray.durable_jobs import wait_for
from tests.ray.resizable_jobs import JOB

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


class Desk:
    def __init__(self, folder):
        self.folder, self.address = folder, ray.get_runtime_context().gcs_address

    def __call__(self, *arguments, code=0):
        done = subprocess.run(
            [*CLI, *arguments, "--address", self.address],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def status(self, name):
        return json.loads(self("status", name, "--json"))

    def start(self, name, *overrides):
        (self.folder / f"{name}.yaml").write_text(JOB.replace("FOLDER", str(self.folder)))
        self("run", f"{name}.yaml", "--detach", *overrides)
        wait_for(lambda: self.status(name)["step"] > 2, 60)

    def resize(self, name, num):
        self("resize", name, "rollout", str(num))
        assert self.status(name)["roles"]["ROLLOUT"] == num
        before = self.status(name)["step"]
        wait_for(lambda: self.status(name)["step"] > before + 2, 60)


@pytest.fixture
def desk(tmp_path, ray_session):
    return Desk(tmp_path)


def check_steps(folder, total):
    """Each step was done once, by all workers of the size that the role had; returns the sizes in their order."""
    seen = json.loads((folder / "seen.json").read_text())
    assert [step for step, _ in seen] == list(range(1, total + 1))
    for _, members in seen:
        assert [rank for rank, _ in members] == list(range(len(members)))
        assert {world_size for _, world_size in members} == {len(members)}
    sizes = [len(members) for _, members in seen]
    return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]


def test_a_role_grows_and_shrinks_while_the_job_runs(desk):
    desk.start("growing")
    desk.resize("growing", 3)
    desk.resize("growing", 2)
    desk("wait", "growing", "--timeout", "90")
    assert check_steps(desk.folder, 150) == [2, 3, 2]


def test_what_cannot_be_resized_is_refused_and_the_job_goes_on(desk):
    desk.start("steady", "config.steps=100000")
    for arguments, words in (
        (("actor", "2"), "its workers hold a state"),
        (("rolout", "3"), "did you mean 'ROLLOUT'?"),
        (("rollout", "0"), "0 is not in the range"),
        (("rollout", "500"), "stays as it is"),
    ):
        assert words in desk("resize", "steady", *arguments, code=2)
    assert desk.status("steady")["roles"]["ROLLOUT"] == 2
    free = ray.available_resources().get("CPU")
    desk.resize("steady", 3)
    desk.resize("steady", 1)
    desk.resize("steady", 3)
    assert ray.available_resources().get("CPU") == free - 1  # the place that was reserved is used again
    desk("stop", "steady")


def test_members_and_masters_that_die_leave_the_size_as_it_is(desk):
    desk.start("hurt", "config.steps=400")
    desk.resize("hurt", 4)
    master = ray.get_actor("hurt/master", namespace="dlrover-rl")
    os.kill(ray.get(master.__ray_call__.remote(lambda _: os.getpid()), timeout=30), signal.SIGKILL)
    wait_for(lambda: ray.get(master.status.remote(), timeout=60).masters == 2, 60)
    desk.resize("hurt", 2)
    for process, _, pid, _ in ray.get(master.status.remote(), timeout=30).members:
        if process in ("ROLLOUT[1]", "trainer"):
            os.kill(pid, signal.SIGKILL)
    desk("wait", "hurt", "--timeout", "150")
    assert check_steps(desk.folder, 400) == [2, 4, 2]
