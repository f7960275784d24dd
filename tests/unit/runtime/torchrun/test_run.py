# SPDX-License-Identifier: Apache-2.0
"""How a launched job of one process ends."""

import pytest

from dlrover.python.rl.recipe.launch import describe_job, run_together
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from dlrover.python.rl.trainer.trainer import BaseTrainer, report_nothing
from dlrover.python.rl.trainer.workload import BaseWorkload

JOB = """
trainer: {module: test_run, class: Caller}
workload: {actor: {module: test_run, class: Raiser}}
config: {error: none}
"""
ERRORS = {"none": None, "interrupt": KeyboardInterrupt(), "value": ValueError("told to fail")}
TOLD = []


class Raiser(BaseWorkload):
    def act(self):
        error = ERRORS[self.config.error]
        if error is not None:
            raise error


class Caller(BaseTrainer):
    def init(self):
        TOLD.clear()

    def fit(self):
        self.RG_ACTOR.act()

    def on_end(self, outcome):
        TOLD.append(outcome)


def launched(folder, error):
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    launch = LaunchEnv()
    return run_together(lambda: describe_job("", "job.yaml", [f"error={error}"], launch), launch, report_nothing)


@pytest.mark.parametrize(("error", "outcomes"), [("none", []), ("value", ["failed"])])
def test_the_trainer_is_told_that_it_has_failed(tmp_path, monkeypatch, error, outcomes):
    monkeypatch.chdir(tmp_path)
    failure = launched(tmp_path, error)
    assert (failure is not None, TOLD) == (bool(outcomes), outcomes)


def test_the_trainer_is_told_that_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The trainer's thread waits on for the interrupted actor: it shall not log that into another test's output.
    monkeypatch.setattr("dlrover.python.rl.trainer.port.STRAGGLER_LOG_INTERVAL_S", 3600.0)
    with pytest.raises(KeyboardInterrupt):
        launched(tmp_path, "interrupt")
    assert TOLD == ["stopped"]
