# SPDX-License-Identifier: Apache-2.0
"""Passes of a model: packed micro-batches, attention over their documents, kernels of a CPU, log-probs by chunks."""

import json
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.cpu_kernels import RmsNorm, Rotation, install_cpu_kernels
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model import attention, chunked_head
from dlrover.python.rl.engine.model.attention import Documents, attend, can_pack, packed_attention
from dlrover.python.rl.engine.model.chunked_head import ChunkedHead, ChunkedLogprobs
from dlrover.python.rl.engine.model.loading import prepare_training
from dlrover.python.rl.engine.model.outputs import token_logprobs
from dlrover.python.rl.engine.model.packing import balance_by_tokens, check_actions, pack, select_columns
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.plain_engine import EntropyLoss, make_batch
from tests.support.processes import run
from tests.support.torch_models import family_model
from tests.support.train_exercise import weights_of

# -- packing ----------------------------------------------------------------------------------------------------------
ROW_MASKS = st.lists(st.lists(st.booleans(), max_size=12), max_size=12)


def numbered(masks, head):
    """Tokens that name their place; the first of a language model's row is never an action."""
    masks = [[mask and (head == "token" or at > 0) for at, mask in enumerate(row)] for row in masks]
    total = sum(map(len, masks))
    flat = Ragged.from_rows(masks, dtype=np.bool_)
    return Batch({"tokens": flat.like(np.arange(100, 100 + total)), "action_mask": flat})


def actions_of(batch):
    return np.flatnonzero(batch.ragged("action_mask").values).tolist()


@given(ROW_MASKS, st.integers(1, 30), st.sampled_from(["causal", "token"]), st.integers(0, 5))
def test_every_action_is_read_once_at_the_right_place(masks, budget, head, at_least):
    batch = numbered(masks, head)
    parts = pack(batch, budget, head, at_least)
    assert len(parts) >= at_least
    assert sorted(place for part in parts for place in part.flat.tolist()) == actions_of(batch)
    for part in parts:
        assert len(part.inputs) <= budget or len(part.lengths) == 1
        assert part.inputs.dtype == part.reads.dtype == np.int64
        assert (np.diff(part.reads) > 0).all()
        assert sum(part.lengths) == len(part.inputs)
        assert part.targets.tolist() == batch.ragged("tokens").values[part.flat].tolist()
        # Tokens are consecutive numbers: what is read is the token itself, or the one before.
        assert (part.inputs[part.reads] + (head == "causal")).tolist() == part.targets.tolist()


@pytest.mark.feature(60)
@given(ROW_MASKS, st.lists(st.integers(0, 4), min_size=12, max_size=12), st.integers(1, 30), st.integers(0, 3))
def test_rows_of_a_unit_stay_together(masks, units, budget, at_least):
    batch = numbered(masks, "causal").with_columns(unit=np.array(units[: len(masks)], dtype=np.int64))
    parts = pack(batch, budget, at_least=at_least)
    assert len(parts) >= at_least
    row_of = np.searchsorted(batch.ragged("tokens").offsets, np.arange(len(batch.ragged("tokens").values)), "right") - 1
    seen = [set(batch.dense("unit")[row_of[part.flat]].tolist()) for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen))
    assert sorted(place for part in parts for place in part.flat.tolist()) == actions_of(batch)
    for part, those in zip(parts, seen, strict=True):
        assert len(part.inputs) <= budget or len(those) <= 1
        assert (np.diff(part.lengths) <= 0).all()
        assert (part.inputs[part.reads] + 1).tolist() == part.targets.tolist()


def test_candidates_come_with_their_actions():
    batch = numbered([[False, True, True], [False, True]], "causal")
    ids = batch.ragged("tokens").like(np.arange(10).reshape(5, 2))
    (part,) = pack(batch.with_columns(candidates=ids), 100)
    assert part.target_ids.tolist() == [[101, 2, 3], [102, 4, 5], [104, 8, 9]]
    (none,) = pack(numbered([[False, False]], "causal").with_columns(candidates=ids.rows(1, 2)), 10, at_least=1)
    assert none.target_ids.shape == (0, 3)
    (scored,) = pack(batch.with_columns(candidates=ids), 100, head="token")
    assert scored.candidates is None
    with pytest.raises(EngineError, match="'candidates' and 'tokens' have rows of different lengths"):
        pack(batch.with_columns(candidates=Ragged.from_rows([[1], [2]])), 100)


