# SPDX-License-Identifier: Apache-2.0
"""The processor seconds of writing spans and samples, as a share of the demo's steps in all processes."""

from dataclasses import replace

import pytest

from dlrover.python.rl.master.job import check_job, run_on_ray
from tests.support.measured_job import describe, processor_seconds, spent_seconds

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

FIRST, LAST, MOST_SHARE = 6, 36, 0.01


def test_spans_and_samples_take_a_hundredth_of_the_steps(tmp_path):
    job = replace(describe(tmp_path, LAST + 1), job_dir=tmp_path / "out")
    seconds, spent = {}, {}

    def report(step_report):
        if step_report.step in (FIRST, LAST):
            seconds[step_report.step] = processor_seconds()
            spent[step_report.step] = spent_seconds(tmp_path / "out")

    assert str(run_on_ray(check_job(job), report, connected=True).phase) == "finished"
    whole_s = seconds[LAST] - seconds[FIRST]
    shares = {part: each / whole_s for part, each in (spent[LAST] - spent[FIRST]).items()}
    print(f"{whole_s / (LAST - FIRST):.3f} processor seconds a step, of which {sum(shares.values()):.2%}")  # noqa: T201
    print("\n".join(f"{share:.2%} {part}" for part, share in shares.items()))  # noqa: T201
    assert 0.0 < sum(shares.values()) < MOST_SHARE
