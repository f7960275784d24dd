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


# What the box has, the reference, the reward when math-verify compared all answers, and the reward.
SMALL_NUMBERS = [
    (r"\frac{1}{2^{70}}", r"\frac{1}{2^{71}}", 1.0, 0.0),
    (r"\frac{1}{22!}", r"\frac{1}{23!}", 1.0, 0.0),
    (r"-\frac{1}{2^{70}}", r"\frac{1}{2^{70}}", 1.0, 0.0),
    (r"1.6\times10^{-19}", r"9.1\times10^{-31}", 1.0, 0.0),
    ("0.0000001", "0.0000004", 1.0, 0.0),
    (r"\frac{1}{2^{30}}", r"\frac{1}{2^{31}}", 0.0, 0.0),
    ("2^{-70}", "2^{-71}", 1.0, 0.0),
    (r"\frac{\pi}{2^{60}}", r"\frac{\pi}{2^{61}}", 1.0, 0.0),
    ("x=e^{-40}", "e^{-50}", 1.0, 0.0),
    (r"(\frac{1}{3^{50}}, 1)", r"(\frac{1}{3^{51}}, 1)", 1.0, 0.0),
    ("0.00001234", "0.00001235", 1.0, 0.0),
    ("-0.0000001", "0.0000001", 1.0, 0.0),
    (r"\frac{1}{2^{70}}", "2^{-70}", 1.0, 1.0),
    (r"1.6\times10^{-19}", "1.6e-19", 0.0, 1.0),
    ("6.02e23", r"6.02\times 10^{23}", 0.0, 1.0),
    ("0.0000001", "10^{-7}", 1.0, 1.0),
    (r"\sqrt{8}-2\sqrt{2}", "0", 1.0, 1.0),
    ("0.333333", "1/3", 1.0, 1.0),
    ("0.3333", "1/3", 0.0, 0.0),
    ("0.016667", r"\frac{1}{60}", 1.0, 1.0),
    ("0.30000000000000004", "0.3", 1.0, 1.0),
    ("1234567.5", "1234568", 0.0, 0.0),
    (r"9\%", "9", 1.0, 1.0),
    ("2 2/3", r"\frac{8}{3}", 0.0, 1.0),
    ("2 2/3", r"\frac{4}{3}", 1.0, 0.0),
]
WORDS_AND_BASES = [
    ("DBAC", "CABD", 1.0, 0.0),
    ("NSSN", "NNSS", 1.0, 0.0),
    ("BCA", "BCA", 1.0, 1.0),
    ("132_4", "132_5", 1.0, 0.0),
    ("1101_{2}", "1101", 1.0, 0.0),
    ("132_4", "30", 0.0, 1.0),
    (r"\text{DBAC}", r"\text{CABD}", 0.0, 0.0),
    ("D, B, A, C", "C, A, B, D", 1.0, 0.0),
    ("D B A C", "C A B D", 1.0, 0.0),
    ("N, S, S, N", "N, N, S, S", 1.0, 0.0),
    ("D-B-A-C", "D-A-B-C", 1.0, 0.0),
    ("stop", "pots", 1.0, 0.0),
    ("D, B, A, C", r"\text{DBAC}", 0.0, 1.0),
    (r"\text{Paris}.", "Paris", 0.0, 1.0),
    ("C, A", "A, C", 1.0, 1.0),
    ("yx", "xy", 1.0, 1.0),
    ("0.11_2", "0.11_3", 1.0, 0.0),
    ("1A3_{16}", "419", 0.0, 1.0),
    ("FF_{16}", "255", 0.0, 1.0),
    ("(1101)_2", "2^3+5", 0.0, 1.0),
    (r"1101\,0110_2", "214", 0.0, 1.0),
    ("-132_4", "-30", 0.0, 1.0),
    ("132_2", "132", 1.0, 0.0),
    ("A_{12}", "A_{11}", 0.0, 0.0),
    (r"\log_2 8", "3", 1.0, 1.0),
    ("7", "192_8", 0.0, "refused"),
]
PUNCTUATION_AND_GROUPS = [
    ("36.", "36", 0.0, 1.0),
    ("3.5.", "3.5", 0.0, 1.0),
    (r"\sqrt{3}.", r"\sqrt3", 0.0, 1.0),
    ("(1,2).", "(1,2)", 0.0, 1.0),
    (r"64\,800", "64800", 0.0, 1.0),
    (r"64\;800", "64800", 0.0, 1.0),
    ("64~800", "64800", 0.0, 1.0),
    ("64 800", "64800", 0.0, 1.0),
    ("64{,}800", "64800", 1.0, 1.0),
    ("64,800", "64800", 1.0, 1.0),
    ("64,800", r"64\,800", 0.0, 1.0),
    ("\u20ac36", "36", 0.0, 1.0),
    ("36 dollars", "$36", 0.0, 1.0),
    (r"x \le 5;", r"x\leq 5", 0.0, 1.0),
    (r"\frac{3\pi}{4},", r"\frac{3\pi}{4}", 0.0, 1.0),
    ("36\u3002", "36", 0.0, 1.0),
    ("0.333...", "0.333", 0.0, 0.0),
    ("The largest is 34.", "34", 1.0, 1.0),
    (r"64\,800\pi", r"64800\pi", 0.0, 1.0),
    (r"(2,1\,000)", "(2, 1000)", 0.0, 1.0),
    ("(1,200)", "(1, 200)", 1.0, 1.0),
    (r"\{100,200\}", r"\{200,100\}", 1.0, 1.0),
    ("10,00,000", "1000000", 0.0, 1.0),
    (r"7\,25", "32", 1.0, 0.0),
    ("36 \u20ac", "36", 0.0, 1.0),
    (r"\log_2\,100", r"\log_2 100", 1.0, 1.0),
    ("7", r"7\,25", 0.0, "refused"),
]
# The whole completion.
UNBOXED = [
    ("It is 7\u202f250.", "7250", 0.0, 1.0),
    ("It is 7\u202f250.", "250", 1.0, 0.0),
    (r"It is $7\,250$.", "257", 1.0, 0.0),
    ("It is 8,00,000", "8", 1.0, 0.0),
    ("It is 7\u202f25.", "25", 1.0, 0.0),
    ("It is 7\u202f25, so $x = 3$.", "3", 1.0, 1.0),
    ("Not 5 but 7\u202f25.", "5", 0.0, 0.0),
    ("It is $132_4$.", "30", 0.0, 1.0),
    ("$19, 46, and 82$", r"$19, 46, \text{ and } 82$", 1.0, 1.0),
]


@pytest.mark.parametrize(
    ("completion", "answer", "before", "reward"),
    [(rf"\boxed{{{row[0]}}}", *row[1:]) for row in (*SMALL_NUMBERS, *WORDS_AND_BASES, *PUNCTUATION_AND_GROUPS)]
    + UNBOXED,
)
def test_answers_are_recognised_or_worth_nothing(completion, answer, before, reward):
    if reward == "refused":
        with pytest.raises(ValueError, match="a number that cannot be read"):
            math_equal(completion, answer, {})
    else:
        assert math_equal(completion, answer, {}) == reward, f"it was {before} before"


def test_a_box_too_long_to_read_whole_is_worth_nothing():
    assert math_equal(r"\boxed{1" + " + 0" * 600 + "}", "1", {}) == 0.0
    assert math_equal(r"\boxed{1 + " + "0" * 2_100 + "7}", "7", {}) == 0.0


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
