# SPDX-License-Identifier: Apache-2.0
"""The processor seconds of writing spans and samples, as a share of those of all processes of the demo's steps."""

from dataclasses import replace

import pytest

from dlrover.python.rl.master.job import check_job, run_on_ray
from tests.support.measured_job import describe, processor_seconds, spent_seconds

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

FIRST, LAST = 10, 50
MOST_SHARE = 0.01


def test_spans_and_samples_take_a_hundredth_of_the_steps(tmp_path):
    job = replace(describe(tmp_path, LAST + 10), job_dir=tmp_path / "out")
    seconds, spent = {}, {}

    def report(step_report):
        if step_report.step in (FIRST, LAST):
            seconds[step_report.step] = processor_seconds()
            spent[step_report.step] = spent_seconds(tmp_path / "out")

    assert str(run_on_ray(check_job(job), report, connected=True).phase) == "finished"
    whole_s = seconds[LAST] - seconds[FIRST]
    shares = {part: each / whole_s for part, each in (spent[LAST] - spent[FIRST]).items()}
    lines = [
        f"{whole_s / (LAST - FIRST):.3f} processor seconds a step",
        *(f"{shares[part]:.2%} {part}" for part in shares),
    ]
    print("\n".join(lines))  # noqa: T201 -- the result
    assert 0.0 < sum(shares.values()) < MOST_SHARE
