# SPDX-License-Identifier: Apache-2.0
"""Optimizers of the train engine: learning rates by hand, gradient descent, ``optimizer_on_host``, ``adamw_8bit``."""

import importlib
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data import device_bytes
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, TrainSettings
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, EngineInfo, engine_info, find_optimizer_errors
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.training import eight_bit
from dlrover.python.rl.engine.training.eight_bit import BLOCK, AdamW8bit, make_state
from dlrover.python.rl.engine.training.stepping import compute_learning_rate
from tests.support.fsdp2_toys import bits, make_batch, step
from tests.support.train_exercise import digest, saved


# -- rates and settings -----------------------------------------------------------------------------------------------
def rates(steps=10, **config):
    config = OptimizerConfig(lr=1.0, **config).over(steps)
    return [compute_learning_rate(config, step) for step in range(steps + 2)]


@pytest.mark.feature(141)
def test_rates_warm_up_and_follow_the_schedule():
    assert rates(4) == [1.0] * 6
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(6, warmup_steps=2, schedule="linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    falls = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in (0, 1, 2, 3, 4, 4)]
    assert rates(6, warmup_steps=2, schedule="cosine", min_lr=0.1) == pytest.approx([0.5, 1.0, *falls])
    assert rates(9, schedule="linear", decay_steps=2) == pytest.approx([1.0, 0.5, *[0.0] * 9])
    assert rates(2, schedule="cosine", warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        ({"momentum": 0.5}, "", "only sgd has momentum"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "", "min_lr (0.01) is above lr (0.001)"),
        ({"name": "sgd", "betas": [0.5, 0.9]}, "", "only adamw has betas"),
        ({"min_lr": 1e-7}, "", "need a schedule that decays: linear or cosine"),
        ({"decay_steps": 5}, "", "need a schedule that decays: linear or cosine"),
        ({"betas": [0.9, 1.0]}, ".betas.1", ""),
        ({"lr": float("inf")}, ".lr", ""),
    ],
)
def test_contradicting_settings_are_refused(settings, where, message):
    _, (problem, *_) = parse(OptimizerConfig, settings, "optimizer")
    assert problem.where == f"optimizer{where}"
    assert message in problem.what


def test_an_optimizer_of_another_engine_is_refused():
    errors = {"fsdp2": []}
    errors |= {name: [f"{name} does not support sgd: use adamw, or fsdp2"] for name in ("deepspeed", "megatron")}
    for name, expected in errors.items():
        assert find_optimizer_errors(name, engine_info(TRAIN_ENGINES, name), OptimizerConfig(name="sgd")) == expected
    assert find_optimizer_errors("mine", EngineInfo(), OptimizerConfig(name="sgd")) == []


def test_a_falling_rate_needs_its_number_of_steps(model_path):
    config = OptimizerConfig(lr=1.0, schedule="linear")
    with pytest.raises(EngineError, match="needs decay_steps"):
        Fsdp2TrainEngine(model_path, config)
    engine = Fsdp2TrainEngine(model_path, replace(config, decay_steps=4))
    assert [step(engine).lr for _ in range(2)] == [1.0, 0.75]


# -- gradient descent -------------------------------------------------------------------------------------------------
@pytest.mark.feature(142)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torchs_own(model_path, momentum):
    config = OptimizerConfig(lr=0.05, name="sgd", momentum=momentum, weight_decay=0.1, max_grad_norm=None)
    engine = Fsdp2TrainEngine(model_path, config)
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    descent = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=momentum)
    for seed in range(3):
        step(engine, seed)
        descent.zero_grad()
        for tokens in make_batch(seed).ragged("tokens"):
            ids = torch.tensor(tokens)[None]
            table = torch.log_softmax(plain(ids).logits[0, 1:-1], dim=-1)
            (-table.gather(1, ids[0, 2:, None]).sum() / 20).backward()
        with torch.no_grad():
            torch._foreach_mul_([parameter for parameter in plain.parameters() if parameter.ndim > 1], 1 - 0.05 * 0.1)
        descent.step()
    trained = dict(engine.named_weights())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), atol=2e-6, rtol=1e-5)


