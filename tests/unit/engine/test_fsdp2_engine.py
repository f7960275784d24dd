# SPDX-License-Identifier: Apache-2.0
"""The fsdp2 engine in one process: its gradients against the slow plain way, its refusals, its weights."""

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate, WeightSyncError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.packing import pack, select_columns
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.processes import free_port, run

CONFIG = OptimizerConfig(lr=1e-3, max_grad_norm=None)
# Adam divides by the gradient's size, so where that nearly cancels out rounding becomes a share of the rate.
GENTLE = OptimizerConfig(lr=1e-5, max_grad_norm=1.0)
LENGTHS = [(3, 9), (1, 2), (7, 30), (2, 1), (4, 12), (5, 5), (1, 20), (6, 3)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)


def make_batch(seed=0) -> Batch:
    """Rows of unequal lengths with a hole in each long action mask, as a tool's answer leaves one."""
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, head + tail) for head, tail in LENGTHS]
    masks = [np.arange(head + tail) >= head for head, tail in LENGTHS]
    for mask in masks:
        if len(mask) > 14:
            mask[10:13] = False
    flat = sum(map(len, tokens))
    ragged = Ragged.from_rows(tokens)
    return Batch(
        {
            "tokens": ragged,
            "action_mask": Ragged.from_rows(masks),
            "old": ragged.like(generator.normal(size=flat).astype(np.float64)),
            "weights": generator.uniform(0.5, 1.5, len(LENGTHS)).astype(np.float32),
            "prompt_id": np.arange(len(LENGTHS)),
            "text": ["x"] * len(LENGTHS),
        }
    )


def token_loss(logprobs, columns):
    """Anything that is a weighted sum over tokens and uses both kinds of column."""
    terms = columns["weights"] * (torch.exp(0.1 * (logprobs - columns["old"])) - logprobs)
    return terms.sum() / 50, {"tokens": torch.tensor(float(len(terms))), "weight": columns["weights"].sum()}


def plain_loss(model, batch, temperature=1.0):
    """The same loss, a row at a time without padding, over the whole vocabulary at every position."""
    rows = zip(*(batch.ragged(name) for name in ("tokens", "action_mask", "old")), batch.dense("weights"), strict=True)
    total = torch.zeros(())
    for tokens, mask, old, weight in rows:
        ids, chosen = torch.tensor(tokens), torch.tensor(mask[1:])
        table = torch.log_softmax(model(ids[None]).logits[0, :-1].float() / temperature, dim=-1)
        logprobs = table[torch.arange(len(ids) - 1), ids[1:]][chosen]
        columns = {
            "old": torch.tensor(old[1:], dtype=torch.float32)[chosen],
            "weights": torch.full((len(logprobs),), weight),
        }
        total = total + token_loss(logprobs, columns)[0]
    return total


