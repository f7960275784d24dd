# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call, which are split over model replicas, its results, and the prompts and outputs of generation."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import EngineError, ShardError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.engine.model.train_module import WHOLE, CallShare
from dlrover.python.rl.session.members import as_batch, as_outputs, as_prompts, as_sampling
from dlrover.python.rl.session.split import NeedParallel, merge, parts_of, split_arguments
from dlrover.python.rl.trainer.shard import Replicate

SEQUENCES = {"context": 2, "type": "seq"}


def split(value, replicas, context=1, **options):
    return parts_of(NeedParallel(value, **options), replicas, context, "x")


def pieces(value, replicas):
    return [piece for piece, _ in split(value, replicas)]


def arrange(*args, sizes=(2, 1), **kwargs):
    """Return the arguments, named arguments and share of each context rank of each replica."""
    values, named, shares, _ = split_arguments(args, kwargs, *sizes, "TRAIN_1.step")

    def part(value, at):
        return value.value if isinstance(value, Replicate) else value.value[at]

    return [
        (tuple(part(value, at) for value in values), {key: part(value, at) for key, value in named.items()}, share)
        for at, share in enumerate(shares)
    ]


@pytest.mark.feature(25)
def test_plain_arguments_go_to_all_ranks():
    assert arrange([1, 2, 3], 0.5, flag=True) == [(([1, 2, 3], 0.5), {"flag": True}, WHOLE)] * 2


@pytest.mark.feature(26)
def test_list_is_split_in_order_with_larger_parts_first():
    assert pieces(list(range(7)), 4) == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.feature(27)
@pytest.mark.parametrize(
    ("replicas", "rows"), [pair for pair in combinations_with_replacement(range(1, 21), 2) if pair[0] < 6]
)
def test_tensors_arrays_and_lists_are_split_alike(rows, replicas):
    values = (list(range(rows)), torch.arange(rows), np.arange(rows), tuple(range(rows)))
    sizes = [[len(part) for part in pieces(value, replicas)] for value in values]
    assert sizes[1:] == sizes[:1] * 3
    assert max(sizes[0]) - min(sizes[0]) <= 1
    assert torch.cat(pieces(torch.arange(rows), replicas)).tolist() == list(range(rows))


@pytest.mark.feature(28)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_parts_of_groups_and_ranks_make_up_the_whole(rows, groups, ranks):
    parts = split(list(range(rows)), groups * ranks, pad=True)
    assert [row for part, share in parts for row in part if share.rows] == list(range(rows))


@pytest.mark.feature(29)
def test_fewer_rows_than_replicas_are_padded_without_count():
    parts = [(piece, share.rows, share.of) for piece, share in split(["a", "b", "c"], 4, pad=True)]
    assert parts == [(["a"], 1, 3), (["b"], 1, 3), (["c"], 1, 3), (["c"], 0, 3)]
    assert [piece.tolist() for piece, _ in split(torch.arange(2), 3, pad=True)] == [[0], [1], [1]]


@pytest.mark.feature(29, 31)
@pytest.mark.parametrize(
    ("value", "replicas", "options", "message"),
    [
        ([1, 2, 3], 4, {}, r"x has 3 rows for 4 model replicas: NeedParallel\(..., pad=True\)"),
        ([], 2, {}, "x has no rows"),
        (torch.zeros(0, 3), 2, {}, "x has no rows"),
        ({"a": []}, 2, {}, "x has no rows"),
        (3.5, 2, {}, "no rows to split"),
        ({"a": [1, 2], "b": [1]}, 1, {}, "different lengths"),
        ([[1, 2], [3]], 1, SEQUENCES, "x has no sequences of one length"),
        (torch.zeros(2), 1, SEQUENCES, "x has no sequences of one length"),
        (Batch({"tokens": Ragged.from_rows([[1, 2]])}), 1, SEQUENCES, "x has no sequences of one length"),
        (torch.zeros(2, 5), 1, SEQUENCES, "x has sequences of 5 tokens for 2 ranks: pad them to a multiple"),
        ([1, 2], 1, {"type": "sequence"}, "NeedParallel has no type 'sequence'"),
    ],
)
def test_unsplittable_argument_is_refused(value, replicas, options, message):
    with pytest.raises(ShardError, match=message):
        split(value, replicas, **options)