@pytest.mark.feature(142)
def test_sgd_continues_from_a_state_and_a_checkpoint(model_path, tmp_path):
    config = OptimizerConfig(lr=0.05, name="sgd", momentum=0.9)
    first, second, third = (Fsdp2TrainEngine(model_path, config) for _ in range(3))
    step(first)
    first.save_checkpoint(tmp_path / "checkpoint")
    second.load_state_dict(saved(first.state_dict()))
    third.load_checkpoint(tmp_path / "checkpoint")
    reports = [step(engine) for engine in (first, second, third)]
    assert reports[0] == reports[1] == reports[2]
    assert digest(first) == digest(second) == digest(third)


# -- on the host ------------------------------------------------------------------------------------------------------
CONFIG = OptimizerConfig(lr=1e-3, warmup_steps=6, weight_decay=0.1, max_grad_norm=0.5)
STEPS = range(3)


def make(path, on_host, precision="bf16", config=CONFIG, **changes):
    backend = {"optimizer_on_host": on_host}
    # Several micro-batches, whose gradients add up.
    settings = TrainSettings(precision=precision, max_tokens_per_microbatch=16, backend=backend, **changes)
    return Fsdp2TrainEngine(path, config, settings)


def buffers(engine):
    return sum(buffer.nbytes for buffer in engine._model.module.buffers())


@pytest.fixture(scope="module")
def trained(model_path):
    engines = {}
    for precision in ("fp32", "bf16"):
        for on_host in (False, True):
            engine = make(model_path, on_host, precision)
            engines[precision, on_host] = engine, [step(engine, seed) for seed in STEPS]
    return engines


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_on_the_host_give_the_same_bits(trained, precision):
    (plain, wanted), (engine, results) = trained[precision, False], trained[precision, True]
    assert results == wanted
    for dtype in (None, torch.float32, torch.bfloat16):
        assert bits(engine, dtype) == bits(plain, dtype)


@pytest.mark.parametrize(("precision", "weights"), [("fp32", 4), ("bf16", 2)])
def test_a_device_holds_the_weights_of_the_passes_alone(trained, precision, weights):
    engine, _ = trained[precision, True]
    assert engine.footprint() == {"weights": weights * engine.parameter_count + buffers(engine)}
    plain, _ = trained[precision, False]
    assert plain.footprint()["optimizer"] >= 8 * engine.parameter_count


def test_a_step_holds_six_bytes_a_parameter_on_the_device(model_path):
    engine, seen = make(model_path, on_host=True), []
    reduced = engine._model.reduce_gradients

    def reduce_gradients():
        gradients = reduced()
        seen.append(sum(gradient.nbytes for gradient in gradients) + sum(engine.footprint().values()))
        return gradients

    engine._model.reduce_gradients = reduce_gradients
    step(engine, 0)
    assert seen == [6 * engine.parameter_count + buffers(engine)]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("way", ["state", "checkpoint"])
def test_a_state_continues_in_either_place(tmp_path, model_path, trained, way, on_host):
    source, _ = trained["bf16", on_host]
    engine, twin = make(model_path, not on_host), make(model_path, on_host)
    source.save_checkpoint(tmp_path / "checkpoint")
    for other in (engine, twin):
        if way == "state":
            other.load_state_dict(source.state_dict())
        else:
            other.load_checkpoint(tmp_path / "checkpoint")
    assert step(engine, 7) == step(twin, 7)
    assert bits(engine) == bits(twin)


def test_a_refused_update_changes_nothing_on_the_host(model_path):
    engine, twin = make(model_path, on_host=True), make(model_path, on_host=True)
    step(engine, 0), step(twin, 0)
    before, passes = bits(engine), []

    def infinite_in_the_second_pass(logprobs, columns):
        passes.append(None)
        return -logprobs.sum() / (20 if len(passes) < 2 else 0.0), {}

    with pytest.raises(NonFiniteUpdate):
        engine.step(make_batch(1), infinite_in_the_second_pass)
    assert len(passes) > 1 and bits(engine) == before
    assert step(engine, 1) == step(twin, 1), "nothing was added to a gradient that is left"


def test_a_failed_step_leaves_no_gradient(model_path, monkeypatch):
    engine, twin = make(model_path, on_host=True), make(model_path, on_host=True)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine._model.optimizer._inner, "step", lambda: 1 / 0)
        step(engine, 0)
    assert all(shard.gradient is None and shard.master.grad is None for shard in engine._model.shards)
    step(engine, 1)
    step(twin, 1)
    assert bits(engine) == bits(twin)


