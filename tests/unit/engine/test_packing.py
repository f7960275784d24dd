# SPDX-License-Identifier: Apache-2.0
"""Packed micro-batches: every action once, within the budget, balance_by_tokens, nothing read that is not needed."""

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.sampler import partition
from dlrover.python.rl.engine.model.packing import balance_by_tokens, check_actions, pack, select_columns

rows = st.lists(st.lists(st.booleans(), max_size=12), max_size=12)


def make(masks, head):
    """Tokens that name their place; the first of a language model's row is never an action."""
    masks = [[mask and (head == "token" or at > 0) for at, mask in enumerate(row)] for row in masks]
    total = sum(map(len, masks))
    flat = Ragged.from_rows(masks, dtype=np.bool_)
    return Batch({"tokens": flat.like(np.arange(100, 100 + total)), "action_mask": flat})


@given(rows, st.integers(1, 30), st.sampled_from(["causal", "token"]), st.integers(0, 5))
def test_every_action_is_read_once_at_the_right_place(masks, budget, head, at_least):
    batch = make(masks, head)
    parts = pack(batch, budget, head, at_least)
    assert len(parts) >= at_least
    assert (
        sorted(np.concatenate([part.flat for part in parts]).tolist() if parts else [])
        == np.flatnonzero(batch.ragged("action_mask").values).tolist()
    )
    for part in parts:
        assert len(part.inputs) <= budget or len(part.lengths) == 1
        assert part.inputs.dtype == part.reads.dtype == np.int64
        assert (np.diff(part.reads) > 0).all()
        assert sum(part.lengths) == len(part.inputs)
        assert part.targets.tolist() == batch.ragged("tokens").values[part.flat].tolist()
        # Tokens are consecutive numbers: what is read is the token itself, or the one before.
        assert (part.inputs[part.reads] + (head == "causal")).tolist() == part.targets.tolist()


@pytest.mark.feature(62)
@given(rows, rows, st.integers(1, 30))
def test_two_batches_at_a_time_come_back_in_their_order(first, second, budget):
    """Nothing but a micro-batch itself knows where its rows came from."""
    batches = [make(masks, "causal") for masks in (first, second)]
    packed = [pack(batch, budget) for batch in batches]
    outputs = [np.zeros(len(batch.ragged("tokens").values), dtype=np.int64) for batch in batches]
    for parts in zip_longest(*packed):
        for which, part in reversed(list(enumerate(parts))):
            if part is not None:
                outputs[which][part.flat] = part.inputs[part.reads] + 1
    for batch, of_batch in zip(batches, outputs, strict=True):
        tokens, actions = batch.ragged("tokens").values, batch.ragged("action_mask").values
        assert of_batch.tolist() == np.where(actions, tokens, 0).tolist()


@pytest.mark.feature(60)
@given(rows, st.lists(st.integers(0, 4), min_size=12, max_size=12), st.integers(1, 30), st.integers(0, 3))
def test_rows_of_a_unit_stay_together(masks, units, budget, at_least):
    batch = make(masks, "causal").with_columns(unit=np.array(units[: len(masks)], dtype=np.int64))
    parts = pack(batch, budget, at_least=at_least)
    assert len(parts) >= at_least
    row_of = np.searchsorted(batch.ragged("tokens").offsets, np.arange(len(batch.ragged("tokens").values)), "right") - 1
    seen = [set(batch.dense("unit")[row_of[part.flat]].tolist()) for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen))
    assert (
        sorted(at for part in parts for at in part.flat.tolist())
        == np.flatnonzero(batch.ragged("action_mask").values).tolist()
    )
    for part, those in zip(parts, seen, strict=True):
        assert len(part.inputs) <= budget or len(those) <= 1
        assert (np.diff(part.lengths) <= 0).all()
        assert (part.inputs[part.reads] + 1).tolist() == part.targets.tolist()


def test_candidates_come_with_their_actions():
    batch = make([[False, True, True], [False, True]], "causal")
    ids = batch.ragged("tokens").like(np.arange(10).reshape(5, 2))
    (part,) = pack(batch.with_columns(candidates=ids), 100)
    assert part.target_ids.tolist() == [[101, 2, 3], [102, 4, 5], [104, 8, 9]]
    (none,) = pack(make([[False, False]], "causal").with_columns(candidates=ids.rows(1, 2)), 10, at_least=1)
    assert none.target_ids.shape == (0, 3)
    (scored,) = pack(batch.with_columns(candidates=ids), 100, head="token")
    assert scored.candidates is None
    with pytest.raises(EngineError, match="'candidates' and 'tokens' have rows of different lengths"):
        pack(batch.with_columns(candidates=Ragged.from_rows([[1], [2]])), 100)


