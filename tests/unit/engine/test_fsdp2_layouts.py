"""The fsdp2 engine over several processes, where the contract does not look: odd sizes, other settings, refusals."""

import math

import numpy as np
import pytest
import torch
from processes import run

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.fsdp2.grid import Grid
from dlrover.python.rl.engine.layout import Layout, ParallelSizes
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.recipe.tiny import write_tiny_model

CONFIG = OptimizerConfig(lr=1e-4, max_grad_norm=1.0)


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


def make_engine(rank, world_size, port, path, settings, frozen=False):
    rendezvous = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240)
    return Fsdp2TrainEngine(path, None if frozen else CONFIG, settings, rendezvous)


def share(engine, rank, batch):
    place = engine.layout.coordinates(rank)
    return batch.split(engine.layout.data_parallel_size)[place.ddp * engine.layout.shard + place.shard]


def three_steps(rank, world_size, port, path, settings):
    """Norms and losses, the weights that came of them, and what share of the model's elements is here."""
    engine = make_engine(rank, world_size, port, path, settings)
    told = [engine.step(share(engine, rank, make_batch(seed)), token_loss) for seed in range(3)]
    found = {
        "told": [(step.loss, step.grad_norm, step.metrics) for step in told],
        "weights": weights(engine),
        "elements": sum(shard.master.numel() for shard in engine._model.shards),
        "dtypes": {str(shard.master.dtype) for shard in engine._model.shards},
    }
    engine.close()
    return found


def assert_like_alone(path, settings, ranks, tolerance=1e-5):
    """The same as one process with the same settings but the layout."""
    alone = three_steps(0, 1, 0, path, TrainSettings(**{**vars(settings), "parallel": ParallelSizes()}))
    for rank in ranks:
        for (loss, norm, metrics), (own_loss, own_norm, own_metrics) in zip(alone["told"], rank["told"], strict=True):
            assert (own_loss, own_norm) == pytest.approx((loss, norm), rel=100 * tolerance)
            assert own_metrics == metrics
        assert rank["weights"].keys() == alone["weights"].keys()
        for name, tensor in rank["weights"].items():
            if not name.endswith("k_proj.bias"):
                assert np.abs(tensor - alone["weights"][name]).max() < tolerance, name
    return alone


def test_row_044_two_shards_hold_little_more_than_half_each(model_path):
    ranks = run(2, three_steps, model_path, TrainSettings())
    alone = assert_like_alone(model_path, TrainSettings(), ranks)
    assert all(rank["elements"] <= 0.6 * alone["elements"] for rank in ranks)


def test_row_047_a_vocabulary_that_cannot_be_shared_is_on_every_rank(model_path):
    settings = TrainSettings(parallel=ParallelSizes(tensor_parallel_size=2))
    assert_like_alone(model_path, settings, run(2, three_steps, model_path, settings))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (ParallelSizes(), {"gradient_checkpointing": True}),
        (ParallelSizes(context_parallel_size=2), {"gradient_checkpointing": True}),
        (ParallelSizes(), {"head": "token"}),
        (ParallelSizes(tensor_parallel_size=2), {"head": "token"}),
        (ParallelSizes(context_parallel_size=2), {"head": "token"}),
    ],
)
@pytest.mark.slow
def test_row_054_settings_work_in_every_dimension(model_path, sizes, options):
    settings = TrainSettings(parallel=sizes, max_tokens_per_microbatch=20, **options)
    assert_like_alone(model_path, settings, run(2, three_steps, model_path, settings))


@pytest.mark.parametrize("sizes", [ParallelSizes(), ParallelSizes(tensor_parallel_size=2), ParallelSizes(ddp_size=2)])
@pytest.mark.slow
def test_row_053_bf16_has_float32_masters_in_every_dimension(model_path, sizes):
    settings = TrainSettings(parallel=sizes, precision="bf16")
    ranks = run(2, three_steps, model_path, settings)
    assert_like_alone(model_path, settings, ranks, tolerance=4 * CONFIG.lr)
    assert all(rank["dtypes"] == {"torch.float32"} for rank in ranks)


@pytest.mark.slow
def test_adapters_are_sharded_too(model_path):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    settings = TrainSettings(lora=LoraSettings(rank=4))
    assert_like_alone(model_path, settings, run(2, three_steps, model_path, settings))


@pytest.mark.slow
def test_row_056_a_head_of_one_row_trains_over_four_shards(model_path):
    settings = TrainSettings(head="token")
    assert_like_alone(model_path, settings, run(4, three_steps, model_path, settings))


@pytest.mark.slow
def test_shards_that_do_not_divide_evenly(model_path):
    assert_like_alone(model_path, TrainSettings(), run(3, three_steps, model_path, TrainSettings()))


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


def test_row_029_ranks_with_nothing_to_learn_from_and_faults_of_one_rank(model_path):
    (first, some, errors, final), (second, none, other_errors, other_final) = run(2, uneven, model_path)
    assert (first, errors, final) == (second, other_errors, other_final)
    assert (some, none) == (True, False)
    assert first.metrics == {"tokens": 28.0}
    (kind, text), (refusal, why) = errors
    assert kind is EngineError
    assert text == "rank 1: a sequence of 65 tokens does not fit the model's 64 positions"
    assert refusal is NonFiniteUpdate
    assert "the loss is nan (first in:" in why


def test_a_user_loss_that_raises_leaves_the_engine_usable(model_path):
    ranks = run(2, raising, model_path)
    assert ranks[0] == ranks[1]


def raising(rank, world_size, port, path):
    engine = make_engine(rank, world_size, port, path, TrainSettings())

    def broken(outputs, columns):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.step(make_batch(), broken)
    result = engine.step(make_batch(), token_loss)
    engine.close()
    return result


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_row_047_heads_that_cannot_be_shared_are_refused_with_the_numbers(model_path):
    settings = TrainSettings(parallel=ParallelSizes(tensor_parallel_size=4))
    assert set(run(4, refused, model_path, settings)) == {"4 tensor-parallel ranks cannot share 2 key-value heads"}


def refused(rank, world_size, port, path, settings):
    with pytest.raises(EngineError) as caught:
        make_engine(rank, world_size, port, path, settings)
    return str(caught.value)


def test_row_051_sizes_that_do_not_divide_the_ranks_are_refused_with_the_numbers():
    with pytest.raises(EngineError, match="6 ranks cannot be divided by ddp_size 2 x tensor_parallel_size 2 = 4"):
        Grid.of(Ranks(0, 6), ParallelSizes(ddp_size=2, tensor_parallel_size=2))
    with pytest.raises(EngineError, match="pipeline_parallel_size is 2, but fsdp2 has no pipeline"):
        Grid.of(Ranks(0, 2), ParallelSizes(pipeline_parallel_size=2))


def test_row_046_one_process_is_a_layout_of_ones(model_path):
    assert Fsdp2TrainEngine(model_path, CONFIG).layout == Layout()
