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


@pytest.mark.parametrize(("total", "eta"), [(0, ""), (8, "  eta 0 s"), (10, r"  eta \d+ s")])
def test_first_and_last_report_have_a_line_but_not_fast_ones(total, eta):
    of = f"/{total}" if total else ""
    first, last = lines_of(*(StepReport(step, total, {"reward": step / 8}) for step in range(1, 9)))
    assert first == f"my-job  step 1{of}  reward 0.125"
    assert re.fullmatch(rf"my-job  step 8{of}  reward 1  \S+ steps/s{eta}", last)


def test_outage_is_forgotten_after_a_while(monkeypatch):
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


SCORES = {"loss": 1e-5, "unknown": 3.0, "score": 0.2, "reward": 0.53, "speed/tokens_per_s": 4812.4}
POLICY = {"reward/mean": 0.5, "loss": -8e-8, "policy/entropy": 2.5, "policy/kl": 0.01}
COMPLETIONS = {"completions/length_mean": 17.25, "completions/truncated": 0.125, "eval/accuracy": 0.75}


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({**SCORES, "policy/kl": float("nan")}, "reward 0.53  score 0.2  loss 1e-05  kl nan  4,812 tok/s"),
        ({}, ""),
        ({**POLICY, **COMPLETIONS}, "reward 0.5  kl 0.01  entropy 2.5  length 17.25  truncated 0.125  accuracy 0.75"),
    ],
    ids=["in their order", "none", "a policy has no loss"],
)
def test_format_metrics_has_the_headline_figures(metrics, line):
    assert format_metrics(metrics) == line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_announcements_are_lines_or_a_bar_until_the_next_report(kind):
    stream = kind()
    with ProgressView("my-job", stream) as view:
        view.announce("starting Ray")
        view.announce("loading the models")
        bars = [task.description for task in view.tasks]
        view(StepReport(1, 2, {"loss": 0.25}))
        reported = [(task.description, task.completed, task.total) for task in view.tasks]
    text = stream.getvalue()
    if kind is Terminal:
        assert (bars, reported) == (["my-job  loading the models"], [("my-job", 1, 2)])
        assert "loading the models" in text
    else:
        lines = ["0 s  starting Ray", "0 s  loading the models", "step 1/2  loss 0.25"]
        assert text.splitlines() == [f"my-job  {line}" for line in lines]


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_opening_is_a_lasting_line(kind):
    stream, opening = kind(), f"my-job: continuing in /a/{'long/' * 30}[folder], after step 3"
    with ProgressView("my-job", stream, opening=opening) as view:
        view.announce("loading the models")
        view.announce(opening)
        assert [task.description for task in view.tasks] in ([], ["my-job  loading the models"])
    assert any(line.rpartition("\x1b[2K")[2] == opening for line in stream.getvalue().splitlines())
