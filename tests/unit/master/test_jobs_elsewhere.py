# SPDX-License-Identifier: Apache-2.0
"""The verbs for a job that no Ray cluster knows: its folder in ``runs`` answers; and the logs of one on Ray."""

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlrover.python.rl.cli.operate import VERBS as COMMANDS
from dlrover.python.rl.common.errors import ClusterUnavailable, InvalidJob
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.client import on_ray as module
from dlrover.python.rl.master.client.jobs import view_of_folder
from dlrover.python.rl.master.client.on_ray import RayJobs, ray_jobs
from dlrover.python.rl.master.client.views import JobHistory, JobView
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
def asked_addresses(tmp_path, monkeypatch):
    """The addresses at which a cluster was looked for; none answers."""
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
    status = run_here(check_job(job, local=True))
    assert status.phase.value == "finished", status.reason


def test_ended_job_without_a_cluster_is_read_from_its_folder(asked_addresses):
    run()
    with ray_jobs("auto", "mine") as jobs:
        view = jobs.get("mine")
        assert (view.phase, view.ended, view.reason) == ("finished", True, "the trainer returned")
        views = [jobs.wait("mine", 0.0), jobs.stop("mine", hard=False)]
        assert list(map(repr, views)) == [repr(view)] * 2  # its reward is NaN, which does not equal itself


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another", r"^no run named 'another' in ./runs, and no Ray cluster here; status, explain and logs also take"),
        ("mien", r"cluster here; did you mean 'mine'\?"),
    ],
)
def test_unknown_job_without_a_cluster_gets_the_nearest(asked_addresses, name, message):
    run()
    with ray_jobs("auto", name) as jobs, pytest.raises(ClusterUnavailable, match=message):
        jobs.get(name)


@pytest.mark.parametrize(("address", "name"), [("auto", None), ("10.0.0.1:6379", "mine")])
def test_cluster_is_needed_for_a_list_and_where_it_is_named(asked_addresses, address, name):
    with pytest.raises(ClusterUnavailable), ray_jobs(address, name):
        pass


def test_job_of_a_process_here_is_neither_lost_nor_stopped(asked_addresses):
    views = []

    def look(trainer):
        with ray_jobs("auto", "mine") as jobs:
            views.append(jobs.get("mine"))
            for verb in (lambda: jobs.stop("mine", hard=True), lambda: jobs.wait("mine", 1.0)):
                with pytest.raises(InvalidJob, match=r"not on this cluster, it runs elsewhere: .*one process, process"):
                    verb()

    run(look)
    (view,) = views
    assert (view.phase, view.ended) == ("running", False)
    assert "resume" not in view.reason


def output_of(verb, *arguments):
    done = CliRunner().invoke(VERBS[verb], arguments)
    if done.exception is not None:
        raise done.exception
    return done.output


def test_verbs_take_the_folder_of_a_run(asked_addresses):
    outputs = []

    def look(trainer):
        outputs.extend([output_of("status", "out/first"), output_of("logs", str(Path.cwd() / "out/first"))])

    run(look, overrides=["job_dir=out/first"])
    status, logs = outputs
    assert status.startswith("mine: running, ") and "elsewhere" not in status
    assert logs == "there is no log; a run in one process writes none\n"
    assert output_of("status", "out/first/").startswith("mine: finished, ")
    assert output_of("explain", "out/first").startswith("mine: It has finished since ")
    folder = Path("out/first/logs")
    folder.mkdir()
    (folder / "trainer.log").write_text("a line\n")
    assert output_of("logs", "out/first", "trainer", "-f") == "a line\n"
    os.chdir("out")
    assert "mine: finished" in output_of("status", "first"), "a job's name, and the folder of another job's run"
    assert asked_addresses == []


def test_argument_without_a_run_is_refused(asked_addresses):
    run(overrides=["job_dir=out/first"])
    Path("out/empty").mkdir()
    for name in ("job.yaml", "owner.1.json"):
        Path("out/empty", name).write_bytes(Path("out/first", name).read_bytes())
    for line, message in (
        ("explain out/frist", r"out/frist: neither the folder of a run nor .*; did you mean 'out/first'\?"),
        ("status out/first --address 10.0.0.1:6379", "--address: is not used for a run's folder"),
        ("stop out/first", "'out/first' is not a job name"),
        ("status out/empty", "out/empty: has no journal: the run has not begun"),
    ):
        with pytest.raises(InvalidJob, match=message):
            output_of(*line.split())


def test_cluster_of_a_running_job_is_asked_first(asked_addresses, monkeypatch):
    def look(trainer):
        monkeypatch.setattr(module, "ON_RAY", "one process")
        for written in ("127.0.0.1:4711", ""):  # empty for a moment, when it is written
            (trainer.job_dir / CLUSTER).write_text(written)
            with ray_jobs("auto", "mine"):
                pass

    run(look)
    with ray_jobs("auto", "mine"):
        pass
    assert asked_addresses == ["127.0.0.1:4711", "auto", "auto"]


@pytest.fixture
def run_elsewhere(tmp_path):
    """The folder of a run whose master claims it, and what its journal tells."""
    text = f"{TEXT.format(module=__name__)}job_dir: {tmp_path}\n"
    job = begin(load_job_text(text, "mine", [], (str(Path(__file__).parent),)))
    claim(job, ON_RAY, bound=False)
    (job.job_dir / CLUSTER).write_text("10.0.0.5:6379")
    return job.job_dir, JobHistory(0.0)


@pytest.mark.parametrize(
    ("beat_s", "address", "phase"), [(0, "", "created"), (0, "10.0.0.5:6379", "lost"), (90, "", "lost")]
)
def test_job_elsewhere_runs_while_its_record_is_touched(run_elsewhere, beat_s, address, phase):
    """It is lost where the cluster that was asked is its own, which does not have it."""
    folder, history = run_elsewhere
    (record,) = folder.glob("owner.*.json")
    os.utime(record, (time.time() - beat_s,) * 2)
    (folder / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.25}\n', encoding="utf-8")
    view = view_of_folder("mine", folder, history, address)
    assert (view.phase, view.ended) == (phase, phase == "lost")
    assert (view.step, view.reward) == (3, 0.25)
    gone = f"its master is gone; to resume the run: dlrover-rl resume {folder}"
    assert view.reason == (gone if phase == "lost" else "")


# -- logs -------------------------------------------------------------------------------------------------------------


class OneJob(RayJobs):
    """A job that ends when its log has been read once."""

    def __init__(self, view):
        self._view = view

    def get(self, name):
        view, self._view = self._view, replace(self._view, ended=True)
        return view


@pytest.fixture
def jobs(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/trainer.log").write_text("one\n")
    return OneJob(JobView("job", "running", folder=str(tmp_path), roles={"ROLLOUT": 2}))


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("process", "message"),
    [("trainr", "trainr: has no log; did you mean 'trainer'"), ("rollout-1", "rollout-1: has no log")],
)
def test_log_of_an_absent_process_is_an_error(jobs, process, message, follow):
    """While it is followed, a process of the job may still write one, until the job has ended."""
    with pytest.raises(InvalidJob, match=message):
        list(jobs.logs("job", process, follow, 0))


def test_a_log_is_followed_to_the_end_of_its_job(jobs):
    assert list(jobs.logs("job", "trainer", True, 0)) == [("trainer", "one\n")]