def test_gradients_are_copied_to_the_host_in_pieces(monkeypatch):
    monkeypatch.setattr(device_bytes, "PIECE", 1 << 8)
    monkeypatch.setattr(device_bytes, "_buffers", {})
    source, target = torch.randn(7, 100).t(), torch.zeros(100, 7)
    device_bytes.copy_to_host(source, target)
    assert torch.equal(source, target)


@pytest.mark.parametrize("base", [None, "nf4"])
def test_adapters_alone_are_on_the_host(model_path, base):
    pytest.importorskip("peft")
    if base:
        pytest.importorskip("bitsandbytes")
    lora = LoraSettings(rank=4, quantize_base=base)
    engine, plain = (make(model_path, on_host, lora=lora) for on_host in (True, False))
    assert [step(engine, seed) for seed in STEPS] == [step(plain, seed) for seed in STEPS]
    assert bits(engine) == bits(plain)
    assert all(shard.on_host == shard.trained for shard in engine._model.shards)
    frozen = make(model_path, on_host=True, config=None)
    assert not any(shard.on_host for shard in frozen._model.shards)


# -- moments in 8 bits ------------------------------------------------------------------------------------------------
ROUNDED = OptimizerConfig(lr=1e-3, name="adamw_8bit", warmup_steps=3, weight_decay=0.1, betas=(0.9, 0.95))


def make_parameter(*shape):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def make_exact(parameter, **options):
    return torch.optim.AdamW([parameter], 1e-3, (0.9, 0.95), weight_decay=0.1, **options)


