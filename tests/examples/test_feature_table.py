"""``docs/features.md`` says which tests show which feature."""

from tests.feature_table import ABSENT, PAGE, features, page, shown


def test_every_feature_has_a_test():
    assert list(features()) == list(range(1, 151))
    assert [f"{number} {name}" for number, name in features().items() if number not in shown()] == [
        f"{number} {features()[number]}" for number in ABSENT
    ]
    assert set(shown()) <= set(features()), "numbers of no feature"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.feature_table"
