# SPDX-License-Identifier: Apache-2.0
"""The file of a process's spans, and the phases of a call."""

import asyncio
import json
import os
import threading

import pytest

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.common.spans import SpanFile, phase, record_phases


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@pytest.fixture
def spans(tmp_path):
    return SpanFile(tmp_path, ProcessId("ROLLOUT", 1), 3, most_mb=1)


def test_spans_of_each_kind_are_lines_after_the_process(tmp_path, spans):
    spans.add_call((4, 0), "sample", 0.5, {"decode": 0.1234567}, "")
    spans.add_call((-1, -1), "!commit", 0.0, {}, "OSError")
    spans.add("issue", 4, 1, "ACTOR", [0, 1], "update", 10.0, ["ROLLOUT.sample"])
    spans.add("wait", "ACTOR", "update", 10.0, 11.5)
    spans.add("step", 4, 9.0, 12.0)
    spans.flush()
    title, call, commit, *trainer = lines_of(tmp_path / "spans" / "rollout-1.jsonl")
    assert title[:4] == ["process", "ROLLOUT[1]", 3, os.getpid()]
    assert (call[:4], call[6:]) == (["call", 4, 0, "sample"], [{"decode": 0.123457}, ""])
    assert call[5] - call[4] == pytest.approx(0.5, abs=1e-5) and title[5] <= call[5]
    assert (commit[1:4], commit[6:]) == ([-1, -1, "!commit"], [None, "OSError"])
    assert trainer == [
        ["issue", 4, 1, "ACTOR", [0, 1], "update", 10.0, ["ROLLOUT.sample"]],
        ["wait", "ACTOR", "update", 10.0, 11.5],
        ["step", 4, 9.0, 12.0],
    ]


def test_spans_are_written_by_a_thread_soon_after(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.python.rl.common.spans._FLUSH_S", 0.0)
    spans = SpanFile(tmp_path, TRAINER_ID, 1, most_mb=1)
    spans.add("step", 1, 0.0, 1.0)
    for thread in threading.enumerate():
        if thread.name == "spans":
            thread.join(5.0)
    spans.flush()
    assert [line[:2] for line in lines_of(tmp_path / "spans" / "trainer.jsonl")] == [
        ["process", "trainer"],
        ["step", 1],
    ]


def test_spans_keep_within_their_bound_in_two_files(tmp_path, spans):
    for step in range(3000):
        spans.add("wait", "ACTOR", "update" * 20, float(step), step + 1.0)
        if step % 100 == 0:
            spans.flush()
    spans.flush()
    newer, older = tmp_path / "spans" / "rollout-1.jsonl", tmp_path / "spans" / "rollout-1.jsonl.1"
    for step in range(3000, 6000):
        spans.add("wait", "ACTOR", "update" * 20, float(step), step + 1.0)
    spans.flush()
    assert max(newer.stat().st_size, older.stat().st_size) <= 500_000
    assert lines_of(newer)[0][:3] == ["process", "ROLLOUT[1]", 3]
    assert lines_of(newer)[-1][-1] == 6000.0


def test_half_a_line_of_a_killed_process_spoils_no_other(tmp_path, spans):
    file = tmp_path / "spans" / "rollout-1.jsonl"
    file.parent.mkdir()
    file.write_text('["call",1,0,"sam')
    spans.add("step", 1, 0.0, 1.0)
    spans.flush()
    assert [json.loads(line)[0] for line in file.read_text().splitlines()[1:]] == ["process", "step"]


def test_spans_that_the_disk_refuses_are_dropped_and_counted(tmp_path, spans):
    blocked = tmp_path / "spans"
    blocked.write_text("a file where the folder should be")
    for second in (0.0, 1.0):
        spans.add("wait", "ACTOR", "update", second, second + 1.0)
        spans.flush()
    blocked.unlink()
    spans.add("wait", "ACTOR", "update", 2.0, 3.0)
    spans.flush()
    assert lines_of(blocked / "rollout-1.jsonl")[1:] == [["dropped", 2], ["wait", "ACTOR", "update", 2.0, 3.0]]


def test_spans_of_a_disk_that_hangs_are_bounded(tmp_path, spans, monkeypatch):
    monkeypatch.setattr("dlrover.python.rl.common.spans._MOST_LINES", 5)
    for second in range(20):
        spans.add("wait", "ACTOR", "update", second, second + 1)
    spans.flush()
    lines = lines_of(tmp_path / "spans" / "rollout-1.jsonl")
    assert (len(lines), lines[1]) == (7, ["dropped", 15])


def test_zero_megabytes_write_no_file(tmp_path):
    spans = SpanFile(tmp_path, TRAINER_ID, 1, most_mb=0)
    spans.add("step", 1, 0.0, 1.0)
    spans.flush()
    assert not (tmp_path / "spans").exists()


def test_phases_exclude_the_phases_inside_them(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 7.0, 10.0, 10.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    with record_phases() as phases:
        with phase("decode"), phase("prefill"):
            pass
        with phase("decode"):
            pass
    assert phases == {"prefill": 2.0, "decode": 7.0 - 2.0 + 0.5}


def test_phases_outside_of_calls_are_ignored():
    with phase("forward"):
        pass
    with record_phases() as phases:
        pass
    with phase("forward"):
        pass
    assert phases == {}


def test_phases_of_another_thread_count_if_the_call_awaits_it():
    def work():
        with phase("decode"):
            pass

    async def call():
        await asyncio.to_thread(work)

    with record_phases() as phases:
        asyncio.run(call())
        stranger = threading.Thread(target=work)
        stranger.start()
        stranger.join()
    assert list(phases) == ["decode"]