def test_documents_end_after_their_last_action():
    batch = make([[False, True, True, False, False], [False, False, True]], "causal")
    (part,) = pack(batch, 100)
    assert part.inputs.tolist() == [100, 101, 105, 106]
    assert part.positions.tolist() == [0, 1, 0, 1]
    assert part.lengths.tolist() == [2, 2]
    assert part.reads.tolist() == [0, 1, 3]


def test_a_micro_batch_without_rows_has_one_token_and_no_action():
    (part,) = pack(make([[False, False]], "causal"), 10, at_least=1)
    assert (part.inputs.tolist(), part.lengths.tolist(), len(part.flat)) == ([0], [1], 0)


def test_padded_rows_hold_the_same_documents():
    batch = make([[False, True, True], [False, True, True, True]], "causal")
    (part,) = pack(batch, 100)
    ids, reads = part.padded(7)
    assert ids.tolist() == [[103, 104, 105], [100, 101, 7]]
    assert (ids.reshape(-1)[reads] + 1).tolist() == part.targets.tolist()


@pytest.mark.feature(57)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60), st.integers(0, 6))
def test_groups_keep_the_budget_and_hold_every_item_once(lengths, budget, at_least):
    groups = balance_by_tokens(lengths, budget, at_least)
    assert len(groups) >= at_least
    assert sorted(item for group in groups for item in group) == list(range(len(lengths)))
    assert all(len(group) <= 1 or sum(lengths[item] for item in group) <= budget for group in groups)


@pytest.mark.feature(57)
def test_groups_are_as_even_as_greedy_ones():
    lengths = np.random.default_rng(0).integers(1, 100, 64).tolist()
    loads = [sum(lengths[item] for item in group) for group in balance_by_tokens(lengths, 400)]
    greedy = [0]
    for length in lengths:
        if greedy[-1] + length > 400:
            greedy.append(0)
        greedy[-1] += length
    assert len(loads) <= len(greedy)
    assert max(loads) - min(loads) <= max(greedy) - min(greedy)
    assert max(loads) - min(loads) < 20


@pytest.mark.feature(57)
def test_replicas_have_equally_many_groups_of_all_rows():
    generator = np.random.default_rng(1)
    masks = [[at > 0 for at in range(length)] for length in generator.integers(2, 100, 64)]
    whole = make(masks, "causal")
    parts = [whole.take(rows) for rows in partition(whole.ragged("tokens").lengths.tolist(), 4)]
    most = max(len(pack(part, 400)) for part in parts)
    groups = [pack(part, 400, at_least=most) for part in parts]
    assert [len(group) for group in groups] == [most] * 4
    micros = [micro for group in groups for micro in group]
    assert all(len(micro.inputs) <= 400 for micro in micros)
    targets = np.concatenate([micro.targets for micro in micros])
    assert sorted(targets) == sorted(whole.ragged("tokens").values[whole.ragged("action_mask").values])


def test_columns_are_picked_or_spread_over_the_actions():
    batch = make([[False, True, True], [False, True]], "causal")
    batch = batch.with_columns(
        ragged=batch.ragged("tokens").like(np.arange(5) / 2),
        dense=np.array([3, 4]),
        text=["a", "b"],
        wide=np.array([[1, 2], [3, 4]]),
        teachers=batch.ragged("tokens").like(np.arange(10).reshape(5, 2)),
        elsewhere=Ragged.from_rows([[1], [2]]),
    )
    (part,) = pack(batch, 100)
    columns = select_columns(batch, part.flat, "cpu")
    assert columns.keys() == {"tokens", "action_mask", "ragged", "dense", "wide", "teachers", "unit"}
    assert columns["ragged"].tolist() == [0.5, 1.0, 2.0]
    assert str(columns["ragged"].dtype) == "torch.float32"
    assert columns["dense"].tolist() == [3, 3, 4]
    assert columns["wide"].tolist() == [[1, 2], [1, 2], [3, 4]]
    assert columns["teachers"].tolist() == [[2, 3], [4, 5], [8, 9]]
    assert columns["unit"].tolist() == [0, 0, 1]


def test_a_first_token_can_have_a_score_but_no_logprob():
    batch = Batch({"tokens": Ragged.from_rows([[1, 2]]), "action_mask": Ragged.from_rows([[True, True]])})
    check_actions(batch, "token")
    with pytest.raises(EngineError, match="first token"):
        check_actions(batch, "causal")
