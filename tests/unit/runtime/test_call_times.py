# SPDX-License-Identifier: Apache-2.0
"""How long calls take, and how many are under way."""

import pytest

from dlrover.python.rl.runtime.ray.processes import port as call_times
from dlrover.python.rl.runtime.ray.processes.port import CallTimes
from dlrover.python.rl.trainer.port import BUCKETS_S


def test_calls_are_counted_once_in_their_bucket_and_drained():
    times = CallTimes()
    times.begin(b"a", "ROLLOUT", "generate", 10.0)
    times.begin(b"b", "ROLLOUT", "generate", 10.0)
    times.begin(b"c", "ACTOR", "train", 10.0)
    assert times.pending() == {"ROLLOUT": 2, "ACTOR": 1}
    times.end(b"a", 10.05)
    times.end(b"a", 99.0)  # its result is read again
    times.end(b"c", 5000.0)
    assert times.pending() == {"ROLLOUT": 1}
    counts = times.drain()
    generate, train = counts["ROLLOUT", "generate"], counts["ACTOR", "train"]
    assert generate[BUCKETS_S.index(0.1)] == 1 and sum(generate[:-1]) == 1 and generate[-1] == pytest.approx(0.05)
    assert train[len(BUCKETS_S)] == 1
    assert times.drain() == {}


def test_results_that_nobody_reads_are_forgotten(monkeypatch):
    monkeypatch.setattr(call_times, "_MOST_PENDING", 3)
    times = CallTimes()
    for number in range(10):
        times.begin(b"%d" % number, "ACTOR", "log", float(number))
    assert times.pending() == {"ACTOR": 3}
