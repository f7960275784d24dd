# SPDX-License-Identifier: Apache-2.0
"""The files that a run writes, and replaces after a restart: its log, curves and samples."""

import json
import math
import sys

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrover.python.rl.common.errors import DataError, RowsDiffer
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.config import LogConfig
from dlrover.python.rl.recipe.reporting.run_log import RunLog, markdown_table
from dlrover.python.rl.recipe.reporting.sample_file import Excerpt, cut_at_step, format_rows, write_step
from dlrover.python.rl.recipe.workloads import RolloutWorkload
from dlrover.python.rl.runtime.run import progress as curve
from dlrover.python.rl.runtime.run.progress import CURVES, redraw
from tests.support.manual_clock import ManualClock
from tests.support.run_files import read_lines, write_rows


def refuse(token):
    raise AssertionError(token)


def written(log, steps, mark=""):
    """Write these steps as a run does."""
    for step in steps:
        log.begin_step(step)
        log.write_samples(step, [{"prompt": f"{mark}{step}", "reward": float(row)} for row in range(3)])
        log.write_step(step, {"reward/mean": step / 10, "loss": float("nan")})


def events_of(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def texts(folder):
    return {name: (folder / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")}


def board(folder):
    return [(point.step, round(point.value, 4)) for point in events_of(folder).Scalars("reward/mean")]


@pytest.mark.feature(137)
def test_values_without_a_number_become_null(tmp_path):
    log = RunLog(tmp_path)
    log.begin_step(1)
    log.write_step(1, {"reward/mean": float("nan"), "loss": float("inf")})
    log.write_samples(1, [{"reward": float("nan"), "prompt": "NaN"}])
    log.write_held_out(1, [{"reward": float("nan")}])
    log.write_summary({"mean": float("nan")})
    log.write_curve("reward/mean")
    expected = {
        "metrics.jsonl": {"step": 1, "reward/mean": None, "loss": None},
        "samples.jsonl": {"step": 1, "reward": None, "prompt": "NaN"},
        "held_out.jsonl": {"step": 1, "reward": None},
        "summary.json": {"mean": None},
    }
    assert {name: json.loads((tmp_path / name).read_text(), parse_constant=refuse) for name in expected} == expected


def test_half_a_character_in_an_errors_text_is_escaped(tmp_path, caplog):
    caplog.set_level("INFO")
    log = RunLog(tmp_path, config=LogConfig(show_samples=1))
    log.begin_step(1)
    log.write_samples(1, [{"prompt": "p", "error": "bad \ud83d", "reward": 1.0}])
    (row,) = read_lines(tmp_path / "samples.jsonl")
    assert row["error"] == "bad \ud83d"
    assert "bad \\ud83d" in caplog.text


def test_second_run_replaces_the_log_and_keeps_the_rest(tmp_path):
    first = RunLog(tmp_path)
    written(first, [1])
    first.write_held_out(1, [{"reward": 1.0}])
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


def test_restart_keeps_committed_rows_and_writes_others_once(tmp_path):
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
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row.get("eval/reward")) for row in rows] == [(0, 0.5), (1, None), (2, None)]
    assert "lacks rows" not in caplog.text
    assert [(point.step, point.value) for point in events_of(tmp_path).Scalars("eval/reward")] == [(0, 0.5)]


def test_log_set_back_replaces_its_later_steps(tmp_path):
    log, steps = RunLog(tmp_path), list(range(1, 7))
    written(log, range(1, 6), mark="old ")
    written(log, range(4, 7), mark="new ")
    rows = read_lines(tmp_path / "samples.jsonl")
    marks = [(row["step"], row["prompt"].split()[0]) for row in rows[::3]]
    assert marks == [(step, "old" if step < 4 else "new") for step in steps]
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == steps
    assert [step for step, _ in board(tmp_path)] == [step for step, _ in log._history] == steps


def test_restart_within_the_same_second_overwrites_no_events(tmp_path):
    for step in range(1, 5):
        written(RunLog(tmp_path), [step])
    assert board(tmp_path) == [(step, step / 10) for step in range(1, 5)]


def test_missing_rows_are_warned_of(tmp_path, caplog):
    written(RunLog(tmp_path), [1])
    with caplog.at_level("WARNING"):
        RunLog(tmp_path).begin_step(4)
    assert "lacks rows of steps up to 3" in caplog.text


def test_run_without_matplotlib_has_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    log = RunLog(tmp_path)
    written(log, [1])
    for name in CURVES:
        log.write_curve(name)
    warning = "matplotlib is not installed (dlrover-rl[plot]); continuing without reward.png"
    assert [record.getMessage() for record in caplog.records] == [warning]
    assert not (tmp_path / "reward.png").exists()


def test_counts_of_samples_and_tokens_survive_a_restart(tmp_path):
    before, after = RunLog(tmp_path), RunLog(tmp_path)
    before.count(samples=8, tokens=100)
    after.load_state_dict(before.state_dict())
    assert after.count(samples=4, tokens=50) == {"total/samples": 12.0, "total/tokens": 150.0}
    after.load_state_dict({"run": "of an earlier version"})
    assert after.count(samples=4, tokens=50) == {"total/samples": 4.0, "total/tokens": 50.0}


def test_curve_is_drawn_again_every_half_a_minute(tmp_path):
    clock = ManualClock()
    log, image = RunLog(tmp_path, now_s=clock), tmp_path / "reward.png"

    def drawing_after(seconds):
        clock.advance(seconds)
        log.redraw("reward/mean")
        if log.drawing is not None:
            log.drawing.join(60.0)
        return log.drawing

    written(log, [1])
    assert drawing_after(29.0) is None
    first, before = drawing_after(1.0), image.read_bytes()
    assert before.startswith(b"\x89PNG")
    written(log, [2, 3])
    assert drawing_after(29.0) is first
    assert drawing_after(1.0) is not first
    assert image.read_bytes() != before


@pytest.mark.parametrize(("name", "file"), CURVES.items())
def test_curve_of_an_unfinished_run_is_drawn_from_its_rows(tmp_path, name, file):
    redraw(tmp_path)
    assert list(tmp_path.iterdir()) == []
    rows = [{"step": step, name: value} for step, value in ((1, 0.5), (2, None), (3, 1))]
    write_rows(tmp_path / "metrics.jsonl", rows)
    with open(tmp_path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 4, "los')
    redraw(tmp_path)
    assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2


def test_run_with_a_broken_library_has_no_curve(tmp_path, monkeypatch):
    """A Ctrl-C that comes while it is imported breaks it."""
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    monkeypatch.setattr(curve, "curve_png", lambda name, points: curve.no_such_attribute)
    redraw(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_has_a_table_of_samples_every_few_steps(tmp_path):
    log = RunLog(tmp_path, config=LogConfig(samples_every=2, samples_rows=1))
    for step in (1, 2, 3):
        log.begin_step(step)
        rows = [{"prompt": [{"role": "user"}], "completion": f"{step}\n|", "reward": 0.5, "version": 7, "score": None}]
        log.write_samples(step, rows * 2)
        log.write_step(step, {"loss": 1.0})
    texts = events_of(tmp_path).Tensors("samples/text_summary")
    tables = {each.step: each.tensor_proto.string_val[0].decode() for each in texts}
    assert list(tables) == [1, 3]
    header, _, row = tables[3].splitlines()
    assert header == "| step | prompt | completion | reward | score |"
    assert row == "| 3 | [{'role': 'user'}] | 3<br>\\| | 0.5 |  |"
    assert markdown_table([{"a": "x\\|y"}]).splitlines()[-1] == "| x\\\\\\|y |", "a cell ends where its text does"


NOTHING = Excerpt(0, 0, 0)


# -- the file of samples -----------------------------------------------------------------------------------------------


def test_lines_of_earlier_versions_are_cut_at_a_step(tmp_path):
    """They have a space behind each colon."""
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b'{"step": 1, "row": 0}\n{"step": 2, "row": 0}\n{"step": 3, "row": 0}\n' + lines_of(3, 1))
    assert cut_at_step(file, 3) == len(file.read_bytes())
    assert [row["step"] for row in read_lines(file)] == [1, 2]
    assert len(read_lines(tmp_path / "samples.superseded.jsonl")) == 2


def lines_of(step, count=2):
    return "".join(f'{{"step":{step},"row":{row}}}\n' for row in range(count)).encode()


@pytest.mark.parametrize(
    ("content", "step", "size"),
    [
        (b"", 1, 0),
        (lines_of(1) + lines_of(2), 1, 0),
        (lines_of(1) + lines_of(2), 2, len(lines_of(1))),
        (lines_of(1) + lines_of(2), 3, len(lines_of(1) + lines_of(2))),
        (lines_of(1) + lines_of(2)[:-4], 3, len(lines_of(1, 2) + lines_of(2, 1))),
        (lines_of(1) + bytes(100), 3, len(lines_of(1))),
    ],
    ids=["empty", "all", "one step", "nothing", "a torn line", "a hole of zeros"],
)
def test_sample_file_is_cut_at_a_step_from_any_expected_place(tmp_path, content, step, size):
    file = tmp_path / "samples.jsonl"
    for expected in (None, *range(len(content) + 3)):
        file.write_bytes(content)
        if expected is None or not _is_another_place(content, step, expected):
            assert cut_at_step(file, step, expected) == size, expected
            assert file.read_bytes() == content[:size]


def _is_another_place(content, step, expected):
    """Tell whether a later or torn line begins there: only a file that was changed from outside ends so."""
    begins_a_line = expected <= len(content) and (not expected or content[expected - 1 : expected] == b"\n")
    return begins_a_line and expected > len(b"".join(lines_of(number) for number in range(1, step)))


def test_lines_cut_off_stay_superseded_until_repeated(tmp_path):
    file, old = tmp_path / "samples.jsonl", tmp_path / "samples.superseded.jsonl"
    file.write_bytes(b"".join(map(lines_of, (1, 2, 3, 4, 5))) + lines_of(6)[:-4])
    cut_at_step(file, 3)
    assert old.read_bytes() == b"".join(map(lines_of, (3, 4, 5))) + lines_of(6, 1), "whole lines"
    write_step(file, 3, [{"text": "new"}], NOTHING)
    assert old.read_bytes() == b"".join(map(lines_of, (4, 5))) + lines_of(6, 1)
    cut_at_step(file, 3)
    assert old.read_bytes().startswith(b'{"step":3,"text":"new"}\n' + lines_of(4)), "of a second way back too"
    for step in (3, 4, 5, 6):
        assert old.exists()
        write_step(file, step, [], NOTHING)
    assert not old.exists()
    cut_at_step(file, 1)
    assert not old.exists(), "a run that begins again replaces nothing"


def test_lines_before_the_expected_place_are_not_read(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b"not a line of a step\n" + lines_of(5))
    assert cut_at_step(file, 5, 21) == 21
    assert cut_at_step(file, 5, 20) == 0


def test_lines_written_again_are_there_once(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_bytes(lines_of(1))
    rows = [{"prompt": "x" * 99, "reward": float(row)} for row in range(3)]
    first = write_step(file, 2, rows, NOTHING, at=len(lines_of(1)))
    content = file.read_bytes()
    assert content.startswith(lines_of(1))
    assert read_lines(file)[2:] == [{"step": 2, **row} for row in rows]
    file.write_bytes(content[:-40] + b"{")
    assert write_step(file, 2, rows, NOTHING, at=len(lines_of(1))) == first
    assert file.read_bytes() == content
    assert first.end == len(content)


def test_columns_of_a_line_have_their_order():
    numbers = Batch({"version": np.array([3]), "reward": np.array([0.5]), "reward/right": np.array([1.0])})
    numbers = numbers.with_columns(row=np.array([7]), set=["first"])
    (row,) = format_rows(numbers, Batch({"prompt": ["p"], "completion": ["c"], "answer": [None]}))
    assert list(row) == ["set", "reward", "version", "prompt", "completion", "answer", "reward/right", "row"]
    assert json.dumps(row)


def test_excerpt_of_a_step_is_cut_as_asked_for(tmp_path):
    rows = [{"prompt": "p" * 500, "reward": 0.5}] * 5
    excerpt = write_step(tmp_path / "samples.jsonl", 1, rows, Excerpt(printed=2, max_chars=10, table=3))
    assert excerpt.printed == [f"prompt {'p' * 10}... (500 characters)  reward 0.5"] * 2
    assert excerpt.table == [{"step": 1, "prompt": "p" * 500, "reward": 0.5}] * 3


@pytest.mark.parametrize(("samples", "lines"), [(math.inf, 6), (2, 4), (0, 0), (9, 6)])
def test_first_samples_are_kept_with_all_their_rows(tmp_path, samples, lines):
    rows = [{"trajectory": row // 2, "prompt": str(row)} for row in range(6)]
    settings = Excerpt(printed=1, max_chars=10, table=3, samples=samples)
    excerpt = write_step(tmp_path / "samples.jsonl", 1, rows, settings)
    assert [row["prompt"] for row in read_lines(tmp_path / "samples.jsonl")] == [str(row) for row in range(lines)]
    assert (len(excerpt.printed), len(excerpt.table)) == (1, 3)


@pytest.mark.parametrize(("text", "most"), [("all", math.inf), ("off", 0), ("false", 0), ("'off'", 0), ("12", 12)])
def test_log_samples_in_yaml_is_read(tmp_path, text, most):
    config, errors = parse(LogConfig, yaml.safe_load(f"samples: {text}"), "log")
    assert (errors, RunLog(tmp_path, config=config).excerpt(1).samples) == ([], most)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0", "greater than 0, got 0"),
        ("on", "a valid integer, got True"),
        ("none", "a valid integer, got 'none'"),
        ("1.5", "a valid integer, got a number with a fractional part, got 1.5"),
    ],
)
def test_other_values_of_log_samples_are_refused(text, error):
    _, errors = parse(LogConfig, yaml.safe_load(f"samples: {text}"), "log")
    assert list(map(str, errors)) == [f"log.samples: input should be 'all' or 'off', or {error}"]


def test_rollout_without_the_folder_of_the_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match="job_dir: .*samples.jsonl is not on .*: all nodes need to see job_dir"):
        RolloutWorkload(None, {}).cut_samples(tmp_path / "elsewhere/samples.jsonl", 1, None)


@pytest.mark.parametrize("left", [None, b"", lines_of(1)[:9]], ids=["removed", "emptied", "cut"])
def test_file_shorter_than_expected_gets_no_hole(tmp_path, left, caplog):
    file = tmp_path / "samples.jsonl"
    if left is not None:
        file.write_bytes(left)
    excerpt = write_step(file, 2, [{"row": 0}], NOTHING, at=len(lines_of(1)))
    assert file.read_bytes() == (left or b"") + lines_of(2, 1)
    assert excerpt.end == file.stat().st_size
    assert "was cut or removed during the run" in caplog.text


def test_texts_of_other_samples_than_the_numbers_are_refused():
    numbers = Batch({"reward": np.zeros(2), "digest": np.array([1, 2])})
    texts = Batch({"prompt": ["a", "b"], "completion": ["c", "d"], "digest": np.array([1, 2])})
    assert [*format_rows(numbers, texts)][0] == {"reward": 0.0, "prompt": "a", "completion": "c"}
    with pytest.raises(RowsDiffer, match=r"rows \[1\] of 2"):
        list(format_rows(numbers, texts.with_columns(digest=np.array([1, 3]))))
