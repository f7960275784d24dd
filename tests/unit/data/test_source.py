# SPDX-License-Identifier: Apache-2.0
"""Readers of every kind of file, JSON Lines among them, and the held-out split."""

import csv
import json
import sys
from datetime import UTC, datetime, time
from decimal import Decimal
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError, MissingExtra
from dlrover.python.rl.common.hub import looking_up
from dlrover.python.rl.data.conversation import SFT_ROWS, arguments_of_template, encode_sft
from dlrover.python.rl.data.jsonl import raise_errors, scan_jsonl
from dlrover.python.rl.data.pairs import PAIR_ROWS
from dlrover.python.rl.data.prompts import PROMPT_ROWS, PromptRow, load_prompts
from dlrover.python.rl.data.source import hold_out, is_left_unread, scan_rows
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
    """Write the rows to a source of ``kind``; return its name."""
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
    elif kind in ("arrow", "stream.arrow"):
        begin = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, begin(file, table.schema) as writer:
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


HAS_DATASETS = find_spec("datasets") is not None


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if HAS_DATASETS:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.feature(65)
@pytest.mark.parametrize("rows", [SFT, CHATS], ids=["raw", "messages"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_each_kind_of_file_give_equal_tensors(tokenizer, tmp_path, kind, rows):
    expected, _ = encode_sft(SFT_ROWS.read(write(tmp_path, "jsonl", rows)), tokenizer)
    batch, counts = encode_sft(SFT_ROWS.read(write(tmp_path, kind, rows)), tokenizer)
    for name in ("tokens", "action_mask"):
        assert [row.tolist() for row in batch.ragged(name)] == [row.tolist() for row in expected.ragged(name)]
    assert counts.rows == 3


def test_source_with_an_at_sign_may_be_a_file(tmp_path):
    (tmp_path / "me@home").mkdir()
    for name in ("me@home/2.jsonl", "v@2.jsonl", "train[1:]@2.jsonl", "2.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": name, "response": ""}))
        rows, errors = scan_rows(name)
        assert ([row["prompt"] for row in rows], errors) == ([name], [])


@pytest.mark.feature(74)
@pytest.mark.parametrize("kind", KINDS)
def test_extra_info_is_equal_from_each_kind_of_file(tmp_path, kind):
    rows = load_prompts(write(tmp_path, kind, PROBLEMS))
    assert [row.extra_info for row in rows] == [{"answer": "Beijing", "idx": 3}, {"answer": "1", "idx": 4}, {}]
    assert [row.answer for row in rows] == ["Beijing", "1", None]
    assert all(row.prompt == SAY[:1] for row in rows)


@pytest.mark.feature(65)
@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "folder"])
def test_source_may_be_a_part_of_a_split(tmp_path, kind):
    place = write(tmp_path, kind, SFT)

    def prompts(where):
        rows, problems = scan_rows(where)
        assert not problems
        return [row["prompt"] for row in rows]

    every = [row["prompt"] for row in SFT]
    parts = {"train": every, "train[1:]": every[1:], "train[:-1]": every[:-1], "train[34%:67%]": every[1:2]}
    assert {part: prompts(f"{part}@{place}") for part in parts} == parts
    if kind == "folder":
        assert prompts(f"test@{place}") == every[:1]


def test_source_of_a_missing_split_is_a_problem(tmp_path):
    _, (problem,) = scan_rows(f"tset@{write(tmp_path, 'jsonl', SFT)}")
    assert "it has no 'tset'" in problem.what
    if HAS_DATASETS:
        _, (problem,) = scan_rows(f"tset@{write(tmp_path, 'folder', SFT)}")
        assert problem.what == "has no split 'tset'; did you mean 'test'?"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_source_columns_by_other_names(tmp_path, kind):
    place = write(tmp_path, kind, [{"question": "1+1", "n": "2"}])
    (row,) = load_prompts(place, {"prompt": "question", "answer": "n"})
    assert (row.prompt, row.answer) == ("1+1", "2")
    _, (problem, *_) = scan_rows(place, {"prompt": "qestion"})
    assert problem.what == "has no column 'qestion'; did you mean 'question'?"


