# SPDX-License-Identifier: Apache-2.0
"""Answers and numbers in hostile text, and the arithmetic task."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.environment.core.rewards import boxed_answer, exact_answer, join_groups, last_number, plain_text
from dlrover.python.rl.environment.verifiers import exact, gsm8k, math
from dlrover.python.rl.environment.verifiers.arithmetic import MathDataset


@pytest.mark.feature(79)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", "42"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"), (r"\boxed{}", ""), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{a \boxed{b} c}", "b"),
        (r"{ \boxed{5} { \boxed{6}", "6"), (r"} \boxed{5} }", "5"), (r"\boxed{8} \boxed{9", "8"), (r"\boxed{9", None),
        (r"\boxed", None), (r"\boxed5", None), ("", None),
    ],
)  # fmt: skip
def test_boxed_answers(text, expected):
    assert boxed_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 apples and 4.50 pears.", "4.50"), ("it is 1,234,567.", "1,234,567"), ("it is 12,34", None),
        ("at -5", "-5"), ("5-3", "3"), ("x = +.5", "+.5"), ("6e23 of them", "6e23"), ("none", None),
        ("3 or 3\u00b2", None), ("about 1\u202f234.5 m", "1\u00a0234.5"), (r"it is $2~\frac{1}{2}$", "2 1/2"),
        ("the 3 1/25", "3 1/25"), (r"2,\,100", "100"), (r"one\\ 250", "250"),
    ],
)  # fmt: skip
def test_last_number(text, expected):
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"It is \boxed{19}.", "19", 1.0), (r"\boxed{019}", "19", 1.0), (r"\boxed{ 1,000.0 }", "1000", 1.0),
        (r"19, so \boxed{18}", "19", 0.0), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1/2}", "0.5", 0.0), ("  Paris\n", "Paris", 1.0), ("the sum is 42.", "42", 1.0),
        ("42 or rather 43", "42", 0.0), ("", "0", 0.0), ("NaN", "nan", 0.0), ("1e99999999999999999999", "1", 0.0),
        ("٤٢", "42", 0.0), ("72", "48 / 2 = <<48/2=24>>24 clips in May.\n#### 72", 1.0),
        (r"\boxed{72}", "24 clips in May.\n#### 72", 1.0), (r"so \boxed{72}", r"it is \boxed{72}", 1.0),
        ("#### 72", "72", 1.0), ("#### 73", "24 clips in May.\n#### 72", 0.0), ("The answer is \u22125.", "-5", 1.0),
        ("The answer is \u22125.", "5", 0.0), ("\\boxed{\u22125}", "-5", 1.0), (r"\boxed{18.}", "18", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0), (r"\boxed{\$19}", "19", 1.0),
    ],
)  # fmt: skip
def test_exact_answer(completion, answer, reward):
    assert exact_answer(completion, answer) == reward


@pytest.mark.feature(98)
def test_answers_are_never_evaluated():
    started = time.perf_counter()
    assert exact_answer(r"\boxed{9**9**9}", "5") == 0.0
    assert exact_answer(r"\boxed{1e999999999}", "5") == 0.0
    assert gsm8k(r"\boxed{1/2}", "1e-999999999", {}) == 0.0
    assert time.perf_counter() - started < 1


MANY = 10_000_000
HOSTILE = {  # what is before, what is repeated, what is behind
    "open braces": (r"\boxed{", "{", ""), "pairs": (r"\boxed{", "{}", ""), "open boxes": ("", r"\boxed{", ""),
    "digits": (r"\boxed{", "9", "}"), "groups": ("1", ",111", "1"), "exponents": ("", "1e", ""), "signs": ("", "-", ""),
    "nested boxes": ("", r"\boxed{", "}" * (MANY // 7)), "spaces": (r"\boxed", " ", ""),
    "fractions": (r"\boxed{", r"\frac{1}", "}"), "quotients": (r"\boxed{", "1/", "a" * 99 + "}"),
    "spaces in numbers": ("1", " 111", ""), "thin spaces": ("1", r"\,111", ""), "halves": (r"\boxed{", "1/2 ", "}"),
    "backslashes": ("", "\\", ""),
}  # fmt: skip


@pytest.mark.feature(98)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [MANY // 50, pytest.param(MANY, marks=pytest.mark.slow)])
def test_answers_of_megabytes_take_seconds(name, size):
    before, unit, behind = HOSTILE[name]
    text = before + unit * (size // len(unit)) + behind
    started = time.process_time()
    assert exact_answer(text, "5") == gsm8k(text, "5", {}) == 0.0
    assert time.process_time() - started < 60  # a quadratic step would take minutes at a fiftieth, and hours


READ = [  # completion, reference
    ("#### -$5", "-5"), ("The answer is -$1,200.", "#### -1,200"), (r"\boxed{-\$5}", "-5"),
    ("It is \u22125", "-5"), ("#### 10 m^2", "10"), ("from 5-$7", "7"), ("a box of 2x3", "3"), ("\u20135", "-5"),
    (r"\boxed{18\,\text{m}^2}", "18"), (r"\boxed{\text{2}}", "2"), (r"\boxed{\frac{36}{2}}", "18"),
    ("#### Step 1\n9\n#### Step 2: Add both\nSo the total is 18.", "18"), ("9+9\n#### **$1,800**", "1800"),
    ("9+9\n#### 18 eggs\nas 9 is half of it, not 20", "18"), (r"\boxed{x = - 5}", "-5"),
    (r"\boxed{\frac{-1}{2}}", "-0.5"), (r"\boxed{\frac12}", "0.5"), (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{$\frac{1}{2}$}", "0.5"), (r"\boxed{1/2 cups}", "0.5"), (r"\boxed{0.5}", r"\boxed{\frac{1}{2}}"),
    (r"\boxed{\frac{2}{4}}", "#### 1/2"), (r"\boxed{3 \times 4 = 12}", "12"),
    (r"\boxed{60\text{ miles}/\text{hour}}", "60"), (r"\boxed{12 \frac{\text{miles}}{\text{hour}}}", "12"),
    (r"\boxed{60\times}", "60"), ("Altogether that makes 7\u202f250 tickets.", "7250"), ("#### 4,50,000", "450000"),
    ("12\u2019500.75", "12500.75"), (r"\boxed{1\thinspace000\thinspace000}", "1000000"), ("in 2024 100 people", "100"),
    ("in 2024 100 000 people", "100000"), ("They are 1, 2, 3", "3"), ("It is 12, 500", "500"),
]  # fmt: skip
NOT_READ = [
    (r"\boxed{\frac{1}{2}}", "2"), ("#### Step 2: Add both\nSo the total is 18.", "2"), (r"\boxed{- 5}", "5"),
    (r"\boxed{\frac{-1}{2}}", "2"), (r"\boxed{\frac12}", "12"), (r"\boxed{3\frac{1}{2}}", "2"),
    (r"\boxed{1/2 cups}", "2"), (r"\boxed{10^3}", "3"), (r"\boxed{2\sqrt{3}}", "3"), (r"\boxed{3 \times 4}", "4"),
    (r"\boxed{\frac{1}{2}}", "1e999999999"), (r"\boxed{2}", r"\boxed{\frac{1}{2}}"), (r"\boxed{7 250}", "250"),
    ("It is 9\u202f000.", "#### 4\u202f000"), ("It is 8 50 000.", "It is 2 50 000."), (r"\boxed{12, 500}", "500"),
    ("It is 12,34", "34"), ("It is 1.234,56", "56"), ("0,500", "500"), (r"\boxed{7\,25}", "725"), ("1, 2, 3", "3"),
    ("It is 1,000 500", "500"), ("So 17 or \uff17250", "250"), ("It is 3\u00bd", "3"), ("It is 10^3", "3"),
    ("It is 6:30", "30"), (r"\boxed{10-12}", "12"), ("It is 1/4.", "4"), (r"It is $-\frac{1}{4}$", "0.25"),
    ("It is 1 000/3", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reward"), [*((row, 1.0) for row in READ), *((row, 0.0) for row in NOT_READ)])
def test_gsm8k_reads_numbers_whole_or_not_at_all(row, reward):
    assert gsm8k(*row, {}) == reward


CALCULATION = "or marks a calculation without its result"


@pytest.mark.parametrize(
    ("verifier", "answer", "message"),
    [
        (exact, "", "no reference answer"), (exact, " \n", "no reference answer"), (gsm8k, None, "no reference answer"),
        (gsm8k, "Paris", "no number"), (gsm8k, r"\boxed{2^{10}}", CALCULATION), (gsm8k, "#### 9/11/2001", CALCULATION),
        (gsm8k, "#### 10 (2*5)", CALCULATION), (gsm8k, "6:30", "no number"), (gsm8k, "#### 8,0,0", "no number"),
    ],
)  # fmt: skip
def test_reference_without_an_answer_is_refused(verifier, answer, message):
    with pytest.raises(ValueError, match=message):
        verifier("72", answer, {})


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        (r"(1\,000,5) 7,250", "(1000,5) 7,250"), (r"\{1,200\} 8,00,000", r"\{1,200\} 800000"),
        ("x_1 7'250 a^{2}", "x_1 7250 a^{2}"), (r"\log_2\,100", "\\log_2\u00a0100"), ("7_25 1_000,5", "7_25 1000,5"),
    ],
)  # fmt: skip
def test_join_groups_in_an_expression(text, joined):
    assert join_groups(plain_text(text)) == joined


MARKS = [",", "{,}", r"\,", r"\;", r"\:", r"\ ", "~", "'", "\u2019", "_", r",\!", "\u00a0", "\u2009", "\u202f"]


@st.composite
def spellings(draw, number, marks=(*MARKS, " ")):
    """``number`` (``-1234567.5``) with any separator in groups of three, the Indian way, or without."""
    whole, point, places = number.lstrip("-").partition(".")
    mark, size = draw(st.sampled_from(["", *marks])), draw(st.sampled_from([2, 3]))
    groups, head = [whole[-3:]], whole[:-3]
    while head:
        groups, head = [head[-size:], *groups], head[:-size]
    return "-" * number.startswith("-") + mark.join(groups) + point + places


WHOLE_NUMBERS, PLACES = st.integers(-(10**12), 10**12), st.sampled_from(["", ".25"])
SENTENCES, REFERENCES = ["{}", r"so \boxed{{{}}}", "It makes {} \u20ac"], ["{}", r"\boxed{{{}}}", "Thus.\n#### {}"]


@given(st.data(), WHOLE_NUMBERS, PLACES, st.integers(1, 10**6))
def test_spelling_of_a_number_changes_nothing(data, number, places, change):
    completion = data.draw(st.sampled_from(SENTENCES)).format(data.draw(spellings(f"{number}{places}")))
    for other, reward in ((number, 1.0), (number + change, 0.0)):
        answer = data.draw(st.sampled_from(REFERENCES)).format(data.draw(spellings(f"{other}{places}")))
        assert exact(completion, answer, {}) == gsm8k(completion, answer, {}) == reward


@given(st.data(), st.integers(1, 10**7), st.integers(1, 10**7), st.sampled_from(["", "-"]))
def test_spelling_of_a_fraction_changes_nothing(data, above, below, sign):
    pytest.importorskip("math_verify")
    parts = [data.draw(spellings(str(part), MARKS)) for part in (above, below)]
    completion = rf"\boxed{{{sign}\frac{{{parts[0]}}}{{{parts[1]}}}}}"
    for factor, reward in ((1, 1.0), (2, 0.0)):
        answer = f"{sign}{data.draw(spellings(str(2 * above * factor), MARKS))}/{2 * below}"
        assert gsm8k(completion, answer, {}) == math(completion, answer, {}) == reward


PYTHON = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def operands(problem) -> tuple[int, str, int]:
    left, symbol, right = re.search(r"(-?\d+) ([-+*/]) (-?\d+)\?", problem.prompt[0]["content"]).groups()
    return int(left), symbol, int(right)


@pytest.mark.feature(78)
def test_arithmetic_makes_two_hundred_additions():
    answers = [(problem.answer, *operands(problem)) for problem in MathDataset()]
    assert len(answers) == 200
    assert all(answer == left + right and symbol == "+" for answer, left, symbol, right in answers)
    assert all(0 <= min(left, right) <= max(left, right) <= 200 for _, left, _, right in answers)


@pytest.mark.feature(78)
@pytest.mark.parametrize("operand", ["add", "mult", "substraction", "subtraction", "division"])
def test_arithmetic_rewards_the_right_answer_most(operand):
    for problem in MathDataset(20, -9, 9, operand):
        left, symbol, right = operands(problem)
        assert PYTHON[symbol](left, right) == problem.answer
        assert symbol != "/" or left % right == 0
        rewards = {error: problem.get_reward(rf"\boxed{{{problem.answer + error}}}") for error in range(-5, 6)}
        assert rewards == {error: -(error**2) for error in range(-5, 6)}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7", -101.0), (r"\boxed{seven}", -101.0), (r"\boxed{9**9**9}", -101.0), (r"\boxed{1e999999}", -100.0),
        (r"\boxed{5000}", -100.0), (r"\boxed{10}", -100.0), (r"\boxed{9}", -81.0), (r"\boxed{1e-200}", -1e-12),
        (r"\boxed{0.0}", 0.0),
    ],
)  # fmt: skip
def test_arithmetic_answers_far_off_or_unreadable(text, reward):
    (problem,) = MathDataset(1, 0, 0)
    assert problem.get_reward(text) == reward


def test_arithmetic_depends_on_the_seed():
    def questions(seed):
        return [problem.question for problem in MathDataset(5, seed=seed)]

    assert questions(1) == questions(1) != questions(2)
    assert [problem.question for problem in MathDataset(5, seed=1)[1:3]] == questions(1)[1:3]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"operand": "addd"}, "unknown operand 'addd'; did you mean 'add'"),
        ({"num_samples": -1}, "cannot sample -1 questions"),
        ({"min_val": 3, "max_val": 2}, "from 3 to 2"),
        ({"min_val": 0, "max_val": 0, "operand": "division"}, "cannot divide by 0"),
    ],
)
def test_arithmetic_refuses_wrong_arguments(arguments, fault):
    with pytest.raises(ValueError, match=fault):
        MathDataset(**arguments)
