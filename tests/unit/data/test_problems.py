"""Prompts with answers, and the held-out split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.problems import PromptRow, check_prompts, hold_out, load_prompts

USER = [{"role": "user", "content": "1+1?"}]


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
    assert check_prompts(path) == []


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"answer": "2"}, "give 'prompt' or 'messages', not neither"),
        ({"prompt": "a", "messages": USER}, "give 'prompt' or 'messages', not both"),
        ({"prompt": "a", "answr": 1}, "unknown key 'answr'; did you mean 'answer'?"),
        ({"prompt": USER}, "'prompt' must be text and not empty; a conversation goes under 'messages'"),
        ({"prompt": ""}, "'prompt' must be text and not empty; a conversation goes under 'messages'"),
        ({"prompt": "a", "answer": True}, "'answer' must be text or a number"),
        ({"prompt": "a", "answer": [1]}, "'answer' must be text or a number"),
        ({"prompt": "a", "extra_info": {"answer": {}}}, "'extra_info.answer' must be text or a number"),
        ({"prompt": "a", "answer": 1, "extra_info": {"answer": 2}}, "'answer' and 'extra_info.answer' differ"),
        ({"prompt": "a", "extra_info": []}, "'extra_info' must be an object"),
        ({"messages": []}, "'messages' must be a list of messages with at least one"),
        ({"messages": ["hi"]}, "messages[0]: must be an object with 'role' and 'content', not str"),
        ({"messages": [{"role": "usr", "content": ""}]}, "messages[0]: unknown role 'usr'; did you mean 'user'?"),
        ({"messages": [{"role": 1, "content": ""}]}, "messages[0]: 'role' must be text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]: 'content' must be text"),
        ({"messages": [*USER, {**USER[0], "contnt": 1}]}, "messages[1]: unknown key 'contnt'; did you mean 'content'?"),
    ],
)
def test_what_can_be_wrong_with_a_row(tmp_path, row, what):
    path = write(tmp_path / "p.jsonl", [{"prompt": "fine"}, row])
    (problem,) = check_prompts(path)
    assert (problem.where, problem.what) == (f"{path}:2", what)


def test_all_bad_rows_are_reported_together_in_order(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"answer": 1, "prmpt": "a"}\nnot json\n{"prompt": "fine"}\n{"prompt": 3}\n')
    with pytest.raises(DataError) as caught:
        load_prompts(path)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:{line}" for line in (1, 1, 2, 4)]
    assert check_prompts(path) == list(caught.value.problems)


def test_a_file_without_rows_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_prompts(tmp_path / "p.jsonl")
    assert "no such file" in check_prompts(tmp_path / "q.jsonl")[0].what


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40), st.integers(0, 5), st.data())
def test_hold_out_never_puts_a_prompt_on_both_sides(prompts, seed, data):
    rows = [PromptRow(prompt) for prompt in prompts]
    count = data.draw(st.integers(1, len(rows) - 1))
    try:
        train, held = hold_out(rows, count, seed)
    except DataError:
        return  # Too few different prompts.
    assert sorted(train + held) == list(range(len(rows)))
    assert len(held) >= count
    assert train
    assert not {prompts[index] for index in train} & {prompts[index] for index in held}


def test_row_76_three_percent_fixed_by_the_seed():
    rows = [PromptRow([{"role": "user", "content": str(index)}]) for index in range(200)]
    train, held = hold_out(rows, 0.03, seed=1)
    assert len(held) == 6
    assert len(train) == 194
    assert hold_out(rows, 6, seed=1) == (train, held)
    assert hold_out(rows, 0.03, seed=2)[1] != held
    backwards = hold_out(rows[::-1], 0.03, seed=1)[1]
    assert sorted(199 - index for index in backwards) == held


@pytest.mark.parametrize("size", [0, 3, -1, 0.0, 1.0, float("nan")])
def test_a_split_must_leave_both_sides_a_row(size):
    with pytest.raises(ValueError, match="held"):
        hold_out([PromptRow("a"), PromptRow("b"), PromptRow("c")], size, 0)


def test_copies_of_one_prompt_cannot_be_split():
    with pytest.raises(DataError, match="too few prompts"):
        hold_out([PromptRow("a")] * 3, 1, 0)
