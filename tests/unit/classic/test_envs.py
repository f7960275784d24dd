# SPDX-License-Identifier: Apache-2.0
"""Samples of a user's data set, checked, and the ready data sets."""

import json

import pytest

from dlrover.python.rl.classic import AIME2025, CapyBaraSFTDataset, EnvBase, IntellectMathDataset, MathDataset
from dlrover.python.rl.classic import get_boxed_answer as boxed
from dlrover.python.rl.classic.envs import load_samples
from dlrover.python.rl.common.errors import DataError

ASKED = [{"role": "system", "content": "Be concise."}, {"role": "user", "content": "What is 2 + 2?"}]


class Judging(EnvBase):
    def get_reward(self, text):
        return float(text == self.answer)


@pytest.mark.feature(77)
def test_the_environment_of_the_readme_is_taken_as_it_is():
    env = EnvBase(prompt=ASKED, answer="4")
    (sample,) = load_samples([env], "train_dataset")
    assert (sample.prompt, sample.answer, sample.environment) == (ASKED, "4", env)
    assert not sample.has_reward
    assert load_samples([Judging(ASKED)], "train_dataset", rewards=True)[0].has_reward


def test_a_dict_is_a_sample_too():
    (sample,) = load_samples([{"prompt": ASKED, "answer": 4}], "train_dataset", answers=True)
    assert (sample.prompt, sample.answer) == (ASKED, 4)


def test_each_sample_is_asked_for_once():
    class Drawing(list):
        def __getitem__(self, index):
            self.asked = [*getattr(self, "asked", []), index]
            return super().__getitem__(index)

    samples = Drawing([EnvBase(ASKED), EnvBase(ASKED)])
    load_samples(samples, "train_dataset")
    assert samples.asked == [0, 1]


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        ({"prompt": "2+2"}, "must have a prompt, a list of messages, not str"),
        ({"prompt": []}, "must have a prompt, a list of messages, not list"),
        ({}, "must have a prompt, a list of messages, not None"),
        ({"prompt": [{"role": "asistant", "content": ""}]}, "unknown role 'asistant'; did you mean 'assistant'"),
        ({"prompt": [{"role": "tool", "content": ""}]}, "unknown role 'tool'"),
        ({"prompt": [{"role": "user", "content": 3}]}, "content must be text, not int"),
        ({"prompt": ["hello"]}, "must be a dict of role and content, not str"),
        ({"prompt": ASKED, "answer": [4]}, "an answer that is text, a number or None, not list"),
        ({"prompt": ASKED, "answer": True}, "not bool"),
    ],
)
def test_what_is_no_sample_is_named_by_its_number(sample, fault):
    with pytest.raises(ValueError, match=r"train_dataset\[1\]") as caught:
        load_samples([EnvBase(ASKED), sample], "train_dataset")
    assert fault in str(caught.value)


def test_samples_that_cannot_serve_their_purpose_are_named():
    with pytest.raises(ValueError, match=r"train_dataset\[0\] has no reward: EnvBase must define get_reward"):
        load_samples([EnvBase(ASKED, 4)], "train_dataset", rewards=True)
    with pytest.raises(ValueError, match=r"train_dataset\[0\] has nothing to train on"):
        load_samples([EnvBase(ASKED)], "train_dataset", answers=True)
    answered = [*ASKED, {"role": "assistant", "content": "4"}]
    assert load_samples([EnvBase(answered)], "train_dataset", answers=True)
    with pytest.raises(ValueError, match=r"train_dataset\[0\] has both an answer and an assistant's message"):
        load_samples([EnvBase(answered, 4)], "train_dataset", answers=True)


def test_not_more_than_twenty_are_named_and_none_is_an_error():
    with pytest.raises(ValueError, match="and 5 more"):
        load_samples([{}] * 25, "train_dataset")
    with pytest.raises(ValueError, match="eval_dataset is empty"):
        load_samples([], "eval_dataset")
    with pytest.raises(TypeError, match="must have a length"):
        load_samples(iter([EnvBase(ASKED)]), "train_dataset")


@pytest.mark.feature(78)
def test_two_hundred_sums_whose_right_answer_has_the_highest_reward():
    dataset = MathDataset(num_samples=200, min_val=0, max_val=50, operand="add")
    assert len(dataset) == 200
    for problem in dataset:
        first, second = [int(word.strip("?")) for word in problem.question.split() if word.strip("?").isdigit()][:2]
        assert problem.answer == first + second
        said = [problem.get_reward(text) for text in (f"\\boxed{{{problem.answer}}}", "\\boxed{-1}", "nothing")]
        assert said[0] == max(said) > said[1] > said[2]


@pytest.mark.feature(79)
def test_the_last_box_counts_with_its_nested_braces():
    assert boxed("\\boxed{1} and \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert boxed("no box") is None


# -- data sets of the hub, from files ---------------------------------------------------------------------------------


def written(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(("kind", "column"), [(IntellectMathDataset, "question"), (AIME2025, "problem")])
def test_problems_of_a_local_file_reward_the_box_alone(tmp_path, kind, column):
    rows = [{column: "What is 6 x 7?", "answer": 42}, {column: "Put 1 in a \\boxed{}.", "answer": "1", "id": 3}]
    dataset = kind(path=written(tmp_path / "problems.jsonl", rows))
    assert len(dataset) == 2
    assert dataset[0].prompt[0]["content"] == "What is 6 x 7?\n\nPut the final answer in \\boxed{}."
    assert dataset[1].prompt[0]["content"] == "Put 1 in a \\boxed{}."
    texts = ("so \\boxed{42.0}", "42", "\\boxed{41}")
    assert [dataset[0].get_reward(text) for text in texts] == [1.0, 0.0, 0.0]
    assert len(kind(path=tmp_path / "problems.jsonl", num_samples=1)) == 1


def test_conversations_of_a_local_file_in_both_layouts(tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": turns}, {"conversation": [{"input": "Hi", "output": "Hello"}], "source": "x"}]
    dataset = CapyBaraSFTDataset(path=written(tmp_path / "talks.jsonl", rows))
    assert [sample.prompt for sample in dataset] == [turns, turns]
    assert [sample.answer for sample in dataset] == [None, None]


def test_rows_of_another_kind_are_named(tmp_path):
    with pytest.raises(DataError, match=r"jsonl:1: needs one of problem, question as text, and 'answer'; it has text"):
        AIME2025(path=written(tmp_path / "a.jsonl", [{"text": "?"}]))
    with pytest.raises(DataError, match=r"needs 'messages' or 'conversation'; it has text"):
        CapyBaraSFTDataset(path=written(tmp_path / "b.jsonl", [{"text": "?"}]))
    with pytest.raises(DataError, match="no such file"):
        AIME2025(path=tmp_path / "c.jsonl")
    with pytest.raises(ValueError, match="num_samples must be above 0, not 0"):
        AIME2025(path=tmp_path / "a.jsonl", num_samples=0)
