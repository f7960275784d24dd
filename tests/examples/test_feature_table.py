"""``docs/features.md`` says which tests show which feature."""

from tests.feature_table import ABSENT, PAGE, features, page, shown


def test_every_feature_has_a_test():
    names, tests = features(), shown()
    assert list(names) == list(range(1, 151))
    assert set(names) - set(tests) == set(ABSENT)
    assert set(tests) <= set(names), "numbers of no feature"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.feature_table"