def plain_gradients(path, batch, temperature=1.0):
    """Loss, gradients by name and the norm of them all."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loss = plain_loss(model, batch, temperature)
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    return float(loss.detach()), norm, {name: parameter.grad for name, parameter in model.named_parameters()}


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.named_weights()}


def gradients(engine) -> dict[str, torch.Tensor]:
    """Those of an engine's first step: Adam's first moment is then the gradient times ``1 - beta``."""
    moments = engine.state_dict()["optimizer"]
    return {name: kept["exp_avg"] / (1 - CONFIG.betas[0]) for name, kept in moments.items()}


def assert_close(first, second, tolerance=1e-6):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=0, atol=tolerance), name


# -- log-probs --------------------------------------------------------------------------------------------------------


@pytest.mark.feature(123)
@pytest.mark.parametrize("budget", [1, 60, 16384])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_at_the_temperature_in_the_rows_order(model_path, budget, temperature):
    batch = make_batch()
    found = Fsdp2TrainEngine(model_path, None, TrainSettings(max_tokens_per_microbatch=budget)).evaluate(
        batch, temperature
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    columns = (batch.ragged("tokens"), batch.ragged("action_mask"), found.ragged("logprobs"))
    for tokens, mask, logprobs in zip(*columns, strict=True):
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor(tokens)[None]).logits[0] / temperature, dim=-1)
        expected = table[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
        assert np.allclose(logprobs[1:], np.where(mask[1:], expected, 0.0), atol=1e-5)
        assert logprobs.dtype == np.float32
        assert logprobs[0] == 0


@pytest.mark.parametrize("budget", [1, 16384])
def test_the_likeliest_ids_and_their_log_probs_are_the_dense_models(model_path, budget):
    batch, engine = make_batch(), Fsdp2TrainEngine(model_path, None, TrainSettings(max_tokens_per_microbatch=budget))
    found = engine.evaluate(batch, 0.7, entropy=True, top=3)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    columns = [found.ragged(name) for name in ("candidates", "candidate_logprobs")]
    rows = zip(batch.ragged("tokens"), batch.ragged("action_mask"), *columns, strict=True)
    for tokens, mask, ids, logprobs in rows:
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor(tokens)[None]).logits[0] / 0.7, dim=-1)
        wanted = table.topk(3)
        before = np.flatnonzero(mask) - 1
        assert np.array_equal(ids[mask], wanted.indices.numpy()[before])
        assert np.allclose(logprobs[mask], wanted.values.numpy()[before], atol=1e-5)
        assert not ids[~mask].any()
        assert not logprobs[~mask].any()
    again = engine.evaluate(batch.with_columns(candidates=found["candidates"]), 0.7)
    assert np.allclose(again.ragged("candidate_logprobs").values, columns[1].values, atol=1e-6)
    assert np.array_equal(again.ragged("logprobs").values, found.ragged("logprobs").values)
    with pytest.raises(EngineError, match="use either"):
        engine.evaluate(batch.with_columns(candidates=found["candidates"]), top=3)


def test_a_batch_without_action_tokens_has_zeros_for_all_that_is_asked(model_path):
    batch = Batch({"tokens": Ragged.from_rows([[1], [2, 3]]), "action_mask": Ragged.from_rows([[False], [False] * 2])})
    engine = Fsdp2TrainEngine(model_path, None)
    assert engine.evaluate(batch).ragged("logprobs").values.tolist() == [0.0] * 3
    told = engine.evaluate(batch, entropy=True, top=2)
    assert {name: told.ragged(name).values.tolist() for name in told.columns} == {
        "logprobs": [0.0] * 3,
        "entropy": [0.0] * 3,
        "candidates": [[0, 0]] * 3,
        "candidate_logprobs": [[0.0, 0.0]] * 3,
    }
    again = engine.evaluate(batch.with_columns(candidates=told["candidates"]))
    assert again.ragged("candidate_logprobs").values.tolist() == [[0.0, 0.0]] * 3


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_equals_the_slow_plain_one(model_path, temperature):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    result = engine.step(make_batch(), token_loss, temperature)
    loss, norm, expected = plain_gradients(model_path, make_batch(), temperature)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert result.metrics["tokens"] == make_batch().ragged("action_mask").values.sum()
    assert engine.version == 1
    assert_close(gradients(engine), expected, 1e-6)


def read_at_once(path, packs):
    """Loss and gradients of all rows in one forward pass: packed, or padded under the library's own attention."""
    backend = Fsdp2TrainEngine(path, CONFIG)._model
    assert backend.packs
    if not packs:
        backend.module.set_attn_implementation("sdpa")
    (micro,) = pack(make_batch(), 16384)
    outputs, _ = dataclasses.replace(backend.reader, packs=packs).read(backend.module, micro)
    loss, _ = token_loss(outputs, select_columns(make_batch(), micro.flat, "cpu"))
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in backend.module.named_parameters()}


@pytest.mark.feature(58)
def test_packed_rows_give_the_loss_and_the_gradient_of_padded_ones(model_path):
    (packed, first), (padded, second) = (read_at_once(model_path, packs) for packs in (True, False))
    assert packed == pytest.approx(padded, rel=1e-5)
    assert_close(first, second, 1e-5)
    assert max(float(gradient.abs().max()) for gradient in first.values()) > 1e-3


