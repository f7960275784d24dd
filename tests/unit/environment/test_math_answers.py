# SPDX-License-Identifier: Apache-2.0
"""Mathematical equivalence."""

import resource
import signal

import pytest

pytest.importorskip("math_verify")

from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier
from dlrover.python.rl.environment.verifiers import math_answers
from dlrover.python.rl.environment.verifiers.math_answers import math_equal, within

EQUAL = [
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("(1, 2)", "(1,2)"),
    (r"x^2+2x+1", r"(x+1)^2"),
    ("42", "42.0"),
    (r"\text{Beijing}", r"\text{Beijing}"),
    ("32348", r"\$32,348"),
    ("18.9", r"\$18.90"),
]
DIFFERENT = [("1/3", "0.333"), (r"\sqrt{8}", "3"), ("(2, 1)", "(1, 2)"), ("x", "y"), ("", "1")]
BOMBS = ["9**9**9", "9^{9^{9}}", r"9^{9^{9^{9}}}", "1000000000!", r"\binom{10^{9}}{5 \cdot 10^{8}}", "(" * 1000]


@pytest.mark.parametrize(("said", "answer"), EQUAL)
def test_equal_answers(said, answer):
    assert math_equal(rf"So it is \boxed{{{said}}}.", answer, {}) == 1.0


@pytest.mark.parametrize(("said", "answer"), DIFFERENT)
def test_different_answers(said, answer):
    assert math_equal(rf"So it is \boxed{{{said}}}.", answer, {}) == 0.0


def test_without_a_box_the_end_of_the_text_counts():
    assert math_equal(r"First $3$, no: the answer is $\frac{1}{2}$.", "0.5", {}) == 1.0
    assert math_equal("the answer is 7", "7", {}) == 1.0
    assert math_equal("I do not know", "7", {}) == 0.0
    with pytest.raises(ValueError, match="no reference answer"):
        math_equal("7", None, {})


@pytest.mark.feature(79)
@pytest.mark.parametrize(
    ("said", "answer"),
    [(r"$\frac{3}{5}$", "5"), (r"$2\sqrt{5}$", "5"), ("1/6", "6"), (r"$\frac{1}{2}$", "2"), ("$10^{5}$", "5")],
)
def test_a_number_in_the_answer_is_not_the_answer(said, answer):
    assert math_equal(f"So it is {said}", answer, {}) == 0.0


def test_the_last_box_with_nested_braces_counts():
    assert math_equal(r"\boxed{1} or rather \boxed{\frac{1}{\sqrt{4}}}", "1/2", {}) == 1.0


def processor_s():
    """What this process and its children that have ended have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.mark.slow
@pytest.mark.feature(98)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_costs_less_than_a_second(bomb):
    began_s = processor_s()
    assert math_equal(rf"\boxed{{{bomb}}}", "1", {}) == 0.0
    assert processor_s() - began_s < 1.0


@pytest.mark.feature(98)
def test_a_comparison_that_waits_for_ever_is_ended_by_the_clock(monkeypatch):
    monkeypatch.setattr(math_answers, "_STUCK_S", 0.2)
    assert math_answers.within(5.0, lambda: not signal.pause()) is None


@pytest.mark.slow
@pytest.mark.feature(98)
def test_in_a_verifiers_process_too_and_the_process_lives_on():
    with DeadlineVerifier(math_equal, timeout_s=20) as verifier:
        before = verifier._child.pid
        assert verifier(r"\boxed{9^{9^{9}}}", "1") == 0.0
        assert verifier(r"\boxed{\frac{1}{2}}", "0.5") == 1.0
        assert verifier._child.pid == before


def test_what_a_fork_says():
    assert within(5.0, lambda: True) is True
    assert within(5.0, lambda: False) is False
    assert within(5.0, lambda: 1 // 0 == 0) is None
    assert within(0.1, lambda: 9**9**9 == 0) is None