@pytest.mark.parametrize(
    ("name", "content", "place", "fault"),
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
def test_wrong_file_is_reported_with_the_place(tmp_path, name, content, place, fault):
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_text(content)
    _, (problem,) = scan_rows(path)
    assert problem.where == f"{path}{place}"
    assert fault in problem.what


def test_csv_may_have_an_index_and_spaces_in_its_header(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(",prompt, answer,\n0,hi,1,\n1,ho,2,\n")
    rows = load_prompts(path)
    assert [(row.prompt, row.answer, row.extra_info) for row in rows] == [("hi", "1", {}), ("ho", "2", {})]


def test_nulls_of_a_table_in_arguments_of_calls_are_omitted(tmp_path):
    pytest.importorskip("pyarrow")
    arguments = {"look": {"city": "P"}, "sum": {"terms": [1, 2]}}
    calls = [{"function": {"name": name, "arguments": values}} for name, values in arguments.items()]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    (row,), errors = scan_rows(write(tmp_path, "parquet", [{"messages": messages}]))
    assert (row["messages"][1]["tool_calls"], errors) == (calls, [])
    calls[0]["function"]["arguments"]["city"] = None  # which a line of JSON keeps
    (row,), _ = scan_rows(write(tmp_path, "jsonl", [{"messages": messages}]))
    assert row["messages"][1]["tool_calls"] == calls


TO_CACHE = "'here' is a folder here: to use the hub's, download it first (hf download --repo-type dataset here/train)"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("./nowhere/data", "no such file; there is no folder nowhere"),
        ("ok.json", "no such file; did you mean 'ok.tsv'?"),
        ("ok.parquet", "no such file; did you mean 'ok.tsv'?"),
        ("ok.jsonl.gz", "no such file; did you mean 'ok.tsv'?"),
        ("test[:5]@none.jsonl.gz", "no such file"),
        ("here/train", f"no such file; {TO_CACHE}"),
        ("here/train:main", f"no such file; {TO_CACHE}"),
    ],
)
def test_local_names_are_none_of_the_hubs(tmp_path, monkeypatch, name, fault):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "ok.tsv").touch()
    with looking_up("none"):
        assert not is_left_unread(name)
    _, (problem,) = scan_rows(name)
    assert problem.what == fault


def test_cached_name_is_the_hubs_beside_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    cached = tmp_path / "hub/datasets--here--train"
    for file, text in {"refs/main": "1a", "snapshots/1a/README.md": ""}.items():
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(text)
    unread = {"here/train": True, "here/train:main": True, "here/test": False, "other/train": True}
    with looking_up("none"):
        assert {name: is_left_unread(name) for name in unread} == unread


def test_tables_without_their_extra_name_it(tmp_path, monkeypatch):
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").touch()
    for place in (tmp_path / "a.parquet", tmp_path):
        _, (problem,) = scan_rows(place)
        assert problem.what == str(MissingExtra("datasets", "data"))
    assert len(scan_rows(write(tmp_path, "jsonl", SFT))[0]) == 3


def test_folder_without_data_or_with_broken_data_is_a_problem(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "README.md").touch()
    _, (error,) = scan_rows(tmp_path)
    assert error.what == "holds no *.json, *.jsonl, *.csv, *.parquet, *.arrow"
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    _, (error,) = scan_rows(tmp_path)
    assert error.what.startswith("cannot be loaded: DatasetGenerationError: ")
    assert "JSON" in error.what


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_dates_and_decimals_of_a_table_become_text(tmp_path, kind):
    when = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)
    extra = {"when": when, "day": when.date(), "at": time(12, 30), "costs": [{"sum": Decimal("2.50")}], "raw": b"x"}
    rows = [{"prompt": "a", "answer": Decimal("0.10"), "day": when.date(), "extra_info": extra}]
    (row,) = load_prompts(write(tmp_path, kind, rows))
    texts = {"when": "2024-02-29T12:30:00+00:00", "day": "2024-02-29", "at": "12:30:00", "costs": [{"sum": "2.50"}]}
    assert (row.answer, row.extra_info) == ("0.10", {**texts, "raw": b"x"})
    assert load(*dump(row.extra_info)) == row.extra_info


@pytest.mark.parametrize(
    ("reader", "keys", "fault"),
    [
        (PROMPT_ROWS, {"prompt": "q", "answer": "q"}, "'prompt' and 'answer' are both its column 'q'"),
        (SFT_ROWS, {"prompt": "q", "response": "q"}, "'prompt' and 'response' are both its column 'q'"),
    ],
)
def test_source_column_cannot_have_two_keys_of_a_reader(tmp_path, reader, keys, fault):
    (tmp_path / "rows.jsonl").write_text('{"q": "1", "a": "2"}')
    assert f"rows.jsonl: data.keys: {fault}" in [str(error) for error in reader.scan("rows.jsonl", keys)[1]]
    keys = {"prompt": "q", "answer": "a", "text": "q", "solution": "a"}  # the last two are a reward function's
    assert load_prompts("rows.jsonl", keys) == [PromptRow("1", "2", {"text": "1", "solution": "2"})]


def read_jsonl(path):
    rows, errors = scan_jsonl(path)
    raise_errors(errors)
    return [row for _, row in rows]


def test_jsonl_reads_objects_and_skips_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": "é\u2028"}\r\n\n  \n{"b": [1]}'.encode())
    assert read_jsonl(path) == [{"a": "é\u2028"}, {"b": [1]}]


def test_jsonl_reports_every_malformed_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    deep = b"[" * 200_000
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n\n{"a": "\xff"}\n{"a": NaN}\n' + deep)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    faults = {
        2: "not JSON: Expecting value at column", 3: "not an object but list", 5: "not UTF-8 at byte 7",
        6: "not JSON: NaN is not a number", 7: "not JSON",
    }  # fmt: skip
    for problem, (line, fault) in zip(caught.value.errors, faults.items(), strict=True):
        assert problem.where == f"{path}:{line}" and problem.what.startswith(fault)