@pytest.mark.feature(61)
def test_outputs_come_back_to_their_rows(model_path):
    generator = np.random.default_rng(0)
    tokens = [generator.integers(0, 256, length) for length in generator.integers(2, 9, 40)]
    masks = [np.arange(len(row)) > 0 for row in tokens]
    batch = Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(masks)})
    engine = Fsdp2TrainEngine(model_path, None, TrainSettings(max_tokens_per_microbatch=50))
    alone = [engine.evaluate(batch.rows(row, row + 1)).ragged("logprobs").values for row in range(40)]
    for count in range(1, 41):
        found = engine.evaluate(batch.rows(0, count)).ragged("logprobs")
        assert len(found) == count
        for row, expected in zip(found, alone, strict=False):
            assert np.allclose(row, expected, atol=1e-5)


@pytest.mark.feature(122)
@pytest.mark.parametrize("budget", [16384, 128, 64, 1])
def test_the_gradient_does_not_depend_on_the_micro_batches(model_path, budget):
    whole = Fsdp2TrainEngine(model_path, CONFIG)
    cut = Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(max_tokens_per_microbatch=budget))
    first, second = whole.step(make_batch(), token_loss), cut.step(make_batch(), token_loss)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-6)
    assert second.metrics == pytest.approx(first.metrics)
    assert_close(gradients(cut), gradients(whole))


@pytest.mark.feature(54)
def test_gradient_checkpointing_changes_nothing(model_path):
    plain, saving = (
        Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(gradient_checkpointing=on)) for on in (False, True)
    )
    assert plain.step(make_batch(), token_loss) == saving.step(make_batch(), token_loss)
    assert_close(weights(plain), weights(saving))


