# SPDX-License-Identifier: Apache-2.0
"""One reader for every kind of file."""

import csv
import json
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import pytest

from dlrover.python.rl.common.errors import MissingExtra
from dlrover.python.rl.common.hub import looking_up
from dlrover.python.rl.data.conversation import SFT_ROWS, encode_sft
from dlrover.python.rl.data.pairs import PAIR_ROWS, encode_pairs
from dlrover.python.rl.data.prompts import PROMPT_ROWS, PromptRow, load_prompts
from dlrover.python.rl.data.source import as_plain, is_left_unread, scan_rows
from dlrover.python.rl.data.state_tree import dump, load

SAY = [{"role": "user", "content": 'Q, "1"\n'}, {"role": "assistant", "content": "A1"}]
SFT = [
    {"prompt": "The capital of China is", "response": "Beijing."},
    {"prompt": "007", "response": "42"},
    {"prompt": 'ä漢🙂, "so"\nto say', "response": ""},
]
CHATS = [{"messages": SAY}, {"messages": SAY * 2}, {"messages": SAY}]
PROBLEMS = [
    {"messages": SAY[:1], "extra_info": {"answer": "Beijing", "idx": 3}},
    {"messages": SAY[:1], "extra_info": {"answer": "1", "idx": 4}},
    {"messages": SAY[:1], "extra_info": None},
]
KINDS = ["json", "jsonl", "csv", "parquet", "arrow", "stream.arrow", "folder", "saved", "hub"]


def write(folder, kind, rows):
    """The same rows in a source of ``kind``; returns its name."""
    path = folder / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows([{key: _cell(value) for key, value in row.items()} for row in rows])
    else:
        return _write_table(folder, kind, rows)
    return str(path)


def _cell(value):
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _write_table(folder, kind, rows):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table, path = pa.Table.from_pylist(rows), folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif kind == "stream.arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    elif kind == "saved":
        datasets = pytest.importorskip("datasets")
        datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(folder / "saved")
        return str(folder / "saved")
    else:
        pytest.importorskip("datasets")
        (folder / "org" / "name").mkdir(parents=True)
        pyarrow.parquet.write_table(table, folder / "org" / "name" / "train.parquet")
        pyarrow.parquet.write_table(table.slice(0, 1), folder / "org" / "name" / "test.parquet")
        return str(folder / "org" / "name") if kind == "folder" else "org/name"
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    datasets = pytest.importorskip("datasets.config", reason="optional") if _has_datasets() else None
    if datasets is not None:
        monkeypatch.setattr(datasets, "HF_DATASETS_CACHE", tmp_path / "cache")


def _has_datasets():
    try:
        import datasets  # noqa: F401
    except ImportError:
        return False
    return True


def tokens(batch):
    return [row.tolist() for row in batch.ragged("tokens")], [row.tolist() for row in batch.ragged("action_mask")]


@pytest.mark.feature(65)
@pytest.mark.parametrize("rows", [SFT, CHATS], ids=["raw", "messages"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_from_each_kind_of_file_give_equal_tensors(tokenizer, tmp_path, kind, rows):
    expected, _ = encode_sft(SFT_ROWS.read(write(tmp_path, "jsonl", rows)), tokenizer)
    batch, counts = encode_sft(SFT_ROWS.read(write(tmp_path, kind, rows)), tokenizer)
    assert tokens(batch) == tokens(expected)
    assert counts.rows == 3


def test_a_file_of_the_whole_name_is_no_split_of_another(tmp_path):
    for name in ("v@2.jsonl", "train[1:]@2.jsonl", "2.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": name, "response": ""}))
        rows, errors = scan_rows(name)
        assert ([row["prompt"] for row in rows], errors) == ([name], [])


@pytest.mark.feature(74)
@pytest.mark.parametrize("kind", KINDS)
def test_extra_info_comes_unchanged_from_each_kind_of_file_and_absent_is_empty(tmp_path, kind):
    rows = load_prompts(write(tmp_path, kind, PROBLEMS))
    assert [row.extra_info for row in rows] == [{"answer": "Beijing", "idx": 3}, {"answer": "1", "idx": 4}, {}]
    assert [row.answer for row in rows] == ["Beijing", "1", None]
    assert all(row.prompt == SAY[:1] for row in rows)


@pytest.mark.feature(65)
@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "folder"])
def test_a_split_and_a_part_of_it(tmp_path, kind):
    place = write(tmp_path, kind, SFT)

    def prompts(where):
        rows, problems = scan_rows(where)
        assert not problems
        return [row["prompt"] for row in rows]

    every = [row["prompt"] for row in SFT]
    assert prompts(f"train@{place}") == every
    assert prompts(f"train[1:]@{place}") == every[1:]
    assert prompts(f"train[:-1]@{place}") == every[:-1]
    assert prompts(f"train[34%:67%]@{place}") == every[1:2]
    if kind == "folder":
        assert prompts(f"test@{place}") == every[:1]


