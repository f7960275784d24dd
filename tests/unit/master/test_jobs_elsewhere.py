# SPDX-License-Identifier: Apache-2.0
"""The verbs of a job that the cluster they ask does not know, or where there is no cluster: its folder in ``runs`` says
how it is, and a job that a process of this machine runs is never called lost."""

import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlrover.python.rl.cli.operate import VERBS as COMMANDS
from dlrover.python.rl.common.errors import ClusterUnavailable, InvalidJob
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.client import on_ray as module
from dlrover.python.rl.master.client.jobs import JobHistory, view_of_folder
from dlrover.python.rl.master.client.on_ray import ray_jobs
from dlrover.python.rl.master.job import check_job, run_here
from dlrover.python.rl.runtime.run.folder import CLUSTER, ON_RAY, begin, claim
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload

TEXT = """
name: mine
trainer: {{module: {module}, class: Watched, device_type: CPU, device_per_node: 2}}
workload: {{actor: {{module: {module}, class: Idle}}}}
"""
WHILE_IT_RUNS = []
VERBS = {command.name: command for command in COMMANDS}


class Idle(BaseWorkload):
    pass


class Watched(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        for look in WHILE_IT_RUNS:
            look(self)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The addresses that were asked; no cluster answers."""
    monkeypatch.chdir(tmp_path)
    addresses = []

    @contextmanager
    def ray_cluster(address, needed):
        addresses.append(address)
        raise ClusterUnavailable("no Ray cluster here")
        yield

    monkeypatch.setattr(module, "ray_cluster", ray_cluster)
    yield addresses
    WHILE_IT_RUNS.clear()


def run(*looks, overrides=()):
    WHILE_IT_RUNS.extend(looks)
    job = load_job_text(TEXT.format(module=__name__), "mine", overrides, (str(Path(__file__).parent),))
    status = run_here(check_job(job))
    assert status.phase.value == "finished", status.reason


def test_without_a_cluster_an_ended_job_is_as_its_folder_says(asked):
    run()
    with ray_jobs("auto", "mine") as jobs:
        view = jobs.get("mine")
        assert (view.phase, view.ended, view.reason) == ("finished", True, "the trainer returned")
        views = [jobs.wait("mine", 0.0), jobs.stop("mine", hard=False)]
        assert list(map(repr, views)) == [repr(view)] * 2  # its reward is NaN, which does not equal itself
    with ray_jobs("auto", "another") as jobs, pytest.raises(ClusterUnavailable) as caught:
        jobs.get("another")
    what = "no run named 'another' in ./runs, and no Ray cluster here; status, explain and logs also take the folder of"
    assert str(caught.value).startswith(what)
    with (
        ray_jobs("auto", "mien") as jobs,
        pytest.raises(ClusterUnavailable, match=r"cluster here; did you mean 'mine'\?"),
    ):
        jobs.get("mien")
    for address, name in (("auto", None), ("10.0.0.1:6379", "mine")):
        with pytest.raises(ClusterUnavailable), ray_jobs(address, name):
            pass


def test_a_job_that_a_process_here_runs_is_not_lost_and_cannot_be_stopped_from_elsewhere(asked):
    seen = []

    def look(trainer):
        with ray_jobs("auto", "mine") as jobs:
            seen.append(jobs.get("mine"))
            for verb in (lambda: jobs.stop("mine", hard=True), lambda: jobs.wait("mine", 1.0)):
                with pytest.raises(InvalidJob, match=r"not on this cluster, it runs elsewhere: .*one process, process"):
                    verb()

    run(look)
    (view,) = seen
    assert (view.phase, view.ended) == ("running", False)
    assert "resume" not in view.reason


def said(verb, *arguments):
    done = CliRunner().invoke(VERBS[verb], arguments)
    if done.exception is not None:
        raise done.exception
    return done.output


def test_the_folder_of_a_run_answers_by_itself(asked):
    def look(trainer):
        seen.append((said("status", "out/first"), said("logs", str(Path.cwd() / "out/first"))))

    seen = []
    run(look, overrides=["job_dir=out/first"])
    ((running, nothing),) = seen
    assert running.startswith("mine: running, ") and "(one process, process" in running
    assert nothing == "there is no log; a run in one process writes none\n"
    assert said("status", "out/first/").startswith("mine: finished, ")
    assert said("explain", "out/first").startswith("mine: It has finished since ")
    logs = Path("out/first/logs")
    logs.mkdir()
    (logs / "trainer.log").write_text("a line\n")
    assert said("logs", "out/first", "trainer", "-f") == "a line\n"
    os.chdir("out")
    assert "mine: finished" in said("status", "first"), "a job's name, and the folder of another job's run"
    assert asked == []


def test_what_is_no_folder_of_a_run_is_answered_with_the_nearest(asked):
    run(overrides=["job_dir=out/first"])
    with pytest.raises(InvalidJob, match=r"out/frist: neither the folder of a run nor .*; did you mean 'out/first'\?"):
        said("explain", "out/frist")
    with pytest.raises(InvalidJob, match="--address: is not used for a run's folder"):
        said("status", "out/first", "--address", "10.0.0.1:6379")
    with pytest.raises(InvalidJob, match="'out/first' is not a job name"):
        said("stop", "out/first")
    Path("out/first/journal.jsonl").unlink()
    with pytest.raises(InvalidJob, match="out/first: has no journal: the run has not begun"):
        said("status", "out/first")


def test_the_cluster_where_a_process_here_runs_the_job_is_asked_first(asked, monkeypatch):
    def look(trainer):
        monkeypatch.setattr(module, "ON_RAY", "one process")
        for written in ("127.0.0.1:4711", ""):  # empty for a moment, when it is written
            (trainer.job_dir / CLUSTER).write_text(written)
            with ray_jobs("auto", "mine"):
                pass

    run(look)
    with ray_jobs("auto", "mine"):
        pass
    assert asked == ["127.0.0.1:4711", "auto", "auto"]


@pytest.mark.parametrize(
    ("shown_s", "asked", "phase"), [(0, "", "running"), (0, "10.0.0.5:6379", "lost"), (90, "", "lost")]
)
def test_a_job_of_a_master_elsewhere_runs_while_it_shows_life_unless_its_cluster_has_none(
    run_elsewhere, shown_s, asked, phase
):
    folder, history = run_elsewhere
    (record,) = folder.glob("owner.*.json")
    os.utime(record, (time.time() - shown_s,) * 2)
    (folder / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.25}\n', encoding="utf-8")
    view = view_of_folder("mine", folder, history, asked)
    assert (view.phase, view.ended) == (phase, phase == "lost")
    assert (view.step, view.reward) == (3, 0.25)
    assert view.reason.endswith(f"to resume the run: dlrover-rl resume {folder}") == (phase == "lost")
    assert ("(Ray, on " in view.reason and view.reason.endswith("alive within the last 60 s")) == (phase == "running")


@pytest.fixture
def run_elsewhere(tmp_path):
    """The folder of a run whose master claims it, and what its journal tells."""
    text = f"{TEXT.format(module=__name__)}job_dir: {tmp_path}\n"
    job = begin(load_job_text(text, "mine", [], (str(Path(__file__).parent),)))
    claim(job, ON_RAY, bound=False)
    (job.job_dir / CLUSTER).write_text("10.0.0.5:6379")
    return job.job_dir, JobHistory(0.0)
