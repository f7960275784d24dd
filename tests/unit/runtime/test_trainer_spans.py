# SPDX-License-Identifier: Apache-2.0
"""The record of what a trainer issues, waits for, and steps through."""

import json
import threading

import pytest

from dlrover.python.rl.common.names import TRAINER_ID
from dlrover.python.rl.common.spans import SpanFile
from dlrover.python.rl.runtime.trainer_spans import RecordedPort
from dlrover.python.rl.trainer.port import RAW_CALL, Call, Outcome, Ref
from dlrover.python.rl.trainer.shard import Rows
from tests.support.manual_clock import ManualClock


class SlowPort:
    """Takes half a second to send a call, and as long as it may to wait."""

    def __init__(self, clock):
        self.clock = clock

    def put(self, value):
        return Ref(self, value)

    def submit(self, role, rank, call):
        self.clock.advance(0.5)
        return Ref(self, None, None, role, rank, call.method)

    def wait(self, refs, timeout_s):
        self.clock.advance(2.0 if timeout_s is None else timeout_s)
        return [Outcome(1) for _ in refs]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Make a port and a function that ends it and returns its lines."""
    clock = ManualClock()
    monkeypatch.setattr("time.time", clock)
    spans = SpanFile(tmp_path, TRAINER_ID, 1, most_mb=1)

    def make(**options):
        port = RecordedPort(SlowPort(clock), spans, **options)

        def end(**options):
            port.close(**options)
            return [json.loads(line) for line in (tmp_path / "spans" / "trainer.jsonl").read_text().splitlines()][1:]

        return port, end

    return make


def test_trainer_issue_lists_ranks_and_sources_once(record):
    port, end = record()
    port.begin_step(1)
    first = [port.submit("ROLLOUT", rank, Call((1, 0), "sample", (), {})) for rank in (0, 1)]
    arguments = ([*first, 7], Rows(first[:1], 0, 1), port.put("stored"), 3)
    port.submit("ACTOR", 0, Call((1, 1), "update", arguments[:2], {"a": arguments[2], "b": first[0]}))
    port.submit("ACTOR", 0, Call(RAW_CALL, "!commit", (), {}))
    assert end() == [
        ["issue", 1, 0, "ROLLOUT", [0, 1], "sample", 0.0, []],
        ["issue", 1, 1, "ACTOR", [0], "update", 1.0, ["ROLLOUT.sample"]],
        ["step", 1, 0.0, 2.0],
    ]


def test_trainer_wait_in_parts_is_one_wait(record):
    port, end = record()
    refs = [port.submit("ROLLOUT", rank, Call((1, 0), "sample", (), {})) for rank in (0, 1)]
    for _ in range(3):
        port.wait(refs, 0.05)
    port.wait([], 1.0)
    port.wait(refs[:1], None)
    port.wait([port.submit("ACTOR", 0, Call((1, 1), "update", (), {}))], 0.0005)
    waits = [line[1:] for line in end() if line[0] == "wait"]
    assert [wait[:2] for wait in waits] == [["ROLLOUT", "sample"]] * 2, "none of half a millisecond"
    assert [second for wait in waits for second in wait[2:]] == pytest.approx([1.0, 1.15, 2.15, 4.15])


def test_trainer_step_is_written_for_each_attempt(record):
    port, end = record()
    for step in (1, 2, 2, 3):
        port.begin_step(step)
        port.submit("ACTOR", 0, Call((step, 0), "update", (), {}))
    port.begin_step(4)
    assert [line[1:] for line in end() if line[0] == "step"] == [[1, 0, 0.5], [2, 0.5, 1], [2, 1, 1.5], [3, 1.5, 2]]


def test_trainer_calls_after_the_last_step_belong_to_none(record):
    port, end = record()
    port.begin_step(1)
    port.begin_step(2)
    port.submit("ACTOR", 0, Call((2, 0), "evaluate", (), {}))
    assert [line[1:] for line in end(has_finished=True) if line[0] == "step"] == [[1, 0, 0], [-1, 0, 0.5]]


def test_trainer_waits_while_a_call_runs_in_its_process(record):
    port, end = record(at_once=True)
    port.submit("ACTOR", 0, Call((1, 0), "update", (), {}))
    assert end() == [["issue", 1, 0, "ACTOR", [0], "update", 0.0, []], ["wait", "ACTOR", "update", 0.0, 0.5]]


def test_trainer_calls_of_several_threads_are_all_recorded(record):
    port, end = record()

    def call(rank):
        for number in range(20):
            port.wait([port.submit("ROLLOUT", rank, Call((1, 20 * rank + number), "sample", (), {}))], 1.0)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    issues = [line for line in end() if line[0] == "issue"]
    assert sorted(line[2] for line in issues) == list(range(80))
