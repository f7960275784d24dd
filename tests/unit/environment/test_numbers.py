# SPDX-License-Identifier: Apache-2.0
"""Numbers with separators, in answers and references."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.environment.core.rewards import join_groups, last_number, plain_text
from dlrover.python.rl.environment.verifiers import exact, gsm8k, math

# The completion, the reference, the reward before the reader of numbers was shared, and the reward.
GROUPED = [
    ("Altogether that makes 7\u202f250 tickets.", "7250", 0.0, 1.0),
    ("Altogether that makes 7 250 tickets.", "7250", 0.0, 1.0),
    (r"\boxed{7~250}", "7250", 0.0, 1.0),
    (r"\boxed{7\;250}", "7250", 0.0, 1.0),
    (r"\boxed{7\ 250}", "7250", 0.0, 1.0),
    ("7'250", "7250", 0.0, 1.0),
    ("7_250", "7250", 0.0, 1.0),
    ("#### 4,50,000", "450000", 0.0, 1.0),
    (r"\boxed{7 250}", "250", 1.0, 0.0),
    ("It is 9\u202f000.", "#### 4\u202f000", 1.0, 0.0),
    ("#### 8,00,000", "#### 2,00,000", 1.0, 0.0),
    (r"\boxed{7{,}250}", "7250", 1.0, 1.0),
    (r"\boxed{7\,250}", "7250", 1.0, 1.0),
    ("7,250", "7250", 1.0, 1.0),
    ("12\u2019500.75", "12500.75", 0.0, 1.0),
    (r"\boxed{1\thinspace000\thinspace000}", "1000000", 0.0, 1.0),
    (r"\boxed{1,\!000,\! 000}", "1000000", 0.0, 1.0),
    ("\u22127\u2009250", "-7250", 0.0, 1.0),
    ("7250", "#### 7\u00a0250", 0.0, 1.0),
    ("8 50 000", "850000", 0.0, 1.0),
    ("It is 8 50 000.", "It is 2 50 000.", 1.0, 0.0),
    ("It is 3 000 apples", "3000", 0.0, 1.0),
    ("in 2024 100 people", "100", 1.0, 1.0),
    ("in 2024 100 000 people", "100000", 0.0, 1.0),
    ("They are 1, 2, 3", "3", 1.0, 1.0),
    ("It is 12, 500", "500", 1.0, 1.0),
    (r"\boxed{12, 500}", "500", 1.0, 0.0),
]
NO_NUMBER = [
    ("It is 12,34", "34", 1.0, 0.0),
    ("It is 1.234,56", "56", 1.0, 0.0),
    ("0,500", "500", 1.0, 0.0),
    (r"\boxed{7\,25}", "725", 1.0, 0.0),
    ("It is 1,000 500", "500", 1.0, 0.0),
    ("It is 7~25", "25", 1.0, 0.0),
    ("So 17 or \uff17250", "250", 1.0, 0.0),
    ("It is 3\u00bd", "3", 1.0, 0.0),
    ("It is 10^3", "3", 1.0, 0.0),
    ("It is 6:30", "30", 1.0, 0.0),
    (r"\boxed{10-12}", "12", 1.0, 0.0),
    ("1, 2, 3", "3", 1.0, 0.0),
    ("It is 1/4.", "4", 1.0, 0.0),
    (r"It is $-\frac{1}{4}$", "0.25", 0.0, 0.0),
    ("It is 1 000/3", "3", 1.0, 0.0),
    ("It is 1 000/3", "1", 0.0, 0.0),
    ("5", "6:30", 0.0, "refused"),
    ("5", "8-12", 0.0, "refused"),
    ("5", "#### 8,0,0", 0.0, "refused"),
]


@pytest.mark.parametrize(("completion", "answer", "before", "reward"), [*GROUPED, *NO_NUMBER])
def test_gsm8k_reads_a_number_whole_or_not_at_all(completion, answer, before, reward):
    if reward == "refused":
        with pytest.raises(ValueError, match="has no number"):
            gsm8k(completion, answer, {})
    else:
        assert gsm8k(completion, answer, {}) == reward, f"it was {before} before"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 12,34", None),
        ("3 or 3\u00b2", None),
        ("1,234 567", None),
        ("about 1\u202f234.5 m", "1\u00a0234.5"),
        (r"it is $2~\frac{1}{2}$", "2 1/2"),
        ("the 3 1/25", "3 1/25"),
        ("2024 100", "100"),
        (r"2,\,100", "100"),
        (r"one\\ 250", "250"),
    ],
)
def test_last_number_ends_where_its_digits_do(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        (r"(1\,000,5) 7,250", "(1000,5) 7,250"),
        (r"\{1,200\} 8,00,000", r"\{1,200\} 800000"),
        ("x_1 7'250 a^{2}", "x_1 7250 a^{2}"),
        (r"\log_2\,100", "\\log_2\u00a0100"),
        ("7_25 1_000,5", "7_25 1000,5"),
    ],
)
def test_groups_in_an_expression_are_joined(text, joined):
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


NUMBERS = st.builds(
    lambda whole, places: f"{whole}{places}", st.integers(-(10**12), 10**12), st.sampled_from(["", ".25"])
)


@given(st.data(), NUMBERS, st.integers(1, 10**6))
def test_any_spelling_of_a_number_is_that_number(data, number, change):
    completion = data.draw(st.sampled_from(["{}", r"so \boxed{{{}}}", "It makes {} \u20ac"])).format(
        data.draw(spellings(number))
    )
    whole, point, places = number.partition(".")
    for other, reward in ((number, 1.0), (f"{int(whole) + change}{point}{places}", 0.0)):
        answer = data.draw(st.sampled_from(["{}", r"\boxed{{{}}}", "Thus.\n#### {}"])).format(
            data.draw(spellings(other))
        )
        assert exact(completion, answer, {}) == gsm8k(completion, answer, {}) == reward


@given(st.data(), st.integers(1, 10**7), st.integers(1, 10**7), st.sampled_from(["", "-"]))
def test_any_spelling_of_a_fraction_is_that_fraction(data, above, below, sign):
    pytest.importorskip("math_verify")
    parts = [data.draw(spellings(str(part), MARKS)) for part in (above, below)]
    completion = rf"\boxed{{{sign}\frac{{{parts[0]}}}{{{parts[1]}}}}}"
    for factor, reward in ((1, 1.0), (2, 0.0)):
        answer = f"{sign}{data.draw(spellings(str(2 * above * factor), MARKS))}/{2 * below}"
        assert gsm8k(completion, answer, {}) == math(completion, answer, {}) == reward
