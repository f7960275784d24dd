# SPDX-License-Identifier: Apache-2.0
"""Weights between Hugging Face's names and Megatron's: complete, in the right order, and back to the same bits."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, Qwen2Config, Qwen3Config

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.megatron.conversion import TransformerShape, join, list_parameters, pad_vocab, split

SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
}


def hugging_face(config, head):
    """Name to tensor of a model with random weights, tied ones once."""
    torch.manual_seed(0)
    kind = AutoModelForTokenClassification if head == "token" else AutoModelForCausalLM
    state = kind.from_config(config).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return {name: torch.randn_like(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("head", ["causal", "token"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_has_each_tensor_once_with_its_shape(name, head):
    config = CONFIGS[name]
    config.num_labels = 1
    table = list_parameters(TransformerShape.of(config, head))
    sources = [pair for item in table for pair in zip(item.sources, item.shapes, strict=True)]
    assert len(sources) == len(dict(sources))
    assert dict(sources) == {name: tuple(tensor.shape) for name, tensor in hugging_face(config, head).items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_split_over_ranks_join_to_the_same_bits(name, ranks):
    shape = TransformerShape.of(CONFIGS[name], "causal")
    weights = hugging_face(CONFIGS[name], "causal")
    for item in list_parameters(shape):
        tensors = [weights[source] for source in item.sources]
        parts = [split(item, tensors, shape, rank, ranks) for rank in range(ranks)]
        assert len({tuple(part.shape) for part in parts}) == 1
        for back, tensor in zip(join(item, parts, shape), tensors, strict=True):
            assert torch.equal(back, tensor), item.name


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.booleans())
@settings(deadline=None, max_examples=50)
def test_queries_stand_above_their_own_key_and_value(kv_heads, per_group, width, hidden, biases):
    """The rows of each head carry its number, so a row at a wrong place has a wrong number."""
    heads = kv_heads * per_group
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": width, "hidden": hidden}
    shape = dataclasses.replace(TransformerShape.of(CONFIGS["qwen2"], "causal"), **sizes)
    name = "self_attention.linear_qkv." + ("bias" if biases else "weight")
    item = next(item for item in list_parameters(shape) if item.name.endswith(name))

    def rows(number):
        return torch.full((width,), float(number)) if biases else torch.full((width, hidden), float(number))

    queries = torch.cat([rows(head) for head in range(heads)])
    keys = torch.cat([rows(100 + group) for group in range(kv_heads)])
    values = torch.cat([rows(200 + group) for group in range(kv_heads)])
    expected = []
    for group in range(kv_heads):
        expected += [rows(group * per_group + head) for head in range(per_group)]
        expected += [rows(100 + group), rows(200 + group)]
    assert torch.equal(split(item, [queries, keys, values], shape, 0, 1), torch.cat(expected))
    parts = [split(item, [queries, keys, values], shape, rank, kv_heads) for rank in range(kv_heads)]
    assert torch.equal(torch.cat(parts), torch.cat(expected))


def test_the_vocabulary_is_filled_up_with_zeros():
    shape = TransformerShape.of(CONFIGS["qwen2"], "causal")
    item = list_parameters(shape)[0]
    tensor = torch.randn(37, 24)
    parts = [split(item, [tensor], shape, rank, 4) for rank in range(4)]
    assert pad_vocab(37, 4) == 40
    assert [len(part) for part in parts] == [10] * 4
    assert not parts[-1][7:].any()


def test_gates_stand_above_their_ranks_up_rows():
    shape = TransformerShape.of(CONFIGS["llama"], "causal")
    item = next(item for item in list_parameters(shape) if item.form == "gate_up")
    gate, up = torch.randn(32, 24), torch.randn(32, 24)
    assert torch.equal(split(item, [gate, up], shape, 1, 2), torch.cat([gate[16:], up[16:]]))


def test_layers_are_numbered_on_their_stage():
    shape = TransformerShape.of(CONFIGS["qwen2"], "causal")
    names = [(item.stage(shape, 2), item.local_name(shape, 2)) for item in list_parameters(shape)]
    assert names[0] == (0, "embedding.word_embeddings.weight")
    assert (1, "decoder.layers.0.mlp.linear_fc2.weight") in names
    assert (1, "decoder.layers.2.mlp.linear_fc2.weight") not in names
    assert names[-1] == (1, "output_layer.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "its type is 'bert', not llama, mistral, qwen2 or qwen3"),
        ({"hidden_act": "gelu"}, "its activation is 'gelu', not 'silu'"),
        ({"attention_bias": True}, "it has attention_bias"),
        ({"use_sliding_window": True, "sliding_window": 16}, "has a sliding window of 16 tokens"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary positions are of type 'yarn'"),
    ],
)
def test_a_model_megatron_computes_otherwise_is_refused(changes, message):
    config = SimpleNamespace(**{**Qwen2Config(**SIZES).to_dict(), **changes})
    with pytest.raises(EngineError, match=message):
        TransformerShape.of(config, "causal")


@pytest.mark.feature(47)
@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [(4, 1, "2 key-value heads cannot be divided by tensor_parallel_size 4"), (1, 3, "4 layers .*_size 3")],
)
def test_sizes_of_other_models_are_refused(tensor, pipeline, message):
    with pytest.raises(EngineError, match=message):
        TransformerShape.of(CONFIGS["qwen2"], "causal").check_split(tensor, pipeline)
