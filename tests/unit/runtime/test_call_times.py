# SPDX-License-Identifier: Apache-2.0
"""How long calls take, and how many are under way."""

import pytest

from dlrover.python.rl.runtime.ray.processes import port as call_times
from dlrover.python.rl.runtime.ray.processes.port import CallWatch
from dlrover.python.rl.trainer.port import BUCKETS_S


def test_calls_are_counted_once_in_their_bucket_and_drained():
    now_s = [10.0]
    watch = CallWatch(lambda: now_s[0])
    watch.begin(b"a", "ROLLOUT", "generate")
    watch.begin(b"b", "ROLLOUT", "generate")
    watch.begin(b"c", "ACTOR", "train")
    assert watch.pending() == {"ROLLOUT": 2, "ACTOR": 1}
    now_s[0] = 10.05
    watch.end([b"a"])
    now_s[0] = 5000.0
    watch.end([b"a", b"c"])  # the first one's result is read again
    assert watch.pending() == {"ROLLOUT": 1}
    counts = watch.drain()
    generate, train = counts["ROLLOUT", "generate"], counts["ACTOR", "train"]
    assert generate[BUCKETS_S.index(0.1)] == 1 and sum(generate[:-1]) == 1 and generate[-1] == pytest.approx(0.05)
    assert train[len(BUCKETS_S)] == 1
    assert watch.drain() == {}


def test_results_that_nobody_reads_are_forgotten(monkeypatch):
    monkeypatch.setattr(call_times, "_MOST_PENDING", 3)
    watch = CallWatch()
    for number in range(10):
        watch.begin(b"%d" % number, "ACTOR", "log")
    assert watch.pending() == {"ACTOR": 3}
