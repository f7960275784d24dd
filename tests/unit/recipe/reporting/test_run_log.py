# SPDX-License-Identifier: Apache-2.0
"""What a run writes, what it replaces, and what a restart makes of it."""

import json
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrover.python.rl.recipe.base.config import LogConfig
from dlrover.python.rl.recipe.reporting.run_log import RunLog, markdown_table
from dlrover.python.rl.runtime.run import progress as curve
from dlrover.python.rl.runtime.run.progress import CURVES, redraw
from tests.support.manual_clock import ManualClock


def refuse(token):
    raise AssertionError(token)


def written(log, steps, mark=""):
    """Write these steps as a run does."""
    for step in steps:
        log.begin_step(step)
        log.write_samples(step, [{"prompt": f"{mark}{step}", "reward": float(row)} for row in range(3)])
        log.write_step(step, {"reward/mean": step / 10, "loss": float("nan")})


def texts(folder):
    return {name: (folder / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")}


def board(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(point.step, round(point.value, 4)) for point in events.Scalars("reward/mean")]


@pytest.mark.feature(137)
def test_numbers_that_are_none_become_null(tmp_path):
    log = RunLog(tmp_path)
    log.begin_step(1)
    log.write_step(1, {"reward/mean": float("nan"), "loss": float("inf")})
    log.write_step(2, {"reward/mean": 1.0, "loss": 0.5})
    log.write_samples(1, [{"reward": float("nan"), "prompt": "NaN"}])
    log.write_held_out([{"reward": float("nan")}])
    log.write_summary({"mean": float("nan")})
    log.write_curve("reward/mean")
    read = {
        name: [json.loads(line, parse_constant=refuse) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl")
    }
    assert read["metrics.jsonl"][0] == {"step": 1, "reward/mean": None, "loss": None}
    assert read["samples.jsonl"] == [{"step": 1, "reward": None, "prompt": "NaN"}]
    assert read["held_out.jsonl"] == [{"reward": None}]
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse) == {"mean": None}


def test_half_a_character_in_an_errors_text_is_escaped(tmp_path, caplog):
    caplog.set_level("INFO")
    log = RunLog(tmp_path, config=LogConfig(show_samples=1))
    log.begin_step(1)
    log.write_samples(1, [{"prompt": "p", "error": "bad \ud83d", "reward": 1.0}])
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["error"] == "bad \ud83d"
    assert "bad \\ud83d" in caplog.text


def test_a_second_run_keeps_nothing_of_the_firsts_log_and_all_of_the_rest(tmp_path):
    first = RunLog(tmp_path)
    first.begin_step(1)
    first.write_step(1, {"reward": 1.0, "loss": 1.0})
    first.write_held_out([{"reward": 1.0}])
    first.write_summary({})
    for name in CURVES:
        first.write_curve(name)
    (tmp_path / "model").mkdir()
    for name in ("model/weights", "job.yaml", "mine.jsonl"):
        (tmp_path / name).write_text("kept")
    second = RunLog(tmp_path)
    assert (tmp_path / "summary.json").exists(), "it may be a restart: only the first step tells"
    second.begin_step(1)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    left = {name for name in names if not name.startswith("tensorboard/")}
    assert left == {"model/weights", "job.yaml", "mine.jsonl", "metrics.jsonl", "samples.jsonl"}
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.stat().st_size < 200


def test_a_restart_keeps_the_rows_of_committed_steps_and_writes_the_others_once(tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    written(RunLog(undisturbed), range(1, 7))
    written(RunLog(disturbed), range(1, 5))
    with open(disturbed / "samples.jsonl", "a") as file:
        file.write('{"step": 5, "prompt": "to')  # killed while it wrote
    log = RunLog(disturbed)
    written(log, range(4, 7))
    assert texts(disturbed) == texts(undisturbed)
    assert board(disturbed) == board(undisturbed) == [(step, step / 10) for step in range(1, 7)]
    log.write_curve("reward/mean")
    assert [step for step, _ in log._history] == list(range(1, 7))


def test_step_0_stays_until_step_1_begins_again(tmp_path, caplog):
    log = RunLog(tmp_path)
    for score in (0.25, 0.5):
        log.begin_step(1)
        log.write_step(0, {"eval/reward": score})
        log.write_step(1, {"reward/mean": 0.1})
    written(RunLog(tmp_path), [2])
    rows = [json.loads(line) for line in texts(tmp_path)["metrics.jsonl"].splitlines()]
    assert [(row["step"], row.get("eval/reward")) for row in rows] == [(0, 0.5), (1, None), (2, None)]
    assert "lacks rows" not in caplog.text
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("eval/reward")] == [(0, 0.5)]


def test_a_step_between_its_samples_and_its_figures_is_written_anew(tmp_path):
    first = RunLog(tmp_path)
    written(first, [1, 2])
    first.begin_step(3)
    first.write_samples(3, [{"prompt": "lost"}])
    written(RunLog(tmp_path), [3])
    steps = [json.loads(line)["step"] for line in texts(tmp_path)["samples.jsonl"].splitlines()]
    assert steps == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert "lost" not in texts(tmp_path)["samples.jsonl"]


def test_a_log_that_goes_back_replaces_what_is_redone(tmp_path):
    log = RunLog(tmp_path)
    written(log, range(1, 6), mark="old ")
    written(log, range(4, 7), mark="new ")
    rows = [json.loads(line) for line in texts(tmp_path)["samples.jsonl"].splitlines()]
    assert [(row["step"], row["prompt"].split()[0]) for row in rows[::3]] == [
        (step, "old" if step < 4 else "new") for step in range(1, 7)
    ]
    assert [json.loads(line)["step"] for line in texts(tmp_path)["metrics.jsonl"].splitlines()] == list(range(1, 7))
    assert [step for step, _ in board(tmp_path)] == [step for step, _ in log._history] == list(range(1, 7))


def test_a_restart_within_the_same_second_overwrites_no_events(tmp_path):
    for step in range(1, 5):
        written(RunLog(tmp_path), [step])
    assert board(tmp_path) == [(step, step / 10) for step in range(1, 5)]


def test_a_restart_after_the_last_step_keeps_every_row_for_the_curve(tmp_path):
    written(RunLog(tmp_path), range(1, 4))
    before = texts(tmp_path)
    log = RunLog(tmp_path)
    log.begin_step(4)
    log.write_curve("reward/mean")
    assert texts(tmp_path) == before
    assert [step for step, _ in log._history] == [1, 2, 3]


def test_rows_that_are_missing_are_said_to_be(tmp_path, caplog):
    written(RunLog(tmp_path), [1])
    with caplog.at_level("WARNING"):
        RunLog(tmp_path).begin_step(4)
    assert "lacks rows of steps up to 3" in caplog.text


def test_without_matplotlib_a_run_has_no_curves_and_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    log = RunLog(tmp_path)
    written(log, [1])
    for name in CURVES:
        log.write_curve(name)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == "matplotlib is not installed (dlrover-rl[plot]); continuing without reward.png"
    assert not (tmp_path / "reward.png").exists()


def test_the_samples_and_tokens_so_far_survive_a_restart(tmp_path):
    before, after = RunLog(tmp_path), RunLog(tmp_path)
    before.count(samples=8, tokens=100)
    after.load_state_dict(before.state_dict())
    assert after.count(samples=4, tokens=50) == {"total/samples": 12.0, "total/tokens": 150.0}
    after.load_state_dict({"run": "of an earlier version"})
    assert after.count(samples=4, tokens=50) == {"total/samples": 4.0, "total/tokens": 50.0}


def test_the_curve_is_drawn_again_every_half_a_minute_beside_the_run(tmp_path):
    clock = ManualClock()
    log, drawn = RunLog(tmp_path, now_s=clock), tmp_path / "reward.png"
    written(log, [1])
    clock.advance(29.0)
    log.redraw("reward/mean")
    assert log.drawing is None
    clock.advance(1.0)
    log.redraw("reward/mean")
    first = log.drawing
    first.join(60.0)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    clock.advance(29.0)
    log.redraw("reward/mean")
    assert log.drawing is first
    clock.advance(1.0)
    before = drawn.read_bytes()
    written(log, [2, 3])
    log.redraw("reward/mean")
    log.drawing.join(60.0)
    assert drawn.read_bytes() != before


@pytest.mark.parametrize(("name", "file"), CURVES.items())
def test_the_curve_of_a_run_that_ended_early_is_drawn_from_its_rows(tmp_path, name, file):
    redraw(tmp_path)
    assert list(tmp_path.iterdir()) == []
    rows = [{"step": step, name: value} for step, value in ((1, 0.5), (2, None), (3, 1.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "los')
    redraw(tmp_path)
    assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_broken_library_leaves_a_run_without_a_curve(tmp_path, monkeypatch):
    """As a Ctrl-C does that comes while it is imported."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    monkeypatch.setattr(curve, "curve_png", lambda name, points: curve.no_such_attribute)
    redraw(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_has_a_table_of_samples_in_the_first_step_and_every_few(tmp_path):
    log = RunLog(tmp_path, config=LogConfig(samples_every=2, samples_rows=1))
    for step in (1, 2, 3):
        log.begin_step(step)
        rows = [{"prompt": [{"role": "user"}], "completion": f"{step}\n|", "reward": 0.5, "version": 7, "score": None}]
        log.write_samples(step, rows * 2)
        log.write_step(step, {"loss": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tables = {each.step: each.tensor_proto.string_val[0].decode() for each in events.Tensors("samples/text_summary")}
    assert list(tables) == [1, 3]
    header, rule, row = tables[3].splitlines()
    assert header == "| step | prompt | completion | reward | score |"
    assert row == "| 3 | [{'role': 'user'}] | 3<br>\\| | 0.5 |  |"


def test_a_cell_of_markdown_ends_where_the_text_does():
    assert markdown_table([{"a": "x\\|y"}]).splitlines()[-1] == "| x\\\\\\|y |"
