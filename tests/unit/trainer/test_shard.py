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
from dlrover.python.rl.trainer.shard import Replicate, Rows, Shard, divide, join, row_count, take_rows, unwrap

Point = namedtuple("Point", "x y z")


def batch_of(items):
    tokens = Ragged.from_rows([[item] * (item + 1) for item in items], dtype=np.int64)
    return Batch({"x": np.array(items), "tokens": tokens, "text": [str(item) for item in items]})


MAKE = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "numpy 2-d": lambda items: np.array(items)[:, None] * np.ones((1, 3)),
    "torch": torch.tensor,
    "batch": batch_of,
}


def items_of(value):
    """The items that a divided value was made from."""
    if isinstance(value, Batch):
        return value.dense("x").tolist()
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return value[:, 0].astype(int).tolist()
    return value.tolist() if hasattr(value, "tolist") else list(value)


def even_sizes(rows, shards):
    return sorted([len(part) for part in np.array_split(np.arange(rows), shards)], reverse=True)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("shards", range(1, 6))
def test_rows_are_divided_evenly_and_in_order(kind, shards):
    for rows in range(shards, 21):
        value = MAKE[kind](list(range(rows)))
        parts = divide(Shard(value), shards, True, "x")
        assert all(type(part) is type(value) for part in parts)
        assert [len(part) for part in parts] == even_sizes(rows, shards)
        assert [item for part in parts for item in items_of(part)] == list(range(rows))
        unwrapped = divide(value, shards, True, "x")
        one_each = kind == "list" and rows == shards
        assert list(map(repr, unwrapped)) == list(map(repr, value if one_each else parts)) or kind == "batch"
        assert not one_each or unwrapped == value


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("shards", range(2, 6))
def test_fewer_rows_than_shards_are_refused(kind, shards):
    for rows in range(1, shards):
        value = MAKE[kind](list(range(rows)))
        for argument in (value, Shard(value)):
            with pytest.raises(ShardError, match=f"m: argument 0 has {rows} rows?, too few to split over {shards}"):
                divide(argument, shards, True, "m: argument 0")


@pytest.mark.parametrize(
    "value",
    [
        Point(1, 2, 3),
        {"a": [1, 2, 3]},
        "abc",
        b"abc",
        7,
        1.5,
        True,
        None,
        range(3),
        np.array(3.0),
        np.float32(3.0),
        torch.tensor(3.0),
        {1, 2, 3},
        (item for item in "abc"),
        OmegaConf.create({"shape": [1, 2], "lr": 1}),
        OmegaConf.create([1, 2, 3]),
        SimpleNamespace(shape=(3,)),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_anything_else_goes_to_every_member_whole(value):
    assert divide(value, 3, True, "x") is None
    assert unwrap(value) is value


@pytest.mark.parametrize("kind", MAKE)
def test_replicate_and_auto_shard_off_give_all_of_it(kind):
    value = MAKE[kind]([1, 2, 3])
    assert divide(Replicate(value), 3, True, "x") is None
    assert unwrap(Replicate(value)) is value
    assert divide(value, 3, False, "x") is None


def test_shard_divides_even_where_auto_shard_is_off():
    assert divide(Shard([1, 2, 3]), 3, False, "x") == [[1], [2], [3]]


@pytest.mark.parametrize("value", [[], (), np.zeros(0), torch.zeros(0, 2), Batch({"x": np.zeros(0)})])
def test_what_is_empty_is_too_short(value):
    with pytest.raises(ShardError, match="has 0 rows, too few to split over 2 shards; wrap it in Replicate"):
        divide(value, 2, True, "x")


def test_a_range_is_divided_when_asked():
    assert divide(Shard(range(5)), 2, True, "x") == [range(3), range(3, 5)]


@pytest.mark.parametrize("value", [None, 7, "abc", Point(1, 2, 3), np.array(3.0), torch.tensor(3.0), {1, 2}])
def test_shard_of_what_has_no_rows_is_refused_with_the_way_out(value):
    with pytest.raises(ShardError, match=r"ACTOR.update: argument 'x' .*has no rows to split; wrap it in Replicate"):
        divide(Shard(value), 2, True, "ACTOR.update: argument 'x'")


def test_a_dict_is_divided_by_columns_inside_shard():
    columns = {"x": np.arange(5), "t": list("abcde")}
    first, second = divide(Shard(columns), 2, True, "x")
    assert first["x"].tolist() == [0, 1, 2]
    assert (first["t"], second["t"]) == (["a", "b", "c"], ["d", "e"])


class Proto:
    """Rows of another library's, divided as verl's are: equally, or not at all."""

    def __init__(self, rows):
        self.rows = rows

    def chunk(self, count):
        assert len(self.rows) % count == 0, f"{len(self.rows)} rows by {count}"
        return [Proto(list(part)) for part in np.array_split(self.rows, count)]


def test_what_divides_itself_is_asked_to_inside_shard():
    proto = Proto([1, 2, 3, 4])
    assert [part.rows for part in divide(Shard(proto), 2, False, "x")] == [[1, 2], [3, 4]]
    assert divide(proto, 2, True, "x") is None


def test_what_does_not_divide_itself_that_often_is_refused():
    with pytest.raises(ShardError, match="x is Proto, which cannot be divided by 3: 4 rows by 3"):
        divide(Shard(Proto([1, 2, 3, 4])), 3, True, "x")
    with pytest.raises(ShardError, match=r"x is SimpleNamespace, whose chunk\(2\) gave 1 parts"):
        divide(Shard(SimpleNamespace(chunk=lambda count: ["all"])), 2, True, "x")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"x": [1, 2], "y": [1, 2, 3]}, "columns of different lengths"),
        ({"x": [1, 2], "lr": 0.1}, "without rows to split: .'lr'."),
        ({}, "without rows to split: it is empty"),
    ],
)
def test_a_dict_that_is_no_table_is_refused(columns, said):
    with pytest.raises(ShardError, match=said):
        divide(Shard(columns), 2, True, "x")


