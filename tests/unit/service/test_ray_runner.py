# SPDX-License-Identifier: Apache-2.0
"""The runner of a service on Ray, without Ray."""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from dlrover.python.rl.common.errors import InvalidJob, MasterLost
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.process.status import JobStatus
from dlrover.python.rl.runtime.ray.processes import actors
from dlrover.python.rl.service import ray_runner
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord
from dlrover.python.rl.service.ray_runner import RayJobRunner, _Driven, _load_job
from tests.support.async_tests import until

JOB = "{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}}"
WITHIN_S = 20.0


@pytest.fixture
def driven():
    return _Driven(JobRecord("job", "r1", "ann", "token", reason="stopped"), JobDescription(JOB))


class Master:
    """A master of a ``run``, which answers with its status; with ``run`` None it does not answer."""

    def __init__(self, run, folder="/of/its/own"):
        self.run, self.folder, self.calls, self.is_ended = run, folder, [], False

    async def call(self, method, *arguments, timeout_s):
        self.calls.append(method)
        if self.run is None:
            raise MasterLost("the master did not answer")
        return JobStatus("job", Phase.RUNNING, 1, 0, "", None, run=self.run, folder=self.folder)

    def end(self):
        self.is_ended = True


@pytest.fixture
def cluster(monkeypatch):
    """The cluster of the runner: ``master`` has the name of the job, ``left`` are the actors of each swept run."""
    cluster = SimpleNamespace(master=None, left={}, swept=[])

    async def find_master(name):
        return cluster.master

    def sweep(name, run):
        cluster.swept.append((name, run))
        return cluster.left.get(run, [])

    monkeypatch.setattr(ray_runner, "find_master", find_master)
    monkeypatch.setattr(ray_runner, "sweep", sweep)
    return cluster


async def checked_at_once(job):
    return SimpleNamespace(job=job)


async def test_failing_end_of_a_job_is_repeated_until_done(driven, cluster, monkeypatch):
    runner = RayJobRunner(grace_s=0.01)

    def sweep(name, run):
        cluster.swept.append((name, run))
        if len(cluster.swept) < 3:
            raise RuntimeError("the GCS is away")
        runner._driven.pop("r1")

    monkeypatch.setattr(ray_runner, "sweep", sweep)
    monkeypatch.setattr(ray_runner, "_RETRY_S", 0.01)
    runner._driven["r1"] = driven
    runner.stop(driven.record)
    await driven.stop
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert cluster.swept == [("job", "r1")] * 3


async def test_job_ended_within_the_grace_leaves_no_task(driven):
    runner = RayJobRunner(grace_s=60.0)
    runner._driven["r1"] = driven
    runner.stop(driven.record)
    await asyncio.sleep(0.01)
    driven.stop.cancel()  # as the end of the run does
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("run", "mode"), [("r1", "latest"), ("r0", "never"), (None, "never")])
async def test_run_resumes_its_own_commits_only(driven, cluster, monkeypatch, run, mode):
    modes = []

    async def start(driven, job):
        modes.append(job.checkpoint.resume)

    owner = None if run is None else SimpleNamespace(run=run, state="running")
    monkeypatch.setattr(ray_runner, "_load_job", lambda record, description: load_job_text(JOB, "job"))
    monkeypatch.setattr(ray_runner, "newest_owner", lambda folder: owner)
    runner = RayJobRunner()
    monkeypatch.setattr(runner, "_start", start)
    await runner._find_or_start(driven, 0)
    assert modes == [mode]


# -- only this run ----------------------------------------------------------------------------------------------------


async def test_hard_stop_before_the_launch_spares_other_runs(driven, cluster, monkeypatch):
    cluster.master = another = Master("r2")
    launching, goes_on, own = threading.Event(), threading.Event(), Master("r1")

    def start_master(checked, claims, launched):
        launching.set()
        assert goes_on.wait(WITHIN_S)
        launched("the handle")
        deadline_s = time.monotonic() + WITHIN_S
        while not own.is_ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
        raise MasterLost("the master is gone")

    monkeypatch.setattr(ray_runner, "MasterCalls", lambda handle: own)
    monkeypatch.setattr(ray_runner, "start_master", start_master)
    runner, seen = RayJobRunner(grace_s=60.0), []
    monkeypatch.setattr(runner, "_check", checked_at_once)
    runner.attach(seen.append)
    runner.run(driven.record, driven.description)
    await until(launching.is_set)
    runner.stop(replace(driven.record, phase=JobPhase.STOPPING, hard=True, reason="stopped by ann"))
    await until(lambda: len(cluster.swept) > 1)
    assert not another.is_ended and set(cluster.swept) == {("job", "r1")}
    goes_on.set()
    await until(lambda: seen)
    assert own.is_ended and not another.is_ended
    assert (seen[-1].phase, seen[-1].reason) == (JobPhase.STOPPED, "stopped by ann")
    await runner.close()


@pytest.mark.parametrize(
    ("run", "left", "ends"),
    [("r1", [], True), ("r2", ["job/r1/trainer/1"], False), (None, [], False), (None, ["job/r1/trainer/1"], True)],
    ids=["its own", "of another run", "of an unknown run", "that does not answer and has workers of this run"],
)
def test_kill_all_ends_a_master_of_the_run_only(driven, cluster, run, left, ends):
    cluster.master, cluster.left = Master(run), {"r1": left}
    driven.job = load_job_text(JOB, "job")
    driven.job = replace(driven.job, run="r1")
    asyncio.run(RayJobRunner()._kill_all(driven))
    assert cluster.master.is_ended is ends and cluster.swept == [("job", "r1")]


