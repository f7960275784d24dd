# SPDX-License-Identifier: Apache-2.0
"""Trackers, with fake modules in place of wandb, mlflow and trackio; samples on the console."""

import json
import logging
import math
import os
import re
import sys
import threading
import types
from contextlib import nullcontext

import pytest

from dlrover.python.rl.common.log import hide_values
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import LogConfig
from dlrover.python.rl.recipe.reporting.run_log import RunLog
from dlrover.python.rl.recipe.sft import SFTTrainer
from tests.support.durable_toys import kill_trainer
from tests.support.example_jobs import EXAMPLES, stage
from tests.support.fake_trackers import FakeTrackio, FakeWandb
from tests.support.run_files import read_lines, write_rows


class Active(threading.local):
    run = None


class FakeMlflow(types.ModuleType):
    """Runs by the ids that it gives them; each thread has an active one."""

    def __init__(self):
        super().__init__("mlflow")
        self.runs, self.places, self.active = {}, [], Active()
        self.set_tracking_uri = self.set_experiment = self.places.append
        self.MlflowClient = lambda: types.SimpleNamespace(set_terminated=self._terminate)

    def _terminate(self, run_id, status):
        self.runs[run_id].ended.append(status)

    def active_run(self):
        return self.active.run and types.SimpleNamespace(info=types.SimpleNamespace(run_id=self.active.run))

    def start_run(self, run_id=None, run_name=None):
        if self.active.run is not None:
            raise RuntimeError(f"Run {self.active.run} is already active")
        self.active.run = run_id or f"run-{len(self.runs)}"
        run = types.SimpleNamespace(name=run_name, steps=[], config=None, ended=[], params={}, tables={})
        self.runs.setdefault(self.active.run, run)
        return self.active_run()

    def log_dict(self, config, file):
        self.runs[self.active.run].config = config

    def log_params(self, params):
        """Refuses what MLflow refuses."""
        assert len(params) <= 100 and all(len(name) <= 250 for name in params)
        assert all(isinstance(value, str) and len(value) <= 500 for value in params.values())
        assert all(re.fullmatch(r"[/\w.\- :]*", name) and os.path.normpath(name) == name for name in params)
        self.runs[self.active.run].params.update(params)

    def log_metrics(self, metrics, step):
        if refused := [name for name in metrics if not re.fullmatch(r"[/\w.\- :]*", name)]:
            raise ValueError(f"Invalid value {refused} for parameter 'metrics[0].name' supplied")
        self.runs[self.active.run].steps.append((step, metrics))

    def log_table(self, columns, file):
        self.runs[self.active.run].tables[file] = columns

    def end_run(self, status):
        self._terminate(self.active.run, status)
        self.active.run = None


@pytest.fixture
def modules(monkeypatch):
    fakes = {"wandb": FakeWandb(), "mlflow": FakeMlflow(), "trackio": FakeTrackio()}
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fakes


def only_runs(modules):
    """The one run of Weights & Biases, and the one of MLflow."""
    (wandb,), (mlflow,) = (modules[name].runs.values() for name in ("wandb", "mlflow"))
    return wandb, mlflow


BOTH = {"wandb": {"project": "sums", "name": "first"}, "mlflow": {"experiment": "sums", "uri": "http://tracking"}}


def log_of(folder, settings=None, before=None, **config):
    """A log of a run, or of its continuation with the state of the log ``before``."""
    folder.mkdir(exist_ok=True)
    parsed, problems = parse(LogConfig, config or BOTH, "log")
    assert not problems
    log = RunLog(folder, config=parsed, settings=settings)
    if before is not None:
        log.load_state_dict(before.state_dict())
    return log


def write_steps(log, *steps):
    for step in steps:
        log.begin_step(step)
        log.write_step(step, {"loss": step / 2, "nothing": math.nan})
    return log


