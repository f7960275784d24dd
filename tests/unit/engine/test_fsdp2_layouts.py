# SPDX-License-Identifier: Apache-2.0
"""The fsdp2 engine over several processes, where the contract does not look: odd sizes, other settings, refusals.

The processes of a test group meet once and do everything in turn; each test looks at what came of one thing.
"""

import dataclasses
import math
import time
from datetime import timedelta
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.algorithm.distillation import VocabularyDistillation
from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.fsdp2 import shards
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.fsdp2.shards import Grid
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.updates import UpdatePlan, assign_updates, run_updates
from tests.support.processes import run

CONFIG = OptimizerConfig(lr=1e-4, max_grad_norm=1.0)
COPIES, TENSOR = ParallelSizes(ddp_size=2), ParallelSizes(tensor_parallel_size=2)
CONTEXT = ParallelSizes(context_parallel_size=2)


def settings(sizes=None, **changes):
    return TrainSettings(parallel=sizes or ParallelSizes(), max_tokens_per_microbatch=20, **changes)


WAYS = {
    "shards": settings(),
    "tensor": settings(TENSOR),
    "context": settings(CONTEXT),
    "recomputed": settings(gradient_checkpointing=True),
    "recomputed, context": settings(CONTEXT, gradient_checkpointing=True),
    "head": settings(head="token"),
    "head, tensor": settings(TENSOR, head="token"),
    "head, context": settings(CONTEXT, head="token"),
    "bf16": settings(precision="bf16"),
    "bf16, tensor": settings(TENSOR, precision="bf16"),
    "bf16, copies": settings(COPIES, precision="bf16"),
}
"""What two processes do."""
if find_spec("peft"):
    WAYS["adapters"] = settings(lora=LoraSettings(rank=4))
    if find_spec("bitsandbytes"):
        QUANTIZED = LoraSettings(rank=4, quantize_base="nf4")
        WAYS["adapters beside 4 bits, copies"] = settings(COPIES, lora=QUANTIZED)
        WAYS["adapters beside 4 bits, shards"] = settings(lora=QUANTIZED)
        WAYS["adapters beside 4 bits, recomputed, bf16"] = settings(
            lora=QUANTIZED, gradient_checkpointing=True, precision="bf16"
        )
        WAYS["adapters beside 4 bits, context"] = settings(CONTEXT, lora=QUANTIZED)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Of 259 tokens, which no two ranks can share equally."""
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)


def make_batch(seed=0, lengths=(9, 4, 17, 6)):
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in lengths]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    return Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})


def token_loss(outputs, columns):
    return -outputs.sum() / 20, {"tokens": float(len(outputs))}


def weights(engine):
    return {name: tensor.detach().clone().numpy() for name, tensor in engine.named_weights()}


def bits(engine):
    return {name: tensor.numpy().tobytes() for name, tensor in engine.state_dict()["model"].items()}


def make_engine(rank, world_size, port, path, way, frozen=False):
    rendezvous = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240)
    return Fsdp2TrainEngine(path, None if frozen else CONFIG, way, rendezvous)


def share(engine, rank, batch):
    place = engine.layout.coordinates(rank)
    return batch.split(engine.layout.data_parallel_size)[place.ddp * engine.layout.shard + place.shard]


def five_steps(rank, world_size, port, path, way):
    """Norms and losses, the weights that came of them, and what is here of the model."""
    engine = make_engine(rank, world_size, port, path, way)
    told = [engine.step(share(engine, rank, make_batch(seed)), token_loss) for seed in range(5)]
    found = {
        "told": [(step.loss, step.grad_norm, step.metrics) for step in told],
        "weights": weights(engine),
        "bytes": sum(engine.footprint().values()),
        "dtypes": {str(shard.master.dtype) for shard in engine._model.shards},
        "bits": bits(engine),
    }
    engine.close()
    return found


def assert_like_alone(path, way, ranks, tolerance=1e-5):
    """The same as one process with the same settings but the layout."""
    alone = five_steps(0, 1, 0, path, TrainSettings(**{**vars(way), "parallel": ParallelSizes()}))
    for rank in ranks:
        assert rank["told"] == ranks[0]["told"]
        for (loss, norm, metrics), (own_loss, own_norm, own_metrics) in zip(alone["told"], rank["told"], strict=True):
            assert (own_loss, own_norm) == pytest.approx((loss, norm), rel=10 * tolerance)
            assert own_metrics == metrics
        assert rank["weights"].keys() == alone["weights"].keys()
        for name, tensor in rank["weights"].items():
            if not name.endswith("k_proj.bias"):
                assert np.abs(tensor - alone["weights"][name]).max() < tolerance, name
    return alone


# -- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(2, id="", marks=pytest.mark.slow)])
def two(request, model_path):
    """What the two ranks found, by name: of each a list."""
    ranks = run(request.param, on_two, model_path)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def on_two(rank, world_size, port, path):
    place = (rank, world_size, port, path)
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    found = {name: five_steps(*place, way) for name, way in WAYS.items()}
    for name in ("tensor", "context"):
        found[f"{name}, read"] = read(make_engine(*place, WAYS[name], frozen=True))
    found |= {f"overlapped, {precision}": overlapped(*place, precision) for precision in ("fp32", "bf16")}
    found |= {"uneven": uneven(*place), "dealt": dealt(*place), "raising": raising(*place), "late": late(ranks)}
    ranks.close()
    return found


@pytest.mark.feature(44, 52)
def test_two_shards_take_the_steps_of_one_process_and_hold_half_of_it_each(two, model_path):
    alone = assert_like_alone(model_path, WAYS["shards"], two["shards"])
    assert all(rank["bytes"] <= 0.6 * alone["bytes"] for rank in two["shards"])


@pytest.mark.feature(47)
def test_a_vocabulary_that_cannot_be_shared_is_on_every_rank(two, model_path):
    assert_like_alone(model_path, WAYS["tensor"], two["tensor"])


@pytest.mark.feature(31, 50)
def test_two_ranks_that_share_sequences_take_the_steps_of_one_process(two, model_path):
    assert_like_alone(model_path, WAYS["context"], two["context"])


def read(engine):
    """Log-probs and entropies of rows of 5, 7 and 3 tokens, flat, and the likeliest two ids with their log-probs."""
    found = engine.evaluate(make_batch(lengths=(5, 7, 3)), temperature=0.7, entropy=True, top=2)
    engine.close()
    return {name: found.ragged(name).values for name in ("logprobs", "entropy", "candidates", "candidate_logprobs")}


@pytest.mark.feature(47, 50)
@pytest.mark.parametrize("name", ["tensor", "context"])
def test_logprobs_and_entropies_are_those_of_the_whole_model(name, two, model_path):
    alone = read(make_engine(0, 1, 0, model_path, settings(), frozen=True))
    for rank in two[f"{name}, read"]:
        for kind, values in rank.items():
            assert np.allclose(values, alone[kind], atol=1e-5)
            assert np.count_nonzero(values.reshape(len(values), -1).any(axis=1)) == 3 + 5 + 1


@pytest.mark.feature(54)
@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("recomputed")])
def test_activations_can_be_recomputed_in_every_dimension(name, two, model_path):
    assert_like_alone(model_path, WAYS[name], two[name])
    assert two[name][0]["weights"].keys() == two["shards"][0]["weights"].keys()
    stored = two["context" if "context" in name else "shards"]
    assert [rank["bits"] for rank in two[name]] == [rank["bits"] for rank in stored]


@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("head")])
def test_a_head_of_one_label_trains_in_every_dimension(name, two, model_path):
    assert_like_alone(model_path, WAYS[name], two[name])


@pytest.mark.feature(53)
@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("bf16")])
def test_bf16_has_float32_masters_in_every_dimension(name, two, model_path):
    # A gradient's sign decides about a step of the whole rate, and bf16 does not know all signs: few of them, in sum.
    alone = assert_like_alone(model_path, WAYS[name], two[name], tolerance=6 * CONFIG.lr)["weights"]
    start = weights(make_engine(0, 1, 0, model_path, settings(), frozen=True))
    names = [weight for weight in alone if not weight.endswith("k_proj.bias")]
    for rank in two[name]:
        assert rank["dtypes"] == {"torch.float32"}
        off = sum(np.square(rank["weights"][weight] - alone[weight]).sum() for weight in names)
        assert off < 0.08**2 * sum(np.square(alone[weight] - start[weight]).sum() for weight in names)


def test_adapters_are_sharded_too(two, model_path):
    if "adapters" not in two:
        pytest.skip("the extra 'lora' is not installed")
    assert_like_alone(model_path, WAYS["adapters"], two["adapters"])


@pytest.mark.parametrize("dimension", ["copies", "shards", "recomputed, bf16", "context"])
def test_adapters_beside_4_bits_train_in_every_dimension(dimension, two, model_path):
    name = f"adapters beside 4 bits, {dimension}"
    if name not in two:
        pytest.skip("the extra 'lora' or 'bitsandbytes' is not installed")
    alone = assert_like_alone(model_path, WAYS[name], two[name], tolerance=6 * CONFIG.lr if "bf16" in name else 1e-5)
    if dimension != "copies":
        assert all(rank["bytes"] <= 0.6 * alone["bytes"] for rank in two[name])


TWO_PASSES = (17, 6, 9, 14, 11, 12, 5, 18)
"""Lengths of rows that two ranks and four read in two passes or more."""


def overlapped(rank, world_size, port, path, precision):
    """Of a step in two passes, in order: when backward passes begin and end, and the elements of each sum over copies.
    Then the norms of that step, and of another one after two that fail: in the last pass, and on one copy."""
    events, all_reduce, backward, long = [], dist.all_reduce, torch.Tensor.backward, make_batch(0, TWO_PASSES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "LARGE", 1000)
        engine = make_engine(rank, world_size, port, path, settings(COPIES, precision=precision))
        copies = engine._grid.copies

        def noted_sum(tensor, *args, group=None, **kwargs):
            if group is copies:
                events.append(tensor.numel())
            return all_reduce(tensor, *args, group=group, **kwargs)

        def noted_pass(loss):
            events.append("begin")
            backward(loss)
            events.append("end")

        patched.setattr(dist, "all_reduce", noted_sum)
        patched.setattr(torch.Tensor, "backward", noted_pass)
        first = engine.step(share(engine, rank, long), token_loss)
    with pytest.raises(NonFiniteUpdate):
        engine.step(share(engine, rank, long), spoiled)
    fail_on_one_copy(engine, rank, share(engine, rank, long))
    second = engine.step(share(engine, rank, make_batch(1)), token_loss)
    sizes = [shard.master.numel() for shard in engine._model.shards]
    engine.close()
    return {"events": events, "steps": (first, second), "sizes": sizes}


def fail_on_one_copy(engine, rank, rows):
    """A step of which one copy has begun all sums when the other fails in its first pass."""
    backend = engine._model
    micros = engine._pack(rows, backend, needs_actions=True)
    if engine.layout.coordinates(rank).ddp:
        next(backend.copy_sums.begin_at_last(micros))
    else:
        backend.add_gradients(micros, rows, token_loss, 1.0)
    backend.drop_gradients()


def assert_overlapped(path, precision, ranks):
    alone = make_engine(0, 1, 0, path, settings(precision=precision))
    norms = [alone.step(rows, token_loss).grad_norm for rows in (make_batch(0, TWO_PASSES), make_batch(1))]
    tolerance = 1e-4 if precision == "fp32" else 1e-2
    for rank in ranks:
        assert rank["steps"] == ranks[0]["steps"]
        assert [step.grad_norm for step in rank["steps"]] == pytest.approx(norms, rel=tolerance)
        last_begun = len(rank["events"]) - rank["events"][::-1].index("begin")
        earlier, sums = rank["events"][:last_begun], rank["events"][last_begun:]
        assert earlier == ["begin", "end"] * (len(earlier) // 2) + ["begin"]
        assert len(earlier) > 1
        assert sums.pop() == "end"
        assert len(sums) > 3
        assert sum(sums) == sum(rank["sizes"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_copies_are_summed_while_the_last_pass_goes_on(precision, two, model_path):
    assert_overlapped(model_path, precision, two[f"overlapped, {precision}"])


# -- ranks that differ ------------------------------------------------------------------------------------------------


def uneven(rank, world_size, port, path):
    """Rank 1 has no action token, then one that does not fit, then a loss that is no number."""
    engine = make_engine(rank, world_size, port, path, TrainSettings(max_tokens_per_microbatch=10))
    batch = make_batch()
    if rank == 1:
        batch = batch.with_columns(action_mask=batch.ragged("tokens").like(np.zeros(36, dtype=bool)))
    step = engine.step(batch, token_loss)
    empty = engine.evaluate(batch).ragged("logprobs").values
    errors = []
    long = make_batch(lengths=(9, 65)) if rank == 1 else batch
    for rows, loss in ((long, token_loss), (batch, spoiled if rank == 0 else token_loss)):
        before = weights(engine)
        try:
            engine.step(rows, loss)
        except EngineError as error:
            errors.append((type(error), str(error)))
        after = weights(engine)
        assert all(np.array_equal(before[name], after[name]) for name in before)
    final = engine.step(make_batch(1), token_loss)
    engine.close()
    return step, bool(empty.any()), errors, final


def spoiled(outputs, columns):
    return outputs.sum() * math.nan, {}


@pytest.mark.feature(29, 59)
def test_ranks_with_nothing_to_learn_from_and_faults_of_one_rank(two):
    (first, some, errors, final), (second, none, other_errors, other_final) = two["uneven"]
    assert (first, errors, final) == (second, other_errors, other_final)
    assert (some, none) == (True, False)
    assert first.metrics == {"tokens": 28.0}
    (kind, text), (refusal, why) = errors
    assert kind is EngineError
    assert text == "rank 1: row 1 of the batch has 65 tokens and does not fit the model's 64 positions"
    assert refusal is NonFiniteUpdate
    assert "the loss is nan (first in:" in why


def dealt(rank, world_size, port, path):
    """Two updates of a row each: two ranks both take part in one without a row, whose columns are wide."""
    engine, batch = make_engine(rank, world_size, port, path, settings()), make_batch(lengths=(9, 6))
    tokens = batch.ragged("tokens")
    batch = batch.with_columns(
        weight=np.full(2, 1 / 11, dtype=np.float32),
        candidates=tokens.like(np.tile(np.arange(3), (15, 1))),
        teacher_logprobs=tokens.like(np.full((15, 3), -2.0, dtype=np.float32)),
    )
    rows, updates = assign_updates(batch, 2)
    loss = EngineLoss(VocabularyDistillation())
    steps = run_updates(share(engine, rank, rows), UpdatePlan(1.0, updates), lambda part: engine.step(part, loss))
    found = [(step.loss, step.grad_norm) for step in steps], weights(engine)
    engine.close()
    return found


@pytest.mark.feature(63)
def test_a_rank_without_a_row_takes_part_in_an_update_over_the_vocabulary(two, model_path):
    told, ends = dealt(0, 1, 0, model_path)
    for rank_told, rank_ends in two["dealt"]:
        assert np.allclose(rank_told, told, rtol=1e-5)
        assert all(np.abs(rank_ends[name] - ends[name]).max() < 1e-5 for name in ends if "k_proj.bias" not in name)


def raising(rank, world_size, port, path):
    engine = make_engine(rank, world_size, port, path, TrainSettings())

    def broken(outputs, columns):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.step(make_batch(), broken)
    result = engine.step(make_batch(), token_loss)
    engine.close()
    return result


def test_a_user_loss_that_raises_leaves_the_engine_usable(two):
    first, second = two["raising"]
    assert first == second
    assert first.grad_norm > 0


def late(ranks):
    """What rank 0 is told that waits for rank 1 among the ranks that shard the model; seconds it waited."""
    grid = Grid.of(dataclasses.replace(ranks, timeout_s=1.0), ParallelSizes())
    done = dist.distributed_c10d._get_default_store()
    if ranks.rank == 1:
        done.wait(["waited"], timedelta(seconds=120))
        return "", 0.0
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1), group=grid.shards.get_group())
    done.set("waited", "")
    return str(caught.value), time.monotonic() - begun


def test_nobody_waits_longer_than_was_said(two):
    (told, waited), _ = two["late"]
    assert "1000ms" in told
    assert 0.9 < waited < 60


# -- four processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(4, id="", marks=pytest.mark.slow)])
def four(request, model_path):
    """What the four ranks found, by name: of each a list."""
    ranks = run(request.param, on_four, model_path)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def on_four(rank, world_size, port, path):
    place = (rank, world_size, port, path)
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    found = {
        "hybrid": five_steps(*place, settings(COPIES)),
        "head": five_steps(*place, settings(head="token")),
        "pairs": pairs(*place),
        "overlapped": overlapped(*place, "bf16"),
        "refused": refused(*place, settings(ParallelSizes(tensor_parallel_size=4))),
    }
    ranks.gather(None)  # The first to leave takes the meeting place along.
    ranks.close()
    return found


@pytest.mark.feature(45)
def test_two_copies_of_two_shards_stay_equal_to_the_bit(four, model_path):
    assert_like_alone(model_path, settings(COPIES), four["hybrid"])
    first, second, third, fourth = (rank["bits"] for rank in four["hybrid"])
    assert (first, second) == (third, fourth)
    assert first != second


def test_gradients_of_copies_of_shards_are_summed_while_the_last_pass_goes_on(four, model_path):
    assert_overlapped(model_path, "bf16", four["overlapped"])


@pytest.mark.feature(56)
def test_a_head_of_one_row_trains_over_four_shards(four, model_path):
    assert_like_alone(model_path, settings(head="token"), four["head"])


PAIRS = make_batch(7, lengths=(8, 3, 5, 13, 4, 9))


def pairs(rank, world_size, port, path):
    """Three ranks have two rows each, and the last one none."""
    engine = make_engine(rank, world_size, port, path, settings(), frozen=True)
    found = engine.evaluate(PAIRS.rows(2 * min(rank, 3), 2 * min(rank + 1, 3))).ragged("logprobs")
    engine.close()
    return [row.copy() for row in found]


@pytest.mark.feature(60)
def test_three_pairs_over_four_ranks_come_back_in_order(four, model_path):
    alone = make_engine(0, 1, 0, model_path, settings(), frozen=True).evaluate(PAIRS).ragged("logprobs")
    assert [len(rows) for rows in four["pairs"]] == [2, 2, 2, 0]
    for row, expected in zip((row for rows in four["pairs"] for row in rows), alone, strict=True):
        assert np.allclose(row, expected, atol=1e-5)


def refused(rank, world_size, port, path, way):
    with pytest.raises(EngineError) as caught:
        make_engine(rank, world_size, port, path, way)
    return str(caught.value)


@pytest.mark.feature(47)
def test_heads_that_cannot_be_shared_are_refused_with_the_numbers(four):
    assert set(four["refused"]) == {"4 tensor-parallel ranks cannot share 2 key-value heads"}


@pytest.mark.slow
def test_shards_that_do_not_divide_evenly(model_path):
    assert_like_alone(model_path, TrainSettings(), run(3, five_steps, model_path, TrainSettings()))


# -- without others ---------------------------------------------------------------------------------------------------


@pytest.mark.feature(51)
def test_sizes_that_do_not_divide_the_ranks_are_refused_with_the_numbers(model_path):
    with pytest.raises(EngineError, match="6 ranks cannot be divided by ddp_size 2 x tensor_parallel_size 2 = 4"):
        Grid.of(Ranks(0, 6), ParallelSizes(ddp_size=2, tensor_parallel_size=2))
    with pytest.raises(EngineError, match="pipeline_parallel_size is 2, but fsdp2 supports only 1"):
        split = TrainSettings(parallel=ParallelSizes(pipeline_parallel_size=2))
        Fsdp2TrainEngine(model_path, CONFIG, split, Rendezvous(0, 2))


@pytest.mark.feature(46)
def test_one_process_is_a_layout_of_ones_and_trains(model_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    assert engine.layout == Layout()
    assert engine.step(make_batch(), token_loss).grad_norm > 0
    assert engine.version == 1
