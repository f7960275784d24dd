# SPDX-License-Identifier: Apache-2.0
"""Kinds of models and settings of the fsdp2 engine in one process: precision, heads, adapters, loading."""

import copy
import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, SamplingParams, TrainSettings
from dlrover.python.rl.engine.api.weights import UP
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.loading import write_atomically
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine

CONFIG = OptimizerConfig(lr=1e-3, max_grad_norm=None)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)


def make_batch(seed=0):
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in (9, 4, 17, 6)]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    return Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})


def token_loss(outputs, columns):
    return -outputs.sum() / 20, {}


def weights(engine):
    return {name: tensor.detach().clone() for name, tensor in engine.named_weights()}


# -- dropout ----------------------------------------------------------------------------------------------------------

_SMALL = {
    "vocab_size": 259,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
DROPOUTS = {
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16, "dropout": 0.3, "layerdrop": 0.3},
    "starcoder2": {
        "intermediate_size": 16,
        "num_key_value_heads": 1,
        "residual_dropout": 0.3,
        "attention_dropout": 0.3,
    },
    "falcon": {"num_ln_in_parallel_attn": None, "hidden_dropout": 0.3, "attention_dropout": 0.3},
}


@pytest.mark.parametrize("family", DROPOUTS)
def test_nothing_is_dropped_in_training_and_the_models_files_keep_its_rates(tmp_path, family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SMALL, **DROPOUTS[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    write_atomically(tmp_path / "T", model, make_byte_tokenizer())
    engine = Fsdp2TrainEngine(tmp_path / "T", CONFIG, TrainSettings(gradient_checkpointing=True))
    batch = make_batch()
    found = engine.evaluate(batch).ragged("logprobs")
    with torch.no_grad():
        for tokens, mask, logprobs in zip(batch.ragged("tokens"), batch.ragged("action_mask"), found, strict=True):
            expected = model(input_ids=torch.tensor(tokens)[None]).logits[0].log_softmax(-1)[:-1]
            expected = expected.gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()
            assert np.abs(expected - logprobs[1:])[mask[1:]].max() < 1e-4
    engine.save(tmp_path / "saved")
    saved = AutoConfig.from_pretrained(tmp_path / "saved")
    assert {name: getattr(saved, name) for name in DROPOUTS[family]} == DROPOUTS[family]


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.feature(53)
def test_bf16_computes_low_and_trains_float32_masters(model_path):
    low = Fsdp2TrainEngine(model_path, dataclasses.replace(CONFIG, lr=1e-6), TrainSettings(precision="bf16"))
    full = Fsdp2TrainEngine(model_path, CONFIG)
    found, expected = (engine.evaluate(make_batch()).ragged("logprobs").values for engine in (low, full))
    assert 0 < np.abs(found - expected).max() < 0.1
    before = weights(low)
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    for _ in range(3):
        low.step(make_batch(), token_loss)
    moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in weights(low).items()}
    assert all(0 < distance < 4e-6 for distance in moved.values())


@pytest.mark.feature(53)
def test_gradients_of_micro_batches_add_up_in_float32(model_path):
    norms = [
        Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(precision="bf16", max_tokens_per_microbatch=budget))
        .step(make_batch(), token_loss)
        .grad_norm
        for budget in (1, 1000)
    ]
    full = Fsdp2TrainEngine(model_path, CONFIG).step(make_batch(), token_loss).grad_norm
    assert norms == pytest.approx([full, full], rel=0.02)


@pytest.mark.feature(41)
def test_four_micro_batches_are_one_big_step(model_path):
    engines = [
        Fsdp2TrainEngine(
            model_path, dataclasses.replace(CONFIG, lr=1e-5), TrainSettings(max_tokens_per_microbatch=size)
        )
        for size in (1, 10**6)
    ]
    for engine in engines:
        engine.step(make_batch(), token_loss)
    first, second = map(weights, engines)
    assert all(torch.allclose(first[name], second[name], atol=1e-6, rtol=0) for name in first)


# -- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "score"]])
def test_a_new_head_leaves_with_the_weights_and_its_adapter_changes_nothing_at_first(model_path, targets):
    settings = TrainSettings(head="token", lora=LoraSettings(rank=2, targets=targets))
    critic = Fsdp2TrainEngine(model_path, CONFIG, settings)
    before, adapters = weights(critic), dict(critic.named_adapters())
    assert len(adapters) == 2 * 2 + 2 * ("score" in targets)
    assert all((tensor == 0).all() == name.endswith(UP) for name, tensor in adapters.items())
    critic.step(make_batch(), token_loss)
    assert not torch.equal(weights(critic)["score.weight"], before["score.weight"])
    assert critic.adapter_scale is None, "alone, adapters would leave the trained head behind"


