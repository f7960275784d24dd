# SPDX-License-Identifier: Apache-2.0
"""Dividing arguments: every type, 1 to 20 items over 1 to 5 shards."""

import pickle
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import ShardError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.trainer.port import Pending, Ref
from dlrover.python.rl.trainer.shard import Rows, Shard, divide, join, row_count, take_rows, unwrap

Point = namedtuple("Point", "x y z")


def batch_of(items):
    tokens = Ragged.from_rows([[item] * (item + 1) for item in items], dtype=np.int64)
    return Batch({"x": np.array(items), "tokens": tokens, "text": [str(item) for item in items]})


MAKE = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "torch": torch.tensor,
    "batch": batch_of,
}


def items_of(value):
    """The items that a divided value was made from."""
    if isinstance(value, Batch):
        return value.dense("x").tolist()
    return value.tolist() if hasattr(value, "tolist") else list(value)


def even_sizes(rows, shards):
    return sorted([len(part) for part in np.array_split(np.arange(rows), shards)], reverse=True)


SCALARS = [7, 1.5, True, None, "abc", b"abc", np.array(3.0), np.float32(3.0), torch.tensor(3.0)]
SEVERAL = [Point(1, 2, 3), {"a": [1, 2, 3]}, range(3), {1, 2, 3}, (item for item in "abc"), SimpleNamespace(shape=(3,))]
CONFIGS = [OmegaConf.create({"shape": [1, 2], "lr": 1}), OmegaConf.create([1, 2, 3])]


@pytest.mark.parametrize("value", [*SCALARS, *SEVERAL, *CONFIGS], ids=lambda value: type(value).__name__)
def test_other_values_go_to_every_member_whole(value):
    assert divide(value, 3, True, "x") is None
    assert unwrap(value) is value


class Proto:
    """Rows of another library's, divided as verl's are: equally, or not at all."""

    def __init__(self, rows):
        self.rows = rows

    def chunk(self, count):
        assert len(self.rows) % count == 0, f"{len(self.rows)} rows by {count}"
        return [Proto(list(part)) for part in np.array_split(self.rows, count)]


def test_shard_divides_values_sent_whole_without_it():
    assert divide(Shard([1, 2, 3]), 3, False, "x") == [[1], [2], [3]]
    assert (divide([1, 2], 2, True, "x"), divide((1, 2), 2, True, "x")) == ([1, 2], [(1,), (2,)])
    assert divide(Shard(range(5)), 2, True, "x") == [range(3), range(3, 5)]
    assert [part.rows for part in divide(Shard(Proto([1, 2, 3, 4])), 2, False, "x")] == [[1, 2], [3, 4]]
    assert divide(Proto([1, 2]), 2, True, "x") is None
    first, second = divide(Shard({"x": np.arange(5), "t": list("abcde")}), 2, True, "x")
    assert first["x"].tolist() == [0, 1, 2]
    assert (first["t"], second["t"]) == (["a", "b", "c"], ["d", "e"])
    tokens = Shard(batch_of([0, 0, 0, 11]), by="tokens")
    assert [len(part) for part in divide(tokens, 2, True, "x")] == [3, 1]


LIST = [1, 2, 3]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ([], "has 0 rows, too few to split over 2 shards; wrap it in Replicate"),
        (Batch({"x": np.zeros(0)}), "has 0 rows, too few to split over 2 shards; wrap it in Replicate"),
        *[
            (Shard(value), "x .*has no rows to split; wrap it in Replicate")
            for value in (None, 7, "abc", Point(1, 2, 3), np.array(3.0), torch.tensor(3.0), {1, 2})
        ],
        (Shard(Proto(LIST)), "x is Proto, which cannot be divided by 2: 3 rows by 2"),
        (Shard(SimpleNamespace(chunk=lambda count: ["all"])), r"x is SimpleNamespace, whose chunk\(2\) gave 1 parts"),
        (Shard({"x": [1, 2], "y": LIST}), "columns of different lengths"),
        (Shard({"x": [1, 2], "lr": 0.1}), "without rows to split: .'lr'."),
        (Shard({}), "without rows to split: it is empty"),
        (Shard([1, 2], by="tokens"), "only a Batch can be split by 'tokens'"),
        (Shard(batch_of([1, 2]), by="token"), "did you mean 'tokens'"),
        (Shard(Batch({"x": np.arange(3)}), by="tokens"), "no column 'tokens'"),
        (Shard(LIST, rows=[0, -1]), "x has 3 rows, and row -1 was chosen"),
        (Shard(LIST, rows=[[0], [1], [2]]), "x has rows chosen for 3 shards, not for 2"),
        (Shard(LIST, rows=[2]), "x has 1 row, too few"),
        (Shard({"a": [1, 2]}, rows=[0, 1]), "x is dict, which has no rows to choose from"),
        (Shard(MAKE["batch"]([1, 2]), by="tokens", rows=[0, 1]), "has its rows chosen; only a whole Batch"),
    ],
)
def test_impossible_division_is_refused(argument, message):
    with pytest.raises(ShardError, match=message):
        divide(argument, 2, True, "x")


