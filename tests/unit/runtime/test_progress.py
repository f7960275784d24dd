# SPDX-License-Identifier: Apache-2.0
"""Progress as plain lines, where there is no terminal."""

import io
import re

import pytest

from dlrover.python.rl.runtime.run import progress
from dlrover.python.rl.runtime.run.progress import ProgressView, format_metrics
from dlrover.python.rl.trainer.trainer import StepReport


def lines_of(*reports):
    stream = io.StringIO()
    with ProgressView("my-job", stream) as view:
        for report in reports:
            view(report)
    return stream.getvalue().splitlines()


def test_the_first_and_the_last_step_have_a_line_and_fast_ones_between_do_not():
    lines = lines_of(*(StepReport(step, 50, {"reward": step / 50}) for step in range(1, 51)))
    assert lines[0] == "my-job  step 1/50  reward 0.02"
    assert re.fullmatch(r"my-job  step 50/50  reward 1  \S+ steps/s  eta 0 s", lines[-1])
    assert len(lines) == 2


@pytest.mark.parametrize("total", [0, 10])
def test_the_last_report_has_a_line_also_of_a_run_that_ends_before_its_last_step(total):
    of = f"/{total}" if total else ""
    lines = lines_of(*(StepReport(step, total, {"reward": step / 8}) for step in range(1, 9)))
    assert len(lines) == 2
    assert lines[-1].startswith(f"my-job  step 8{of}  reward 1  ")


def test_an_outage_is_forgotten_after_a_while(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    stream = io.StringIO()
    with ProgressView("my-job", stream) as view:
        for step in range(1, 41):
            now_s[0] += 600.0 if step == 5 else 10.0
            view(StepReport(step, 100, {}))
    lines = stream.getvalue().splitlines()
    assert lines[5].endswith("eta 12032 s"), "600 s of 640 were the outage"
    assert lines[-1].endswith("0.1 steps/s  eta 600 s")


def test_an_unknown_total_is_not_shown():
    assert lines_of(StepReport(3, 0, {"loss": 0.25})) == ["my-job  step 3  loss 0.25"]


def test_the_figures_worth_a_line_in_their_order():
    metrics = {
        "loss": 1e-5,
        "unknown": 3.0,
        "score": 0.2,
        "reward": 0.53,
        "speed/tokens_per_s": 4812.4,
        "policy/kl": float("nan"),
    }
    assert format_metrics(metrics) == "reward 0.53  score 0.2  loss 1e-05  kl nan  4,812 tok/s"
    assert format_metrics({}) == ""


def test_headline_of_a_policy_has_no_loss_but_its_completions():
    metrics = {"reward/mean": 0.5, "loss": -8e-8, "policy/entropy": 2.5, "policy/kl": 0.01}
    metrics |= {"completions/length_mean": 17.25, "completions/truncated": 0.125, "eval/accuracy": 0.75}
    expected = "reward 0.5  kl 0.01  entropy 2.5  length 17.25  truncated 0.125  accuracy 0.75"
    assert format_metrics(metrics) == expected


def test_what_a_run_does_between_its_reports_has_a_line_each_without_a_terminal():
    stream = io.StringIO()
    with ProgressView("my-job", stream) as view:
        view.announce("starting Ray")
        view.announce("loading the models")
        view(StepReport(1, 2, {"loss": 0.25}))
    assert stream.getvalue().splitlines() == [
        "my-job  0 s  starting Ray",
        "my-job  0 s  loading the models",
        "my-job  step 1/2  loss 0.25",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_the_opening_is_a_line_that_stays(kind):
    stream, opening = kind(), f"my-job: going on in /a/{'long/' * 30}[folder], after step 3"
    with ProgressView("my-job", stream, opening=opening) as view:
        view.announce("loading the models")
        view.announce(opening)
        assert [task.description for task in view.tasks] in ([], ["my-job  loading the models"])
    assert any(line.rpartition("\x1b[2K")[2] == opening for line in stream.getvalue().splitlines())


def test_on_a_terminal_the_bar_says_it_until_the_next_report():
    stream = Terminal()
    with ProgressView("my-job", stream) as view:
        view.announce("loading the models")
        assert [task.description for task in view.tasks] == ["my-job  loading the models"]
        view(StepReport(1, 2, {"loss": 0.25}))
        assert [(task.description, task.completed, task.total) for task in view.tasks] == [("my-job", 1, 2)]
    assert "loading the models" in stream.getvalue()


def test_a_view_without_reports_writes_nothing():
    assert lines_of() == []
