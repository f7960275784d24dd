# SPDX-License-Identifier: Apache-2.0
"""Mathematical equivalence."""

import resource
import signal

import pytest

pytest.importorskip("math_verify")

from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier
from dlrover.python.rl.environment.verifiers import math_answers
from dlrover.python.rl.environment.verifiers.math_answers import math_equal, within

BOMBS = ["9**9**9", "9^{9^{9}}", r"9^{9^{9^{9}}}", "1000000000!", r"\binom{10^{9}}{5 \cdot 10^{8}}", "(" * 1000]


# the box's content, the reference, the reward
FORMS = [
    ("1/2", "0.5", 1.0), (r"\frac{1}{2}", "0.5", 1.0), (r"\sqrt{8}", r"2\sqrt{2}", 1.0), ("42", "42.0", 1.0),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", 1.0), ("(1, 2)", "(1,2)", 1.0), (r"x^2+2x+1", r"(x+1)^2", 1.0),
    (r"\text{Beijing}", r"\text{Beijing}", 1.0), ("32348", r"\$32,348", 1.0), ("18.9", r"\$18.90", 1.0),
    ("1/3", "0.333", 0.0), (r"\sqrt{8}", "3", 0.0), ("(2, 1)", "(1, 2)", 0.0), ("x", "y", 0.0), ("", "1", 0.0),
]  # fmt: skip
SMALL_NUMBERS = [
    (r"\frac{1}{2^{70}}", r"\frac{1}{2^{71}}", 0.0), (r"-\frac{1}{2^{70}}", r"\frac{1}{2^{70}}", 0.0),
    (r"1.6\times10^{-19}", r"9.1\times10^{-31}", 0.0), (r"\frac{1}{2^{30}}", r"\frac{1}{2^{31}}", 0.0),
    ("2^{-70}", "2^{-71}", 0.0), (r"\frac{\pi}{2^{60}}", r"\frac{\pi}{2^{61}}", 0.0),
    (r"(\frac{1}{3^{50}}, 1)", r"(\frac{1}{3^{51}}, 1)", 0.0), (r"\frac{1}{2^{70}}", "2^{-70}", 1.0),
    (r"1.6\times10^{-19}", "1.6e-19", 1.0), ("0.0000001", "10^{-7}", 1.0), (r"\sqrt{8}-2\sqrt{2}", "0", 1.0),
    ("0.333333", "1/3", 1.0), ("0.3333", "1/3", 0.0), ("0.016667", r"\frac{1}{60}", 1.0),
    ("0.30000000000000004", "0.3", 1.0), ("1234567.5", "1234568", 0.0), (r"9\%", "9", 1.0),
    ("2 2/3", r"\frac{8}{3}", 1.0), ("2 2/3", r"\frac{4}{3}", 0.0),
]  # fmt: skip
WORDS = [
    ("DBAC", "CABD", 0.0), ("BCA", "BCA", 1.0), ("132_4", "132_5", 0.0), ("132_4", "30", 1.0),
    (r"\text{DBAC}", r"\text{CABD}", 0.0), ("D, B, A, C", "C, A, B, D", 0.0), ("stop", "pots", 0.0),
    ("D, B, A, C", r"\text{DBAC}", 1.0), (r"\text{Paris}.", "Paris", 1.0), ("C, A", "A, C", 1.0), ("yx", "xy", 1.0),
    ("0.11_2", "0.11_3", 0.0), ("FF_{16}", "255", 1.0), ("(1101)_2", "2^3+5", 1.0), (r"1101\,0110_2", "214", 1.0),
    ("-132_4", "-30", 1.0), ("132_2", "132", 0.0), ("A_{12}", "A_{11}", 0.0), (r"\log_2 8", "3", 1.0),
    ("7", "192_8", "refused"),
]  # fmt: skip
PUNCTUATION = [
    ("3.5.", "3.5", 1.0), (r"64\,800", "64800", 1.0), ("64 800", "64800", 1.0), ("64{,}800", "64800", 1.0),
    ("64,800", "64800", 1.0), ("64,800", r"64\,800", 1.0), ("\u20ac36", "36", 1.0), ("36 dollars", "$36", 1.0),
    (r"x \le 5;", r"x\leq 5", 1.0), (r"\frac{3\pi}{4},", r"\frac{3\pi}{4}", 1.0), ("0.333...", "0.333", 0.0),
    ("The largest is 34.", "34", 1.0), (r"64\,800\pi", r"64800\pi", 1.0), (r"(2,1\,000)", "(2, 1000)", 1.0),
    ("(1,200)", "(1, 200)", 1.0), (r"\{100,200\}", r"\{200,100\}", 1.0), ("10,00,000", "1000000", 1.0),
    (r"7\,25", "32", 0.0), (r"\log_2\,100", r"\log_2 100", 1.0), ("7", r"7\,25", "refused"),
]  # fmt: skip
# the whole completion, the reference, the reward
UNBOXED = [
    ("It is 7\u202f250.", "7250", 1.0), ("It is 7\u202f250.", "250", 0.0), (r"It is $7\,250$.", "257", 0.0),
    ("It is 7\u202f25.", "25", 0.0), ("It is 7\u202f25, so $x = 3$.", "3", 1.0), ("Not 5 but 7\u202f25.", "5", 0.0),
    (r"First $3$, no: the answer is $\frac{1}{2}$.", "0.5", 1.0), ("the answer is 7", "7", 1.0),
    ("I do not know", "7", 0.0), (r"So it is $\frac{3}{5}$", "5", 0.0), (r"So it is $2\sqrt{5}$", "5", 0.0),
    ("So it is 1/6", "6", 0.0), (r"So it is $\frac{1}{2}$", "2", 0.0), ("So it is $10^{5}$", "5", 0.0),
    ("It is $132_4$.", "30", 1.0), ("$19, 46, and 82$", r"$19, 46, \text{ and } 82$", 1.0),
]  # fmt: skip


