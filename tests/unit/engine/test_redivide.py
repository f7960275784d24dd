# SPDX-License-Identifier: Apache-2.0
"""Ranks that go on from the states of other numbers of ranks, and of other layouts."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, OtherLayout, WeightSyncError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.training.redivide import merge_states, place
from tests.support.processes import run

CONFIG = OptimizerConfig(lr=1e-3, max_grad_norm=1.0)
ALONE = ParallelSizes()
ON_TWO = {
    "shards": ParallelSizes(),
    "copies": ParallelSizes(ddp_size=2),
    "tensor": ParallelSizes(tensor_parallel_size=2),
}
ON_FOUR = {
    "shards": ParallelSizes(),
    "copies of shards": ParallelSizes(ddp_size=2),
    "shards of matrices": ParallelSizes(tensor_parallel_size=2),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Of 259 tokens, which no two ranks can share equally."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=1, max_positions=64)


def make_batch(seed):
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in (9, 4, 17, 6)]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    return Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})


def token_loss(outputs, columns):
    return -outputs.sum() / 20, {"tokens": float(len(outputs))}


class Rank:
    """One rank of an engine in a layout."""

    def __init__(self, rank, world_size, port, path, sizes):
        settings = TrainSettings(parallel=sizes, max_tokens_per_microbatch=20)
        self.rank, rendezvous = rank, Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240)
        self.engine = Fsdp2TrainEngine(path, CONFIG, settings, rendezvous)

    def train(self, *seeds):
        layout = self.engine.layout
        at = layout.coordinates(self.rank)
        shares = [make_batch(seed).split(layout.data_parallel_size) for seed in seeds]
        return [self.engine.step(share[at.ddp * layout.shard + at.shard], token_loss).loss for share in shares]

    def goes_on(self, folder):
        """What comes of the states in ``folder``, and of two further steps."""
        self.train(7)  # it may have gone on, and is taken back
        files = sorted(folder.iterdir())
        self.engine.load_states(torch.load(file, weights_only=True) for file in files)
        version = self.engine.version
        losses = self.train(2, 3)
        weights = {name: tensor.detach().clone().numpy() for name, tensor in self.engine.named_weights()}
        self.engine.close()
        return version, losses, weights


def write(rank, world_size, port, path, ways, folder):
    """Two steps in each layout, and then the rank's state."""
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    for name, sizes in ways.items():
        one = Rank(rank, world_size, port, path, sizes)
        one.train(0, 1)
        (folder / name).mkdir(exist_ok=True, parents=True)
        torch.save(one.engine.state_dict(), folder / name / f"{rank}.pt")
        one.engine.close()
    ranks.close()


def read(rank, world_size, port, path, ways, folders):
    """In each layout, what comes of each folder."""
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    found = {
        (name, folder.name): Rank(rank, world_size, port, path, sizes).goes_on(folder)
        for name, sizes in ways.items()
        for folder in folders
    }
    ranks.close()
    return found


def undisturbed(path):
    one = Rank(0, 1, 0, path, ALONE)
    one.train(0, 1)
    losses = one.train(2, 3)
    return losses, {name: tensor.detach().clone().numpy() for name, tensor in one.engine.named_weights()}


def assert_same(found, expected):
    version, losses, weights = found
    expected_losses, expected_weights = expected
    assert version == 2
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for name, tensor in weights.items():
        if not name.endswith("k_proj.bias"):  # which the softmax does not see: noise, as large as Adam makes it
            assert np.abs(tensor - expected_weights[name]).max() < 2e-5, name


@pytest.fixture(scope="module")
def of_two(model_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run(2, write, model_path, ON_TWO, folder)
    return [folder / name for name in ON_TWO]


def test_one_process_goes_on_from_what_two_have_saved(model_path, of_two):
    expected = undisturbed(model_path)
    for folder in of_two:
        assert_same(Rank(0, 1, 0, model_path, ALONE).goes_on(folder), expected)


def test_two_go_on_in_another_layout_and_from_one(model_path, of_two, tmp_path):
    write(0, 1, 0, model_path, {"one": ALONE}, tmp_path)
    expected = undisturbed(model_path)
    for rank in run(2, read, model_path, ON_TWO, [*of_two, tmp_path / "one"]):
        for found in rank.values():
            assert_same(found, expected)


@pytest.mark.slow
def test_four_go_on_from_two_and_two_from_four(model_path, of_two, tmp_path):
    expected = undisturbed(model_path)
    run(4, write, model_path, ON_FOUR, tmp_path)
    of_four = [tmp_path / name for name in ON_FOUR]
    for ranks in (run(4, read, model_path, ON_FOUR, of_two), run(2, read, model_path, ON_TWO, of_four)):
        for rank in ranks:
            for found in rank.values():
                assert_same(found, expected)


# -- parts, without an engine -----------------------------------------------------------------------------------------


def state_of(whole, rows, moments=True):
    """Of a rank that has these rows."""
    part = whole[rows].clone()
    optimizer = {"w": {"step": torch.tensor(3.0), "exp_avg": part + 100}} if moments else None
    return {
        "places": {"w": place(whole.shape, (rows, slice(0, whole.shape[1])))},
        "model": {"w": part, "buffer": torch.tensor([float(whole[0, 0])])},
        "optimizer": optimizer,
    }


def cuts(rows, parts):
    size = -(-rows // parts)  # as torch.chunk cuts: the last ones may be empty
    return [slice(min(part * size, rows), min((part + 1) * size, rows)) for part in range(parts)]


@pytest.mark.parametrize("before", range(1, 7))
@pytest.mark.parametrize("after", range(1, 7))
def test_every_rank_finds_its_rows_and_their_moments(before, after):
    whole = torch.arange(1.0, 11.0).reshape(5, 2)
    states = [state_of(whole, rows) for rows in cuts(5, before)]
    for rows in cuts(5, after):
        own = state_of(torch.zeros(5, 2), rows)
        own["optimizer"]["w"]["step"].zero_()
        merge_states(own, iter([*states, *states]))  # the second ones are copies
        assert torch.equal(own["model"]["w"], whole[rows])
        assert torch.equal(own["optimizer"]["w"]["exp_avg"], whole[rows] + 100)
        assert own["optimizer"]["w"]["step"] == 3.0
        assert own["model"]["buffer"] == 1.0


def test_states_that_do_not_fit_are_refused():
    whole = torch.arange(1.0, 11.0).reshape(5, 2)
    own = state_of(torch.zeros(5, 2), slice(0, 5))
    with pytest.raises(EngineError, match="lack a part of w"):
        merge_states(own, [state_of(whole, slice(0, 2))])
    with pytest.raises(WeightSyncError, match="another model: 'w' has shape"):
        merge_states(own, [state_of(torch.zeros(5, 3), slice(0, 5))])
    with pytest.raises(EngineError, match="does not fit a frozen engine"):
        merge_states(own, [state_of(whole, slice(0, 5), moments=False)])
    other = state_of(whole, slice(0, 5))
    other["optimizer"]["w"] = {"momentum_buffer": whole}
    with pytest.raises(WeightSyncError, match="it has another optimizer"):
        merge_states(own, [other])


def test_a_state_of_another_layout_raises_an_error_of_its_own(model_path):
    engine = Rank(0, 1, 0, model_path, ALONE).engine
    state = engine.state_dict()
    with pytest.raises(OtherLayout, match="the state is of layout"):
        engine.load_state_dict({**state, "layout": [2, 1, 1, 1]})
