# SPDX-License-Identifier: Apache-2.0
"""The processor seconds of writing spans and samples, as a share of the demo's steps in all processes."""

import pytest

from dlrover.python.rl.master.job import check_job, run_on_ray

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

FIRST, LAST, MOST_SHARE = 6, 36, 0.014  # 0.010 to 0.012 on a quiet machine; 0.01 is the aim


def test_spans_and_samples_take_a_small_part_of_the_steps(tmp_path):
    # It measures the process that imports it.
    from tests.support.measured_job import describe, processor_seconds, spent_seconds

    noted = []

    def report(step_report):
        if step_report.step in (FIRST, LAST):
            noted.append((processor_seconds(), spent_seconds(tmp_path / "out")))

    assert str(run_on_ray(check_job(describe(tmp_path, LAST + 1)), report, connected=True).phase) == "finished"
    (began_s, first), (ended_s, last) = noted
    shares = {part: each / (ended_s - began_s) for part, each in (last - first).items()}
    print((ended_s - began_s) / (LAST - FIRST), {part: f"{each:.2%}" for part, each in shares.items()})  # noqa: T201
    assert 0.0 < sum(shares.values()) < MOST_SHARE