@pytest.mark.feature(136)
def test_trackers_get_names_settings_and_steps_from_one(modules, tmp_path):
    write_steps(log_of(tmp_path / "job", {"seed": 3}), 1, 2).write_summary({})
    (start,), (wandb, mlflow) = modules["wandb"].starts, only_runs(modules)
    assert (start["project"], start["name"], start["config"]) == ("sums", "first", {"seed": 3})
    assert wandb.steps == mlflow.steps == [(1, {"loss": 0.5}), (2, {"loss": 1.0})]
    assert wandb.exit_codes == [0]
    assert (mlflow.name, mlflow.config, mlflow.ended) == ("job", {"seed": 3}, ["FINISHED"])
    assert modules["mlflow"].places == ["http://tracking", "sums"]


@pytest.mark.feature(136)
def test_trackers_do_not_get_the_secrets_among_the_settings(modules, tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.python.rl.common.log._secrets", ())
    hide_values(["hunter22"])
    settings = {"reward": {"api_key": 12345678, "url": "https://canary@host", "note": "a hunter22", "workers": 4}}
    shown = {"reward": {"api_key": "***", "url": "***", "note": "a ***", "workers": 4}}
    write_steps(log_of(tmp_path / "job", settings), 1).write_summary({})
    assert modules["wandb"].starts[0]["config"] == only_runs(modules)[1].config == shown
    assert "canary" not in (tmp_path / "job" / "trackers.json").read_text()


@pytest.mark.feature(136)
@pytest.mark.parametrize(("again", "steps"), [([3, 4], [1, 2, 3, 4]), ([2, 3, 4], [1, 2, 3, 2, 3, 4])])
def test_resumed_run_is_the_same_and_sends_newer_values(modules, tmp_path, again, steps):
    first = write_steps(log_of(tmp_path), 1, 2, 3)
    write_steps(log_of(tmp_path, before=first), *again)
    for run in only_runs(modules):
        assert [step for step, _ in run.steps] == steps
    assert [start["resume"] for start in modules["wandb"].starts] == ["allow", "allow"]
    assert modules["wandb"].axes == [("step", "step"), ("*", "step")] * 2
    modules["mlflow"].active.run = None  # as in another process
    write_steps(log_of(tmp_path), 1)
    assert len(modules["wandb"].runs) == len(modules["mlflow"].runs) == 2, "another run has another name"


def test_mlflow_parameters_are_the_dotted_keys_within_its_limits(modules, tmp_path):
    many = {f"option{number}": number for number in range(150)}
    reward = {"function": {"../mod.py:f@1": 0.5}, "model": None, "options": {}, "api_key": "canary"}
    settings = {"optimizer": {"lr": 1e-6, "betas": (0.9, 0.95)}, "reward": reward}
    settings |= {"prompt": "x" * 1000, "n" * 300: True, "many": many}
    first = write_steps(log_of(tmp_path, settings), 1)
    write_steps(log_of(tmp_path, settings | {"prompt": "y"}, first), 2)  # MLflow refuses another value of a parameter
    assert only_runs(modules)[1].params == {
        "optimizer.lr": "1e-06",
        "optimizer.betas": "[0.9, 0.95]",
        "reward.function..._mod.py:f_at_1": "0.5",
        "reward.model": "None",
        "reward.options": "{}",
        "reward.api_key": "***",
        "prompt": "x" * 500,
        "n" * 250: "True",
        **{f"many.{name}": str(number) for name, number in many.items()},
    }


@pytest.mark.feature(136)
def test_absent_tracker_is_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        write_steps(log_of(tmp_path, wandb={"project": "sums"}), 1, 2, 3)
    assert [record.message for record in caplog.records] == ["wandb is not installed; continuing without it"]
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3


def test_failing_tracker_is_left_and_the_other_stays(modules, tmp_path, caplog):
    log = write_steps(log_of(tmp_path), 1)
    modules["wandb"].fails = True
    with caplog.at_level(logging.WARNING):
        write_steps(log, 2, 3)
    message = "wandb failed; continuing without it: ConnectionError: no network"
    assert [record.message for record in caplog.records] == [message]
    assert [step for step, _ in only_runs(modules)[1].steps] == [1, 2, 3]


def test_step_0_reaches_the_trackers_once(modules, tmp_path):
    log = log_of(tmp_path)
    for _ in range(2):
        log.begin_step(1)
        log.write_step(0, {"eval/reward": 0.25})
        log.write_step(1, {"loss": 1.0})
    assert only_runs(modules)[0].steps == [(0, {"eval/reward": 0.25}), (1, {"loss": 1.0})]


def test_names_refused_by_mlflow_are_replaced_there(modules, tmp_path):
    log, metrics = log_of(tmp_path), {"eval/avg@4": 0.5, "eval/1+1 (easy)/pass@2": 1.0}
    log.begin_step(1)
    log.write_step(1, metrics)
    wandb, mlflow = only_runs(modules)
    assert mlflow.steps == [(1, {"eval/avg_at_4": 0.5, "eval/1_1 _easy_/pass_at_2": 1.0})]
    assert wandb.steps == [(1, metrics)]


def test_samples_are_a_table_after_their_steps_metrics(modules, tmp_path):
    config = {"samples_every": 2, "samples_rows": 2, **BOTH}
    first = log_of(tmp_path, trackers=["test_trackers:Silent"], **config)
    second = log_of(tmp_path, before=first, **config)
    rows = [{"prompt_id": 1, "prompt": "1+1=", "completion": str(row), "reward": math.nan} for row in range(3)]
    for log, steps in ((first, [1, 2, 3]), (second, [3, 4, 5])):
        for step in steps:
            log.begin_step(step)
            log.write_samples(step, rows)
            log.write_step(step, {"loss": 1.0})
    wandb, mlflow = only_runs(modules)
    tables = [(step, metrics["samples"]) for step, metrics in wandb.steps if "samples" in metrics]
    assert [step for step, _ in tables] == [1, 3, 5]
    assert tables[1][1] == [{"step": 3, "prompt": "1+1=", "completion": text, "reward": None} for text in ("0", "1")]
    assert [step for step, _ in wandb.steps] == [1, 1, 2, 3, 3, 4, 5, 5]
    assert list(mlflow.tables) == [f"samples/step-{step:06d}.json" for step in (1, 3, 5)]
    assert mlflow.tables["samples/step-000001.json"]["completion"] == ["0", "1"]


class Silent:
    """A tracker from before there were tables."""

    start = log = close = lambda *_, **__: None


@pytest.mark.parametrize(("options", "name"), [({}, "job-{id}"), ({"name": "first"}, "first")])
def test_trackio_resumes_a_run_of_its_name(modules, tmp_path, options, name):
    config = {"trackers": [{"trackio": {"project": "sums", **options}}], "samples_every": 2}
    first = write_steps(log_of(tmp_path / "job", {"seed": 3, "api_key": "canary"}, **config), 1, 2)
    second = log_of(tmp_path / "job", before=first, **config)
    second.begin_step(3)
    second.write_samples(3, [{"prompt": "1+1=", "completion": "2"}])
    second.write_step(3, {"loss": 1.5})
    second.write_summary({})
    ((written, run),) = modules["trackio"].runs.items()
    assert written == name.format(id=json.loads((tmp_path / "job/trackers.json").read_text())["run"])
    assert run.config == {"seed": 3, "api_key": "***"}
    table = {"samples": [{"step": 3, "prompt": "1+1=", "completion": "2"}]}
    assert run.steps == [(1, {"loss": 0.5}), (2, {"loss": 1.0}), (3, {"loss": 1.5}), (3, table)]
    assert run.ends == 1


@pytest.mark.parametrize(("outcome", "exit_code", "status"), [("failed", 1, "FAILED"), ("stopped", 1, "KILLED")])
@pytest.mark.parametrize("in_thread", [False, True])
def test_unfinished_run_ends_once_with_its_outcome(modules, tmp_path, outcome, exit_code, status, in_thread):
    log = write_steps(log_of(tmp_path), 1)
    end = threading.Thread(target=log.close, args=(outcome,))
    end.run() if not in_thread else (end.start(), end.join())
    log.close("failed")
    write_steps(log, 2)
    wandb, mlflow = only_runs(modules)
    assert (len(wandb.steps), wandb.exit_codes) == (1, [exit_code])
    assert (len(mlflow.steps), mlflow.ended) == (1, [status])


def test_log_without_a_step_ends_the_run_left_open(modules, tmp_path):
    first = write_steps(log_of(tmp_path), 1)
    for _ in range(2):
        log_of(tmp_path).close("failed")  # by a trainer that failed before it had its state
        assert only_runs(modules)[0].exit_codes == [1]
    write_steps(log_of(tmp_path, before=first), 2).close("finished")
    log_of(tmp_path).close("failed")
    wandb, mlflow = only_runs(modules)
    assert (wandb.exit_codes, mlflow.ended) == ([1, 0], ["FAILED", "FINISHED"])


# -- runs of a recipe --------------------------------------------------------------------------------------------------


def run_sft(tmp_path, name="out", faults=None):
    if not (tmp_path / "model").exists():
        write_tiny_model(tmp_path / "model", hidden=32, layers=1, max_positions=32)
    config = {"model": str(tmp_path / "model"), "data": {"train": write_rows(tmp_path / "rows.jsonl", EXAMPLES)}}
    config |= {"batch_size": 1, "engine": {"threads": 1}, "log": {"wandb": {"project": "sums"}}}
    job = stage("sft", tmp_path / name, config)
    job.run(faults)
    return job


class Flaky(Exception):
    retryable = True


@pytest.mark.parametrize(
    ("error", "times", "exit_code"), [(Flaky, 1, 0), (Flaky, 100, 1), (ArithmeticError, 100, 1), (SystemExit, 100, 1)]
)
def test_error_ends_the_run_as_failed_unless_it_is_repeated(modules, tmp_path, monkeypatch, error, times, exit_code):
    left, update = [error("in the third step")] * times, SFTTrainer.update

    def failing(trainer, step, batch):
        if step == 3 and left:
            raise left.pop()
        return update(trainer, step, batch)

    monkeypatch.setattr(SFTTrainer, "update", failing)
    with pytest.raises(error) if exit_code else nullcontext():
        run_sft(tmp_path)
    (run,) = modules["wandb"].runs.values()
    assert [step for step, _ in run.steps] == ([1, 2] if exit_code else [1, 2, 3, 4])
    assert run.exit_codes == [exit_code]


@pytest.mark.feature(136)
def test_run_of_a_killed_trainer_is_resumed_under_the_jobs_name(modules, tmp_path):
    whole = run_sft(tmp_path, "whole")
    at = [number for number, call in enumerate(whole.port.calls) if call[2] == "train"]
    modules["wandb"].runs.clear()
    run_sft(tmp_path, "20261123-071500-1a2b3c4d", {(at[2], "after"): kill_trainer})
    (run,) = modules["wandb"].runs.values()
    assert {start["name"] for start in modules["wandb"].starts} == {"job"}
    losses = [row["loss"] for row in read_lines(tmp_path / "20261123-071500-1a2b3c4d/metrics.jsonl")]
    assert [(step, metrics["loss"]) for step, metrics in run.steps] == list(enumerate(losses, start=1))
    assert (len(losses), run.exit_codes) == (4, [0])


@pytest.mark.feature(139)
def test_samples_on_the_console_are_cut_and_whole_in_the_file(tmp_path, caplog):
    log = log_of(tmp_path, show_samples=1, max_chars=10)
    log.begin_step(1)
    with caplog.at_level(logging.INFO):
        log.write_samples(1, ({"prompt": "1+1=", "completion": "two\n" * 20, "reward": row} for row in (0.5, 1.0)))
    message = "step 1: prompt 1+1=  completion two\\ntwo\\n... (80 characters)  reward 0.5"
    assert [record.message for record in caplog.records] == [message]
    assert [row["completion"] for row in read_lines(tmp_path / "samples.jsonl")] == ["two\n" * 20] * 2