def test_sweep_of_a_run_removes_its_actors_and_groups(monkeypatch):
    names = ["job/master", "job/r1/trainer/1", "job/r2/trainer/1", "job-2/r1/trainer/1"]
    groups = [SimpleNamespace(id=name, name=name, state="CREATED") for name in ("job/r1/1/node-0", "job/r2/1/node-0")]
    removed, forgotten = [], []
    api = SimpleNamespace(
        list_actors=lambda prefix: [name for name in names if name.startswith(prefix)],
        find_actor=lambda name: name,
        kill_actor=removed.append,
        list_groups=lambda: groups,
        remove_group=removed.append,
        list_nodes=list,
    )

    async def forget_on_nodes(cluster, nodes, job, run):
        forgotten.append(run)
        return True

    monkeypatch.setattr(actors, "RayClusterApi", lambda: api)
    monkeypatch.setattr(actors, "wait_gone", lambda name, timeout_s: None)
    monkeypatch.setattr(actors, "forget_on_nodes", forget_on_nodes)
    monkeypatch.setattr(actors, "forget_memory", lambda job, run, **options: forgotten.append((job, run)))
    assert actors.sweep("job", "r1") == removed == ["job/r1/trainer/1", "job/r1/1/node-0"]
    assert forgotten == ["r1", ("job", "r1")]
    removed.clear()
    actors.sweep("job")
    assert removed == [*names[:3], *(group.name for group in groups)]


# -- the folder of a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", ["folder", "results"])
def test_recorded_folder_is_used_in_every_time_zone(driven, in_zone, fixed):
    in_zone("UTC")
    before = _load_job(replace(driven.record, submitted_s=1e9), driven.description).job_dir
    assert before.name == "20010909-014640-r1"
    saved = replace(driven.record, submitted_s=1e9, **{fixed: str(before)})
    in_zone("Asia/Tokyo")
    assert _load_job(saved, driven.description).job_dir == before


@pytest.mark.parametrize(
    ("run", "folder", "is_found"), [("r1", "/moved", True), ("r2", "here", False), ("", "here", True), ("", "/", False)]
)
def test_the_master_of_a_run_is_known_by_its_id(driven, cluster, monkeypatch, run, folder, is_found):
    job = replace(load_job_text(JOB, "job"), run="r1", job_dir=Path("here"))
    cluster.master = Master(run, folder)
    assert asyncio.run(RayJobRunner()._find_master(driven, job)) is (cluster.master if is_found else None)
    assert ("start" in cluster.master.calls) is is_found
    assert driven.job is None or driven.job.job_dir == Path(folder)


def test_run_with_a_link_for_its_folder_is_not_continued(driven, cluster, tmp_path):
    (tmp_path / "run").symlink_to(tmp_path)
    driven.record = replace(driven.record, folder=str(tmp_path / "run"))
    for use in (lambda: asyncio.run(RayJobRunner()._find_or_start(driven, 0)), lambda: RayJobRunner()._outcome(driven)):
        with pytest.raises(InvalidJob, match="behind a link that was added later"):
            use()


def test_folder_from_a_master_does_not_replace_the_record(driven, cluster):
    driven.record = replace(driven.record, folder="/of/the/record")
    cluster.master = Master("r1", "/etc")
    asyncio.run(RayJobRunner()._find_master(driven, replace(load_job_text(JOB, "job"), run="r1")))
    assert driven.job.job_dir == Path("/of/the/record")


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_job_stopped_during_its_check_has_the_reason(driven, cluster, monkeypatch):
    runner, seen, checking = RayJobRunner(), [], asyncio.Event()

    async def check(job):
        checking.set()
        await asyncio.sleep(WITHIN_S)

    monkeypatch.setattr(runner, "_check", check)
    runner.attach(seen.append)
    runner.run(replace(driven.record, reason=""), driven.description)
    await checking.wait()
    runner.stop(replace(driven.record, phase=JobPhase.STOPPING, reason="stopped by admin"))
    await until(lambda: seen)
    assert (seen[-1].phase, seen[-1].reason) == (JobPhase.STOPPED, "stopped by admin")
    await runner.close()


async def test_failure_of_a_lost_cluster_is_reported_after_a_look(driven, cluster, monkeypatch):
    """The service ends, and its next process continues the job."""
    looks = []

    def lost_process():
        looks.append(True)
        return "raylet" if len(looks) < 3 else ""

    async def lost(*_):
        raise MasterLost("the master is gone")

    monkeypatch.setattr(ray_runner, "lost_process", lost_process)
    monkeypatch.setattr(ray_runner, "_RETRY_S", 0.01)
    runner, seen = RayJobRunner(), []
    monkeypatch.setattr(runner, "_find_or_start", lost)
    runner.attach(lambda observed: seen.append((observed.phase, len(looks))))
    runner.run(driven.record, driven.description)
    await until(lambda: seen)
    assert seen == [(JobPhase.FAILED, 3)]
    await runner.close()