def test_a_batch_can_be_divided_by_tokens():
    batch = batch_of([0, 0, 0, 11])
    assert [len(part) for part in divide(Shard(batch, by="tokens"), 2, True, "x")] == [3, 1]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (Shard([1, 2], by="tokens"), "only a Batch can be split by 'tokens'"),
        (Shard({"x": [1, 2]}, by="tokens"), "only a Batch can be split by 'tokens'"),
        (Shard(batch_of([1, 2]), by="token"), "did you mean 'tokens'"),
        (Shard(Batch({"x": np.arange(3)}), by="tokens"), "no column 'tokens'"),
    ],
)
def test_a_division_that_is_not_possible_is_refused(argument, said):
    with pytest.raises(ShardError, match=said):
        divide(argument, 2, True, "x")


def test_a_slice_of_a_tensor_does_not_carry_its_whole_storage():
    tensor = torch.zeros(1000, 100)
    parts = divide(tensor, 4, True, "x")
    assert all(part.untyped_storage().nbytes() == tensor.untyped_storage().nbytes() // 4 for part in parts)
    assert len(pickle.dumps(parts[0])) < 110_000


def test_a_slice_of_a_batch_does_not_carry_its_whole_buffer():
    batch = Batch({"tokens": Ragged.from_rows([[row] * 1000 for row in range(100)])})
    parts = divide(batch, 4, True, "x")
    assert len(pickle.dumps(parts[0], protocol=5)) < len(pickle.dumps(batch, protocol=5)) / 3.5


# -- pending results --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from(["list", "tuple", "numpy", "torch", "batch"]),
)
def test_pending_rows_are_divided_anew_and_only_needed_parts_are_fetched(sizes, shards, kind):
    total = sum(sizes)
    numbers = iter(range(total))
    parts = [MAKE[kind]([next(numbers) for _ in range(size)]) for size in sizes]
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


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from(["list", "tuple", "numpy", "torch", "batch"]),
    st.data(),
)
def test_chosen_rows_of_pending_results_come_in_their_order_from_the_parts_that_hold_them(sizes, shards, kind, data):
    total = sum(sizes)
    numbers = iter(range(total))
    parts = [MAKE[kind]([next(numbers) for _ in range(size)]) for size in sizes]
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


@pytest.mark.parametrize(
    ("shard", "what"),
    [
        (Shard([1, 2, 3], rows=[0, 3]), "x has 3 rows, and row 3 was chosen"),
        (Shard([1, 2, 3], rows=[0, -1]), "x has 3 rows, and row -1 was chosen"),
        (Shard([1, 2, 3], rows=[[0], [1], [2]]), "x has rows chosen for 3 shards, not for 2"),
        (Shard([1, 2, 3], rows=[2]), "x has 1 row, too few"),
        (Shard({"a": [1, 2]}, rows=[0, 1]), "x is dict, which has no rows to choose from"),
        (Shard(MAKE["batch"]([1, 2]), by="tokens", rows=[0, 1]), "has its rows chosen; only a whole Batch"),
    ],
)
def test_rows_that_cannot_be_chosen_are_refused(shard, what):
    with pytest.raises(ShardError, match=what):
        divide(shard, 2, True, "x")


def test_pending_results_without_rows_are_refused():
    with pytest.raises(ShardError, match="needs results with rows"):
        take_rows(Rows((0, 1), 0, 2), [3, None], lambda part: None)


def test_parts_that_cannot_be_joined_are_refused():
    class Odd:
        shape = (2,)

        def __getitem__(self, rows):
            return self

    with pytest.raises(ShardError, match="parts of type Odd cannot be joined"):
        join([Odd(), Odd()])


def test_tensors_are_joined_along_the_first_axis():
    parts = [torch.arange(6).reshape(3, 2), torch.arange(6, 8).reshape(1, 2)]
    assert torch.equal(join(parts), torch.cat(parts))
    assert join([torch.tensor([1, 0]), torch.tensor([0.5, 0.25])]).tolist() == [1.0, 0.0, 0.5, 0.25]
    with pytest.raises(ShardError, match="parts that are tensors cannot be joined: Sizes of tensors must match"):
        join([torch.ones(2, 3), torch.ones(2, 1)])


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ([1, 2], 2),
        ((), 0),
        (Point(1, 2, 3), None),
        ("ab", None),
        (np.zeros((3, 2)), 3),
        (np.array(1), None),
        ({}, None),
    ],
)
def test_the_rows_of_a_result_are_counted_where_it_has_some(value, rows):
    assert row_count(value) == rows