def test_documents_end_after_their_last_action():
    batch = numbered([[False, True, True, False, False], [False, False, True]], "causal")
    (part,) = pack(batch, 100)
    assert part.inputs.tolist() == [100, 101, 105, 106]
    assert part.positions.tolist() == [0, 1, 0, 1]
    assert part.lengths.tolist() == [2, 2]
    assert part.reads.tolist() == [0, 1, 3]


def test_a_micro_batch_without_rows_has_one_token_and_no_action():
    (part,) = pack(numbered([[False, False]], "causal"), 10, at_least=1)
    assert (part.inputs.tolist(), part.lengths.tolist(), len(part.flat)) == ([0], [1], 0)


def test_padded_rows_hold_the_same_documents():
    batch = numbered([[False, True, True], [False, True, True, True]], "causal")
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


def test_columns_are_picked_or_spread_over_the_actions():
    batch = numbered([[False, True, True], [False, True]], "causal")
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


# -- attention --------------------------------------------------------------------------------------------------------
def plain_attention(query, key, value, window):
    """Attention of one document, position by position."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows = []
    for at in range(query.shape[2]):
        seen = slice(max(0, at + 1 - (window or at + 1)), at + 1)
        scores = (query[:, :, at : at + 1] @ key[:, :, seen].transpose(2, 3)) / query.shape[-1] ** 0.5
        rows.append(scores.softmax(-1) @ value[:, :, seen])
    return torch.cat(rows, dim=2).transpose(1, 2)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from([None, 1, 3]), st.sampled_from([1, 2, 4]))
def test_each_document_attends_to_itself_alone(lengths, window, heads):
    generator = torch.Generator().manual_seed(sum(lengths))
    query = torch.randn(1, 4, sum(lengths), 8, generator=generator)
    key, value = torch.randn(2, 1, heads, sum(lengths), 8, generator=generator)
    packed = attend(query, key, value, Documents(tuple(lengths)), window=window)
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    expected = torch.cat([plain_attention(*part, window) for part in parts], dim=1)
    assert torch.allclose(packed, expected, atol=1e-5)


def logits(model, rows, packed):
    """Compute the rows packed into one, or each by itself."""
    if not packed:
        return torch.cat([model(input_ids=torch.tensor(row)[None], use_cache=False).logits[0] for row in rows])
    positions = np.concatenate([np.arange(len(row)) for row in rows])
    return model(
        input_ids=torch.tensor(np.concatenate(rows))[None],
        position_ids=torch.tensor(positions)[None],
        documents=Documents(tuple(map(len, rows))),
        use_cache=False,
    ).logits[0]


@pytest.mark.feature(58)
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen2, sliding"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gives_the_logits_and_gradients_of_rows_alone(family, checkpointing):
    model = family_model(family)
    if "sliding" in family:
        assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    generator = np.random.default_rng(0)
    rows = [generator.integers(1, 50, length) for length in (17, 17, 5, 1)]
    alone = logits(model, rows, packed=False)
    alone.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert can_pack(model)
    model.set_attn_implementation(attention.NAME)
    if checkpointing:
        prepare_training(model, trained=True, recompute=True)
    packed = logits(model, rows, packed=True)
    assert torch.allclose(packed, alone, atol=1e-5)
    packed.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-6), name


def test_layers_unfit_for_packing_are_refused():
    unaware, capped = family_model("llama"), family_model("gemma2")
    for model in (unaware, capped):
        model.set_attn_implementation(attention.NAME)
    with pytest.raises(EngineError, match="LlamaAttention does not forward 'documents'"):
        unaware(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)
    with pytest.raises(EngineError, match="Gemma2Attention needs softcap"):
        logits(capped, [np.arange(4)], packed=True)


def test_models_with_other_layers_are_not_packed():
    model = family_model("qwen2")
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert not can_pack(model)


def test_models_with_dynamic_positions_are_not_packed():
    model = family_model("llama, longrope")
    short, long = np.arange(1, 6), np.arange(1, 80)
    beside = logits(model, [short, short], packed=False)[: len(short)]
    together = model(input_ids=torch.tensor(np.stack([np.resize(short, len(long)), long])), use_cache=False).logits[0]
    assert not torch.allclose(together[: len(short)], beside, atol=1e-3), "the model does mix rows"
    assert not can_pack(model)
    layered, longrope = family_model("qwen2"), model.config.rope_parameters
    layered.config.rope_parameters = {"full_attention": longrope, "sliding_attention": {"rope_type": "default"}}
    assert attention.find_fixed_positions(layered) == 64
    assert attention.find_fixed_positions(family_model("llama")) is None


@pytest.mark.feature(143)
def test_half_precision_on_a_host_uses_pytorchs_attention(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", None)
    query, key, value = torch.randn(3, 1, 4, 7, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    packed = attend(query, key, value, Documents((3, 4)))
    parts = zip(*(tensor.split([3, 4], dim=2) for tensor in (query, key, value)), strict=True)
    expected = [torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    assert torch.allclose(packed, torch.cat(expected, dim=2).transpose(1, 2), atol=2e-2)


# -- kernels of a CPU -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, 7, 12), (2, 3, 5, 12), (12,)])
def test_a_norm_has_the_librarys_values_and_gradients(shape):
    generator = torch.Generator().manual_seed(0)
    layer = Qwen2RMSNorm(12, eps=1e-3).double()
    layer.weight.data.normal_(generator=generator)
    hidden, outer = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    first, second = (hidden.clone().requires_grad_() for _ in range(2))
    own = RmsNorm.apply(first, layer.weight, layer.variance_epsilon)
    (own * outer).sum().backward()
    by_weight, layer.weight.grad = layer.weight.grad, None
    # The library computes in float32 whatever it is given.
    plain = layer.weight * second / torch.sqrt(second.square().mean(-1, keepdim=True) + 1e-3)
    (plain * outer).sum().backward()
    assert torch.allclose(own, layer(hidden).double(), atol=1e-6)
    for result, expected in ((own, plain), (first.grad, second.grad), (by_weight, layer.weight.grad)):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_a_rotation_has_the_librarys_values_and_gradients():
    generator = torch.Generator().manual_seed(0)
    heads, outer = torch.randn(2, 2, 5, 3, 8, generator=generator, dtype=torch.float64)
    cos, sin = torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64)
    first, second = (heads.clone().requires_grad_() for _ in range(2))
    own = Rotation.apply(first, cos, sin)
    plain = apply_rotary_pos_emb(second, second, cos, sin, unsqueeze_dim=2)[0]
    by_own, by_plain = (torch.autograd.grad(one, x, outer)[0] for one, x in ((own, first), (plain, second)))
    assert torch.allclose(own, plain, rtol=0, atol=1e-12)
    assert torch.allclose(by_own, by_plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "mistral, sliding", "qwen3"])
def test_own_kernels_give_a_packed_models_logits_and_gradients(family):
    model = family_model(family)
    model.set_attn_implementation(attention.NAME)
    ids = torch.randint(1, 50, (1, 20), generator=torch.Generator().manual_seed(0))
    packed = {"position_ids": torch.tensor([[*range(14), *range(6)]]), "documents": Documents((14, 6))}

    def computed():
        model.zero_grad()
        logits = model(ids, **packed, use_cache=False).logits
        logits.square().mean().backward()
        return [logits, *(parameter.grad for parameter in model.parameters())]

    expected = computed()
    install_cpu_kernels(model, packed_attention)
    for result, wanted in zip(computed(), expected, strict=True):
        assert torch.allclose(result, wanted, rtol=1e-4, atol=1e-5)


def test_own_kernels_are_not_used_in_bf16():
    ids = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    model = family_model("qwen3")
    low = model.bfloat16()(ids).logits.detach()
    exact = model.float()(ids).logits.detach()
    install_cpu_kernels(model, packed_attention)
    assert torch.allclose(model(ids).logits, exact, atol=1e-5)
    kinds = ("RMSNorm", "Attention")
    assert not any(type(part).__name__.endswith(kinds) and "forward" not in vars(part) for part in model.modules())
    assert torch.equal(model.bfloat16()(ids).logits, low)


def test_layers_of_another_kind_keep_the_librarys_kernels():
    model = family_model("gemma2")
    install_cpu_kernels(model, packed_attention)
    assert not any("forward" in vars(part) for part in model.modules())


# -- log-probs by chunks ----------------------------------------------------------------------------------------------
TOKENS, WIDTH, VOCAB = 13, 5, 11
HIDDEN = 32


@pytest.mark.parametrize("count", [1, 3], ids=["one id a token", "three"])
@pytest.mark.parametrize("trains", [(True, False), (True, True), (False, True)], ids=["log-probs", "both", "entropy"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", [1, 4, 13])
def test_chunks_have_the_values_and_gradients_of_all_logits(count, trains, has_bias, rows):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    slopes, targets = (draw(TOKENS, count), draw(TOKENS)), torch.randint(VOCAB, (TOKENS, count), generator=generator)
    factors = [draw(TOKENS, WIDTH), draw(VOCAB, WIDTH), draw(VOCAB) if has_bias else None]

    def score(logits, ids):
        return token_logprobs(logits, ids, 0.7, True)

    def outcome(compute):
        leaves = [None if factor is None else factor.clone().requires_grad_() for factor in factors]
        outputs = compute(*leaves)
        parts = zip(trains, slopes, outputs, strict=True)
        sum((slope * output).sum() for is_trained, slope, output in parts if is_trained).backward()
        return [*(each.detach() for each in outputs), *(leaf.grad for leaf in leaves if leaf is not None)]

    whole = outcome(lambda *leaves: score(functional.linear(*leaves), targets))

    def compute(*leaves):
        logprobs, entropies = ChunkedLogprobs.apply(*leaves, targets, score, rows)
        return logprobs[0], entropies

    chunks = outcome(compute)
    for result, expected in zip(chunks, whole, strict=True):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def train(model, settings):
    """Return log-probs and entropies, and the weights after two steps."""
    engine = Fsdp2TrainEngine(model, OptimizerConfig(name="sgd", lr=0.1), settings)
    outputs = engine.evaluate(make_batch(), 0.7, entropy=True)
    for _ in range(2):
        engine.step(make_batch(), EntropyLoss(), 0.7)
    return [*(outputs.ragged(name).values for name in outputs.columns), *weights_of(engine).values()]


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"lora": LoraSettings(rank=2)}])
def test_an_engine_trains_the_same_weights_by_chunks(tmp_path, monkeypatch, settings):
    if "lora" in settings:
        pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    model = write_tiny_model(tmp_path / "T", hidden=32, layers=2, max_positions=64, rows=300)  # some are masked
    expected = train(model, TrainSettings(**settings))
    monkeypatch.setattr(chunked_head, "CHUNK_ELEMENTS", 7 * 300)
    for chunks, whole in zip(train(model, TrainSettings(**settings)), expected, strict=True):
        np.testing.assert_allclose(chunks, whole, rtol=0, atol=2e-6)


def two_steps(rank, world_size, port, model, precision, chunk):
    chunked_head.CHUNK_ELEMENTS = chunk
    settings = TrainSettings(precision=precision)
    rendezvous = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=120)
    engine = Fsdp2TrainEngine(model, OptimizerConfig(name="sgd", lr=0.1), settings, rendezvous)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.step(make_batch().split(world_size)[rank], EntropyLoss(), 0.7)
    weights = list(weights_of(engine).values())
    engine.close()
    return weights, [str(one.message) for one in caught if "FSDP" in str(one.message)]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 2e-4)])
def test_ranks_train_the_same_weights_by_chunks(model_path, precision, tolerance):
    chunks, whole = (run(2, two_steps, model_path, precision, chunk) for chunk in (7 * 300, 1 << 29))
    for (weights, messages), (expected, _) in zip(chunks, whole, strict=True):
        assert messages == []
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


class Largest(TorchDispatchMode):
    """Records the most elements of a tensor of logits; one with ``HIDDEN`` rows is the output layer's."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.elements = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,) and len(tensor) != HIDDEN:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("tokens", [5, 20, 70])
def test_no_more_logits_are_held_than_a_chunk_has(model_path, monkeypatch, tokens):
    vocabulary = json.loads((model_path / "config.json").read_text())["vocab_size"]
    monkeypatch.setattr(chunked_head, "CHUNK_ELEMENTS", tokens * vocabulary)
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-3))
    with Largest(vocabulary) as seen:
        engine.step(make_batch(), EntropyLoss())
    assert seen.elements == tokens * vocabulary


def test_a_model_with_changed_logits_has_no_chunks():
    assert ChunkedHead.of(family_model("gemma2")) is None
