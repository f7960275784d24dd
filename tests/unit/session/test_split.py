# SPDX-License-Identifier: Apache-2.0
"""How arguments are split over model replicas, and results put together."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import ShardError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.model.train_module import WHOLE, CallShare
from dlrover.python.rl.session.split import NeedParallel, merge, parts_of, split_arguments
from dlrover.python.rl.trainer.shard import Replicate


def pieces(value, replicas, pad=False):
    return [piece for piece, _ in parts_of(NeedParallel(value, pad), replicas, 1, "x")]


def shares(value, replicas, pad=False):
    return [share for _, share in parts_of(NeedParallel(value, pad), replicas, 1, "x")]


@dataclass(frozen=True)
class ArgumentSet:
    args: tuple
    kwargs: dict
    share: CallShare


def arrange(*args, sizes=(2, 1), **kwargs):
    """What each context rank of each replica gets."""
    values, named, shares, _ = split_arguments(args, kwargs, *sizes, "TRAIN_1.step")

    def part(value, at):
        return value.value if isinstance(value, Replicate) else value.value[at]

    return [
        ArgumentSet(tuple(part(value, at) for value in values), {key: part(v, at) for key, v in named.items()}, share)
        for at, share in enumerate(shares)
    ]


# -- splitting --------------------------------------------------------------------------------------------------------


@pytest.mark.feature(25)
def test_what_is_not_wrapped_goes_to_everybody():
    for each in arrange([1, 2, 3], 0.5, flag=True):
        assert (each.args, each.kwargs, each.share) == (([1, 2, 3], 0.5), {"flag": True}, WHOLE)


@pytest.mark.feature(26)
def test_a_list_is_split_in_order_larger_parts_first():
    assert pieces(list(range(7)), 4) == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.feature(27)
@pytest.mark.parametrize("rows", range(1, 21))
@pytest.mark.parametrize("replicas", range(1, 6))
def test_tensors_arrays_and_lists_are_split_alike(rows, replicas):
    if rows < replicas:
        for value in (torch.arange(rows), np.arange(rows), list(range(rows))):
            with pytest.raises(ShardError, match="pad=True"):
                pieces(value, replicas)
        return
    sizes = [len(part) for part in pieces(list(range(rows)), replicas)]
    assert max(sizes) - min(sizes) <= 1
    for value in (torch.arange(rows), np.arange(rows), tuple(range(rows))):
        assert [len(part) for part in pieces(value, replicas)] == sizes
    assert torch.cat(pieces(torch.arange(rows), replicas)).tolist() == list(range(rows))


@pytest.mark.feature(28)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_parts_of_groups_and_ranks_make_up_the_whole(rows, groups, ranks):
    """One split over all replicas: parts in order give the input, whatever the groups."""
    replicas = groups * ranks
    found = [
        row
        for part, share in parts_of(NeedParallel(list(range(rows)), pad=True), replicas, 1, "x")
        for row in part
        if share.rows
    ]
    assert found == list(range(rows))


@pytest.mark.feature(28)
def test_ten_rows_over_two_groups_of_four():
    assert sum(pieces(list(range(10)), 8), []) == list(range(10))


@pytest.mark.feature(29)
def test_fewer_rows_than_replicas_are_padded_with_rows_that_do_not_count():
    found = parts_of(NeedParallel(["a", "b", "c"], pad=True), 4, 1, "x")
    assert [piece for piece, _ in found] == [["a"], ["b"], ["c"], ["c"]]
    assert [part.rows for _, part in found] == [1, 1, 1, 0]
    assert {part.of for _, part in found} == {3}
    tensors = pieces(torch.arange(2), 3, pad=True)
    assert [piece.tolist() for piece in tensors] == [[0], [1], [1]]


@pytest.mark.feature(29)
def test_without_padding_too_few_rows_are_refused_and_none_in_any_case():
    with pytest.raises(ShardError, match=r"x has 3 rows for 4 model replicas: NeedParallel\(..., pad=True\)"):
        pieces([1, 2, 3], 4)
    for pad in (False, True):
        with pytest.raises(ShardError, match="x has no rows"):
            pieces([], 2, pad)
    with pytest.raises(ShardError, match="no rows to split"):
        pieces(3.5, 2)


@pytest.mark.feature(30)
def test_a_dict_of_columns_is_split_by_rows():
    columns = {"ids": [[1], [2, 2], [3]], "reward": np.array([0.1, 0.2, 0.3]), "mask": torch.ones(3, 2)}
    first, second = pieces(columns, 2)
    assert first["ids"] == [[1], [2, 2]]
    assert second["ids"] == [[3]]
    assert first["reward"].tolist() == [0.1, 0.2]
    assert second["mask"].shape == (1, 2)
    with pytest.raises(ShardError, match="different lengths"):
        pieces({"a": [1, 2], "b": [1]}, 1)


def test_a_batch_is_split_by_rows():
    batch = Batch({"tokens": Ragged.from_rows([[1], [2, 3], [4, 5, 6]])})
    assert [len(part) for part in pieces(batch, 2)] == [2, 1]


def test_two_wrapped_arguments_have_the_same_rows():
    shares = arrange(NeedParallel([1, 2, 3]), 7, weights=NeedParallel(np.ones(3)))
    assert [share.args for share in shares] == [([1, 2], 7), ([3], 7)]
    assert [len(share.kwargs["weights"]) for share in shares] == [2, 1]
    with pytest.raises(ShardError, match="argument 1 has 2 rows, another argument 3"):
        arrange(NeedParallel([1, 2, 3]), NeedParallel([1, 2]))


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ([[1, 2], [3]], [2, 1]),
        ([0.5, 0.7], [1, 1]),
        (["one text", "two"], [1, 1]),
        (torch.zeros(2, 5), [5, 5]),
        ({"input_ids": [[1, 2, 3], [1]], "reward": [0.0, 1.0]}, [3, 1]),
        ({"reward": [0.0, 1.0]}, [1, 1]),
        (Batch({"tokens": Ragged.from_rows([[1, 2], [3]]), "id": np.arange(2)}), [2, 1]),
    ],
)
def test_a_part_knows_its_tokens(value, tokens):
    assert [part.tokens for part in shares(value, 2)] == tokens


# -- sequences --------------------------------------------------------------------------------------------------------


def in_parts(value, replicas, context, pad=False):
    return parts_of(NeedParallel(value, pad, type="seq"), replicas, context, "x")


@pytest.mark.feature(31)
def test_rows_go_to_replicas_and_their_sequences_to_the_ranks_of_each():
    rows = torch.arange(24).reshape(4, 6)
    for value in (rows, rows.numpy(), rows.tolist(), {"input_ids": rows}):
        found = in_parts(value, 2, 3)
        held = [piece["input_ids"] if isinstance(value, dict) else piece for piece, _ in found]
        assert [torch.as_tensor(piece).tolist() for piece in held] == [
            rows[start : start + 2, at : at + 2].tolist() for start in (0, 2) for at in (0, 2, 4)
        ]
        assert {share for _, share in found} == {CallShare(rows=2, tokens=4, of=4, sequences=True)}
    assert all(piece.untyped_storage().nbytes() == 4 * 8 for piece, _ in in_parts(rows, 2, 3))


@pytest.mark.feature(31)
def test_without_ranks_that_share_sequences_only_the_rows_are_split():
    assert in_parts([[1, 2], [3, 4]], 2, 1) == parts_of(NeedParallel([[1, 2], [3, 4]]), 2, 1, "x")


@pytest.mark.feature(31)
def test_other_arguments_go_to_all_ranks_of_a_replica_alike():
    ids, rewards = NeedParallel([[1, 2], [3, 4]], type="seq"), NeedParallel([0.5, 0.7])
    found = arrange(rewards, ids, "all", sizes=(2, 2))
    assert [argument_set.args for argument_set in found] == [
        ([0.5], [[1]], "all"),
        ([0.5], [[2]], "all"),
        ([0.7], [[3]], "all"),
        ([0.7], [[4]], "all"),
    ]
    assert [argument_set.share for argument_set in found] == [CallShare(rows=1, tokens=1, of=2, sequences=True)] * 4


@pytest.mark.feature(31)
def test_padding_has_no_tokens():
    assert [share for _, share in in_parts([[1, 2]], 2, 2, pad=True)] == [
        *[CallShare(rows=1, tokens=1, of=1, sequences=True)] * 2,
        *[CallShare(rows=0, tokens=0, of=1, sequences=True)] * 2,
    ]


@pytest.mark.feature(31)
@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([[1, 2], [3]], "no sequences of one length"),
        ([1, 2], "no sequences of one length"),
        (torch.zeros(2), "no sequences of one length"),
        (Batch({"tokens": Ragged.from_rows([[1, 2], [3, 4]])}), "no sequences of one length"),
        (torch.zeros(2, 5), "sequences of 5 tokens for 2 ranks: pad them to a multiple"),
    ],
)
def test_what_cannot_be_shared_equally_is_refused(value, what):
    with pytest.raises(ShardError, match=f"x has {what}"):
        in_parts(value, 1, 2)


def test_a_type_that_there_is_not_is_refused():
    with pytest.raises(ShardError, match="NeedParallel has no type 'sequence'"):
        parts_of(NeedParallel([1, 2], type="sequence"), 1, 1, "x")


# -- merging ----------------------------------------------------------------------------------------------------------

THREE_TO_ONE = [CallShare(1, 3, 2), CallShare(1, 1, 2)]


@pytest.mark.feature(62)
def test_two_calls_under_way_at_a_time_both_come_back_in_their_order():
    first, second = arrange(NeedParallel(list(range(7)))), arrange(NeedParallel(list("abc")))
    results = [[[row * 2 for row in argument_set.args[0]] for argument_set in each] for each in (first, second)]
    shares = [[argument_set.share for argument_set in each] for each in (first, second)]
    assert merge(results[1], shares[1], "flat") == ["aa", "bb", "cc"]
    assert merge(results[0], shares[0], "flat") == [0, 2, 4, 6, 8, 10, 12]


@pytest.mark.feature(32)
def test_results_come_as_a_list_unless_asked_otherwise():
    results = [[1, 2], [3]]
    assert merge(results, THREE_TO_ONE, "list") == [[1, 2], [3]]
    assert merge(results, THREE_TO_ONE, "flat") == [1, 2, 3]
    assert merge(results, THREE_TO_ONE, "rank0") == [1, 2]
    assert merge([1, 4], THREE_TO_ONE, "sum") == 5
    assert merge([1.0, 5.0], THREE_TO_ONE, "mean") == 2.0
    assert merge([None, None], [WHOLE, WHOLE], "list") == [None, None]


@pytest.mark.feature(32)
def test_the_mean_is_weighted_by_tokens():
    tensors = [torch.tensor([1.0, 0.0]), torch.tensor([5.0, 4.0])]
    assert merge(tensors, THREE_TO_ONE, "mean").tolist() == [2.0, 1.0]
    assert torch.cat([merge(tensors, THREE_TO_ONE, "flat")]).tolist() == [1.0, 0.0, 5.0, 4.0]
    assert merge([{"loss": 1.0}, {"loss": 5.0}], THREE_TO_ONE, "mean") == {"loss": 2.0}
    told = [{"loss": 1.0, "tokens": 1}, {"loss": 5.0, "tokens": 3}]
    assert merge(told, THREE_TO_ONE, "mean") == {"loss": 4.0, "tokens": 4}
    assert merge(told, THREE_TO_ONE, "sum") == {"loss": 6.0, "tokens": 4}
    assert merge([1.0, 2.0], [WHOLE, WHOLE], "mean") == 1.5


@pytest.mark.feature(32)
def test_results_of_padding_are_left_out():
    parts = [CallShare(1, 2, 1), CallShare(0, 0, 1)]
    for how in ("list", "flat"):
        assert merge([["a"], ["a"]], parts, how) in ([["a"]], ["a"])
    assert merge([3.0, 99.0], parts, "mean") == 3.0
    assert merge([3.0, 99.0], parts, "sum") == 3.0


@pytest.mark.feature(32)
@pytest.mark.parametrize("how", ["flat", "mean", "sum", "rank0"])
def test_an_engine_that_merges_has_methods_that_return_nothing(how):
    assert merge([None, None], THREE_TO_ONE, how) is None


@pytest.mark.feature(32)
def test_what_cannot_be_put_together_is_refused():
    for how in ("mean", "sum"):
        for results in ([None, 1.0], [1.0, None]):
            with pytest.raises(ShardError, match="NoneType"):
                merge(results, THREE_TO_ONE, how)
    with pytest.raises(ShardError, match="no tokens to weight"):
        merge([1.0, 2.0], [CallShare(1, 0, 2), CallShare(1, 0, 2)], "mean")
    for how in ("mean", "sum"):
        with pytest.raises(ShardError, match=r"shapes \(3,\) and \(1,\) have no sum: merge='flat'"):
            merge([torch.ones(3), torch.ones(1)], THREE_TO_ONE, how)
        with pytest.raises(ShardError, match="differ in their entries: 'a', 'b'; 'a'"):
            merge([{"a": 1.0, "b": 2.0}, {"a": 1.0}], THREE_TO_ONE, how)
        with pytest.raises(ShardError, match="differ in their entries: 'a'; float"):
            merge([{"a": 1.0}, 2.0], THREE_TO_ONE, how)


@pytest.mark.parametrize("value", [[], (), torch.zeros(0, 3), {"a": []}])
def test_no_rows_are_not_divided(value):
    with pytest.raises(ShardError, match="argument 0 has no rows for 2 model replicas"):
        split_arguments([NeedParallel(value)], {}, 2, 1, "TRAIN_1.step")


@pytest.mark.parametrize("value", [{"rows": NeedParallel([1, 2])}, [NeedParallel([1, 2])], (NeedParallel([1]), 3)])
def test_a_part_of_an_argument_is_not_wrapped(value):
    with pytest.raises(ShardError, match="argument 1 has a NeedParallel in it: wrap the whole argument"):
        split_arguments([0, value], {}, 2, 1, "TRAIN_1.step")