@pytest.mark.feature(30)
def test_dict_of_columns_is_split_by_rows():
    columns = {"ids": [[1], [2, 2], [3]], "reward": np.array([0.1, 0.2, 0.3]), "mask": torch.ones(3, 2)}
    first, second = pieces(columns, 2)
    assert (first["ids"], second["ids"]) == ([[1], [2, 2]], [[3]])
    assert (first["reward"].tolist(), second["mask"].shape) == ([0.1, 0.2], (1, 2))
    batch = Batch({"tokens": Ragged.from_rows([[1], [2, 3], [4, 5, 6]])})
    assert [len(part) for part in pieces(batch, 2)] == [2, 1]


def test_two_wrapped_arguments_have_the_same_rows():
    parts = arrange(NeedParallel([1, 2, 3]), 7, weights=NeedParallel(np.ones(3)))
    assert [(args, len(named["weights"])) for args, named, _ in parts] == [(([1, 2], 7), 2), (([3], 7), 1)]
    with pytest.raises(ShardError, match="argument 1 has 2 rows, another argument 3"):
        arrange(NeedParallel([1, 2, 3]), NeedParallel([1, 2]))


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ([[1, 2], [3]], [2, 1]),
        (["one text", "two"], [1, 1]),
        (torch.zeros(2, 5), [5, 5]),
        ({"input_ids": [[1, 2, 3], [1]], "reward": [0.0, 1.0]}, [3, 1]),
        (Batch({"tokens": Ragged.from_rows([[1, 2], [3]]), "id": np.arange(2)}), [2, 1]),
    ],
)
def test_part_knows_its_tokens(value, tokens):
    assert [share.tokens for _, share in split(value, 2)] == tokens


@pytest.mark.feature(31)
def test_rows_go_to_replicas_and_sequences_to_their_ranks():
    rows = torch.arange(24).reshape(4, 6)
    expected = [rows[start : start + 2, at : at + 2].tolist() for start in (0, 2) for at in (0, 2, 4)]
    for value in (rows, rows.numpy(), rows.tolist(), {"input_ids": rows}):
        parts = split(value, 2, 3, type="seq")
        columns = [piece["input_ids"] if isinstance(value, dict) else piece for piece, _ in parts]
        assert [torch.as_tensor(column).tolist() for column in columns] == expected
        assert {share for _, share in parts} == {CallShare(rows=2, tokens=4, of=4, sequences=True)}
    assert all(piece.untyped_storage().nbytes() == 4 * 8 for piece, _ in split(rows, 2, 3, type="seq"))
    assert split(rows.tolist(), 2, type="seq") == split(rows.tolist(), 2), "one rank has whole sequences"


@pytest.mark.feature(31)
def test_other_arguments_go_to_all_ranks_of_a_replica():
    ids, rewards = NeedParallel([[1, 2], [3, 4]], type="seq"), NeedParallel([0.5, 0.7])
    share = CallShare(rows=1, tokens=1, of=2, sequences=True)
    assert arrange(rewards, ids, "all", sizes=(2, 2)) == [
        (([reward], [[token]], "all"), {}, share) for reward, token in ((0.5, 1), (0.5, 2), (0.7, 3), (0.7, 4))
    ]


@pytest.mark.feature(31)
def test_padding_has_no_tokens():
    first, padding = (CallShare(rows=number, tokens=number, of=1, sequences=True) for number in (1, 0))
    assert [share for _, share in split([[1, 2]], 2, 2, pad=True, type="seq")] == [first, first, padding, padding]