def test_a_split_that_is_not_there(tmp_path):
    ((_, (problem,))) = scan_rows(f"tset@{write(tmp_path, 'jsonl', SFT)}")
    assert "it has no 'tset'" in problem.what
    if _has_datasets():
        _, (problem,) = scan_rows(f"tset@{write(tmp_path, 'folder', SFT)}")
        assert problem.what == "has no split 'tset'; did you mean 'test'?"


def test_an_at_sign_in_a_path_is_no_split(tmp_path):
    (tmp_path / "me@home").mkdir()
    rows, problems = scan_rows(write(tmp_path / "me@home", "jsonl", SFT))
    assert (len(rows), problems) == (3, [])
    assert rows.location(1).endswith("me@home/rows.jsonl:2")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_columns_by_other_names(tmp_path, kind, caplog):
    place = write(tmp_path, kind, [{"question": "1+1", "answer": "A: 2", "n": "2"}])
    (row,) = (
        load_prompts(place, {"prompt": "question", "answer": "n"})
        if kind != "jsonl"
        else load_prompts(
            write(tmp_path, "jsonl", [{"question": "1+1", "n": "2"}]), {"prompt": "question", "answer": "n"}
        )
    )
    assert (row.prompt, row.answer) == ("1+1", "2")
    _, (problem, *_) = scan_rows(place, {"prompt": "qestion"})
    assert problem.what == "has no column 'qestion'; did you mean 'question'?"


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_what_a_prompt_has_besides_is_handed_on(tmp_path, kind):
    (row,) = load_prompts(write(tmp_path, kind, [{"prompt": "a", "answer": "1", "source": "web"}]))
    assert (row.answer, row.extra_info) == ("1", {"source": "web"})


@pytest.mark.parametrize(
    ("name", "content", "place", "what"),
    [
        ("a.json", "[1, {}]", ":1", "not an object but int"),
        ("a.json", "[{]", "", "not JSON"),
        ("a.json", '{"prompt": "a"}\n[]\n', ":2", "not an object but list"),
        ("a.json", "", "", "holds no rows"),
        ("a.csv", "prompt,response\na\n", ":2", "has fewer cells than the header"),
        ("a.csv", 'prompt,response\n"a\nb",c\nx,y,z\n', ":4", "has more cells than the header"),
        ("a.csv", 'prompt\n"a', "", "not CSV in UTF-8"),
        ("a.csv", "prompt,answer,prompt\na,b,c\n", "", "its header has 'prompt' twice"),
        ("a.csv", "messages\n[\n", ":2", "'messages' is not JSON"),
        ("a.txt", "x", "", "a file of kind '.txt' cannot be read"),
        ("a.parquet", "PAR0", "", "cannot be read"),
        ("a.arrow", "x", "", "cannot be read"),
    ],
)
def test_files_that_are_wrong_are_told_with_the_place(tmp_path, name, content, place, what):
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_text(content)
    _, (problem,) = scan_rows(path)
    assert problem.where == f"{path}{place}"
    assert what in problem.what


def test_a_csv_may_have_an_index_and_spaces_in_its_header(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(",prompt, answer,\n0,hi,1,\n1,ho,2,\n")
    rows = load_prompts(path)
    assert [(row.prompt, row.answer, row.extra_info) for row in rows] == [("hi", "1", {}), ("ho", "2", {})]


def test_nulls_that_a_table_puts_into_the_arguments_of_calls_are_left_out(tmp_path):
    pytest.importorskip("pyarrow")
    arguments = {"look": {"city": "P"}, "sum": {"terms": [1, 2]}}
    calls = [{"function": {"name": name, "arguments": given}} for name, given in arguments.items()]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    rows, errors = scan_rows(write(tmp_path, "parquet", [{"messages": messages}]))
    assert not errors
    (row,) = rows
    assert row["messages"][1]["tool_calls"] == calls


def test_nulls_that_a_line_of_json_has_in_the_arguments_of_a_call_stay(tmp_path):
    call = {"function": {"name": "look", "arguments": {"city": None}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows, _ = scan_rows(write(tmp_path, "jsonl", [{"messages": messages}]))
    assert rows.numbered[0][1]["messages"][1]["tool_calls"] == [call]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "arrow"])
def test_a_file_that_is_not_there(tmp_path, kind):
    write(tmp_path, kind, SFT)
    _, (problem,) = scan_rows(str(tmp_path / f"row.{kind}"))
    assert problem.what == f"no such file; did you mean 'rows.{kind}'?"
    _, (problem,) = scan_rows("./nowhere/data")
    assert problem.what == "no such file; there is no folder nowhere"


TO_CACHE = "'here' is a folder here: to use the hub's, download it first (hf download --repo-type dataset here/train)"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ok.txt", "no such file; did you mean 'ok.tsv'?"),
        ("ok.jsonl.gz", "no such file; did you mean 'ok.tsv'?"),
        ("test[:5]@none.jsonl.gz", "no such file"),
        ("here/train", f"no such file; {TO_CACHE}"),
        ("here/train:main", f"no such file; {TO_CACHE}"),
    ],
)
def test_a_files_name_and_one_in_a_folder_here_are_none_of_the_hubs(tmp_path, monkeypatch, name, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "ok.tsv").touch()
    with looking_up("none"):
        assert not is_left_unread(name)
    _, (problem,) = scan_rows(name)
    assert problem.what == what


