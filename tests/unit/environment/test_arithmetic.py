# SPDX-License-Identifier: Apache-2.0
"""The arithmetic task."""

import re

import pytest

from dlrover.python.rl.environment.verifiers.arithmetic import EnvBase, MathDataset

PYTHON = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def operands(problem) -> tuple[int, str, int]:
    left, symbol, right = re.search(r"(-?\d+) ([-+*/]) (-?\d+)\?", problem.prompt[0]["content"]).groups()
    return int(left), symbol, int(right)


@pytest.mark.feature(78)
def test_two_hundred_additions():
    dataset = MathDataset()
    assert len(dataset) == 200
    for problem in dataset:
        left, symbol, right = operands(problem)
        assert symbol == "+"
        assert problem.answer == left + right
        assert 0 <= min(left, right) <= max(left, right) <= 200


@pytest.mark.feature(78)
@pytest.mark.parametrize("operand", ["add", "mult", "substraction", "subtraction", "division"])
def test_the_right_answer_has_the_highest_reward(operand):
    for problem in MathDataset(20, -9, 9, operand):
        left, symbol, right = operands(problem)
        assert PYTHON[symbol](left, right) == problem.answer
        assert symbol != "/" or left % right == 0
        rewards = {error: problem.get_reward(rf"\boxed{{{problem.answer + error}}}") for error in range(-5, 6)}
        assert rewards == {error: -(error**2) for error in range(-5, 6)}
        assert max(rewards.values()) == rewards[0] == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7", -101.0),
        (r"\boxed{seven}", -101.0),
        (r"\boxed{9**9**9}", -101.0),
        (r"\boxed{1e999999}", -100.0),
        (r"\boxed{5000}", -100.0),
        (r"\boxed{10}", -100.0),
        (r"\boxed{9}", -81.0),
        (r"\boxed{1e-200}", -1e-12),
        (r"\boxed{0.0}", 0.0),
    ],
)
def test_answers_that_are_far_or_unreadable(text, reward):
    (problem,) = MathDataset(1, 0, 0)
    assert problem.get_reward(text) == reward


def test_the_seed_decides():
    def questions(seed):
        return [problem.question for problem in MathDataset(5, seed=seed)]

    assert questions(1) == questions(1) != questions(2)
    assert [problem.question for problem in MathDataset(5, seed=1)[1:3]] == questions(1)[1:3]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"operand": "addd"}, "unknown operand 'addd'; did you mean 'add'"),
        ({"num_samples": -1}, "cannot sample -1 questions"),
        ({"min_val": 3, "max_val": 2}, "from 3 to 2"),
        ({"min_val": 0, "max_val": 0, "operand": "division"}, "cannot divide by 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, what):
    with pytest.raises(ValueError, match=what):
        MathDataset(**arguments)


@pytest.mark.feature(77)
def test_a_problem_of_ones_own():
    class Shout(EnvBase):
        def get_reward(self, text: str) -> float:
            return float(text.isupper())

    assert Shout([{"role": "user", "content": "shout"}]).get_reward("HEY") == 1.0
    with pytest.raises(NotImplementedError, match=r"EnvBase must define get_reward"):
        EnvBase(prompt=[], answer=3).get_reward("3")
