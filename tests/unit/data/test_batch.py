# SPDX-License-Identifier: Apache-2.0
"""Ragged rows and columnar batches."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch, Ragged, even_cuts, token_cuts

row_lists = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=6), max_size=8)


def as_lists(ragged: Ragged) -> list[list[int]]:
    return [row.tolist() for row in ragged]


def make_batch(rows: int) -> Batch:
    tokens = Ragged.from_rows([list(range(index % 4 + 1)) for index in range(rows)], dtype=np.int64)
    return Batch({"id": np.arange(rows), "tokens": tokens, "text": [str(index) for index in range(rows)]})


def same(left: Batch, right: Batch) -> bool:
    return all(
        as_lists(left.ragged(name)) == as_lists(right.ragged(name))
        if isinstance(left[name], Ragged)
        else list(left[name]) == list(right[name])
        for name in left.columns
    )


# -- Ragged ---------------------------------------------------------------------------------------------------------


@given(row_lists)
def test_ragged_gives_its_rows_back(rows):
    ragged = Ragged.from_rows(rows, dtype=np.int64)
    assert as_lists(ragged) == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert len(ragged) == len(rows)


def test_ragged_spread_repeats_and_like_keeps_the_rows():
    ragged = Ragged.from_rows([[1, 2], [], [3]])
    spread = ragged.spread(np.array([0.5, 1.5, 2.5]))
    assert as_lists(ragged.like(spread)) == [[0.5, 0.5], [], [2.5]]
    with pytest.raises(DataError, match="2 values for rows that hold 3"):
        ragged.like(np.zeros(2))


def test_ragged_rows_are_views_and_take_copies():
    ragged = Ragged.from_rows([[1], [2, 3], [], [4]])
    part, taken = ragged.rows(1, 4), ragged.take([3, 1, 3])
    assert (as_lists(part), as_lists(taken)) == ([[2, 3], [], [4]], [[4], [2, 3], [4]])
    assert np.shares_memory(part.values, ragged.values) and not np.shares_memory(taken.values, ragged.values)
    assert ragged[-1].tolist() == [4]
    with pytest.raises(IndexError):
        ragged[4]
    wide = Ragged(np.ones((3, 4), dtype=np.float32), np.array([0, 3, 3]))
    for indices in ([], [1]):
        taken = wide.take(indices)
        assert (taken.values.shape, taken.values.dtype, len(taken)) == ((0, 4), np.float32, len(indices))


# -- Batch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Batch({"a": np.zeros(2), "b": ["x"]}), r"columns differ in length: \{'a': 2, 'b': 1\}"),
        (lambda: Batch({"a": (1, 2)}), "a column is a numpy array, a Ragged or a list"),
        (lambda: make_batch(2)["tokns"], "no column 'tokns'; did you mean 'tokens'"),
        (lambda: make_batch(2).dense("tokens"), "column 'tokens' is Ragged, not ndarray"),
        (lambda: Batch.concat([]), "nothing to concatenate"),
        (lambda: Batch.concat([make_batch(1), make_batch(1).select("id")]), "different columns"),
        (lambda: make_batch(2).split(2, by="token"), "split by 'token'; did you mean 'tokens'"),
        (lambda: make_batch(2).split(3), "2 rows cannot be split into 3 parts"),
    ],
)
def test_batch_refuses_wrong_columns_and_calls(call, message):
    with pytest.raises(DataError, match=message):
        call()


def test_batch_columns_are_added_and_selected():
    batch = make_batch(3)
    assert list(batch.with_columns(reward=np.ones(3)).select("reward", "id").columns) == ["reward", "id"]
    assert "tokens" in batch and "reward" not in batch
    assert [list(batch.row(1)[name]) for name in ("tokens", "text")] == [[0, 1], ["1"]]


def test_batch_rows_share_memory_and_take_does_not():
    batch = make_batch(6)
    part, taken = batch.rows(2, 5), batch.take([2, 3, 4])
    assert same(part, taken)
    assert np.shares_memory(part.dense("id"), batch.dense("id"))
    assert np.shares_memory(part.ragged("tokens").values, batch.ragged("tokens").values)
    assert not np.shares_memory(taken.dense("id"), batch.dense("id"))


@pytest.mark.parametrize("by", ["rows", "tokens"])
@pytest.mark.parametrize("parts", range(1, 6))
def test_batch_split_keeps_rows_in_order(parts, by):
    for rows in range(parts, 21):
        batch = make_batch(rows)
        pieces = batch.split(parts, by=by)
        assert same(Batch.concat(pieces), batch)
        sizes = [len(piece) for piece in pieces]
        assert len(sizes) == parts and all(sizes)
        assert by == "tokens" or (max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True))


def test_token_cuts_even_out_tokens_rather_than_rows():
    assert even_cuts(5, 2) == [0, 3, 5]
    assert token_cuts(np.array([9, 1, 1, 1, 6]), 2) == [0, 1, 5]
    assert token_cuts(np.array([0, 0, 0]), 3) == [0, 1, 2, 3]


def test_batch_pickles_out_of_band_without_a_copy():
    batch = make_batch(50)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    back = pickle.loads(data, buffers=buffers)
    assert same(back, batch)
    assert np.shares_memory(back.dense("id"), batch.dense("id"))
    assert np.shares_memory(back.ragged("tokens").values, batch.ragged("tokens").values)


def test_batch_view_sends_its_own_rows_only():
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(make_batch(400).rows(0, 4).select("tokens"), protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == (1 + 2 + 3 + 4) * 8 + 5 * 8


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_batch_split_by_tokens_keeps_units_together(parts):
    lengths = [1, 9, 2, 2, 5, 1]
    tokens = Ragged.from_rows([np.arange(length) for length in lengths])
    batch = Batch({"tokens": tokens, "unit": np.array([4, 4, 7, 7, -1, -1])})
    shares = batch.split(parts, "tokens")
    assert [unit for share in shares for unit in share.dense("unit").tolist()] == [4, 4, 7, 7, -1, -1]
    seen = [set(share.dense("unit").tolist()) for share in shares]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 3
    assert parts != 2 or [len(share) for share in shares] == [2, 4]
    with pytest.raises(DataError, match="3 units cannot be split into 4 parts"):
        batch.split(4, "tokens")
