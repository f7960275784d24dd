# SPDX-License-Identifier: Apache-2.0
"""The fsdp2 engine in one process, where the contract does not look: its outputs, its gradients, its refusals."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine, compile_layers
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support import fsdp2_toys as toys
from tests.support.fsdp2_toys import logprobs, step, token_loss, weights
from tests.support.plain_engine import EntropyLoss, make_batch
from tests.support.processes import run
from tests.support.train_exercise import weights_of

CONFIG = OptimizerConfig(lr=1e-3, max_grad_norm=None)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that Dynamo looks at
ROWS = make_batch().select("tokens", "action_mask")


def trainer(path, config=CONFIG, **settings):
    return Fsdp2TrainEngine(path, config, TrainSettings(**settings))


def gradients(engine):
    """The gradients of an engine's first step: Adam's first moment is then the gradient times ``1 - beta``."""
    moments = engine.state_dict()["optimizer"]
    return {name: moment["exp_avg"] / (1 - CONFIG.betas[0]) for name, moment in moments.items()}


def assert_close(first, second, tolerance=1e-6):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=0, atol=tolerance), name


# -- outputs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [1, 16384])
def test_the_likeliest_ids_and_logprobs_are_the_dense_models(model_path, budget):
    engine = trainer(model_path, None, max_tokens_per_microbatch=budget)
    outputs = engine.evaluate(ROWS, 0.7, entropy=True, top=3)
    columns = [outputs.ragged(name) for name in ("candidates", "candidate_logprobs")]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = zip(ROWS.ragged("tokens"), ROWS.ragged("action_mask"), *columns, strict=True)
    for tokens, mask, ids, ids_logprobs in rows:
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor(tokens)[None]).logits[0] / 0.7, dim=-1)
        wanted, before = table.topk(3), np.flatnonzero(mask) - 1
        assert np.array_equal(ids[mask], wanted.indices.numpy()[before])
        assert np.allclose(ids_logprobs[mask], wanted.values.numpy()[before], atol=1e-5)
        assert not ids[~mask].any()
        assert not ids_logprobs[~mask].any()
    with_ids = ROWS.with_columns(candidates=outputs["candidates"])
    again = engine.evaluate(with_ids, 0.7)
    assert np.allclose(again.ragged("candidate_logprobs").values, columns[1].values, atol=1e-6)
    assert np.array_equal(again.ragged("logprobs").values, outputs.ragged("logprobs").values)
    with pytest.raises(EngineError, match="use either"):
        engine.evaluate(with_ids, top=3)


def test_outputs_of_a_batch_without_actions_are_zeros(model_path):
    batch = Batch({"tokens": Ragged.from_rows([[1], [2, 3]]), "action_mask": Ragged.from_rows([[False], [False] * 2])})
    engine = trainer(model_path, None)
    assert engine.evaluate(batch).ragged("logprobs").values.tolist() == [0.0] * 3
    outputs = engine.evaluate(batch, entropy=True, top=2)
    assert {name: outputs.ragged(name).values.tolist() for name in outputs.columns} == {
        "logprobs": [0.0] * 3,
        "entropy": [0.0] * 3,
        "candidates": [[0, 0]] * 3,
        "candidate_logprobs": [[0.0, 0.0]] * 3,
    }
    again = engine.evaluate(batch.with_columns(candidates=outputs["candidates"]))
    assert again.ragged("candidate_logprobs").values.tolist() == [[0.0, 0.0]] * 3


# -- gradients --------------------------------------------------------------------------------------------------------
@pytest.mark.feature(41, 122)
@pytest.mark.parametrize("budget", [16384, 128, 64, 1])
def test_the_gradient_does_not_depend_on_the_micro_batches(model_path, budget):
    whole, cut = trainer(model_path), trainer(model_path, max_tokens_per_microbatch=budget)
    first, second = (engine.step(make_batch(), EntropyLoss()) for engine in (whole, cut))
    assert (second.loss, second.grad_norm) == pytest.approx((first.loss, first.grad_norm), rel=1e-6)
    assert second.metrics == pytest.approx(first.metrics)
    assert_close(gradients(cut), gradients(whole))


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_the_first_column_with_nan_is_named(model_path):
    batch = make_batch()
    batch.ragged("old").values[batch.ragged("action_mask").values.argmax() + 1] = math.nan
    with pytest.raises(NonFiniteUpdate, match=r"the loss is nan \(first in: old\)"):
        trainer(model_path).step(batch, EntropyLoss())


@pytest.mark.feature(59)
@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        ([[1, 2]], [[True, True]], "first token"),
        ([[1, 2]], [[False]], "different lengths"),
        ([[1, 2]], [[False, False]], "no row of the batch has an action token"),
        ([[1], [1, 700]], [[False], [False, True]], "row 1 of the batch has the id 700, .* has ids 0 to 258"),
        ([[1] * 129], [[False] * 128 + [True]], "row 0 of the batch has 129 tokens and does not fit .* 128 positions"),
    ],
)
def test_batches_unfit_for_training_are_refused(model_path, tokens, mask, message):
    batch = Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})
    engine = trainer(model_path)
    with pytest.raises(EngineError, match=message):
        engine.step(batch, token_loss)
    assert engine.version == 0


def save_without_norms(path, folder):
    model = AutoModelForCausalLM.from_pretrained(path)
    state = {name: tensor for name, tensor in model.state_dict().items() if "norm.weight" not in name}
    model.save_pretrained(folder, state_dict=state)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)


UNKNOWN = '{"model_type": "not_yet_known"}'


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda path, folder: folder.rmdir(), "no model at '.*model': it is not a folder"),
        (lambda path, folder: None, "the folder does not contain a causal language model"),
        (lambda _, folder: (folder / "config.json").write_text(UNKNOWN), "no model can be loaded .*not_yet_known"),
        (save_without_norms, r"lacks .*model\.norm\.weight"),
    ],
    ids=["no folder", "empty", "unknown architecture", "cut"],
)
def test_folders_without_a_whole_model_are_refused(model_path, tmp_path, fill, message):
    folder = tmp_path / "model"
    folder.mkdir()
    fill(model_path, folder)
    with pytest.raises(EngineError, match=message):
        Fsdp2TrainEngine(folder, None)


# -- weights ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def bf16_path(model_path, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path / "bf16")
    return tmp_path / "bf16"


@pytest.mark.feature(53)
def test_masters_of_a_bf16_checkpoint_are_moved_by_small_steps(bf16_path):
    engine = trainer(bf16_path, dataclasses.replace(CONFIG, lr=1e-6))
    before = weights(engine)
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    for _ in range(100):
        step(engine)
    for name, tensor in weights(engine).items():
        assert 0 < (tensor - before[name]).abs().max() < 3e-4, name


@pytest.mark.feature(106)
def test_a_tied_model_saves_and_loads_with_equal_logits(model_path, tmp_path):
    engine = trainer(model_path)
    step(engine)
    engine.save(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_close(weights(engine), dict(loaded.named_parameters()), 0.0)
    assert np.array_equal(logprobs(trainer(tmp_path / "saved", None)), logprobs(engine))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("hi") == [104, 105]
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(("save_dtype", "saved"), [("auto", "bfloat16"), ("fp32", "float32"), ("fp16", "float16")])
def test_a_model_is_saved_in_its_files_dtype_or_the_given_one(bf16_path, tmp_path, save_dtype, saved):
    engine = trainer(bf16_path, save_dtype=save_dtype)
    step(engine)
    engine.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == saved
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    expected = {name: tensor.to(getattr(torch, saved)) for name, tensor in weights(engine).items()}
    assert_close(expected, dict(loaded.named_parameters()), 0.0)


def test_weights_for_an_actor_are_refused(model_path):
    with pytest.raises(EngineError, match="only a frozen engine"):
        trainer(model_path).receive(trainer(model_path, None).publish())


# -- compiled layers --------------------------------------------------------------------------------------------------
DECAYING = OptimizerConfig(lr=1e-3, weight_decay=0.1)
LAYERS = 3
GRAPHS = 4  # a norm, an MLP, and attention before its core and after it
STEPS = range(4)


@pytest.fixture(scope="module")
def deeper_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=LAYERS, max_positions=64)


@pytest.fixture
def without_kernels(monkeypatch):
    """Compiled code is run by PyTorch's own kernels, without waiting for others."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    counters.clear()
    yield
    torch._dynamo.reset()


