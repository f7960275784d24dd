# SPDX-License-Identifier: Apache-2.0
"""Ranks that continue from the states of other numbers of ranks, and of other layouts."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, OtherLayout, WeightSyncError
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.training.redivide import merge_states, place
from tests.support.fsdp2_toys import step
from tests.support.processes import run
from tests.support.train_exercise import weights_of

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


class Rank:
    def __init__(self, rank, world_size, port, path, sizes):
        settings = TrainSettings(parallel=sizes, max_tokens_per_microbatch=20)
        self.rank, rendezvous = rank, Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240)
        self.engine = Fsdp2TrainEngine(path, CONFIG, settings, rendezvous)

    def train(self, *seeds):
        return [step(self.engine, seed, self.rank).loss for seed in seeds]

    def resume(self, folder):
        """Take two steps from the states in ``folder``."""
        self.train(7)  # it may have continued, and is taken back
        files = sorted(folder.iterdir())
        self.engine.load_states(torch.load(file, weights_only=True) for file in files)
        version = self.engine.version
        losses = self.train(2, 3)
        weights = weights_of(self.engine)
        self.engine.close()
        return version, losses, weights


def write(rank, world_size, port, path, ways, folder):
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    for name, sizes in ways.items():
        one = Rank(rank, world_size, port, path, sizes)
        one.train(0, 1)
        (folder / name).mkdir(exist_ok=True, parents=True)
        torch.save(one.engine.state_dict(), folder / name / f"{rank}.pt")
        one.engine.close()
    ranks.close()


def read(rank, world_size, port, path, ways, folders):
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=240))
    results = [
        Rank(rank, world_size, port, path, sizes).resume(folder) for sizes in ways.values() for folder in folders
    ]
    ranks.close()
    return results


@pytest.fixture(scope="module")
def undisturbed(model_path):
    one = Rank(0, 1, 0, model_path, ALONE)
    one.train(0, 1)
    return one.train(2, 3), weights_of(one.engine)


def assert_same(result, expected):
    version, losses, weights = result
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


def test_one_process_continues_from_two(model_path, of_two, undisturbed):
    for folder in of_two:
        assert_same(Rank(0, 1, 0, model_path, ALONE).resume(folder), undisturbed)


def test_two_continue_in_another_layout_and_from_one(model_path, of_two, undisturbed, tmp_path):
    write(0, 1, 0, model_path, {"one": ALONE}, tmp_path)
    for rank in run(2, read, model_path, ON_TWO, [*of_two, tmp_path / "one"]):
        for result in rank:
            assert_same(result, undisturbed)


@pytest.mark.slow
def test_four_continue_from_two_and_two_from_four(model_path, of_two, undisturbed, tmp_path):
    run(4, write, model_path, ON_FOUR, tmp_path)
    of_four = [tmp_path / name for name in ON_FOUR]
    for ranks in (run(4, read, model_path, ON_FOUR, of_two), run(2, read, model_path, ON_TWO, of_four)):
        for rank in ranks:
            for result in rank:
                assert_same(result, undisturbed)


# -- parts, without an engine -----------------------------------------------------------------------------------------
WHOLE = torch.arange(1.0, 11.0).reshape(5, 2)
ALL_ROWS = slice(0, 5)


def state_of(whole, rows, moments=True):
    part = whole[rows].clone()
    kinds = {"step": torch.tensor(3.0), "exp_avg": part + 100, "exp_avg_scale": part[:, :1] / 10}
    return {
        "places": {"w": place(whole.shape, (rows, slice(0, whole.shape[1])))},
        "model": {"w": part, "buffer": torch.tensor([float(whole[0, 0])])},
        "optimizer": {"w": kinds} if moments else None,
    }


def cuts(rows, parts):
    size = -(-rows // parts)  # as torch.chunk cuts: the last ones may be empty
    return [slice(min(part * size, rows), min((part + 1) * size, rows)) for part in range(parts)]


@pytest.mark.parametrize("before", range(1, 7))
@pytest.mark.parametrize("after", range(1, 7))
def test_each_rank_gets_its_rows_and_their_moments(before, after):
    states = [state_of(WHOLE, rows) for rows in cuts(5, before)]
    for rows in cuts(5, after):
        own = state_of(torch.zeros(5, 2), rows)
        own["optimizer"]["w"]["step"].zero_()
        merge_states(own, iter([*states, *states]))  # the second ones are copies
        assert torch.equal(own["model"]["w"], WHOLE[rows])
        assert torch.equal(own["optimizer"]["w"]["exp_avg"], WHOLE[rows] + 100)
        assert torch.equal(own["optimizer"]["w"]["exp_avg_scale"], WHOLE[rows, :1] / 10)
        assert own["optimizer"]["w"]["step"] == 3.0
        assert own["model"]["buffer"] == 1.0


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (state_of(WHOLE, slice(0, 2)), EngineError, "lack a part of w"),
        (state_of(torch.zeros(5, 3), ALL_ROWS), WeightSyncError, "another model: 'w' has shape"),
        (state_of(WHOLE, ALL_ROWS, moments=False), EngineError, "does not fit a frozen engine"),
        (
            state_of(WHOLE, ALL_ROWS) | {"optimizer": {"w": {"momentum_buffer": WHOLE}}},
            WeightSyncError,
            "it has another optimizer",
        ),
    ],
)
def test_states_of_other_models_are_refused(other, error, message):
    with pytest.raises(error, match=message):
        merge_states(state_of(torch.zeros(5, 2), ALL_ROWS), [other])


def test_a_state_of_another_layout_raises_otherlayout(model_path):
    engine = Rank(0, 1, 0, model_path, ALONE).engine
    state = engine.state_dict()
    with pytest.raises(OtherLayout, match="the state is of layout"):
        engine.load_state_dict({**state, "layout": [2, 1, 1, 1]})
