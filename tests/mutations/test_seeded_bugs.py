# SPDX-License-Identifier: Apache-2.0
"""Do the tests of the trainer, the hosts, the stores and the executor see what they are meant to see?"""

import pytest
from seeded_bugs import BUGS, TESTS
from trying import REPOSITORY, copies, failure_of, files_for, path_of, try_all

SHARE = 0.95


@pytest.mark.parametrize("name", BUGS)
def test_a_seeded_bug_changes_the_code(name):
    source = path_of(BUGS[name]).read_text(encoding="utf-8")
    changed = BUGS[name].apply(source)
    assert changed != source
    compile(changed, BUGS[name].file, "exec")


def test_the_tests_of_each_file_are_there():
    assert {bug.file for bug in BUGS.values()} <= TESTS.keys()
    assert all((REPOSITORY / test).is_file() for file in TESTS for test in files_for(file))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_without_a_bug_nothing_fails_in_a_minute():
    with copies(1) as folders:
        folder = folders.get()
        failures = {file: failure_of(files_for(file), folder) for file in TESTS}
    assert set(failures.values()) == {""}, failures


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_at_least_95_of_100_seeded_bugs_are_caught():
    outcomes = try_all(list(BUGS))
    missed = [name for name, failure in outcomes.items() if not failure]
    assert len(outcomes) >= 100
    assert len(missed) <= (1.0 - SHARE) * len(outcomes), f"{len(missed)} of {len(outcomes)} were missed: {missed}"
