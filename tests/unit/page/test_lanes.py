# SPDX-License-Identifier: Apache-2.0
"""The lanes of steps from files of spans."""

import json
import os

import pytest

from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.page.spans import last_step, read_steps
from tests.support.recorded_spans import BEGAN_S, Recording, labels, lose_rollout, write_loss


def lane_of(step, process):
    return next(lane for lane in step.lanes if lane.process == process)


@pytest.fixture
def recording(tmp_path):
    return Recording(tmp_path)


def test_lanes_name_each_call_and_the_cause_of_each_wait(recording):
    (step,) = read_steps(recording.step(1, [0.2, 0.4]).step(2).write(), 1, 1)
    lanes = {lane.process: labels(lane) for lane in step.lanes}
    after = ["waits for ACTOR.update", "waits for the trainer"]
    assert lanes == {
        "trainer": ["trainer", "waits for ACTOR.update", "trainer"],
        "ACTOR[0]": ["waits for the trainer", "waits for ROLLOUT.sample", "is being called", "update", *after],
        "ROLLOUT[0]": ["is being called", "sample", *after],
        "ROLLOUT[1]": ["is being called", "sample", *after],
    }
    assert lane_of(step, "ACTOR[0]").spans[1].cause == "ROLLOUT[1]", "the slower one"
    assert lane_of(step, "ROLLOUT[0]").spans[1].phases == {"decode": 0.1}


def test_lanes_have_no_gaps(recording):
    recording.step(1, [0.1, 0.3]).step(2, own_s=0.5)
    write_loss(recording.folder, lose_rollout(recording, 3) + 1.0, CauseKind.PROCESS_DIED)
    for step in read_steps(recording.step(4).write(), 1, 4):
        for lane in step.lanes:
            edges = [step.begin_s, *(span.end_s for span in lane.spans)]
            assert [span.begin_s for span in lane.spans] == edges[:-1] and edges[-1] == step.end_s, lane


def test_clock_of_another_node_may_be_behind(recording):
    (step,) = read_steps(recording.step(1, behind_s=0.02).write(), 1, 1)
    assert labels(lane_of(step, "ROLLOUT[0]"))[:2] == ["sample", "waits for ACTOR.update"]


def test_torn_and_hostile_lines_are_skipped(recording):
    folder = recording.step(1).write()
    file = folder / "spans" / "rollout-1.jsonl"
    hostile = ['["call", 1, 0, "sa', '["call",1,0,"x",1e999,2,null,""]', '["call",1]', "7", '{"a":1}', "[" * 5000]
    hostile += [
        '["call","1",0,"x",1,2,null,""]',
        '["call",1,0,"x",1,2,{"a":[1]},""]',
        '["call",1,0,"x",1,2,[1],""]',
        '["what"]',
        "[[]]",
        "",
    ]
    file.write_text(file.read_text() + "\n".join(hostile) + "\n" + file.read_text())
    file.with_name("other.jsonl").write_text("no spans\n")
    file.with_name("link.jsonl").symlink_to(file)
    os.mkfifo(file.with_name("pipe.jsonl"))
    (step,) = read_steps(folder, 1, 1)
    assert [lane.process for lane in step.lanes] == ["trainer", "ACTOR[0]", "ROLLOUT[0]", "ROLLOUT[1]"]


def test_step_is_found_across_a_rotation(recording):
    folder = recording.step(1).step(2).write()
    for name in ("trainer", "rollout-0"):
        file = folder / "spans" / f"{name}.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        cut = len(lines) // 2
        file.with_name(f"{name}.jsonl.1").write_text("".join(lines[:cut]))
        title = json.loads(lines[0])
        title[-1] = recording.now_s - 1.0
        file.write_text(json.dumps(title, separators=(",", ":")) + "\n" + "".join(lines[cut:]))
    steps = read_steps(folder, 1, 2)
    assert [(step.step, len(step.calls), step.losses) for step in steps] == [(1, 3, ()), (2, 3, ())]
    assert last_step(folder) == 2


def test_repeated_step_is_listed_once_for_each_attempt(recording):
    recording.step(1).step(2).step(3).step(2).step(3)
    assert [step.step for step in read_steps(recording.write(), 2, 3)] == [2, 3, 2, 3]


def test_step_that_the_trainers_end_cut_off_is_unfinished(recording):
    recording.step(1).step(2)
    recording.add("trainer", "issue", 3, 0, "ROLLOUT", [0, 1], "sample", recording.now_s + 0.1, [])
    recording.call("ROLLOUT[0]", (3, 0), "sample", recording.now_s + 0.2, recording.now_s + 0.3)
    folder, now_s = recording.write(), recording.now_s
    (step,) = read_steps(folder, 3, 3, now_s=now_s + 20.0)
    assert (step.is_open, step.begin_s, step.end_s) == (True, now_s, now_s + 20.0)
    last = lane_of(step, "ROLLOUT[1]").spans[-1]
    assert (last.kind, last.label, last.cause, last.begin_s) == ("call", "sample", "has not ended", now_s + 0.1)
    assert last_step(folder) == 3
    recording.start("trainer", 2, now_s + 500.0)
    recording.step(3)
    cut_off, repeated = read_steps(recording.write(), 3, 3)
    assert (cut_off.is_open, repeated.is_open) == (True, False)
    assert cut_off.end_s == now_s + 0.1, "not when the next trainer began, perhaps days later"


def test_calls_after_the_last_step_are_no_step(recording):
    recording.step(1).step(2).step(3)
    recording.lines["trainer"][-1][1] = -1  # as the trainer writes it that has ended
    folder = recording.write()
    assert ([step.step for step in read_steps(folder, 1, 9)], last_step(folder)) == ([1, 2], 2)


@pytest.mark.parametrize("kind", [CauseKind.PROCESS_DIED, CauseKind.HUNG])
def test_lost_worker_is_replaced_in_its_lane(recording, kind):
    recording.step(1)
    began_s = lose_rollout(recording, 2)
    write_loss(recording.folder, began_s + 1.0, kind)
    (step,) = read_steps(recording.write(), 2, 2)
    (loss,) = step.losses
    times = [round(each - began_s, 3) for each in (loss.begin_s, loss.gone_s, loss.ready_s, loss.end_s)]
    assert (str(loss.process), loss.method, loss.is_hung) == ("ROLLOUT[1]", "sample", kind is CauseKind.HUNG)
    assert times == [0.0, 1.0, 2.5, 2.6]
    spans = lane_of(step, "ROLLOUT[1]").spans
    assert [(span.kind, span.label) for span in spans[:2]] == [("call", "sample"), ("down", "is being replaced")]
    assert lane_of(step, "ROLLOUT[0]").spans[-1].end_s == step.end_s


def test_run_without_spans_has_no_steps(tmp_path):
    assert read_steps(tmp_path, 1, 10) == [] and last_step(tmp_path) == 0
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans" / "trainer.jsonl").write_bytes(b"")
    assert read_steps(tmp_path, 1, 10) == [] and last_step(tmp_path) == 0


def test_step_is_found_in_a_large_file_by_bisection(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrover.python.rl.page.spans._CHUNK", 300)
    recording = Recording(tmp_path)
    for number in range(1, 41):
        recording.step(number)
    folder = recording.write()
    for number in (1, 2, 20, 39, 40):
        (step,) = read_steps(folder, number, number)
        assert (len(step.calls), {call.step for _, call in step.calls}) == (3, {number})
        assert step.begin_s == pytest.approx(BEGAN_S + number - 1)