BOXED = [(rf"So \boxed{{{row[0]}}}.", *row[1:]) for row in (*FORMS, *SMALL_NUMBERS, *WORDS, *PUNCTUATION)]


@pytest.mark.feature(79)
@pytest.mark.parametrize(("completion", "answer", "reward"), [*BOXED, *UNBOXED])
def test_math_equal_recognises_an_answer_or_gives_nothing(completion, answer, reward):
    if reward == "refused":
        with pytest.raises(ValueError, match="a number that cannot be read"):
            math_equal(completion, answer, {})
    else:
        assert math_equal(completion, answer, {}) == reward


def test_math_equal_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="no reference answer"):
        math_equal("7", None, {})


def test_math_equal_of_a_box_too_long_to_read_is_0():
    assert math_equal(r"\boxed{1" + " + 0" * 600 + "}", "1", {}) == 0.0
    assert math_equal(r"\boxed{1 + " + "0" * 2_100 + "7}", "7", {}) == 0.0


def processor_s():
    """Processor time of this process and its children that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.mark.slow
@pytest.mark.feature(98)
@pytest.mark.parametrize("bomb", BOMBS)
def test_math_equal_of_a_bomb_takes_less_than_a_second(bomb):
    began_s = processor_s()
    assert math_equal(rf"\boxed{{{bomb}}}", "1", {}) == 0.0
    assert processor_s() - began_s < 1.0


@pytest.mark.slow
@pytest.mark.feature(98)
def test_math_equal_bomb_leaves_a_verifiers_process_alive():
    with DeadlineVerifier(math_equal, timeout_s=20) as verifier:
        before = verifier._child.pid
        assert verifier(r"\boxed{9^{9^{9}}}", "1") == 0.0
        assert verifier(r"\boxed{\frac{1}{2}}", "0.5") == 1.0
        assert verifier._child.pid == before


@pytest.mark.feature(98)
def test_within_gives_the_result_of_a_fork(monkeypatch):
    assert within(5.0, lambda: True) is True
    assert within(5.0, lambda: False) is False
    assert within(5.0, lambda: 1 // 0 == 0) is None
    assert within(0.1, lambda: 9**9**9 == 0) is None
    monkeypatch.setattr(math_answers, "_STUCK_S", 0.2)
    assert within(5.0, lambda: not signal.pause()) is None