def test_one_in_a_folder_here_is_the_hubs_if_its_cache_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    cached = tmp_path / "hub/datasets--here--train"
    for file, text in {"refs/main": "1a", "snapshots/1a/README.md": ""}.items():
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(text)
    with looking_up("none"):
        left = {name: is_left_unread(name) for name in ("here/train", "here/train:main", "here/test", "other/train")}
    assert left == {"here/train": True, "here/train:main": True, "here/test": False, "other/train": True}


def test_a_name_that_the_hub_does_not_have_is_a_problem_not_a_crash():
    pytest.importorskip("datasets")
    _, (problem,) = scan_rows("no-such-org/no-such-name")
    assert problem.what.startswith("is no file or folder, and the hub cannot be reached: ")


def test_tables_without_the_extra_name_it(tmp_path, monkeypatch):
    import sys

    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for place in (tmp_path / "a.parquet", tmp_path):
        if place.suffix:
            place.write_bytes(b"")
        _, (problem,) = scan_rows(place)
        assert problem.what == str(MissingExtra("datasets", "data"))
    assert len(scan_rows(write(tmp_path, "jsonl", SFT))[0]) == 3


@pytest.mark.feature(73)
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_from_each_kind_of_file(tokenizer, tmp_path, kind):
    rows = [{"messages": SAY[:1], "chosen": "Beijing.", "rejected": "Shanghai."}]
    expected, _ = encode_pairs(PAIR_ROWS.read(write(tmp_path, "jsonl", rows)), tokenizer)
    batch, _ = encode_pairs(PAIR_ROWS.read(write(tmp_path, kind, rows)), tokenizer)
    assert tokens(batch) == tokens(expected)


def test_a_folder_without_data_says_so_and_a_broken_one_why(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "README.md").touch()
    _, (error,) = scan_rows(tmp_path)
    assert error.what == "holds no *.json, *.jsonl, *.csv, *.parquet, *.arrow"
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    _, (error,) = scan_rows(tmp_path)
    assert error.what.startswith("cannot be loaded: DatasetGenerationError: ")
    assert "JSON" in error.what


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_dates_and_decimals_of_a_table_are_text_which_any_process_is_sent(tmp_path, kind):
    when = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)
    extra = {"when": when, "day": when.date(), "at": time(12, 30), "costs": [{"sum": Decimal("2.50")}], "raw": b"x"}
    rows = [{"prompt": "a", "answer": Decimal("0.10"), "day": when.date(), "extra_info": extra}]
    (row,) = load_prompts(write(tmp_path, kind, rows))
    assert (row.answer, row.extra_info) == (
        "0.10",
        {
            "when": "2024-02-29T12:30:00+00:00",
            "day": "2024-02-29",
            "at": "12:30:00",
            "costs": [{"sum": "2.50"}],
            "raw": b"x",
        },
    )
    assert load(*dump(row.extra_info)) == row.extra_info


def test_every_cell_of_a_table_becomes_plain():
    cells = {"gone": timedelta(days=1, seconds=2), "id": [UUID(int=1)], "other": (1, None)}
    assert as_plain(cells) == {"gone": "1 day, 0:00:02", "id": [str(UUID(int=1))], "other": (1, None)}


@pytest.mark.parametrize(
    ("reader", "row", "keys", "what"),
    [
        (PROMPT_ROWS, {"q": "1"}, {"prompt": "q", "answer": "q"}, "'prompt' and 'answer' are both its column 'q'"),
        (SFT_ROWS, {"q": "1"}, {"prompt": "q", "response": "q"}, "'prompt' and 'response' are both its column 'q'"),
        (
            PAIR_ROWS,
            {"prompt": "1", "a": "2"},
            {"chosen": "a", "rejected": "a"},
            "'chosen' and 'rejected' are both its column 'a'",
        ),
    ],
)
def test_two_keys_with_a_meaning_cannot_be_one_column(tmp_path, reader, row, keys, what):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert f"rows.jsonl: data.keys: {what}" in [str(error) for error in reader.scan("rows.jsonl", keys)[1]]


def test_a_column_may_have_a_second_key_for_a_reward_function(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"q": "1", "a": "2"}')
    keys = {"prompt": "q", "answer": "a", "text": "q", "solution": "a"}
    assert load_prompts("rows.jsonl", keys) == [PromptRow("1", "2", {"text": "1", "solution": "2"})]