THREE_TO_ONE = [CallShare(1, 3, 2), CallShare(1, 1, 2)]


@pytest.mark.feature(62)
def test_two_calls_at_a_time_are_merged_in_their_order():
    first, second = arrange(NeedParallel(list(range(7)))), arrange(NeedParallel(list("abc")))
    for parts, expected in ((second, ["aa", "bb", "cc"]), (first, [0, 2, 4, 6, 8, 10, 12])):
        results = [[row * 2 for row in args[0]] for args, _, _ in parts]
        assert merge(results, [share for _, _, share in parts], "flat") == expected


@pytest.mark.feature(32)
@pytest.mark.parametrize(
    ("results", "kind", "expected"),
    [
        ([[1, 2], [3]], "list", [[1, 2], [3]]),
        ([[1, 2], [3]], "flat", [1, 2, 3]),
        ([[1, 2], [3]], "rank0", [1, 2]),
        ([1, 4], "sum", 5),
        ([{"loss": 1.0}, {"loss": 5.0}], "mean", {"loss": 2.0}),
        ([{"loss": 1.0, "tokens": 1}, {"loss": 5.0, "tokens": 3}], "mean", {"loss": 4.0, "tokens": 4}),
        ([{"loss": 1.0, "tokens": 1}, {"loss": 5.0, "tokens": 3}], "sum", {"loss": 6.0, "tokens": 4}),
        ([None, None], "list", [None, None]),
        *(([None, None], kind, None) for kind in ("flat", "mean", "sum", "rank0")),
    ],
)
def test_results_are_merged_by_their_kind(results, kind, expected):
    assert merge(results, THREE_TO_ONE, kind) == expected


@pytest.mark.feature(32)
def test_mean_of_tensors_is_weighted_by_tokens():
    tensors = [torch.tensor([1.0, 0.0]), torch.tensor([5.0, 4.0])]
    assert merge(tensors, THREE_TO_ONE, "mean").tolist() == [2.0, 1.0]
    assert merge(tensors, THREE_TO_ONE, "flat").tolist() == [1.0, 0.0, 5.0, 4.0]
    assert merge([1.0, 2.0], [WHOLE, WHOLE], "mean") == 1.5


@pytest.mark.feature(32)
def test_results_of_padding_are_left_out():
    shares = [CallShare(1, 2, 1), CallShare(0, 0, 1)]
    for kind in ("list", "flat"):
        assert merge([["a"], ["a"]], shares, kind) in ([["a"]], ["a"])
    for kind in ("mean", "sum"):
        assert merge([3.0, 99.0], shares, kind) == 3.0


@pytest.mark.feature(32)
@pytest.mark.parametrize("kind", ["mean", "sum"])
@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([None, 1.0], "NoneType"),
        ([torch.ones(3), torch.ones(1)], r"shapes \(3,\) and \(1,\) have no sum: merge='flat'"),
        ([{"a": 1.0, "b": 2.0}, {"a": 1.0}], "differ in their entries: 'a', 'b'; 'a'"),
        ([{"a": 1.0}, 2.0], "differ in their entries: 'a'; float"),
    ],
)
def test_unmergeable_results_are_refused(results, message, kind):
    with pytest.raises(ShardError, match=message):
        merge(results, THREE_TO_ONE, kind)


@pytest.mark.feature(32)
def test_mean_without_tokens_is_refused():
    with pytest.raises(ShardError, match="no tokens to weight"):
        merge([1.0, 2.0], [CallShare(1, 0, 2)] * 2, "mean")


@pytest.mark.parametrize("value", [{"rows": NeedParallel([1, 2])}, [NeedParallel([1, 2])], (NeedParallel([1]), 3)])
def test_wrapped_part_of_an_argument_is_refused(value):
    with pytest.raises(ShardError, match="argument 1 has a NeedParallel in it: wrap the whole argument"):
        split_arguments([0, value], {}, 2, 1, "TRAIN_1.step")


