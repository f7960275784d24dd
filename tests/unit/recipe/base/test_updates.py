# SPDX-License-Identifier: Apache-2.0
"""One step's rows as several optimizer steps, and errors that name their samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import EngineError, InvocationError, NonFiniteUpdate, RowsDiffer, Scope
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import UpdateResult
from dlrover.python.rl.recipe.base.updates import (
    UpdatePlan,
    annotate_errors_with_samples,
    assign_updates,
    average_metrics,
    find_nonfinite_rows,
    join_columns,
    run_updates,
)


def weighted(*weights, **columns):
    return Batch({"weight": np.array(weights, dtype=np.float32), "row": np.arange(len(weights)), **columns})


def trained_on(rows, updates, epochs=1):
    """The rows of each optimizer step."""
    dealt, updates = assign_updates(rows, updates)
    return run_updates(dealt, UpdatePlan(1.0, updates, epochs), lambda batch: batch.dense("row").tolist())


@pytest.mark.feature(63)
@pytest.mark.parametrize(
    ("rows", "updates", "epochs", "steps"),
    [
        (weighted(*[0.2] * 5), 4, 1, [[0, 4], [1], [2], [3]]),
        (weighted(*[0.2] * 5), 2, 3, [[0, 2, 4], [1, 3]] * 3),
        (weighted(0.5, 0.5), 4, 1, [[0], [1]]),
        (weighted(0.0, 0.5, 0.0, 0.5), 2, 1, [[1], [3]]),
        (weighted(0.0, 0.5, 0.0, 0.5), 1, 1, [[1, 3]]),
        (weighted(*[0.2] * 6, trajectory=np.array([7, 3, 7, 5, 3, 9])), 2, 1, [[0, 2, 3], [1, 4, 5]]),
    ],
    ids=["all once", "in each epoch", "no more than samples", "without weight 0", "in one", "samples stay whole"],
)
def test_updates_of_a_step_take_each_row_once(rows, updates, epochs, steps):
    assert trained_on(rows, updates, epochs) == steps


def test_one_update_of_all_rows_copies_nothing():
    rows, updates = assign_updates(weighted(1.0, 1.0), 1)
    (step,) = run_updates(rows, UpdatePlan(1.0, updates), lambda batch: batch)
    assert step is rows


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 4))
def test_members_have_about_as_many_rows_in_each_update(counts, updates, members):
    rows = weighted(*[0.1 * count for count in counts])
    if not any(counts):
        return
    dealt, updates = assign_updates(rows, updates)
    whole = [set(np.flatnonzero(dealt.dense("update") == number).tolist()) for number in range(updates)]
    parts = [set() for _ in range(updates)]
    for part in dealt.split(min(members, len(rows))):
        seen = run_updates(part, UpdatePlan(1.0, updates), lambda batch: batch.dense("row").tolist())
        assert max(map(len, seen)) - min(map(len, seen)) <= 1
        for together, mine in zip(parts, seen, strict=False):
            together.update(mine)
    assert parts == whole
    assert set.union(*whole) == {row for row, count in enumerate(counts) if count}


def test_mean_of_the_updates_weighs_rows_like_the_step():
    rows = weighted(0.1, 0.2, 0.3, 0.15, 0.25)
    dealt, updates = assign_updates(rows, 3)
    assert updates == 3
    np.testing.assert_allclose(dealt.dense("weight") / 3, rows.dense("weight"), rtol=1e-6)


NAN = float("nan")


def test_metrics_are_means_over_the_updates():
    steps = [UpdateResult(1.0, 2.0, 0.1, {"kl": 0.0}), UpdateResult(3.0, 4.0, 0.2, {"kl": 0.5})]
    assert average_metrics(steps) == {"loss": 2.0, "grad_norm": 3.0, "lr": 0.2, "kl": 0.25, "updates/skipped": 0.0}
    sums = {"ratio": 8.0, "clip_low": 1.0, "weight": 4.0, "memory/peak_gib": 3.0}
    metrics = average_metrics([UpdateResult(1.0, 2.0, 0.1, sums), UpdateResult(1.0, 2.0, 0.1, sums | {"ratio": 4.0})])
    by_weight = {"ratio": 1.5, "clip_low": 0.25, "weight": 4.0, "memory/peak_gib": 3.0}
    assert {name: metrics[name] for name in sums} == by_weight


def test_skipped_updates_are_counted_and_left_out_of_the_means():
    taken, skipped = UpdateResult(1.0, 2.0, 0.1, {"kl": 0.5}), UpdateResult(NAN, NAN, 0.2, {"kl": NAN}, skipped=True)
    means = {"loss": 1.0, "grad_norm": 2.0, "kl": 0.5, "lr": 0.2, "updates/skipped": 2.0}
    assert average_metrics([skipped, taken, skipped]) == means
    none = average_metrics([skipped])
    assert (none["updates/skipped"], none["lr"], np.isnan(none["loss"])) == (1.0, 0.2, True)


def tokens(*rows):
    return Ragged.from_rows(rows, dtype=np.int64)


def samples(**columns):
    return Batch({"tokens": tokens([1, 2], [3]), "action_mask": tokens([0, 1], [1]), "text": ["a", "b"], **columns})


def test_columns_of_several_roles_are_stacked():
    one, two = (Batch({"told": Ragged.from_rows(rows, dtype=np.float32)}) for rows in ([[1, 2], [3]], [[4, 5], [6]]))
    assert join_columns(samples(), Batch({"weight": np.ones(2)}), [one]).ragged("told") is one.ragged("told")
    both = join_columns(samples(), Batch({"weight": np.ones(2)}), [one, two])
    assert both.ragged("told").values.tolist() == [[1, 4], [2, 5], [3, 6]]
    again = join_columns(samples(), Batch({}), [Batch({"told": both["told"]}), one])
    assert again.ragged("told").values.tolist() == [[1, 4, 1], [2, 5, 2], [3, 6, 3]]
    assert set(both.columns) == {"tokens", "action_mask", "weight", "told"}


def test_samples_drawn_again_after_scoring_are_refused():
    digests = np.array([11, 22], dtype=np.uint64)
    assert len(join_columns(samples(digest=digests), Batch({"digest": digests}))) == 2
    assert len(join_columns(samples(), Batch({"digest": digests}))) == 2
    with pytest.raises(RowsDiffer, match=r"rows \[1\] of 2 are not the samples that were scored") as caught:
        join_columns(samples(digest=digests), Batch({"digest": np.array([11, 23], dtype=np.uint64)}))
    assert (caught.value.retryable, caught.value.restarts) == (True, Scope.TRAINER)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ({"advantage": np.array([1.0, NAN, 2.0])}, [1]),
        ({"advantage": np.array([-np.inf, 0.0, np.inf])}, [0, 2]),
        ({"logprobs": Ragged.from_rows([np.array([0.0, NAN]), np.zeros(1), np.array([-np.inf, 1.0, 2.0])])}, [0, 2]),
        ({"stacked": np.array([[0.0, NAN], [0.0, 1.0], [NAN, NAN]])}, [0, 2]),
        ({"text": ["nan", "inf", ""]}, []),
        ({"count": np.array([1, 2, 3])}, []),
    ],
)
def test_row_with_a_nonfinite_value_is_found(column, expected):
    rows = Batch({"tokens": tokens([1, 2], [3], [4, 5, 6]), **column})
    assert find_nonfinite_rows(rows, np.zeros(6)) == expected
    assert find_nonfinite_rows(rows, np.array([0, 0, np.inf, 0, 0, 0])) == sorted({*expected, 1})


SAMPLES = [{"sample": f"sample {index} of prompt 1"} for index in range(10)]


@pytest.mark.parametrize(
    ("offending", "named"),
    [
        (SAMPLES[3:4], "not finite; samples with a value that is not finite: sample 3 of prompt 1 "),
        ([], "each sample alone is finite; samples of the update: sample 0 .* sample 7 of prompt 1 and 2 more "),
    ],
)
def test_refused_update_names_its_samples(offending, named):
    refused = []
    error = InvocationError("failed", role="ACTOR", rank=0, method="update")
    error.original = NonFiniteUpdate("the loss is not finite")
    with (
        pytest.raises(NonFiniteUpdate, match=f"step 5: .*{named}.*refused.jsonl"),
        annotate_errors_with_samples(5, lambda *row: refused.append(row), SAMPLES, lambda: offending),
    ):
        raise error
    assert refused == [(5, offending or SAMPLES)]


@pytest.mark.parametrize("original", [None, EngineError("out of memory")])
def test_other_error_of_an_update_names_no_samples(original):
    error = InvocationError("failed", role="ACTOR", rank=0, method="update")
    error.original = original
    with pytest.raises(InvocationError) as caught, annotate_errors_with_samples(5, None, SAMPLES, lambda: SAMPLES):
        raise error
    assert caught.value is error
