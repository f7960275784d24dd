# SPDX-License-Identifier: Apache-2.0
"""One step's rows as several optimizer steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import RowsDiffer, Scope
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import UpdateResult
from dlrover.python.rl.recipe.base.updates import UpdatePlan, assign_updates, average_metrics, join_columns, run_updates


def weighted(*weights, **columns):
    return Batch({"weight": np.array(weights, dtype=np.float32), "row": np.arange(len(weights)), **columns})


def trained_on(rows, updates, epochs=1):
    """The rows of each optimizer step."""
    dealt, updates = assign_updates(rows, updates)
    return run_updates(dealt, UpdatePlan(1.0, updates, epochs), lambda batch: batch.dense("row").tolist())


@pytest.mark.feature(63)
def test_five_rows_in_four_updates_are_all_used_once():
    steps = trained_on(weighted(*[0.2] * 5), updates=4)
    assert [len(rows) for rows in steps] == [2, 1, 1, 1]
    assert sorted(sum(steps, [])) == [0, 1, 2, 3, 4]


@pytest.mark.feature(63)
def test_epochs_use_all_of_them_as_often_as_there_are():
    steps = trained_on(weighted(*[0.2] * 5), updates=2, epochs=3)
    assert steps == [[0, 2, 4], [1, 3]] * 3


def test_there_are_not_more_updates_than_samples():
    assert trained_on(weighted(0.5, 0.5), updates=4) == [[0], [1]]


def test_rows_that_count_nowhere_are_in_no_update():
    assert trained_on(weighted(0.0, 0.5, 0.0, 0.5), updates=2) == [[1], [3]]
    assert trained_on(weighted(0.0, 0.5, 0.0, 0.5), updates=1) == [[1, 3]]


def test_one_update_of_all_rows_copies_nothing():
    dealt, updates = assign_updates(weighted(1.0, 1.0), 1)
    (step,) = run_updates(dealt, UpdatePlan(1.0, updates), lambda batch: batch)
    assert step is dealt


def test_a_sample_of_several_rows_stays_whole():
    rows = weighted(*[0.2] * 6, trajectory=np.array([7, 3, 7, 5, 3, 9]))
    assert trained_on(rows, updates=2) == [[0, 2, 3], [1, 4, 5]]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 4))
def test_members_have_about_as_many_rows_in_each_update_and_together_all_of_it(counts, updates, members):
    rows = weighted(*[0.1 * count for count in counts])
    if not any(counts):
        return
    dealt, updates = assign_updates(rows, updates)
    whole = [set(np.flatnonzero(dealt.dense("update") == number).tolist()) for number in range(updates)]
    members = min(members, len(rows))
    parts = [[] for _ in range(updates)]
    for part in dealt.split(members):
        seen = run_updates(part, UpdatePlan(1.0, updates), lambda batch: batch.dense("row").tolist())
        assert max(map(len, seen)) - min(map(len, seen)) <= 1
        for number, found in enumerate(seen):
            parts[number] += found
    assert [set(found) for found in parts] == whole
    assert set.union(*whole) == {row for row, count in enumerate(counts) if count}


def test_the_mean_of_the_updates_weighs_each_row_as_the_whole_step_does():
    rows = weighted(0.1, 0.2, 0.3, 0.15, 0.25)
    dealt, updates = assign_updates(rows, 3)
    assert updates == 3
    np.testing.assert_allclose(dealt.dense("weight") / 3, rows.dense("weight"), rtol=1e-6)


NAN = float("nan")


def test_figures_are_means_over_the_updates():
    steps = [UpdateResult(1.0, 2.0, 0.1, {"kl": 0.0}), UpdateResult(3.0, 4.0, 0.2, {"kl": 0.5})]
    assert average_metrics(steps) == {"loss": 2.0, "grad_norm": 3.0, "lr": 0.2, "kl": 0.25, "updates/skipped": 0.0}


def test_figures_of_tokens_are_means_by_their_weights():
    sums = {"ratio": 8.0, "clip_low": 1.0, "weight": 4.0, "memory/peak_gib": 3.0}
    found = average_metrics([UpdateResult(1.0, 2.0, 0.1, sums), UpdateResult(1.0, 2.0, 0.1, sums | {"ratio": 4.0})])
    assert {name: found[name] for name in sums} == {
        "ratio": 1.5,
        "clip_low": 0.25,
        "weight": 4.0,
        "memory/peak_gib": 3.0,
    }


def test_skipped_updates_are_counted_and_left_out_of_the_means():
    taken, skipped = UpdateResult(1.0, 2.0, 0.1, {"kl": 0.5}), UpdateResult(NAN, NAN, 0.2, {"kl": NAN}, skipped=True)
    means = {"loss": 1.0, "grad_norm": 2.0, "kl": 0.5, "lr": 0.2, "updates/skipped": 2.0}
    assert average_metrics([skipped, taken, skipped]) == means
    none = average_metrics([skipped])
    assert (none["updates/skipped"], none["lr"], np.isnan(none["loss"])) == (1.0, 0.2, True)


def tokens(*rows):
    return Ragged.from_rows(rows, dtype=np.int64)


def drawn(**columns):
    return Batch({"tokens": tokens([1, 2], [3]), "action_mask": tokens([0, 1], [1]), "text": ["a", "b"], **columns})


def test_what_several_roles_say_comes_side_by_side():
    one, two = (Batch({"told": Ragged.from_rows(rows, dtype=np.float32)}) for rows in ([[1, 2], [3]], [[4, 5], [6]]))
    assert join_columns(drawn(), Batch({"weight": np.ones(2)}), [one]).ragged("told") is one.ragged("told")
    both = join_columns(drawn(), Batch({"weight": np.ones(2)}), [one, two])
    assert both.ragged("told").values.tolist() == [[1, 4], [2, 5], [3, 6]]
    again = join_columns(drawn(), Batch({}), [Batch({"told": both["told"]}), one])
    assert again.ragged("told").values.tolist() == [[1, 4, 1], [2, 5, 2], [3, 6, 3]]
    assert set(both.columns) == {"tokens", "action_mask", "weight", "told"}


def test_samples_that_were_drawn_anew_after_their_judgement_are_not_trained_on():
    digests = np.array([11, 22], dtype=np.uint64)
    assert len(join_columns(drawn(digest=digests), Batch({"digest": digests}))) == 2
    assert len(join_columns(drawn(), Batch({"digest": digests}))) == 2
    with pytest.raises(RowsDiffer, match=r"rows \[1\] of 2 are not the samples that were scored") as caught:
        join_columns(drawn(digest=digests), Batch({"digest": np.array([11, 23], dtype=np.uint64)}))
    assert (caught.value.retryable, caught.value.restarts) == (True, Scope.TRAINER)
