# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: their order, evaluation sets, dropped ones, and what a resumed run finds changed."""

import json

import pytest

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.common.hub import looking_up
from dlrover.python.rl.recipe.base.config import PromptData
from dlrover.python.rl.recipe.grpo import GRPOConfig
from dlrover.python.rl.recipe.online.prompts import PromptSource, digest_of_rows, validate_data
from tests.support.run_files import write_rows

EXACT = "'dlrover.python.rl.environment.verifiers:exact'"


def write_sums(folder, rows=8):
    return write_rows(folder / "p.jsonl", [{"prompt": f"{row}+1=", "answer": row + 1} for row in range(rows)])


def source(folder, rows, **more):
    path = write_sums(folder, rows)
    return PromptSource(GRPOConfig("m", PromptData(path, eval=path, eval_rows=3), **more))


def test_rows_are_drawn_epoch_after_epoch_however_many_at_a_time(tmp_path):
    numbers, prompts = [], source(tmp_path, 8, prompts_per_step=5)
    for count in (3, 0, 8, 5, 16):
        numbers += prompts.next_rows(count)
        assert prompts.select(numbers[-2:]).objects("prompt") == [f"{row}+1=" for row in numbers[-2:]]
    assert [sorted(numbers[start : start + 8]) for start in (0, 8, 16, 24)] == [list(range(8))] * 4


def test_every_prompt_has_a_place(tmp_path):
    prompts = source(tmp_path, 8)
    path = tmp_path / "p.jsonl"
    assert prompts.places.objects("place") == [f"{path}:{line}" for line in [*range(1, 9), 1, 2, 3]]


def too_long(folder, *lines):
    return [ConfigError(f"{folder}/p.jsonl:{line}", "9 tokens, 5 at most") for line in lines]


@pytest.mark.feature(64)
def test_dropped_prompts_stay_out_of_a_resumed_run(tmp_path, caplog):
    prompts = source(tmp_path, 8)
    prompts.drop(too_long(tmp_path, 2, 7))
    assert sorted(prompts.next_rows(6)) == [0, 2, 3, 4, 5, 7]
    assert prompts.held_out.dense("prompt_id").tolist() == [0, 2]
    assert prompts.summary() == {"held_out_prompts": 2, "dropped_prompts": 3}
    assert "3 of 11 prompts are too long and dropped" in caplog.text
    again = source(tmp_path, 8)
    again.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    assert again.summary() == prompts.summary()
    assert again.next_rows(12) == prompts.next_rows(12)


def test_evaluation_sets_have_their_own_rows(tmp_path):
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": f"{row}", "answer": row} for row in range(8)])
    other = write_rows(tmp_path / "q.jsonl", [{"prompt": f"q{row}", "answer": row} for row in range(2)])
    sets = {"first": path, "second": other}
    prompts = PromptSource(GRPOConfig("m", PromptData(path, eval=sets, eval_rows=3)))
    assert prompts.held_out.objects("prompt") == ["0", "1", "2", "q0", "q1"]
    assert prompts.find_sets(prompts.held_out).tolist() == ["first"] * 3 + ["second"] * 2
    rows = prompts.name_sets(prompts.held_out.with_columns(row=prompts.held_out.dense("prompt_id")))
    places = [("first", 0), ("first", 1), ("first", 2), ("second", 0), ("second", 1)]
    assert list(zip(rows.objects("set"), rows.dense("row").tolist(), strict=True)) == places
    prompts.drop([ConfigError(f"{other}:1", "too long")])
    assert prompts.held_out.objects("prompt") == ["0", "1", "2", "q1"]
    assert prompts.find_sets(prompts.held_out).tolist() == ["first"] * 3 + ["second"]
    with pytest.raises(DataError, match="leaves no prompt to evaluate second on"):
        prompts.drop([ConfigError(f"{other}:{line}", "too long") for line in (1, 2)])


@pytest.mark.feature(64)
def test_run_back_at_its_beginning_has_every_prompt(tmp_path):
    prompts = source(tmp_path, 8)
    state = prompts.state_dict()
    prompts.drop(too_long(tmp_path, 5))
    prompts.load_state_dict(state)
    assert sorted(prompts.next_rows(8)) == list(range(8))
    assert prompts.summary() == {"held_out_prompts": 3, "dropped_prompts": 0}


def other_evaluation(folder, prompts, **changes):
    other = write_rows(folder / "q.jsonl", [{"prompt": text, "answer": 1} for text in prompts])
    return PromptSource(GRPOConfig("m", PromptData(write_sums(folder), eval=other), **changes))