def test_slice_of_a_tensor_does_not_carry_its_whole_storage():
    tensor = torch.zeros(1000, 100)
    parts = divide(tensor, 4, True, "x")
    assert all(part.untyped_storage().nbytes() == tensor.untyped_storage().nbytes() // 4 for part in parts)
    assert len(pickle.dumps(parts[0])) < 110_000


def test_slice_of_a_batch_does_not_carry_its_whole_buffer():
    batch = Batch({"tokens": Ragged.from_rows([[row] * 1000 for row in range(100)])})
    parts = divide(batch, 4, True, "x")
    assert len(pickle.dumps(parts[0], protocol=5)) < len(pickle.dumps(batch, protocol=5)) / 3.5


SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=5)
KINDS = st.sampled_from(["list", "tuple", "numpy", "torch", "batch"])


def parts_of(sizes, kind):
    ends = np.cumsum(sizes).tolist()
    return [MAKE[kind](list(range(end - size, end))) for end, size in zip(ends, sizes, strict=True)]


@given(SIZES, st.integers(1, 5), KINDS)
def test_pending_rows_are_divided_again_from_the_needed_parts(sizes, shards, kind):
    total, parts = sum(sizes), parts_of(sizes, kind)
    if total < shards:
        with pytest.raises(ShardError, match=f"{total} rows, too few"):
            take_rows(Rows(range(len(parts)), 0, shards), sizes, parts.__getitem__)
        return
    got = []
    for index in range(shards):
        fetched = []

        def fetch(part, fetched=fetched):
            fetched.append(part)
            return parts[part]

        taken = take_rows(Rows(range(len(parts)), index, shards), sizes, fetch)
        rows = items_of(taken)
        got.append(rows)
        assert type(taken) is type(parts[0])
        assert fetched == [part for part, value in enumerate(parts) if set(items_of(value)) & set(rows)]
    assert [row for rows in got for row in rows] == list(range(total))
    assert [len(rows) for rows in got] == even_sizes(total, shards)


@given(SIZES, st.integers(1, 5), KINDS, st.data())
def test_chosen_rows_come_in_their_order_from_the_needed_parts(sizes, shards, kind, data):
    total, parts = sum(sizes), parts_of(sizes, kind)
    order = data.draw(st.permutations(range(total)))[: data.draw(st.integers(0, total))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), min_size=shards - 1, max_size=shards - 1)))
    chosen = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    pending = Pending([Ref(None, token) for token in range(len(parts))])
    for rows, wanted in zip(divide(Shard(pending, rows=chosen), shards, True, "x"), chosen, strict=True):
        fetched = []

        def fetch(ref, fetched=fetched):
            fetched.append(ref.token)
            return parts[ref.token]

        taken = take_rows(rows, sizes, fetch)
        assert items_of(taken) == wanted
        assert type(taken) is type(parts[0])
        if wanted:
            assert fetched == [part for part, value in enumerate(parts) if set(items_of(value)) & set(wanted)]
    whole = join(parts)
    assert [items_of(part) for part in divide(Shard(whole, rows=chosen), shards, True, "x")] == chosen
    if len(order) >= shards:
        even = divide(Shard(whole, rows=order), shards, True, "x")
        assert [row for part in even for row in items_of(part)] == order
        assert [len(part) for part in even] == even_sizes(len(order), shards)


def test_pending_results_without_rows_are_refused():
    with pytest.raises(ShardError, match="needs results with rows"):
        take_rows(Rows((0, 1), 0, 2), [3, None], lambda part: None)


def test_tensors_are_joined_along_the_first_axis():
    parts = [torch.arange(6).reshape(3, 2), torch.arange(6, 8).reshape(1, 2)]
    assert torch.equal(join(parts), torch.cat(parts))
    assert join([torch.tensor([1, 0]), torch.tensor([0.5, 0.25])]).tolist() == [1.0, 0.0, 0.5, 0.25]
    with pytest.raises(ShardError, match="parts of type object cannot be joined"):
        join([object(), object()])
    with pytest.raises(ShardError, match="parts that are tensors cannot be joined: Sizes of tensors must match"):
        join([torch.ones(2, 3), torch.ones(2, 1)])


def test_row_count_of_a_value_without_rows_is_none():
    assert [row_count(value) for value in (Point(1, 2, 3), "ab", np.array(1), {})] == [None] * 4
    assert [row_count(value) for value in ([1, 2], (), np.zeros((3, 2)))] == [2, 0, 3]