def test_jsonl_shows_twenty_errors_and_counts_others(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{{{' ' * row}x\n" for row in range(25)))
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    assert len(caught.value.errors) == 21
    assert str(caught.value.errors[-1]) == f"{path}: and 5 more errors"


@pytest.mark.parametrize(("rows", "errors"), [(3, 3), (4, 1), (5000, 1)])
def test_jsonl_counts_equal_errors(tmp_path, rows, errors):
    path = tmp_path / "rows.jsonl"
    path.write_text("x\n" * rows)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    assert len(caught.value.errors) == errors
    expected = f"not JSON: Expecting value at column 1 (the same in {rows - 1:,} more rows)"
    assert errors > 1 or str(caught.value.errors[0]) == f"{path}:1: {expected}"


def test_jsonl_names_the_nearest_of_a_missing_file(tmp_path):
    (tmp_path / "train.jsonl").touch()
    faults = {
        "trian.jsonl": r"trian\.jsonl: no such file; did you mean 'train\.jsonl'\?", "zzz": "no such file$",
        ".": "cannot be read: Is a directory", "nowhere/train.jsonl": "no such file; there is no folder",
    }  # fmt: skip
    for name, fault in faults.items():
        with pytest.raises(DataError, match=fault):
            read_jsonl(tmp_path / name)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40), st.integers(0, 5), st.data())
def test_hold_out_never_puts_a_prompt_on_both_sides(prompts, seed, data):
    count = data.draw(st.integers(1, len(prompts) - 1))
    try:
        train, held_out = hold_out(list(prompts), count, seed)
    except DataError:
        return  # too few different prompts
    assert sorted(train + held_out) == list(range(len(prompts)))
    assert len(held_out) >= count and train
    assert not {prompts[index] for index in train} & {prompts[index] for index in held_out}


@pytest.mark.feature(76)
def test_hold_out_is_fixed_by_the_seed():
    rows = [[{"role": "user", "content": str(index)}] for index in range(200)]
    train, held_out = hold_out(rows, 0.03, seed=1)
    assert (len(train), len(held_out)) == (194, 6)
    assert hold_out(rows, 6, seed=1) == (train, held_out)
    assert hold_out(rows, 0.03, seed=2)[1] != held_out
    backwards = hold_out(rows[::-1], 0.03, seed=1)[1]
    assert sorted(199 - index for index in backwards) == held_out


@pytest.mark.parametrize("size", [0, 3, -1, 0.0, 1.0, float("nan")])
def test_hold_out_leaves_both_sides_a_row(size):
    with pytest.raises(ValueError, match="held"):
        hold_out(["a", "b", "c"], size, 0)
    with pytest.raises(DataError, match="too few prompts"):
        hold_out(["a"] * 3, 1, 0)


TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
ASK = {"role": "user", "content": "Q"}
CHAT = {"messages": [ASK, {"role": "assistant", "content": "A"}]}
PAIR = {"prompt": [ASK], "chosen": "A", "rejected": "B"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_template_arguments_stay_with_prompts(tmp_path, kind):
    other = [{"type": "function", "function": {"name": "moon", "parameters": {"required": ["day"]}}}]
    rows = [{"messages": [ASK], "tools": tools, "source": "web"} for tools in (TOOLS, other)]
    loaded = load_prompts(write(tmp_path, kind, rows))
    names = [[tool["function"] for tool in arguments_of_template(row.extra_info)["tools"]] for row in loaded]
    assert [function["name"] for (function,) in names] == ["tide", "moon"]
    assert "required" not in names[0][0]["parameters"], "a null of the table"
    assert [row.extra_info["source"] for row in loaded] == ["web", "web"]
    (text,) = load_prompts(write(tmp_path, "jsonl", [{"prompt": "Q", "tools": "hammer"}]))
    assert (text.extra_info, arguments_of_template(text.extra_info)) == ({"tools": "hammer"}, {})
    (error,) = PROMPT_ROWS.scan(write(tmp_path, "jsonl", [{"messages": [ASK], "tools": "hammer"}]))[1]
    assert "'tools' must be a list of" in error.what


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("reader", "row", "keys", "unused"),
    [
        (SFT_ROWS, {**CHAT, "id": "1", "tool": "x"}, {}, ["id", "tool (did you mean 'tools'?)"]),
        (SFT_ROWS, {"prompt": "Q", "response": "A", "prompt_id": "1"}, {}, ["prompt_id"]),
        (PAIR_ROWS, {**PAIR, "score_chosen": 1.0}, {"source": "score_chosen"}, ["source"]),
        (PAIR_ROWS, PAIR, {}, []),
        (PROMPT_ROWS, {"prompt": "Q", "answer": "A", "level": "1"}, {}, []),
    ],
)
def test_unread_columns_are_named(tmp_path, kind, reader, row, keys, unused):
    assert reader.read(write(tmp_path, kind, [row, row]), keys).unused == unused