def test_changed_evaluation_prompts_are_checked_again(tmp_path):
    prompts = other_evaluation(tmp_path, "abc")
    prompts.drop([ConfigError(f"{tmp_path}/q.jsonl:1", "too long"), *too_long(tmp_path, 2)])
    numbers = prompts.next_rows(4)
    state = json.loads(json.dumps(prompts.state_dict()))
    again = other_evaluation(tmp_path, "abc")
    again.load_state_dict(state)
    assert (again.changed_sets, again.held_out.objects("prompt")) == (set(), ["b", "c"])
    other = other_evaluation(tmp_path, "dbf")
    other.load_state_dict(state)
    assert (other.changed_sets, other.held_out.objects("prompt")) == ({""}, ["d", "b", "f"])
    other.drop([ConfigError(f"{tmp_path}/q.jsonl:3", "too long"), *too_long(tmp_path, 2)])
    assert (other.changed_sets, other.held_out.objects("prompt")) == (set(), ["d", "b"])
    assert sorted(numbers + other.next_rows(3)) == [0, 2, 3, 4, 5, 6, 7], "the others keep their order"
    assert other.state_dict()["sets"] != state["sets"]


def test_digest_of_rows_is_the_same_for_any_object():
    one, other = object(), object()
    assert digest_of_rows([{"image": one}]) == digest_of_rows([{"image": other}]) != digest_of_rows([{}])


def test_changed_training_rows_are_refused(tmp_path):
    state = source(tmp_path, 8).state_dict()
    path = tmp_path / "p.jsonl"
    source(tmp_path, 8)
    path.write_text(path.read_text().replace('"answer": 3', '"answer": 4'))
    config = GRPOConfig("m", PromptData(str(path), eval=str(path), eval_rows=3))
    PromptSource(config).load_state_dict(state)
    path.write_text(path.read_text().replace("7+1=", "8-1="))
    with pytest.raises(DataError, match=r"config.data.train: the rows of '.*p.jsonl' or their order have changed"):
        PromptSource(config).load_state_dict(state)
    PromptSource(config).load_state_dict({**state, "digest": ""})


def test_columns_are_taken_from_all_rows_and_files(tmp_path):
    path, other = tmp_path / "p.jsonl", tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a", "level": 3}\n{"prompt": "b", "level": null, "extra_info": {"source": "x"}}\n')
    other.write_text('{"prompt": "c", "answer": 1, "grade": 2, "level": null}\n')
    assert PromptSource(GRPOConfig("m", PromptData(str(path), eval=str(other)))).columns == ["grade", "level", "source"]
    assert PromptSource(GRPOConfig("m", PromptData(str(path)))).columns == ["level", "source"]


@pytest.mark.feature(64)
def test_dropped_rows_may_be_held_out_of_the_training_file(tmp_path):
    prompts = PromptSource(GRPOConfig("m", PromptData(write_sums(tmp_path), eval_rows=3)))
    train, held_out = sorted(prompts.next_rows(5)), prompts.held_out.dense("prompt_id").tolist()
    prompts.drop(too_long(tmp_path, train[0] + 1, held_out[1] + 1))
    assert sorted(prompts.next_rows(4)) == train[1:]
    assert prompts.held_out.dense("prompt_id").tolist() == [held_out[0], held_out[2]]


@pytest.mark.feature(64)
@pytest.mark.parametrize(("lines", "message"), [(range(1, 9), "to train on"), (range(1, 4), "to evaluate on")])
def test_dropping_every_prompt_is_an_error(tmp_path, lines, message):
    with pytest.raises(DataError, match=f"max_prompt_tokens: leaves no prompt {message}"):
        source(tmp_path, 8).drop(too_long(tmp_path, *lines))


@pytest.mark.feature(64)
def test_resumed_run_needs_the_same_limit_of_length(tmp_path):
    state = source(tmp_path, 8).state_dict()
    path = str(tmp_path / "p.jsonl")
    data = PromptData(path, eval=path, eval_rows=3, max_prompt_tokens=4, over_long="drop")
    with pytest.raises(DataError, match=r"are now \[4, 'drop'\], but the run began with \[None, 'refuse'\]: restore"):
        PromptSource(GRPOConfig("m", data)).load_state_dict(state)


def test_data_without_lookup_is_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with looking_up("none"):
        assert validate_data(GRPOConfig("m", PromptData("other/train", eval="other/test"))) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, f"has no 'answer', which reward.function {EXACT} needs; it has prompt"),
        ({"answer": True}, f"its 'answer' is true, a bool: reward.function {EXACT} needs text or a number"),
        ({"answer": ["2"]}, f"""its 'answer' is ["2"], a list: reward.function {EXACT} needs text or a number"""),
        ({"extra_info": {"answer": {}}}, "its 'answer' is {}, a dict: reward.function "),
        ({"answer": 2.5}, None),
    ],
)
def test_answer_of_another_type_is_not_called_missing(tmp_path, row, message):
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "0", "answer": "a"}, {"prompt": "1", **row}])
    errors = validate_data(GRPOConfig("m", PromptData(path, eval_rows=1)))
    assert [error.where for error in errors] == ([] if message is None else [f"{path}:2"])
    assert message is None or errors[0].what.startswith(message)