def test_a_critic_scores_the_action_tokens_and_learns(model_path, tmp_path):
    settings = TrainSettings(head="token")
    critic = Fsdp2TrainEngine(model_path, CONFIG, settings)
    batch = make_batch()
    scores = critic.evaluate(batch).ragged("scores")
    critic.save(tmp_path / "critic")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert model.config.num_labels == 1
    for tokens, mask, row in zip(batch.ragged("tokens"), batch.ragged("action_mask"), scores, strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor(tokens)[None]).logits[0, :, 0].numpy()
        assert np.allclose(row, np.where(mask, expected, 0.0), atol=1e-5)
        assert np.abs(row[mask]).min() > 0
    again = Fsdp2TrainEngine(model_path, None, settings)
    assert np.array_equal(again.evaluate(batch).ragged("scores").values, scores.values)

    def to_one(found, columns):
        return (found - 1).square().sum() / 30, {}

    losses = [critic.step(batch, to_one).loss for _ in range(15)]
    assert losses[-1] < 0.2 * losses[0]
    with pytest.raises(EngineError, match="entropy needs a causal head"):
        critic.evaluate(batch, entropy=True)
    with pytest.raises(EngineError, match="top needs a causal head"):
        critic.evaluate(batch, top=2)


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_beside_a_model_in_bf16_leave_in_one_precision(model_path, tmp_path):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    engine = Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(lora=LoraSettings(rank=2), precision="bf16"))
    start = {name: tensor.bfloat16().float() for name, tensor in weights(Fsdp2TrainEngine(model_path, None)).items()}
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(engine).items())
    engine.step(make_batch(), token_loss)
    moved = {name for name, tensor in weights(engine).items() if not torch.equal(tensor, start[name])}
    assert moved and all(name.removesuffix(".weight").endswith("proj") for name in moved)
    engine.save(tmp_path / "merged")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_without_peft_the_extra_is_named(model_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"'peft' is not installed: pip install 'dlrover-rl\[lora\]'"):
        Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(lora=LoraSettings()))


def test_adapters_come_back_after_meta(model_path):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    engine = Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(lora=LoraSettings(rank=2)))
    engine.step(make_batch(), token_loss)
    kept, live = weights(engine), engine.state_dict()
    state = copy.deepcopy(live)
    engine.meta()
    with pytest.raises(EngineError, match="the state's tensors were released with their engine"):
        engine.load_state_dict(live)
    engine.load_state_dict(state)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in weights(engine).items())


# -- models -----------------------------------------------------------------------------------------------------------


def logprobs_of(model, batch):
    rows = []
    for tokens, mask in zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            table = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], dim=-1)
        rows.append(np.where(mask[1:], table[torch.arange(len(ids) - 1), ids[1:]].numpy(), 0.0))
    return rows


CAPPED = {
    "vocab_size": 259, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4, "eos_token_id": 258, "pad_token_id": 256,
}  # fmt: skip
"""Models whose scores are capped or have a sink, which is no SDPA."""

OTHERS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=259, n_positions=64, n_embd=16, n_layer=2, n_head=2)),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=259, hidden_size=16, state_size=4, num_hidden_layers=2, use_mambapy=True)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**CAPPED)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**CAPPED, num_local_experts=4, num_experts_per_tok=2)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_built_otherwise_are_right_too(kind, tmp_path):
    torch.manual_seed(0)
    model = OTHERS[kind]()
    path = write_atomically(tmp_path / kind, model, make_byte_tokenizer())
    engine = Fsdp2TrainEngine(path, CONFIG)
    logprobs = engine.evaluate(make_batch()).ragged("logprobs")
    for row, expected in zip(logprobs, logprobs_of(model.eval(), make_batch()), strict=True):
        assert np.allclose(row[1:], expected, atol=1e-4)
    assert engine.step(make_batch(), token_loss).grad_norm > 0


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_sampled_logprobs_of_capped_scores_are_the_trained(kind, tmp_path):
    path = write_atomically(tmp_path / kind, OTHERS[kind](), make_byte_tokenizer())
    trained, engine = Fsdp2TrainEngine(path, CONFIG), TorchRolloutEngine(path)
    trained.step(make_batch(), token_loss)
    engine.receive(trained.publish())
    prompts = Batch({"prompt_id": np.arange(2), "tokens": Ragged.from_rows([np.arange(12) + 60, np.arange(5) + 90])})
    drawn = engine.generate(prompts, SamplingParams(max_new_tokens=8, samples_per_prompt=2), (0,))
    computed = trained.evaluate(drawn.select("tokens", "action_mask")).ragged("logprobs").values
    actions = drawn.ragged("action_mask").values
    assert np.allclose(computed[actions], drawn.ragged("logprobs").values[actions], atol=1e-5)


@pytest.mark.feature(35)
def test_rotary_frequencies_are_those_of_a_normal_load(model_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    engine.cpu()
    engine.cuda()
    found = dict(engine._model.module.named_buffers())
    expected = dict(AutoModelForCausalLM.from_pretrained(model_path).named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


def test_files_of_several_parts_are_read(model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    make_byte_tokenizer().save_pretrained(tmp_path / "parts")
    assert len(json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())["weight_map"]) > 2
    found, expected = (weights(Fsdp2TrainEngine(path, None)) for path in (tmp_path / "parts", model_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_of_the_bare_model_is_read(model_path, tmp_path):
    write_tiny_model(tmp_path / "bare", hidden=32, layers=2, max_positions=64)
    file = tmp_path / "bare/model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    found, expected = (weights(Fsdp2TrainEngine(path, None)) for path in (tmp_path / "bare", model_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_options_of_another_backend_are_refused(model_path):
    with pytest.raises(EngineError, match="fsdp2: backend.zero_stage"):
        Fsdp2TrainEngine(model_path, None, TrainSettings(backend={"zero_stage": 2}))
