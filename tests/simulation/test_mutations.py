# SPDX-License-Identifier: Apache-2.0
"""Is the proof worth anything? Seeded bugs must be seen."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import sim_modules
import sim_specs
from mutations import MUTATIONS
from sim_mutants import caught_by

LEAST, SHARE = 30, 0.95


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_seeded_bug_changes_the_code(name):
    mutation = MUTATIONS[name]
    source = sim_modules.source_of(mutation.module)
    assert mutation.apply(source) != source


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_least_95_of_100_seeded_bugs_are_caught():
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(MUTATIONS, pool.map(caught_by, MUTATIONS), strict=True))
    missed = [name for name, how in found.items() if not how]
    assert len(found) >= LEAST
    assert len(missed) <= (1.0 - SHARE) * len(found), f"{len(missed)} of {len(found)} seeded bugs were missed: {missed}"


def test_without_a_seeded_bug_nothing_is_caught():
    assert sim_specs.broken_by(sim_modules.load_all()) == ""
