# SPDX-License-Identifier: Apache-2.0
"""The verb ``trace``, and the findings of ``explain``, on a run in one process."""

from pathlib import Path

import pytest

from dlrover.python.rl.page.spans import read_steps
from tests.support.recorded_spans import Recording
from tests.unit.cli.test_cli import shell, write  # noqa: F401 -- a fixture


@pytest.fixture
def ran(shell):  # noqa: F811 -- the fixture
    """Run a job of three steps in ``out``, and return the shell."""
    assert shell("run", write(), "--local", "job_dir=out")[0] == 0
    return shell


def test_trace_of_a_local_run_is_written(ran):
    code, out, _ = ran("trace", "out", "--steps", "2:3")
    assert (code, out.split(":")[0]) == (0, "steps-2-3.pftrace")
    assert b"ACTOR[1]" in Path("steps-2-3.pftrace").read_bytes()
    assert ran("trace", "out", "-o", "last")[0] == 0 and b"step 1" in Path("last").read_bytes()


def test_local_workers_wait_behind_each_other(ran):
    (step,) = read_steps(Path("out"), 2, 2)
    labels = {lane.process: [span.label for span in lane.spans if span.kind == "call"] for lane in step.lanes}
    assert labels["ACTOR[0]"] == labels["ACTOR[1]"] == ["add", "commit"]
    assert "behind ACTOR.add" in [span.label for lane in step.lanes[1:] for span in lane.spans]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("out --steps 9", "--steps: there are no spans of steps 9 to 9; the last step with spans is"),
        ("out --steps 3:1", "--steps: there are no spans of steps 3 to 1"),
        ("out --steps last", "--steps: must be FIRST:LAST, such as 10:12, got 'last'"),
        ("out -o missing/file", "missing/file cannot be written: No such file or directory"),
        ("aut", "did you mean 'out'?"),
    ],
)
def test_trace_of_wrong_arguments_is_refused(ran, arguments, message):
    code, _, err = ran("trace", *arguments.split())
    assert code == 2 and message in err


@pytest.mark.parametrize("steps", [[], ["--steps", "2:3"]], ids=["last", "named"])
def test_trace_without_spans_says_why(shell, steps):  # noqa: F811 -- the fixture
    assert shell("run", write(), "--local", "job_dir=out", "spans_mb=0")[0] == 0
    assert not Path("out/spans").exists()
    code, _, err = shell("trace", "out", *steps)
    assert code == 2 and "out: has no spans: it ran with spans_mb: 0" in err and " to " not in err


def test_explain_names_what_made_steps_slow(ran):
    assert "What made the last steps slow" not in ran("explain", "out")[1]
    recording = Recording(Path("out"))
    for number in range(1, 5):
        recording.step(number, [0.4, 1.4])
    recording.write()
    assert "What made the last steps slow:\n  ROLLOUT[1].sample took 1.4 s, its peers" in ran("explain", "out")[1]
