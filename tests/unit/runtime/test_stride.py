# SPDX-License-Identifier: Apache-2.0
"""The distance between two commits, in steps."""

import pytest

from dlrover.python.rl.runtime.checkpoint.commits import Stride


def committed(stride, clock, step_s, steps, commit_s):
    """The steps that are committed, each of which takes ``commit_s``."""
    found = []
    for step in range(1, steps + 1):
        clock[0] += step_s
        if stride.is_due(step):
            found.append(step)
            stride.start_after(step)
            stride.note_commit(commit_s)
    return found


@pytest.mark.parametrize(
    ("every", "is_deterministic", "step_s", "commit_s", "apart"),
    [
        (None, True, 10.0, 0.09, 1),  # 0.9 % of a step
        (None, True, 1.0, 0.011, 2),
        (None, True, 1.0, 0.05, 5),
        (None, True, 1.0, 10.0, 8),  # at most eight steps
        (None, True, 3.0, 10.0, 3),  # at most 10 s
        (None, True, 60.0, 10.0, 1),
        (None, False, 1.0, 10.0, 1),
        (3, False, 1.0, 10.0, 3),
        (3, True, 100.0, 0.0, 3),
    ],
)
def test_stride_holds_its_share_and_limits(every, is_deterministic, step_s, commit_s, apart):
    clock = [0.0]
    stride = Stride(every, is_deterministic, lambda: clock[0])
    steps = committed(stride, clock, step_s, 60, commit_s)
    assert {later - earlier for earlier, later in zip(steps[2:], steps[3:], strict=False)} == {apart}


def test_stride_counts_from_the_commit_that_a_run_goes_back_to():
    clock = [0.0]
    stride = Stride(4, now_s=lambda: clock[0])
    assert committed(stride, clock, 1.0, 9, 0.1) == [4, 8]
    stride.start_after(6)
    assert [stride.is_due(step) for step in (7, 9, 10)] == [False, False, True]
