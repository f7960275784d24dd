# SPDX-License-Identifier: Apache-2.0
"""``adamw_8bit``: beside bitsandbytes' own, and its state, saved, divided otherwise, and gone on from."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra, WeightSyncError
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_info, find_optimizer_errors
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.training import eight_bit
from dlrover.python.rl.engine.training.eight_bit import BLOCK, AdamW8bit, make_state
from dlrover.python.rl.engine.training.redivide import merge_states, place
from tests.support.processes import run

CONFIG = OptimizerConfig(lr=1e-3, name="adamw_8bit", warmup_steps=3, weight_decay=0.1, betas=(0.9, 0.95))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Of 259 tokens, which no two ranks can share equally."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)


# -- the optimizer ----------------------------------------------------------------------------------------------------


def make_parameter(*shape):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def take_steps(parameter, optimizer, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        scale = torch.rand((len(parameter), *[1] * (parameter.ndim - 1)), generator=generator)
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
        optimizer.step()
    return parameter.detach()


def optimizer_of(parameter, of_matrices=True):
    optimizer = AdamW8bit([{"params": [parameter], "weight_decay": 0.1}], 1e-3, (0.9, 0.95))
    optimizer.state[parameter] = make_state(parameter, of_matrices)
    return optimizer


def ours(*shape, of_matrices=True):
    parameter = make_parameter(*shape)
    optimizer = optimizer_of(parameter, of_matrices)
    return take_steps(parameter, optimizer, 8), optimizer.state[parameter]


def test_rows_of_whole_blocks_take_the_steps_of_bitsandbytes(bitsandbytes):
    found, state = ours(64, 2 * BLOCK)
    parameter = make_parameter(64, 2 * BLOCK)
    library = bitsandbytes.optim.AdamW8bit([parameter], 1e-3, (0.9, 0.95), weight_decay=0.1, min_8bit_size=1)
    take_steps(parameter, library, 8)
    # In a few places the last bit of a sum decides between two values.
    assert ((found - parameter.detach()).abs() > 2e-6).float().mean() < 1e-3
    kept = library.state[parameter]
    for kind, codes, scales in (("exp_avg", "state1", "absmax1"), ("exp_avg_sq", "state2", "absmax2")):
        assert (state[kind] != kept[codes]).float().mean() < 1e-3
        assert torch.allclose(state[f"{kind}_scale"].flatten(), kept[scales], rtol=1e-5)
    exact = make_parameter(64, 2 * BLOCK)
    take_steps(exact, torch.optim.AdamW([exact], 1e-3, (0.9, 0.95), weight_decay=0.1), 8)
    assert 1e-4 < (found - exact.detach()).abs().max() < 1e-3, "the moments are rounded"


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("shape", [(5, 300), (7, 3), (3, 4, 70)], ids=str)
def test_a_block_ends_with_its_row(shape):
    whole, state = ours(*shape)
    blocks = -(-whole[0].numel() // BLOCK)
    assert state["exp_avg"].shape == shape and state["exp_avg"].dtype == torch.uint8
    assert state["exp_avg_scale"].shape == state["exp_avg_sq_scale"].shape == (shape[0], blocks)
    exact = make_parameter(*shape)
    take_steps(exact, torch.optim.AdamW([exact], 1e-3, (0.9, 0.95), weight_decay=0.1), 8)
    assert (whole - exact.detach()).abs().max() < 2e-3


@pytest.mark.usefixtures("bitsandbytes")
def test_pieces_of_a_matrix_take_the_same_step(monkeypatch):
    whole, state = ours(10, 300)
    monkeypatch.setattr(eight_bit, "PIECE", 900)
    pieces, other = ours(10, 300)
    assert torch.equal(pieces, whole)
    assert all(torch.equal(tensor, other[kind]) for kind, tensor in state.items())


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("size", [2 * BLOCK, 2 * BLOCK + 7, 3])
def test_a_flat_part_is_divided_into_blocks_whatever_the_pieces(monkeypatch, size):
    """As one row is, whose step is tested above."""
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


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("shape", [(5, 300), (700,)], ids=str)
def test_what_is_read_can_be_written_again(shape):
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


@pytest.mark.usefixtures("bitsandbytes")
def test_vectors_have_moments_in_float32():
    found, state = ours(300, of_matrices=False)
    exact = make_parameter(300)
    take_steps(exact, torch.optim.AdamW([exact], 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True), 8)
    assert torch.equal(found, exact.detach())
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.usefixtures("bitsandbytes")
def test_a_rank_without_a_row_counts_its_steps():
    parameter = make_parameter(0, 300)
    optimizer = optimizer_of(parameter)
    take_steps(parameter, optimizer, 8)
    state = optimizer.state[parameter]
    assert state["step"] == 8 and state["exp_avg"].shape == (0, 300)
    moment = optimizer.read(state, "exp_avg")
    assert moment.dtype == torch.float32 and moment.shape == (0, 300)


@pytest.mark.parametrize("before", range(1, 7))
@pytest.mark.parametrize("after", range(1, 7))
def test_ranks_that_divide_rows_otherwise_find_the_same_numbers(before, after):
    whole = torch.randn(5, 300)
    codes, scales = torch.randint(0, 256, (5, 300), dtype=torch.uint8), torch.rand(5, 2)

    def state_of(rows, empty):
        kinds = {"exp_avg": codes[rows], "exp_avg_scale": scales[rows], "step": torch.tensor(3.0)}
        taken = {kind: torch.zeros_like(tensor) if empty else tensor.clone() for kind, tensor in kinds.items()}
        places, model = {"w": place(whole.shape, (rows, slice(0, 300)))}, {"w": whole[rows].clone()}
        return {"places": places, "model": model, "optimizer": {"w": taken}}

    for rows in cuts(5, after):
        own = state_of(rows, empty=True)
        merge_states(own, (state_of(other, empty=False) for other in cuts(5, before)))
        found = own["optimizer"]["w"]
        assert torch.equal(found["exp_avg"], codes[rows]) and torch.equal(found["exp_avg_scale"], scales[rows])
        assert found["step"] == 3.0


def cuts(rows, parts):
    size = -(-rows // parts)  # as torch.chunk cuts: the last ones may be empty
    return [slice(min(part * size, rows), min((part + 1) * size, rows)) for part in range(parts)]


# -- the engine -------------------------------------------------------------------------------------------------------


def make(path, config=CONFIG, rendezvous=None, **changes):
    return Fsdp2TrainEngine(path, config, TrainSettings(max_tokens_per_microbatch=20, **changes), rendezvous)


def step(engine, seed, rank=0):
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in (9, 4, 17, 6)]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    batch = Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})
    share = batch.split(engine.layout.data_parallel_size)[rank]
    return engine.step(share, lambda logprobs, columns: (-logprobs.sum() / 20, {}))


def bits(engine):
    skeleton, buffers = state_tree.dump(engine.state_dict())
    return skeleton, [bytes(buffer) for buffer in buffers]


def trained(path, steps=2, **changes):
    engine = make(path, **changes)
    for seed in range(steps):
        step(engine, seed)
    return engine


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_a_state_and_a_checkpoint_go_on_to_the_bit(model_path, tmp_path, settings):
    undisturbed = trained(model_path, **settings)
    skeleton, buffers = state_tree.dump(undisturbed.state_dict())
    state = state_tree.load(bytes(skeleton), [memoryview(bytes(buffer)) for buffer in buffers])
    undisturbed.save_checkpoint(tmp_path / "checkpoint")
    restored, loaded = trained(model_path, 1, **settings), trained(model_path, 1, **settings)
    restored.load_state_dict(state)
    loaded.load_checkpoint(tmp_path / "checkpoint")
    wanted = step(undisturbed, 7)
    for engine in (restored, loaded):
        assert step(engine, 7) == wanted
        assert bits(engine) == bits(undisturbed)


@pytest.mark.usefixtures("bitsandbytes")
def test_steps_are_near_those_of_adamw(model_path):
    exact = OptimizerConfig(lr=1e-3, warmup_steps=3, weight_decay=0.1, betas=(0.9, 0.95))
    low, full = make(model_path), make(model_path, exact)
    found, wanted = ([step(engine, seed % 2).loss for seed in range(12)] for engine in (low, full))
    assert found == pytest.approx(wanted, rel=0.01)
    assert wanted[-1] < 0.95 * wanted[0]
    with pytest.raises(WeightSyncError, match="it has another optimizer"):
        full.load_state_dict(low.state_dict())


@pytest.mark.usefixtures("bitsandbytes")
def test_it_makes_room_for_others_and_comes_back(model_path):
    engine, undisturbed = trained(model_path), trained(model_path)
    before = engine.footprint()
    assert before["optimizer"] < 0.4 * 8 * engine.parameter_count
    engine.cpu()
    assert engine.footprint() == {} and bits(engine) == bits(undisturbed)
    engine.cuda()
    assert engine.footprint() == before
    assert step(engine, 2) == step(undisturbed, 2) and bits(engine) == bits(undisturbed)


@pytest.mark.usefixtures("bitsandbytes")
def test_the_step_may_be_on_the_host(model_path):
    plain, on_host = trained(model_path), trained(model_path, backend={"optimizer_on_host": True})
    assert bits(on_host) == bits(plain) and "optimizer" not in on_host.footprint()


@pytest.mark.usefixtures("bitsandbytes")
def test_adapters_over_4_bits_are_trained_so(model_path):
    pytest.importorskip("peft")
    engine = trained(model_path, lora=LoraSettings(rank=4, quantize_base="nf4"))
    moments = engine.state_dict()["optimizer"].values()
    assert {str(kinds["exp_avg"].dtype) for kinds in moments} == {"torch.uint8"}


def shards(rank, world_size, port, path, folder):
    """Two ranks: a state and a checkpoint of two steps, and then what a third one gives."""
    engine = make(path, rendezvous=Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    for seed in range(2):
        step(engine, seed, rank)
    torch.save(engine.state_dict(), folder / f"{rank}.pt")
    engine.save_checkpoint(folder / "checkpoint")
    engine.load_states(torch.load(file, weights_only=True) for file in sorted(folder.parent.glob("one/*.pt")))
    again = [tensor.clone() for kinds in engine.state_dict()["optimizer"].values() for tensor in kinds.values()]
    engine.close()
    return [tensor.numpy() for tensor in again]


@pytest.mark.slow
@pytest.mark.usefixtures("bitsandbytes")
def test_one_process_goes_on_from_two_shards_with_the_same_numbers_and_two_from_one(model_path, tmp_path):
    alone = trained(model_path)
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    torch.save(alone.state_dict(), tmp_path / "one" / "0.pt")
    ranks = run(2, shards, model_path, tmp_path / "two")
    states = [torch.load(tmp_path / "two" / f"{rank}.pt", weights_only=True) for rank in range(2)]
    loaded, merged = make(model_path), make(model_path)
    loaded.load_checkpoint(tmp_path / "two" / "checkpoint")
    merged.load_states(states)
    assert bits(loaded) == bits(merged)
    for name, kinds in merged.state_dict()["optimizer"].items():
        for kind, tensor in kinds.items():
            parts = [state["optimizer"][name][kind] for state in states]
            assert torch.equal(tensor, torch.cat(parts) if tensor.ndim else parts[0]), (name, kind)
    of_one = [tensor for kinds in alone.state_dict()["optimizer"].values() for tensor in kinds.values()]
    for tensor, *parts in zip(of_one, *ranks, strict=True):
        assert np.array_equal(tensor.numpy(), np.concatenate(parts) if tensor.ndim else parts[0])


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_it_does_not_go_with_is_refused(model_path):
    for name in ("deepspeed", "megatron"):
        (error,) = find_optimizer_errors(name, engine_info(TRAIN_ENGINES, name), OptimizerConfig(name="sgd"))
        assert error == f"{name} does not support sgd: use adamw, or fsdp2"
    with pytest.raises(EngineError, match="adamw_8bit needs tensor_parallel_size 1, not 2"):
        make(model_path, parallel=ParallelSizes(tensor_parallel_size=2))


def test_without_bitsandbytes_or_with_an_old_one_the_extra_is_named(model_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.49.2")
    with pytest.raises(
        MissingExtra, match=r"'bitsandbytes>=0.50' is not installed: pip install 'dlrover-rl\[bitsandbytes\]'"
    ):
        make(model_path)