def tokenize(text, add_special_tokens=True):
    return {"input_ids": list(text.encode())}


@pytest.mark.feature(83)
def test_sampling_is_given_as_parameters_or_a_dict():
    assert as_sampling(None) == SamplingParams()
    assert as_sampling(SamplingParams(top_k=3)) == SamplingParams(top_k=3)
    names_of_vllm = {"temperature": 0.0, "max_tokens": 7, "n": 2, "stop": "end", "top_k": -1}
    assert as_sampling(names_of_vllm) == SamplingParams(7, 0.0, 2, stop=("end",), top_k=None)


@pytest.mark.feature(83)
@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (as_sampling, {"temprature": 1.0}, "no parameter 'temprature'; did you mean 'temperature'"),
        (as_sampling, {"max_new_tokens": 1, "max_tokens": 2}, "'max_new_tokens' is given twice, also as 'max_tokens'"),
        (as_sampling, {"top_p": 1.5}, "top_p"),
        (as_sampling, [1], "not list"),
        (as_prompts, ["a", 0.5], "prompt 1 is float"),
        (as_prompts, [{"text": "a"}], "prompt 0 is a dict: it needs either"),
    ],
)
def test_bad_sampling_or_prompt_is_refused(read, value, message):
    with pytest.raises(EngineError, match=message):
        read(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", ["text"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ({"prompt": "text"}, [{"prompt": "text"}]),
        (["a", [1, 2]], ["a", [1, 2]]),
        (NeedParallel(["a", "b"]), ["a", "b"]),
        ([], []),
    ],
)
def test_prompts_are_a_list(value, expected):
    assert as_prompts(value) == expected


def test_texts_and_tokens_become_a_batch():
    batch = as_batch(["ab", [7, 8, 9], {"prompt_token_ids": np.array([5])}], 4, tokenize, ())
    assert batch.dense("prompt_id").tolist() == [4, 5, 6]
    assert [row.tolist() for row in batch.ragged("tokens")] == [[97, 98], [7, 8, 9], [5]]
    assert list(batch.columns) == ["prompt_id", "tokens"]


@pytest.mark.feature(43)
def test_other_entries_of_a_prompt_reach_the_engine():
    image = object()
    prompts = [{"prompt": "see", "multi_modal_data": {"image": image}}, "no image"]
    batch = as_batch(prompts, 0, tokenize, ("prompt", "multi_modal_data"))
    assert batch.objects("multi_modal_data") == [{"image": image}, None]
    assert batch.objects("prompt") == ["see", "no image"]
    with pytest.raises(EngineError, match="prompt 0 has 'multi_modal_data', which the engine does not accept"):
        as_batch(prompts, 0, tokenize, ())


def test_outputs_have_the_form_of_vllm():
    output = Batch(
        {
            "prompt_id": np.array([3, 3, 4]),
            "sample_index": np.array([0, 1, 0]),
            "tokens": Ragged.from_rows([[1, 2, 10], [1, 2, 11, 12], [3, 13]]),
            "action_mask": Ragged.from_rows([[0, 0, 1], [0, 0, 1, 1], [0, 1]], dtype=np.bool_),
            "logprobs": Ragged.from_rows([[0, 0, -0.5], [0, 0, -1, -2], [0, -3]], dtype=np.float32),
            "finished": np.array([True, False, True]),
            "version": np.array([7, 7, 7]),
            "completion": ["x", "yz", "w"],
        }
    )
    first, second = as_outputs(["one", [3]], 3, output)
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("3", "one", [1, 2])
    samples = [(sample.index, sample.token_ids, sample.finish_reason, sample.text) for sample in first.outputs]
    assert samples == [(0, [10], "stop", "x"), (1, [11, 12], "length", "yz")]
    assert (first.outputs[1].logprobs[1][12].logprob, first.outputs[1].cumulative_logprob) == (-2.0, -3.0)
    assert (second.outputs[0].version, second.prompt_token_ids) == (7, [3])
