# SPDX-License-Identifier: Apache-2.0
"""Prompts with answers."""

import json

import pytest

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.prompts import PROMPT_ROWS, PromptRow, empty_prompts, load_prompts

USER = [{"role": "user", "content": "1+1?"}]
CALL = {"function": {"name": "f", "arguments": {}}}


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_rows_of_both_kinds(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        [
            {"prompt": "1+1=", "answer": 2},
            {"messages": USER, "answer": "2", "extra_info": {"idx": 7}},
            {"prompt": "x", "extra_info": {"answer": 0.5}},
            {"prompt": "y", "answer": None},
        ],
    )
    assert load_prompts(path) == [
        PromptRow("1+1=", "2", {}),
        PromptRow(USER, "2", {"idx": 7}),
        PromptRow("x", "0.5", {"answer": 0.5}),
        PromptRow("y", None, {}),
    ]
    assert PROMPT_ROWS.scan(path)[1] == []


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"answer": "2"}, "has no 'prompt' or 'messages'; it has answer"),
        ({"prompt": "a", "messages": USER}, "give 'prompt' or 'messages', not both"),
        ({"promt": "a"}, "unknown key 'promt'; did you mean 'prompt'?"),
        ({"prompt": 3}, "'prompt' must be text and not empty, or a list of messages"),
        ({"prompt": ""}, "'prompt' must be text and not empty, or a list of messages"),
        ({"prompt": "a", "answer": 1, "extra_info": {"answer": 2}}, "'answer' and 'extra_info.answer' differ"),
        ({"prompt": "a", "extra_info": []}, "'extra_info' must be an object"),
        ({"messages": []}, "'messages' must be a list of messages with at least one"),
        ({"messages": ["hi"]}, "messages[0]: must be an object with 'role' and 'content', not str"),
        ({"messages": [{"role": "usr", "content": ""}]}, "messages[0]: unknown role 'usr'; did you mean 'user'?"),
        ({"messages": [{"role": 1, "content": ""}]}, "messages[0]: 'role' must be text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]: 'content' must be text"),
        ({"messages": [*USER, {**USER[0], "contnt": 1}]}, "messages[1]: unknown key 'contnt'; did you mean 'content'?"),
        ({"prompt": "ab\ud83d"}, "'prompt' has a lone surrogate at character 3"),
        (
            {"messages": [{"role": "user", "content": "\ud83d"}]},
            "messages[0]: 'content' has a lone surrogate at character 1",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": "\udc00"}]}]},
            "messages[0]: a text in 'tool_calls' has a lone surrogate at character 1",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            'messages[0]: tool_calls[0]: must be {"function": {"name": ..., "arguments": {...}}}',
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": CALL}]},
            'messages[0]: tool_calls[0]: must be {"function": {"name": ..., "arguments": {...}}}',
        ),
    ],
)
def test_what_can_be_wrong_with_a_row(tmp_path, row, what):
    path = write(tmp_path / "p.jsonl", [{"prompt": "fine"}, row])
    (problem,) = PROMPT_ROWS.scan(path)[1]
    assert (problem.where, problem.what) == (f"{path}:2", what)


def test_messages_may_have_calls_of_tools_instead_of_text(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    asked = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answered = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}
    (row,) = load_prompts(write(tmp_path / "p.jsonl", [{"messages": [*asked, answered]}]))
    assert row.prompt == [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answered]


@pytest.mark.feature(74)
@pytest.mark.parametrize(
    ("row", "answer", "extra_info"),
    [
        ({"id": 3, "data_source": "gsm8k"}, None, {"id": 3, "data_source": "gsm8k"}),
        ({"answer": "2", "tags": ["a", {"b": 1}]}, "2", {"tags": ["a", {"b": 1}]}),
        ({"answer": ["2", "two"]}, None, {"answer": ["2", "two"]}),
        ({"answer": True}, None, {"answer": True}),
        ({"extra_info": {"answer": {"numbers": [1, 2]}}}, None, {"answer": {"numbers": [1, 2]}}),
        ({"answer": "2", "extra_info": {"answer": 2, "n": 1}, "n": 9}, "2", {"answer": 2, "n": 1}),
        ({"extra_info": None}, None, {}),
    ],
)
def test_everything_else_in_a_row_is_handed_on_unchanged(tmp_path, row, answer, extra_info):
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", **row}])
    assert load_prompts(path) == [PromptRow("a", answer, extra_info)]


def test_all_bad_rows_are_reported_together_in_order(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"answer": 1, "prmpt": "a"}\nnot json\n{"prompt": "fine"}\n{"prompt": 3}\n')
    with pytest.raises(DataError) as caught:
        load_prompts(path)
    assert [problem.where for problem in caught.value.errors] == [f"{path}:{line}" for line in (1, 2, 4)]
    assert PROMPT_ROWS.scan(path)[1] == list(caught.value.errors)


def test_a_file_without_rows_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_prompts(tmp_path / "p.jsonl")
    assert "no such file" in PROMPT_ROWS.scan(tmp_path / "q.jsonl")[1][0].what


@pytest.mark.feature(75)
def test_an_environment_that_says_what_it_begins_with_needs_no_file():
    rows = empty_prompts(3)
    assert rows == [PromptRow("", None, {"seed": number}) for number in range(3)]
    assert rows[0].extra_info is not rows[1].extra_info
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        empty_prompts(0)


@pytest.mark.feature(74)
def test_a_conversation_may_stand_under_prompt(tmp_path):
    assert load_prompts(write(tmp_path / "p.jsonl", [{"prompt": USER}])) == [PromptRow(USER)]