def test_the_rate_warms_up_linearly(model_path):
    engine = Fsdp2TrainEngine(model_path, dataclasses.replace(CONFIG, lr=0.4, warmup_steps=4))
    engine.step = partial(engine.step, make_batch(), lambda logprobs, columns: (0.0 * logprobs.sum(), {}))
    assert [engine.step().lr for _ in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_only_matrices_decay(model_path):
    engine = Fsdp2TrainEngine(model_path, dataclasses.replace(CONFIG, weight_decay=0.1))
    before = weights(engine)
    engine.step(make_batch(), lambda logprobs, columns: (0.0 * logprobs.sum(), {}))
    for name, tensor in weights(engine).items():
        factor = 1 - CONFIG.lr * 0.1 if tensor.ndim >= 2 else 1.0
        assert torch.allclose(tensor, before[name] * factor, rtol=1e-6, atol=0), name


@pytest.mark.feature(52)
def test_clipping_scales_by_the_global_norm_and_reports_it_unclipped(model_path):
    free = Fsdp2TrainEngine(model_path, CONFIG)
    clipped = Fsdp2TrainEngine(model_path, dataclasses.replace(CONFIG, max_grad_norm=0.01))
    norms = [engine.step(make_batch(), token_loss).grad_norm for engine in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 0.01
    scaled = {name: gradient * (0.01 / norms[0]) for name, gradient in gradients(free).items()}
    assert_close(gradients(clipped), scaled)


# -- ranks ------------------------------------------------------------------------------------------------------------


def train_rank(rank, world_size, port, path):
    """One data-parallel rank: three steps on its shard, then two of which one rank has a non-finite part: every rank
    must skip the first, and refuse the second."""
    copies = TrainSettings(parallel=ParallelSizes(ddp_size=world_size))
    skipping = dataclasses.replace(GENTLE, skip_nonfinite=1)
    engine = Fsdp2TrainEngine(path, skipping, copies, Rendezvous(rank, world_size, "127.0.0.1", port, 240))
    steps = [engine.step(make_batch(seed).split(world_size)[rank], token_loss) for seed in range(3)]
    scale = float("nan") if rank == 1 else 1.0
    refused = False
    try:
        for _ in range(2):
            skipped = engine.step(make_batch(), lambda logprobs, columns: (scale * logprobs.sum(), {}))
    except NonFiniteUpdate as error:
        refused = skipped.skipped and "first in" in str(error)
    state = {name: tensor.numpy() for name, tensor in weights(engine).items()}
    engine.close()
    return [(step.loss, step.grad_norm, step.metrics) for step in steps], refused, state


@pytest.mark.slow
@pytest.mark.feature(122)
def test_two_ranks_train_as_one_process_does(model_path):
    answers = run(2, train_rank, model_path)
    alone = Fsdp2TrainEngine(model_path, GENTLE)
    steps = [alone.step(make_batch(seed), token_loss) for seed in range(3)]
    for found, refused, state in answers:
        assert refused
        assert_close(weights(alone), {name: torch.from_numpy(array) for name, array in state.items()}, 1e-6)
        for step, (loss, norm, metrics) in zip(steps, found, strict=True):
            assert (loss, norm) == pytest.approx((step.loss, step.grad_norm), rel=1e-4)
            assert metrics == pytest.approx(step.metrics, rel=1e-4)


@pytest.mark.feature(122)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_sum_over_shards_is_the_whole_batchs_gradient(model_path, ranks):
    whole = Fsdp2TrainEngine(model_path, CONFIG)
    whole.step(make_batch(), token_loss)
    shards = [Fsdp2TrainEngine(model_path, CONFIG) for _ in range(ranks)]
    for engine, part in zip(shards, make_batch().split(ranks, by="tokens"), strict=True):
        engine.step(part, token_loss)
    parts = [gradients(engine) for engine in shards]
    assert_close({name: sum(part[name] for part in parts) for name in parts[0]}, gradients(whole))


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_an_error():
    port = free_port()
    with pytest.raises(EngineError, match=f"rank 0 of 2 did not meet the others at 127.0.0.1:{port}"):
        Ranks.connect(Rendezvous(0, 2, "127.0.0.1", port, timeout_s=1))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logprobs, columns: (logprobs.sum() * math.nan, {}), "loss is nan"),
        (lambda logprobs, columns: (logprobs.sum() * math.inf, {}), "loss is -inf"),
        # The square root's slope at zero is infinite: a finite loss with a gradient that is not.
        (
            lambda logprobs, columns: ((logprobs - logprobs.detach()).abs().sqrt().sum(), {}),
            r"gradient norm is nan \(first in: model\.embed_tokens\.weight\): the update of version 1 is refused",
        ),
    ],
)
def test_an_update_that_is_not_finite_is_refused(model_path, loss, message):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    engine.step(make_batch(), token_loss)
    before = weights(engine)
    with pytest.raises(NonFiniteUpdate, match=message):
        engine.step(make_batch(), loss)
    assert engine.version == 1
    assert_close(weights(engine), before, 0.0)
    again = Fsdp2TrainEngine(model_path, CONFIG)
    again.step(make_batch(), token_loss)
    assert engine.step(make_batch(1), token_loss) == again.step(make_batch(1), token_loss)


def test_the_first_column_that_is_not_finite_is_named(model_path):
    batch = make_batch()
    batch.ragged("old").values[batch.ragged("action_mask").values.argmax() + 1] = math.nan
    with pytest.raises(NonFiniteUpdate, match=r"the loss is nan \(first in: old\)"):
        Fsdp2TrainEngine(model_path, CONFIG).step(batch, token_loss)


def test_a_frozen_engine_refuses_to_step(model_path):
    with pytest.raises(EngineError, match="frozen"):
        Fsdp2TrainEngine(model_path, None).step(make_batch(), token_loss)


@pytest.mark.feature(59)
@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        ([[1, 2]], [[True, True]], "first token"),
        ([[1, 2]], [[False]], "different lengths"),
        ([[1, 2]], [[False, False]], "no row of the batch has an action token"),
        ([[1], [1, 700]], [[False], [False, True]], "row 1 of the batch has the id 700, .* has ids 0 to 258"),
        ([[1] * 65], [[False] * 64 + [True]], "row 0 of the batch has 65 tokens and does not fit .* 64 positions"),
    ],
)
def test_batches_that_cannot_be_trained_on_are_refused(model_path, tokens, mask, message):
    batch = Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    with pytest.raises(EngineError, match=message):
        engine.step(batch, lambda logprobs, columns: (logprobs.sum(), {}))
    assert engine.version == 0


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(EngineError, match="no model at '.*nowhere': it is not a folder"):
        Fsdp2TrainEngine(tmp_path / "nowhere", None)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(EngineError, match="the folder does not contain a causal language model"):
        Fsdp2TrainEngine(tmp_path, None)