def take_steps(parameter, optimizer, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        scale = torch.rand((len(parameter), *[1] * (parameter.ndim - 1)), generator=generator)
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
        optimizer.step()
    return parameter.detach()


def optimizer_of(parameter, of_matrices=True):
    pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    optimizer = AdamW8bit([{"params": [parameter], "weight_decay": 0.1}], 1e-3, (0.9, 0.95))
    optimizer.state[parameter] = make_state(parameter, of_matrices)
    return optimizer


def ours(*shape, of_matrices=True):
    parameter = make_parameter(*shape)
    optimizer = optimizer_of(parameter, of_matrices)
    return take_steps(parameter, optimizer, 8), optimizer.state[parameter]


def test_rows_of_whole_blocks_take_the_steps_of_bitsandbytes():
    stepped, state = ours(64, 2 * BLOCK)
    parameter = make_parameter(64, 2 * BLOCK)
    bitsandbytes = importlib.import_module("bitsandbytes")
    library = bitsandbytes.optim.AdamW8bit([parameter], 1e-3, (0.9, 0.95), weight_decay=0.1, min_8bit_size=1)
    take_steps(parameter, library, 8)
    # In a few places the last bit of a sum decides between two values.
    assert ((stepped - parameter.detach()).abs() > 2e-6).float().mean() < 1e-3
    expected = library.state[parameter]
    for kind, codes, scales in (("exp_avg", "state1", "absmax1"), ("exp_avg_sq", "state2", "absmax2")):
        assert (state[kind] != expected[codes]).float().mean() < 1e-3
        assert torch.allclose(state[f"{kind}_scale"].flatten(), expected[scales], rtol=1e-5)
    exact = make_parameter(64, 2 * BLOCK)
    take_steps(exact, make_exact(exact), 8)
    assert 1e-4 < (stepped - exact.detach()).abs().max() < 1e-3, "the moments are rounded"


@pytest.mark.parametrize("shape", [(5, 300), (7, 3), (3, 4, 70)], ids=str)
def test_a_block_ends_with_its_row(shape):
    whole, state = ours(*shape)
    blocks = -(-whole[0].numel() // BLOCK)
    assert state["exp_avg"].shape == shape and state["exp_avg"].dtype == torch.uint8
    assert state["exp_avg_scale"].shape == state["exp_avg_sq_scale"].shape == (shape[0], blocks)
    exact = make_parameter(*shape)
    take_steps(exact, make_exact(exact), 8)
    assert (whole - exact.detach()).abs().max() < 2e-3


def test_pieces_of_a_matrix_take_the_same_step(monkeypatch):
    whole, state = ours(10, 300)
    monkeypatch.setattr(eight_bit, "PIECE", 900)
    pieces, other = ours(10, 300)
    assert torch.equal(pieces, whole)
    assert all(torch.equal(tensor, other[kind]) for kind, tensor in state.items())


@pytest.mark.parametrize("size", [2 * BLOCK, 2 * BLOCK + 7, 3])
def test_flat_parts_take_the_steps_of_one_row_in_any_pieces(monkeypatch, size):
    row, flat, pieces = make_parameter(1, size), make_parameter(size), make_parameter(size)
    optimizers = [optimizer_of(parameter) for parameter in (row, flat, pieces)]
    for number in range(8):
        gradient = torch.randn(size, generator=torch.Generator().manual_seed(number))
        for parameter, optimizer in zip((row, flat, pieces), optimizers, strict=True):
            monkeypatch.setattr(eight_bit, "PIECE", BLOCK if parameter is pieces else 1 << 24)
            parameter.grad = gradient.view(parameter.shape)
            optimizer.step()
    states = [optimizer.state[parameter] for parameter, optimizer in zip((row, flat, pieces), optimizers, strict=True)]
    for parameter, state in zip((flat, pieces), states[1:], strict=True):
        assert torch.equal(parameter, row[0])
        assert state["exp_avg"].dtype == torch.uint8 and state["exp_avg"].shape == (size,)
        assert state["exp_avg_scale"].shape == (-(-size // BLOCK),)
        assert all(torch.equal(tensor.flatten(), states[0][kind].flatten()) for kind, tensor in state.items())


@pytest.mark.parametrize("shape", [(5, 300), (700,)], ids=str)
def test_moments_can_be_read_and_written_again(shape):
    parameter = make_parameter(*shape)
    optimizer = optimizer_of(parameter)
    take_steps(parameter, optimizer, 3)
    state, other = optimizer.state[parameter], make_state(parameter, of_matrices=True)
    for kind in ("exp_avg", "exp_avg_sq"):
        moment = optimizer.read(state, kind)
        assert moment.dtype == torch.float32 and moment.shape == shape
        optimizer.write(other, kind, moment)
        again = optimizer.read(other, kind)
        assert (again - moment).abs().max() < 0.02 * moment.abs().max()
    # The largest code of numbers of both signs is 1, and the smallest more than -1.
    assert torch.equal(other["exp_avg_sq"], state["exp_avg_sq"])
    assert torch.equal(other["exp_avg_sq_scale"], state["exp_avg_sq_scale"])


def test_vectors_have_moments_in_float32():
    stepped, state = ours(300, of_matrices=False)
    exact = make_parameter(300)
    take_steps(exact, make_exact(exact, fused=True), 8)
    assert torch.equal(stepped, exact.detach())
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_rank_without_a_row_counts_its_steps():
    parameter = make_parameter(0, 300)
    optimizer = optimizer_of(parameter)
    take_steps(parameter, optimizer, 8)
    state = optimizer.state[parameter]
    assert state["step"] == 8 and state["exp_avg"].shape == (0, 300)
    moment = optimizer.read(state, "exp_avg")
    assert moment.dtype == torch.float32 and moment.shape == (0, 300)


def make_low(path, rendezvous=None, **changes):
    pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    return Fsdp2TrainEngine(path, ROUNDED, TrainSettings(max_tokens_per_microbatch=20, **changes), rendezvous)


def trained_low(path, **changes):
    engine = make_low(path, **changes)
    for seed in range(2):
        step(engine, seed)
    return engine


def test_adamw_8bit_on_the_host_gives_the_same_state(model_path):
    plain, on_host = trained_low(model_path), trained_low(model_path, backend={"optimizer_on_host": True})
    assert digest(on_host) == digest(plain)
    assert plain.footprint()["optimizer"] < 0.4 * 8 * plain.parameter_count
    assert "optimizer" not in on_host.footprint()


def test_adamw_8bit_with_tensor_parallel_ranks_is_refused(model_path):
    with pytest.raises(EngineError, match="adamw_8bit needs tensor_parallel_size 1, not 2"):
        make_low(model_path, parallel=ParallelSizes(tensor_parallel_size=2))
