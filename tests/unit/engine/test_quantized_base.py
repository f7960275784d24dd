# SPDX-License-Identifier: Apache-2.0
"""``lora.quantize_base``: adapters beside a model in 4 bits."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.training.adapters import BLOCK, QuantizedLinear
from tests.support.fsdp2_toys import bits, logprobs, step, weights

LORA = LoraSettings(rank=4, alpha=8.0, quantize_base="nf4")
CONFIG = OptimizerConfig(lr=1e-2, max_grad_norm=None)

pytest.importorskip("peft", reason="the extra 'lora' is not installed")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)
    tensors = load_file(path / "model.safetensors")
    biases = {name: torch.full_like(tensor, 0.1) for name, tensor in tensors.items() if name.endswith(".bias")}
    assert biases
    save_file(tensors | biases, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")


def make(path, lora=LORA, config=CONFIG, **changes):
    # Several micro-batches, one of them of several documents.
    return Fsdp2TrainEngine(path, config, TrainSettings(lora=lora, **{"max_tokens_per_microbatch": 16, **changes}))


def packed(engine):
    layers = [part for part in engine._model.module.modules() if isinstance(part, QuantizedLinear)]
    return [layer.weight.view(torch.uint8).numpy().tobytes() for layer in layers]


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_matrices_are_rounded_to_sixteen_values_a_block(model_path, precision):
    plain = weights(make(model_path, None, None))
    engine = make(model_path, precision=precision)
    restored = weights(engine)
    assert list(restored) == list(plain)
    matrices = [name for name in plain if name.endswith("_proj.weight")]
    assert len(matrices) == len(packed(engine)) == 7 * 2
    for name, tensor in plain.items():
        exact = tensor if precision == "fp32" else tensor.bfloat16().float()
        if name not in matrices:
            assert torch.equal(restored[name], exact), name
            continue
        blocks = zip(exact.reshape(-1, BLOCK), restored[name].reshape(-1, BLOCK), strict=True)
        for block, rounded in blocks:
            largest = block.abs().max()
            assert len(rounded.unique()) <= 16
            assert (rounded - block).abs().max() <= 0.153 * largest + 2**-8 * largest, "half of the widest gap"
        assert not torch.equal(restored[name], exact)


def quantized(weight, parts=1):
    """A layer whose weight ranks divide, each of which has read its rows alone."""
    with torch.device("meta"):
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer = QuantizedLinear(plain, weight.dtype, parts).to_empty(device="cpu")
    for part in range(parts):
        layer.store(weight[layer.rows_of(part)], layer.weight.detach()[part : part + 1], part)
    return layer


@pytest.mark.usefixtures("bitsandbytes")
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


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 48), (5, 80), (64, 32), (3, 5), (4, 64), (1, 16)])
def test_rows_of_any_length_are_restored_to_the_nearest_values(shape, precision):
    from bitsandbytes.functional import get_4bit_type

    code, generator = get_4bit_type("nf4", device="cpu"), torch.Generator().manual_seed(0)
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


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_steps_equal_steps_over_the_rounded_model(model_path, tmp_path, settings):
    engine = make(model_path, **settings)
    engine.save(tmp_path / "rounded")
    plain = make(tmp_path / "rounded", replace(LORA, quantize_base=None), **settings)
    for seed in range(3):
        report, wanted = step(engine, seed), step(plain, seed)
        assert (report.loss, report.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5)
    assert np.allclose(logprobs(engine), logprobs(plain), atol=1e-4)
    for (name, one), (_, other) in zip(engine.named_weights(), plain.named_weights(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name


@pytest.mark.usefixtures("bitsandbytes")
def test_results_do_not_depend_on_passes_and_recomputing(model_path):
    ways = [{}, {"max_tokens_per_microbatch": 16384}, {"gradient_checkpointing": True}]
    one, whole, recomputed = ([step(make(model_path, **way), seed) for seed in range(2)] for way in ways)
    assert recomputed == one
    assert [result.loss for result in whole] == pytest.approx([result.loss for result in one], rel=1e-5)


@pytest.mark.usefixtures("bitsandbytes")
def test_published_weights_give_the_same_logprobs(model_path):
    engine, plain = make(model_path), make(model_path, None, None)
    for seed in range(3):
        step(engine, seed)
    with engine.without_adapters():
        base = logprobs(engine)
    plain.receive(engine.publish())
    assert np.allclose(logprobs(plain), logprobs(engine), atol=1e-5)
    assert not np.allclose(base, logprobs(engine), atol=1e-2)
    assert np.array_equal(base, logprobs(make(model_path)))
    served = weights(engine, torch.bfloat16)
    assert all(torch.equal(served[name], tensor.bfloat16()) for name, tensor in weights(engine).items())


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_matrix_takes_half_a_byte_a_number_and_its_scales(model_path, precision):
    lora = replace(LORA, quantize_base=None)
    small, large = (make(model_path, lora, precision=precision).footprint() for lora in (LORA, lora))
    numbers = sum(size for name, size in sizes(model_path) if name.endswith("_proj.weight"))
    saved = numbers * (4 if precision == "fp32" else 2) - numbers / 2 - numbers / BLOCK * 4
    assert large["weights"] - small["weights"] == saved
    assert large["optimizer"] == small["optimizer"]


def sizes(model_path):
    return [(name, tensor.numel()) for name, tensor in make(model_path, None, None).named_weights()]


@pytest.mark.usefixtures("bitsandbytes")
def test_a_trip_to_the_host_changes_nothing_in_4_bits(model_path):
    engine, undisturbed = make(model_path), make(model_path)
    step(engine, 0), step(undisturbed, 0)
    engine.cpu()
    assert engine.footprint() == {}
    assert bits(engine) == bits(undisturbed)
    engine.cuda()
    assert step(engine, 1) == step(undisturbed, 1)
    assert engine.footprint() == undisturbed.footprint()


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_state_has_adapters_alone_beside_the_same_4_bits(model_path, precision):
    engine, undisturbed = make(model_path, precision=precision), make(model_path, precision=precision)
    step(engine, 0), step(undisturbed, 0)
    state = copy.deepcopy(engine.state_dict())
    assert all(".lora_" in name for name in state["model"])
    engine.meta()
    assert engine.footprint() == {}
    engine.load_state_dict(state)
    assert packed(engine) == packed(undisturbed)
    assert step(engine, 1) == step(undisturbed, 1)
    assert bits(engine) == bits(undisturbed)


@pytest.mark.usefixtures("bitsandbytes")
def test_a_checkpoint_continues_and_fits_no_whole_model(model_path, tmp_path):
    engine, other = make(model_path), make(model_path)
    step(engine, 0)
    engine.save_checkpoint(tmp_path / "checkpoint")
    other.load_checkpoint(tmp_path / "checkpoint")
    assert step(other, 1) == step(engine, 1)
    assert bits(other) == bits(engine)
    base = make(model_path, replace(LORA, quantize_base=None))
    with pytest.raises(EngineError, match=r"is of another model: it lacks model/model\.embed_tokens"):
        base.load_checkpoint(tmp_path / "checkpoint")


@pytest.mark.usefixtures("bitsandbytes")
def test_adapters_over_4_bits_can_be_trained_on_the_host(model_path):
    engine, plain = make(model_path, backend={"optimizer_on_host": True}), make(model_path)
    assert [step(engine, seed) for seed in range(3)] == [step(plain, seed) for seed in range(3)]
    assert bits(engine, torch.bfloat16) == bits(plain, torch.bfloat16)
    assert "optimizer" not in engine.footprint()