def test_a_model_of_an_unknown_architecture_is_refused_with_the_librarys_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "not_yet_known"}')
    with pytest.raises(EngineError, match="no model can be loaded from .*: .*not_yet_known"):
        Fsdp2TrainEngine(tmp_path, None)


def test_a_checkpoint_that_lacks_weights_is_refused(model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    kept = {name: tensor for name, tensor in model.state_dict().items() if "norm.weight" not in name}
    model.save_pretrained(tmp_path / "cut", state_dict=kept)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path / "cut")
    with pytest.raises(EngineError, match=r"lacks .*model\.norm\.weight"):
        Fsdp2TrainEngine(tmp_path / "cut", None)


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.feature(53)
def test_a_bf16_checkpoint_loads_as_fp32_masters_that_small_steps_move(model_path, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path / "bf16")
    engine = Fsdp2TrainEngine(tmp_path / "bf16", dataclasses.replace(CONFIG, lr=1e-6))
    before = weights(engine)
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    batch = make_batch().rows(0, 2)
    for _ in range(100):
        engine.step(batch, token_loss)
    for name, tensor in weights(engine).items():
        assert 0 < (tensor - before[name]).abs().max() < 3e-4, name


@pytest.mark.feature(106)
def test_a_tied_model_saves_and_loads_with_equal_logits(model_path, tmp_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    engine.step(make_batch(), token_loss)
    engine.save(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_close(weights(engine), dict(loaded.named_parameters()), 0.0)
    again = Fsdp2TrainEngine(tmp_path / "saved", None).evaluate(make_batch()).ragged("logprobs").values
    assert np.array_equal(again, engine.evaluate(make_batch()).ragged("logprobs").values)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("hi") == [104, 105]
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(("asked", "saved"), [("auto", "bfloat16"), ("fp32", "float32"), ("fp16", "float16")])
def test_a_model_is_saved_in_the_data_type_of_its_files_or_as_asked(model_path, tmp_path, asked, saved):
    AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path / "bf16")
    engine = Fsdp2TrainEngine(tmp_path / "bf16", CONFIG, TrainSettings(save_dtype=asked))
    engine.step(make_batch(), token_loss)
    engine.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == saved
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    expected = {name: tensor.to(getattr(torch, saved)) for name, tensor in weights(engine).items()}
    assert_close(expected, dict(loaded.named_parameters()), 0.0)
    assert {tensor.dtype for tensor in weights(engine).values()} == {torch.float32}


@pytest.mark.feature(107)
def test_a_reference_follows_its_actor(model_path):
    actor, reference = Fsdp2TrainEngine(model_path, CONFIG), Fsdp2TrainEngine(model_path, None)
    actor.step(make_batch(), token_loss)
    reference.receive(actor.publish())
    assert reference.version == 1
    found, expected = (engine.evaluate(make_batch()).ragged("logprobs").values for engine in (reference, actor))
    assert np.array_equal(found, expected)
    with pytest.raises(EngineError, match="only a frozen engine"):
        actor.receive(reference.publish())


@pytest.mark.feature(104)
def test_a_snapshot_carries_the_version_it_was_taken_at(model_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    first = engine.publish()
    engine.step(make_batch(), token_loss)
    assert (first.version, engine.publish().version) == (0, 1)
    name = "model.norm.weight"
    assert not torch.equal(first.tensor(name), engine.publish().tensor(name))


def test_a_snapshot_of_another_shape_is_refused_by_a_reference(model_path):
    frozen = Fsdp2TrainEngine(model_path, None)
    wider = take_snapshot([(name, torch.cat([tensor, tensor])) for name, tensor in weights(frozen).items()], 1)
    with pytest.raises(WeightSyncError, match="has shape"):
        frozen.receive(wider)
    assert frozen.version == 0
