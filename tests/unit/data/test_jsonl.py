# SPDX-License-Identifier: Apache-2.0
"""JSON Lines files."""

import pytest

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.jsonl import raise_errors, scan_jsonl


def read_jsonl(path):
    rows, errors = scan_jsonl(path)
    raise_errors(errors)
    return [row for _, row in rows]


def test_objects_in_order_without_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": "é\u2028"}\r\n\n  \n{"b": [1]}'.encode())
    assert read_jsonl(path) == [{"a": "é\u2028"}, {"b": [1]}]


def test_every_malformed_line_is_reported_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    deep = b"[" * 200_000
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n\n{"a": "\xff"}\n{"a": NaN}\n' + deep)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    found = {problem.where.rpartition(":")[2]: problem.what for problem in caught.value.errors}
    assert list(found) == ["2", "3", "5", "6", "7"]
    assert found["2"].startswith("not JSON: Expecting value at column")
    assert found["3"] == "not an object but list"
    assert found["5"] == "not UTF-8 at byte 7"
    assert found["6"] == "not JSON: NaN is not a number"
    assert found["7"].startswith("not JSON")
    assert all(problem.where.startswith(f"{path}:") for problem in caught.value.errors)


def test_twenty_problems_are_shown_and_the_others_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{{{' ' * row}x\n" for row in range(25)))
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    assert len(caught.value.errors) == 21
    assert str(caught.value.errors[-1]) == f"{path}: and 5 more errors"


@pytest.mark.parametrize(("rows", "errors"), [(3, 3), (4, 1), (5000, 1)])
def test_first_errors_of_equal_rows_are_one_with_a_count(tmp_path, rows, errors):
    path = tmp_path / "rows.jsonl"
    path.write_text("x\n" * rows)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    assert len(caught.value.errors) == errors
    expected = f"not JSON: Expecting value at column 1 (the same in {rows - 1:,} more rows)"
    assert errors > 1 or str(caught.value.errors[0]) == f"{path}:1: {expected}"


def test_a_missing_file_is_named_with_the_nearest(tmp_path):
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"trian\.jsonl: no such file; did you mean 'train\.jsonl'\?"):
        read_jsonl(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match="no such file$"):
        read_jsonl(tmp_path / "zzz")
    with pytest.raises(DataError, match="no such file; there is no folder"):
        read_jsonl(tmp_path / "nowhere" / "train.jsonl")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_jsonl(tmp_path)
