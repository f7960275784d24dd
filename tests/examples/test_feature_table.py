# SPDX-License-Identifier: Apache-2.0
"""``docs/contributing/features.md`` lists the tests that show each feature."""

from tests.feature_table import ABSENT, PAGE, QUICKLY, SECTIONS, features, page, shown


def test_every_feature_has_a_test():
    names, tests = features(), shown()
    assert list(names) == list(range(1, 151))
    assert set(names) - set(tests) == set(ABSENT)
    assert set(tests) <= set(names), "numbers of no feature"


def test_what_is_to_be_shown_quickly_has_a_test_that_is_not_slow():
    quick = shown(slow=False)
    for title, (first, *names) in SECTIONS.items():
        if title[0] in QUICKLY:
            slow = [number for number in range(first, first + len(names)) if number not in quick]
            assert set(slow) <= set(ABSENT), title


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m tests.feature_table"