def compiling(path, compiled, rendezvous=None, **settings):
    backend = {"compile_layers": compiled}
    settings = TrainSettings(max_tokens_per_microbatch=40, backend=backend, **settings)
    return Fsdp2TrainEngine(path, DECAYING, settings, rendezvous)


def batch_of(seed):
    return toys.make_batch(seed, np.random.default_rng(seed).integers(4, 30, 6 + seed))


def step_on_other_lengths(engine, seed):
    result = engine.step(batch_of(seed), token_loss)
    return result.loss, result.grad_norm


def assert_results_are_equal(path, **settings):
    plain, compiled = compiling(path, False, **settings), compiling(path, True, **settings)
    assert [name for name, _ in compiled.named_weights()] == [name for name, _ in plain.named_weights()]
    for seed in STEPS:
        assert step_on_other_lengths(compiled, seed) == pytest.approx(step_on_other_lengths(plain, seed), rel=1e-5)
        outputs = (engine.evaluate(batch_of(seed)).ragged("logprobs").values for engine in (compiled, plain))
        assert np.allclose(*outputs, atol=1e-5)
    for (_, one), (_, other) in zip(plain.named_weights(), compiled.named_weights(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("recomputes", [False, True])
def test_one_compilation_is_for_all_layers_and_lengths(deeper_path, recomputes):
    assert_results_are_equal(deeper_path, gradient_checkpointing=recomputes)
    assert GRAPHS <= counters["stats"]["unique_graphs"] < LAYERS * GRAPHS


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("base", [None, "nf4"])
def test_compiled_layers_may_have_adapters(deeper_path, base):
    pytest.importorskip("peft")
    if base:
        pytest.importorskip("bitsandbytes")
    assert_results_are_equal(deeper_path, lora=LoraSettings(rank=4, quantize_base=base))


def shards(rank, world_size, port, path, compiled):
    engine = compiling(path, compiled, Rendezvous(rank, world_size, "127.0.0.1", port), gradient_checkpointing=True)
    calls, attend = [], attention.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend", lambda *args: calls.append(None) or attend(*args))
        step_on_other_lengths(engine, 0)
    results = [step_on_other_lengths(engine, seed) for seed in STEPS]
    outcome = len(calls), results, weights_of(engine)
    engine.close()
    return outcome


@pytest.mark.slow
def test_sharding_ranks_may_compile_layers(deeper_path):
    plain, compiled = (run(2, shards, deeper_path, compiled) for compiled in (False, True))
    for (calls, results, trained), (plain_calls, wanted, expected) in zip(compiled, plain, strict=True):
        assert calls == plain_calls
        assert np.allclose(results, wanted, rtol=1e-5)
        assert all(np.allclose(trained[name], expected[name], atol=1e-5) for name in expected)


def test_a_model_without_names_of_its_layers_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8))
    model._no_split_modules = None
    with pytest.raises(EngineError, match="GPT2LMHeadModel does not name its layers"):
        compile_layers(model)
