# SPDX-License-Identifier: Apache-2.0
"""Final answers in hostile text."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.environment.core.functions import load_function
from dlrover.python.rl.environment.core.rewards import boxed_answer, exact_answer, last_number
from dlrover.python.rl.environment.verifiers import gsm8k


@pytest.mark.feature(79)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"{ \boxed{5} { \boxed{6}", "6"),
        (r"} \boxed{5} }", "5"),
        (r"\boxed{8} \boxed{9", "8"),
        (r"\boxed{9", None),
        (r"\boxed", None),
        (r"\boxed5", None),
        ("no box {3}", None),
        ("", None),
    ],
)
def test_boxed_answers(text, expected):
    assert boxed_answer(text) == expected


@pytest.mark.feature(79)
@given(st.recursive(st.text(alphabet="ab 1", max_size=4), lambda inner: inner.map(lambda text: "{" + text + "}")))
def test_any_balanced_content_comes_back(content):
    assert boxed_answer(rf"{{x}} \boxed{{{content}}} }}{{") == content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 apples and 4.50 pears.", "4.50"),
        ("it is 1,234,567.", "1,234,567"),
        ("it is 12,34", None),
        ("at -5", "-5"),
        ("5-3", "3"),
        ("x = +.5", "+.5"),
        ("6e23 of them", "6e23"),
        ("none", None),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"It is \boxed{19}.", "19", 1.0),
        (r"\boxed{019}", "19", 1.0),
        (r"\boxed{ 1,000.0 }", "1000", 1.0),
        (r"\boxed{1e3}", "1000", 1.0),
        (r"19, so \boxed{18}", "19", 0.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1/2}", "0.5", 0.0),
        ("  Paris\n", "Paris", 1.0),
        ("Paris, of course", "Paris", 0.0),
        ("the sum is 42.", "42", 1.0),
        ("42 or rather 43", "42", 0.0),
        ("0.1", "0.10000000000000000001", 0.0),
        ("", "0", 0.0),
        ("NaN", "nan", 0.0),
        ("Infinity", "inf", 0.0),
        ("1e99999999999999999999", "1", 0.0),
        ("٤٢", "42", 0.0),
        ("72", "48 / 2 = <<48/2=24>>24 clips in May.\n#### 72", 1.0),
        (r"\boxed{72}", "24 clips in May.\n#### 72", 1.0),
        (r"so \boxed{72}", r"it is \boxed{72}", 1.0),
        ("#### 72", "72", 1.0),
        ("#### 73", "24 clips in May.\n#### 72", 0.0),
        ("The answer is \u22125.", "-5", 1.0),
        ("The answer is \u22125.", "5", 0.0),
        ("\\boxed{\u22125}", "-5", 1.0),
        (r"\boxed{18.}", "18", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        (r"\boxed{\$19}", "19", 1.0),
    ],
)
def test_exact_answer(completion, answer, reward):
    assert exact_answer(completion, answer) == reward


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_reference_is_refused(answer):
    with pytest.raises(ValueError, match="no reference answer"):
        exact_answer("", answer)


@pytest.mark.feature(98)
def test_nothing_is_evaluated():
    started = time.perf_counter()
    assert exact_answer(r"\boxed{9**9**9}", "5") == 0.0
    assert exact_answer(r"\boxed{1e999999999}", "5") == 0.0
    assert gsm8k(r"\boxed{1/2}", "1e-999999999", {}) == 0.0
    assert time.perf_counter() - started < 1


HOSTILE = {
    "open braces": lambda size: r"\boxed{" + "{" * size,
    "pairs": lambda size: r"\boxed{" + "{}" * (size // 2),
    "open boxes": lambda size: r"\boxed{" * (size // 7),
    "nested boxes": lambda size: r"\boxed{" * (size // 8) + "}" * (size // 8),
    "digits": lambda size: r"\boxed{" + "9" * size + "}",
    "groups": lambda size: "1" + ",111" * (size // 4) + "1",
    "exponents": lambda size: "1e" * (size // 2),
    "signs": lambda size: "-" * size,
    "spaces": lambda size: r"\boxed" + " " * size,
    "backslashes": lambda size: "\\" * size,
    "fractions": lambda size: r"\boxed{" + r"\frac{1}" * (size // 8) + "}",
    "quotients": lambda size: r"\boxed{" + "1/" * (size // 2) + "a" * 99 + "}",
    "spaces in numbers": lambda size: "1" + " 111" * (size // 4),
    "thin spaces": lambda size: "1" + r"\,111" * (size // 10),
    "halves": lambda size: r"\boxed{" + "1/2 " * (size // 4) + "}",
}


LONG = {"open braces", "open boxes", "nested boxes", "backslashes", "pairs", "thin spaces"}


@pytest.mark.feature(98)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in HOSTILE])
def test_ten_megabytes_take_seconds(name):
    text = HOSTILE[name](10_000_000)
    started = time.process_time()
    assert exact_answer(text, "5") == gsm8k(text, "5", {}) == 0.0
    assert time.process_time() - started < 10  # A quadratic step would take hours.


def _gsm8k_pair(rng):
    """A worked solution and its number, in a spelling that a model or the data may use."""
    number = rng.choice((rng.randint(-9_999_999, 9_999_999), rng.randint(0, 99), rng.randint(1, 99_999) / 4))
    plain = str(number)
    grouped = f"{number:,}"
    before, after = rng.choice(
        (("", ""), ("$", ""), ("", "%"), ("", " meters"), ("€", ""), ("", " clips."), ("", " m^2"), ("", " ft2"))
    )
    spellings = [before + text + after for text in (plain, grouped)]
    if number < 0:
        spellings += [f"-{before}{text[1:]}{after}" for text in (plain, grouped)]
        spellings += [f"\u2212{before}{text[1:]}{after}" for text in (plain, grouped)]
    return number, spellings


def _solution(rng, text):
    steps = f"Natalia sold 48/2 = <<48/2=24>>24 clips, then {rng.randint(1, 99)} more.\n"
    latex = text.replace(",", "{,}").replace("$", r"\$").replace("%", r"\%")
    return steps + rng.choice((f"#### {text}", f"####{text}", rf"\boxed{{{latex}}}", rf"\boxed{{\text{{{latex}}}}}"))


def test_gsm8k_rewards_each_right_answer_and_no_changed_number():
    rng = random.Random(0)
    for _ in range(1_000):
        number, spellings = _gsm8k_pair(rng)
        completion = _solution(rng, rng.choice(spellings))
        assert gsm8k(completion, _solution(rng, rng.choice(spellings)), {}) == 1.0, completion
        changed = _solution(rng, f"{number + rng.choice((-1, 1, 0.5, 1_000)):,}")
        assert gsm8k(completion, changed, {}) == 0.0, (completion, changed)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### -$5", "-5"),
        ("The answer is -$1,200.", "#### -1,200"),
        (r"\boxed{-\$5}", "-5"),
        ("It is \u22125", "-5"),
        ("#### 10 m^2", "10"),
        ("#### 72 m2", "72"),
        ("from 5-$7", "7"),
        ("a box of 2x3", "3"),
        ("\u20135", "-5"),
        (r"\boxed{18 \text{ cm}^2}", "18"),
        (r"\boxed{18\,\text{m}^2}", "18"),
        (r"\boxed{18\ \mathrm{m^2}}", "18"),
        (r"\boxed{\text{2}}", "2"),
        (r"\boxed{1/2}", "0.5"),
        (r"\boxed{\frac{36}{2}}", "18"),
        ("#### Step 1\n9\n#### Step 2: Add both\nSo the total is 18.", "18"),
        ("#### 1. Add\n9+9=18", "18"),
        ("9+9\n#### **$1,800**", "1800"),
        ("9+9\n#### 18 eggs\nas 9 is half of it, not 20", "18"),
        (r"\boxed{- 5}", "-5"),
        (r"\boxed{x = - 5}", "-5"),
        (r"\boxed{\frac{-1}{2}}", "-0.5"),
        (r"\boxed{-\dfrac{1}{2}}", "-0.5"),
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{3\frac{1}{2}}", "3.5"),
        (r"\boxed{-3 1/2}", "-3.5"),
        (r"\boxed{$\frac{1}{2}$}", "0.5"),
        (r"\boxed{1/2 cups}", "0.5"),
        (r"\boxed{0.5}", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{\frac{2}{4}}", "#### 1/2"),
        (r"\boxed{3 \times 4 = 12}", "12"),
        (r"\boxed{60\text{ miles}/\text{hour}}", "60"),
        (r"\boxed{12 \frac{\text{miles}}{\text{hour}}}", "12"),
        (r"\boxed{60\ \frac{\mathrm{km}}{\mathrm{h}}}", "60"),
        (r"\boxed{60\times}", "60"),
    ],
)
def test_gsm8k_reads_signs_currencies_and_units(completion, answer):
    assert gsm8k(completion, answer, {}) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", "2"),
        (r"\boxed{1/2}", "2"),
        ("#### Step 2: Add both\nSo the total is 18.", "2"),
        (r"\boxed{- 5}", "5"),
        (r"\boxed{\frac{-1}{2}}", "2"),
        (r"\boxed{\frac12}", "12"),
        (r"\boxed{3\frac{1}{2}}", "2"),
        (r"\boxed{3 1/2}", "2"),
        (r"\boxed{$\frac{1}{2}$}", "2"),
        (r"\boxed{1/2 cups}", "2"),
        (r"\boxed{10^3}", "3"),
        (r"\boxed{2^{10}}", "10"),
        (r"\boxed{2\sqrt{3}}", "3"),
        (r"\boxed{3 \times 4}", "4"),
        (r"\boxed{\frac{1}{2}}", "1e999999999"),
        (r"\boxed{2}", r"\boxed{\frac{1}{2}}"),
    ],
)
def test_gsm8k_takes_no_part_of_something_else(completion, answer):
    assert gsm8k(completion, answer, {}) == 0.0


def test_gsm8k_needs_a_number_in_the_reference():
    with pytest.raises(ValueError, match="no number"):
        gsm8k("72", "Paris", {})
    for calculation in (r"\boxed{2^{10}}", "#### 9/11/2001", "#### 10 (2*5)"):
        with pytest.raises(ValueError, match="or marks a calculation without its result"):
            gsm8k("72", calculation, {})
    with pytest.raises(ValueError, match="no number"):
        gsm8k("72", None, {})


@pytest.mark.parametrize(("name", "reward"), [("gsm8k", 1.0), ("exact", 1.0)])
def test_rewards_are_named_in_a_job_file(name, reward):
    assert load_function(name)("It is 72.", "24 clips in May.\n#### 72", {}) == reward
