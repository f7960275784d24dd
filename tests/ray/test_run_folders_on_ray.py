# SPDX-License-Identifier: Apache-2.0
"""The folders of runs on clusters of their own, beside runs in one process: real processes, from outside."""

import json
import re

import pytest
import ray

from tests.support.held_job import Desk, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    desk = Desk(tmp_path)
    yield desk
    desk.kill_all()


def test_runs_on_two_clusters_and_in_one_process_do_not_touch_each_other(desk):
    first, second = desk.held("out"), desk.start("run", "job.yaml")
    output = desk.run("run", "job.yaml", "--local", "job_dir=out", code=2)
    assert f"in use by run {desk.owner('out')['run']} of 'held' (Ray, process {first.pid} on" in output
    desk.run("run", "job.yaml", "--local")
    output = desk.end(second)
    assert second.returncode == 0, output
    first_folder, second_folder = [path for path in (desk.folder / "runs/held").iterdir() if not path.is_symlink()]
    assert desk.steps(first_folder) == desk.steps(second_folder) == [1, 2, 3, 4, 5, 6]
    desk.release("out")
    output = desk.end(first)
    assert first.returncode == 0, output
    assert desk.steps("out") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("where", ["--ray", "--local"])
def test_a_run_whose_cluster_was_killed_goes_on_after_its_last_step(desk, where):
    process = desk.held("out")
    process.kill()
    process.wait(60)
    output = desk.run("resume", "out", where, "hold=0")
    assert "after step 3" in output
    assert desk.steps("out") == [1, 2, 3, 4, 5, 6]
    assert not list((desk.folder / "memory").rglob("step-*"))


def test_on_a_cluster_that_is_shared_a_folder_that_cannot_be_made_is_said_and_nothing_stays(desk, ray_session):
    output = desk.run("run", "job.yaml", "--address", "auto", "name=nowhere", "job_dir=/proc/none/out", code=2)
    assert output.partition("1 error in the job:\n")[2].startswith("  - job_dir: cannot be created: ")
    assert "Traceback" not in output
    with pytest.raises(ValueError, match="nowhere/master"):
        ray.get_actor("nowhere/master", namespace="dlrover-rl")


def test_on_a_cluster_that_is_shared_the_master_holds_the_folder(desk, ray_session):
    first = desk.held("out", "--address", "auto")
    output = desk.run("run", "job.yaml", "--local", "job_dir=out", code=2)
    assert f"in use by run {desk.owner('out')['run']} of 'held' (Ray, on" in output
    desk.release("out")
    output = desk.end(first)
    assert first.returncode == 0, output
    wait_for(lambda: desk.owner("out")["state"] == "finished")
    (start,) = [json.loads(line) for line in (desk.folder / "out/environment.jsonl").read_text().splitlines()]
    assert "job.yaml" in start["command"] and start["runtime"] == "Ray"
    assert start["devices"]["nodes"] == 1 and start["devices"]["cpus"] >= 1
    steps = re.findall(r"^\d\d:\d\d:\d\d step (\d)/6", (desk.folder / "out/logs/trainer.log").read_text(), re.MULTILINE)
    assert steps == list("123456")
