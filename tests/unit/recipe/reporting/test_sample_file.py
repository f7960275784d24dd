# SPDX-License-Identifier: Apache-2.0
"""A file of samples: where a step's lines begin, and what repeating a call makes of it."""

import json
import math

import numpy as np
import pytest
import yaml

from dlrover.python.rl.common.errors import DataError, RowsDiffer
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.config import LogConfig
from dlrover.python.rl.recipe.reporting.run_log import RunLog
from dlrover.python.rl.recipe.reporting.sample_file import Excerpt, cut_at_step, format_rows, write_step
from dlrover.python.rl.recipe.workloads import RolloutWorkload

NOTHING = Excerpt(0, 0, 0)


def lines_of(step, count=2):
    return "".join(f'{{"step": {step}, "row": {row}}}\n' for row in range(count)).encode()


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
def test_a_file_is_cut_at_a_step_wherever_it_is_expected(tmp_path, content, step, size):
    file = tmp_path / "samples.jsonl"
    for expected in (None, *range(len(content) + 3)):
        file.write_bytes(content)
        if expected is None or not _is_another_place(content, step, expected):
            assert cut_at_step(file, step, expected) == size, expected
            assert file.read_bytes() == content[:size]


def _is_another_place(content, step, expected):
    """Before a later line of the step, or of what is torn: only a file that was changed from outside ends there."""
    begins_a_line = expected <= len(content) and (not expected or content[expected - 1 : expected] == b"\n")
    return begins_a_line and expected > len(b"".join(lines_of(number) for number in range(1, step)))


def test_lines_cut_off_stay_superseded_until_repeated(tmp_path):
    file, old = tmp_path / "samples.jsonl", tmp_path / "samples.superseded.jsonl"
    file.write_bytes(b"".join(map(lines_of, (1, 2, 3, 4, 5))) + lines_of(6)[:-4])
    cut_at_step(file, 3)
    assert old.read_bytes() == b"".join(map(lines_of, (3, 4, 5))) + lines_of(6, 1), "whole lines"
    write_step(file, 3, [{"text": "new"}], Excerpt(0, 0, 0))
    assert old.read_bytes() == b"".join(map(lines_of, (4, 5))) + lines_of(6, 1)
    cut_at_step(file, 3)
    assert old.read_bytes().startswith(b'{"step": 3, "text": "new"}\n' + lines_of(4)), "of a second way back too"
    for step in (3, 4, 5, 6):
        assert old.exists()
        write_step(file, step, [], Excerpt(0, 0, 0))
    assert not old.exists()
    cut_at_step(file, 1)
    assert not old.exists(), "a run that begins again replaces nothing"


def test_lines_before_the_expected_place_are_not_read(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b"not a line of a step\n" + lines_of(5))
    assert cut_at_step(file, 5, 21) == 21
    assert cut_at_step(file, 5, 20) == 0


def test_lines_that_are_written_again_are_there_once(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_bytes(lines_of(1))
    rows = [{"prompt": "x" * 99, "reward": float(row)} for row in range(3)]
    first = write_step(file, 2, rows, NOTHING, at=len(lines_of(1)))
    content = file.read_bytes()
    assert content.startswith(lines_of(1))
    assert [json.loads(line) for line in content.splitlines()[2:]] == [{"step": 2, **row} for row in rows]
    file.write_bytes(content[:-40] + b"{")
    assert write_step(file, 2, rows, NOTHING, at=len(lines_of(1))) == first
    assert file.read_bytes() == content
    assert first.end == len(content)


def test_texts_are_among_the_numbers_in_the_order_of_the_file():
    numbers = Batch({"version": np.array([3]), "reward": np.array([0.5]), "reward/right": np.array([1.0])})
    numbers = numbers.with_columns(row=np.array([7]), set=["first"])
    (row,) = format_rows(numbers, Batch({"prompt": ["p"], "completion": ["c"], "answer": [None]}))
    assert list(row) == ["set", "reward", "version", "prompt", "completion", "answer", "reward/right", "row"]
    assert json.dumps(row)


def test_what_is_shown_is_cut_and_no_more_than_was_asked_for(tmp_path):
    rows = [{"prompt": "p" * 500, "reward": 0.5}] * 5
    written = write_step(tmp_path / "samples.jsonl", 1, rows, Excerpt(printed=2, max_chars=10, table=3))
    assert written.printed == [f"prompt {'p' * 10}... (500 characters)  reward 0.5"] * 2
    assert written.table == [{"step": 1, "prompt": "p" * 500, "reward": 0.5}] * 3


@pytest.mark.parametrize(("samples", "lines"), [(math.inf, 6), (2, 4), (0, 0), (9, 6)])
def test_first_samples_are_kept_with_all_their_rows(tmp_path, samples, lines):
    rows = [{"trajectory": row // 2, "prompt": str(row)} for row in range(6)]
    excerpt = Excerpt(printed=1, max_chars=10, table=3, samples=samples)
    written = write_step(tmp_path / "samples.jsonl", 1, rows, excerpt)
    kept = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in kept] == [str(row) for row in range(lines)]
    assert (len(written.printed), len(written.table)) == (1, 3)


@pytest.mark.parametrize(("text", "most"), [("all", math.inf), ("off", 0), ("false", 0), ("'off'", 0), ("12", 12)])
def test_log_samples_in_yaml_is_read(tmp_path, text, most):
    config, errors = parse(LogConfig, yaml.safe_load(f"samples: {text}"), "log")
    assert (errors, RunLog(tmp_path, config=config).excerpt(1).samples) == ([], most)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0", "greater than 0, got 0"),
        ("-3", "greater than 0, got -3"),
        ("on", "a valid integer, got True"),
        ("none", "a valid integer, got 'none'"),
        ("1.5", "a valid integer, got a number with a fractional part, got 1.5"),
    ],
)
def test_other_values_of_log_samples_are_refused(text, error):
    _, errors = parse(LogConfig, yaml.safe_load(f"samples: {text}"), "log")
    assert list(map(str, errors)) == [f"log.samples: input should be 'all' or 'off', or {error}"]


def test_a_rollout_that_does_not_see_the_folder_of_the_run_says_so(tmp_path):
    with pytest.raises(DataError, match="job_dir: .*samples.jsonl is not on .*: all nodes need to see job_dir"):
        RolloutWorkload(None, {}).begin_samples(tmp_path / "elsewhere/samples.jsonl", 1, None)


@pytest.mark.parametrize("left", [None, b"", lines_of(1)[:9]], ids=["removed", "emptied", "cut"])
def test_a_file_that_is_shorter_than_expected_gets_no_hole_and_the_log_says_so(tmp_path, left, caplog):
    file = tmp_path / "samples.jsonl"
    if left is not None:
        file.write_bytes(left)
    written = write_step(file, 2, [{"row": 0}], NOTHING, at=len(lines_of(1)))
    assert file.read_bytes() == (left or b"") + lines_of(2, 1)
    assert written.end == file.stat().st_size
    assert "was cut or removed during the run" in caplog.text


def test_texts_of_other_samples_than_the_numbers_are_refused():
    numbers = Batch({"reward": np.zeros(2), "digest": np.array([1, 2])})
    texts = Batch({"prompt": ["a", "b"], "completion": ["c", "d"], "digest": np.array([1, 2])})
    assert [*format_rows(numbers, texts)][0] == {"reward": 0.0, "prompt": "a", "completion": "c"}
    with pytest.raises(RowsDiffer, match=r"rows \[1\] of 2"):
        list(format_rows(numbers, texts.with_columns(digest=np.array([1, 3]))))
