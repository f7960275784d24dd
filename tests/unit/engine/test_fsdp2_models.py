# SPDX-License-Identifier: Apache-2.0
"""Kinds of models and settings of the fsdp2 engine: other families, heads, adapters beside 4 bits, files, modules."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.fsdp2.materialize import MaterializeOptions, materialize
from dlrover.python.rl.engine.fsdp2.shards import Grid
from dlrover.python.rl.engine.model.loading import TensorSource, write_atomically
from dlrover.python.rl.engine.model.spec import empty_weights
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, write_tiny_model
from dlrover.python.rl.engine.training.adapters import BLOCK, QuantizedLinear
from tests.support.fsdp2_toys import bits, logprobs, make_batch, step, weights
from tests.support.session_toys import TwoLayers, start
from tests.support.torch_models import family_model

CONFIG = OptimizerConfig(lr=1e-3, max_grad_norm=None)
ALONE = Grid(Layout(), Layout(1, 0, 0, 0, 0))


def logprobs_of(model, batch):
    rows = []
    for tokens, mask in zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            table = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], dim=-1)
        rows.append(np.where(mask[1:], table[torch.arange(len(ids) - 1), ids[1:]].numpy(), 0.0))
    return rows


def assert_evaluates_as(engine, model):
    rows = engine.evaluate(make_batch()).ragged("logprobs")
    for row, expected in zip(rows, logprobs_of(model.eval(), make_batch()), strict=True):
        assert np.allclose(row[1:], expected, atol=1e-4)


# -- dropout ----------------------------------------------------------------------------------------------------------
_SMALL = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_SMALL |= {"intermediate_size": 16, "max_position_embeddings": 64}
_SMALL |= {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256}
DROPOUTS = {
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16, "dropout": 0.3, "layerdrop": 0.3},
    "starcoder2": {"num_key_value_heads": 1, "residual_dropout": 0.3, "attention_dropout": 0.3},
    "falcon": {"num_ln_in_parallel_attn": None, "hidden_dropout": 0.3, "attention_dropout": 0.3},
}


@pytest.mark.parametrize("family", DROPOUTS)
def test_training_drops_nothing_and_saved_files_keep_the_rates(tmp_path, family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SMALL, **DROPOUTS[family])
    model = AutoModelForCausalLM.from_config(config)
    write_atomically(tmp_path / "T", model, make_byte_tokenizer())
    engine = Fsdp2TrainEngine(tmp_path / "T", CONFIG, TrainSettings(gradient_checkpointing=True))
    assert_evaluates_as(engine, model)
    engine.save(tmp_path / "saved")
    saved = AutoConfig.from_pretrained(tmp_path / "saved")
    assert {name: getattr(saved, name) for name in DROPOUTS[family]} == DROPOUTS[family]


@pytest.mark.feature(53)
def test_gradients_of_micro_batches_add_up_in_float32(model_path):
    reports = [
        step(Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(max_tokens_per_microbatch=budget, precision=precision)))
        for budget, precision in ((1, "bf16"), (1000, "bf16"), (1000, "fp32"))
    ]
    assert [report.grad_norm for report in reports[:2]] == pytest.approx([reports[2].grad_norm] * 2, rel=0.02)


# -- heads ------------------------------------------------------------------------------------------------------------
def test_a_critic_is_saved_with_its_head_and_has_no_entropy(model_path, tmp_path):
    settings = TrainSettings(head="token")
    critic, again = Fsdp2TrainEngine(model_path, CONFIG, settings), Fsdp2TrainEngine(model_path, None, settings)
    batch = make_batch()
    scores = critic.evaluate(batch).ragged("scores")
    assert np.array_equal(again.evaluate(batch).ragged("scores").values, scores.values)
    critic.save(tmp_path / "critic")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert model.config.num_labels == 1
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(next(iter(batch.ragged("tokens"))))[None]).logits[0, 2:, 0]
    assert np.allclose(next(iter(scores))[2:], expected.numpy(), atol=1e-5)
    for refused in ({"entropy": True}, {"top": 2}):
        with pytest.raises(EngineError, match=f"{next(iter(refused))} needs a causal head"):
            critic.evaluate(batch, **refused)


# -- models -----------------------------------------------------------------------------------------------------------
def mamba():
    sizes = {"vocab_size": 259, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes, use_mambapy=True))


@pytest.mark.parametrize("family", ["gpt2", "mamba", "gemma2", "gpt_oss"])
def test_models_of_other_kinds_have_the_librarys_logprobs(family, tmp_path):
    model = mamba() if family == "mamba" else family_model(family)
    engine = Fsdp2TrainEngine(write_atomically(tmp_path / family, model, make_byte_tokenizer()), CONFIG)
    assert_evaluates_as(engine, model)
    assert step(engine).grad_norm > 0


@pytest.mark.feature(35)
def test_rotary_frequencies_are_those_of_a_normal_load(model_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    engine.cpu()
    engine.cuda()
    buffers = dict(engine._model.module.named_buffers())
    expected = dict(AutoModelForCausalLM.from_pretrained(model_path).named_buffers())
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected.items())


def save_in_parts(model_path, folder):
    AutoModelForCausalLM.from_pretrained(model_path).save_pretrained(folder, max_shard_size="20KB")
    make_byte_tokenizer().save_pretrained(folder)
    assert len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]) > 2


def save_bare(model_path, folder):
    write_tiny_model(folder, hidden=32, layers=2, max_positions=64)
    file = folder / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize("save", [save_in_parts, save_bare])
def test_checkpoints_in_parts_and_of_the_bare_model_are_read(model_path, tmp_path, save):
    save(model_path, tmp_path / "saved")
    read, expected = (weights(Fsdp2TrainEngine(path, None)) for path in (tmp_path / "saved", model_path))
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


# -- a base in 4 bits -------------------------------------------------------------------------------------------------
LORA = LoraSettings(rank=4, alpha=8.0, quantize_base="nf4")
FAST = OptimizerConfig(lr=1e-2, max_grad_norm=None)


@pytest.fixture(scope="module")
def biased_path(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)
    tensors = load_file(path / "model.safetensors")
    biases = {name: torch.full_like(tensor, 0.1) for name, tensor in tensors.items() if name.endswith(".bias")}
    assert biases
    save_file(tensors | biases, path / "model.safetensors", {"format": "pt"})
    return path


def import_extras():
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")


def make(path, lora=LORA, config=FAST, **changes):
    import_extras()
    # Several micro-batches, one of them of several documents.
    return Fsdp2TrainEngine(path, config, TrainSettings(lora=lora, **{"max_tokens_per_microbatch": 16, **changes}))


def packed(engine):
    layers = [part for part in engine._model.module.modules() if isinstance(part, QuantizedLinear)]
    return [layer.weight.view(torch.uint8).numpy().tobytes() for layer in layers]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matrices_of_layers_alone_are_rounded(biased_path, precision):
    plain, engine = weights(make(biased_path, None, None)), make(biased_path, precision=precision)
    restored = weights(engine)
    assert list(restored) == list(plain)
    assert len(packed(engine)) == 7 * 2
    for name, tensor in plain.items():
        exact = tensor if precision == "fp32" else tensor.bfloat16().float()
        assert torch.equal(restored[name], exact) != name.endswith("_proj.weight"), name


def quantized(weight, parts=1):
    """A layer whose weight ranks divide, each of which has read its rows alone."""
    import_extras()
    with torch.device("meta"):
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer = QuantizedLinear(plain, weight.dtype, parts).to_empty(device="cpu")
    for part in range(parts):
        layer.store(weight[layer.rows_of(part)], layer.weight.detach()[part : part + 1], part)
    return layer


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 48), (5, 80), (3, 5), (130, 72), (1, 16)])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_equal_parts_of_a_matrix_are_restored_to_the_whole(shape, precision, parts):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(precision)
    one, divided = quantized(weight), quantized(weight, parts)
    assert torch.equal(divided.restored(divided.weight), one.restored(one.weight))
    blocks = -(-weight.numel() // BLOCK)
    assert divided.weight.shape[0] == parts
    assert divided.weight.nbytes == parts * -(-blocks // parts) * (BLOCK // 2 + 4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 48), (5, 80), (64, 32), (3, 5), (4, 64), (1, 16)])
def test_rows_of_any_length_are_restored_to_the_nearest_values(shape, precision):
    functional = pytest.importorskip("bitsandbytes.functional", reason="the extra 'bitsandbytes' is not installed")
    code, generator = functional.get_4bit_type("nf4", device="cpu"), torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(precision)
    layer = quantized(weight)
    flat = torch.nn.functional.pad(weight.flatten().float(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest = flat.abs().amax(dim=1, keepdim=True)
    nearest = code[(flat / largest).unsqueeze(-1).sub(code).abs().argmin(dim=-1)] * largest
    expected = nearest.flatten()[: weight.numel()].view(shape)
    restored = layer.restored(layer.weight)
    assert torch.allclose(restored.float(), expected, atol=0.0, rtol=1e-6 if precision == torch.float32 else 2**-8)
    inputs = torch.randn(2, 3, shape[1], generator=generator).to(precision).requires_grad_()
    layer(inputs).float().square().sum().backward()
    gradient, inputs.grad = inputs.grad, None
    torch.nn.functional.linear(inputs, restored).float().square().sum().backward()
    assert torch.equal(gradient, inputs.grad)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_steps_equal_steps_over_the_rounded_model(biased_path, tmp_path, settings):
    engine = make(biased_path, **settings)
    engine.save(tmp_path / "rounded")
    plain = make(tmp_path / "rounded", replace(LORA, quantize_base=None), **settings)
    for seed in range(3):
        report, wanted = step(engine, seed), step(plain, seed)
        assert (report.loss, report.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5)
    assert np.allclose(logprobs(engine), logprobs(plain), atol=1e-4)
    for (name, one), (_, other) in zip(engine.named_weights(), plain.named_weights(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name


def test_a_checkpoint_continues_and_fits_no_whole_model(biased_path, tmp_path):
    engine, other = make(biased_path), make(biased_path)
    step(engine, 0)
    engine.save_checkpoint(tmp_path / "checkpoint")
    other.load_checkpoint(tmp_path / "checkpoint")
    assert packed(other) == packed(engine)
    assert step(other, 1) == step(engine, 1)
    assert bits(other) == bits(engine)
    base = make(biased_path, replace(LORA, quantize_base=None))
    with pytest.raises(EngineError, match=r"is of another model: it lacks model/model\.embed_tokens"):
        base.load_checkpoint(tmp_path / "checkpoint")


# -- refusals ---------------------------------------------------------------------------------------------------------
SPLIT = ParallelSizes(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": {"zero_stage": 2}}, "fsdp2: backend.zero_stage"),
        ({"parallel": ParallelSizes(pipeline_parallel_size=2)}, "pipeline_parallel_size is 2, but fsdp2 supports only"),
        ({"parallel": SPLIT, "backend": {"compile_layers": True}}, "compile_layers needs tensor_parallel_size 1, not"),
    ],
)
def test_settings_of_other_engines_are_refused(model_path, settings, message):
    with pytest.raises(EngineError, match=message):
        Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(**settings), Rendezvous(0, 2))


@pytest.mark.parametrize(
    ("optimizer", "lora", "extra"),
    [
        ("adamw", LoraSettings(), "'peft' is not installed: pip install 'dlrover-rl[lora]'"),
        ("adamw_8bit", None, "'bitsandbytes>=0.50' is not installed: pip install 'dlrover-rl[bitsandbytes]'"),
        ("adamw", LoraSettings(quantize_base="nf4"), "'bitsandbytes>=0.50' is not installed"),
    ],
)
def test_an_absent_or_old_library_is_named_with_its_extra(model_path, monkeypatch, optimizer, lora, extra):
    if "peft" in extra:
        monkeypatch.setitem(sys.modules, "peft", None)
    elif lora:
        pytest.importorskip("peft")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.49.2")
    with pytest.raises(MissingExtra, match=re.escape(extra)):
        Fsdp2TrainEngine(model_path, OptimizerConfig(name=optimizer), TrainSettings(lora=lora))


# -- any module -------------------------------------------------------------------------------------------------------
def fill(module, **changes):
    return materialize(module, TensorSource({**start(), **changes}), ALONE, MaterializeOptions())


def test_other_shapes_and_buffers_without_values_are_named():
    with empty_weights():
        module = TwoLayers()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.scale.tolist() == [2.0]
    assert not torch.nn.Linear(2, 2).weight.is_meta
    with pytest.raises(EngineError, match=r"first\.weight of shape \(8, 4\) \(it has \(5, 7\)\)"):
        fill(module, **{"first.weight": torch.zeros(5, 7)})
    with torch.device("meta"):
        without_values = TwoLayers()
    with pytest.raises(EngineError, match="buffers without values: steps_seen, scale"):
        fill(without_values)
    assert list(fill(module).buffers) == ["steps_seen"]
