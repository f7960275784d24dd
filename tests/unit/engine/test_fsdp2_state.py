# SPDX-License-Identifier: Apache-2.0
"""The train engine's state: saved, and gone on from, bit for bit."""

import random

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.ranks import get_random_state, set_random_state
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

CONFIG = OptimizerConfig(lr=1e-3, warmup_steps=6, weight_decay=0.1, max_grad_norm=0.5)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)


def step(engine, seed):
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in (9, 4, 17, 6)]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    batch = Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})
    return engine.step(batch, lambda logprobs, columns: (-logprobs.sum() / 20, {}))


def saved(state):
    """Through bytes and back, as a checkpoint goes."""
    skeleton, buffers = state_tree.dump(state)
    return state_tree.load(bytes(skeleton), [memoryview(bytes(buffer)) for buffer in buffers])


def bits(engine):
    skeleton, buffers = state_tree.dump(engine.state_dict())
    return skeleton, [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("used", [0, 2])
def test_a_restored_engine_goes_on_bit_for_bit(model_path, before, used):
    undisturbed = Fsdp2TrainEngine(model_path, CONFIG)
    for seed in range(before):
        step(undisturbed, seed)
    state = saved(undisturbed.state_dict())
    restored = Fsdp2TrainEngine(model_path, CONFIG)
    for seed in range(used):  # It may have gone on, and be taken back.
        step(restored, seed + 100)
    restored.load_state_dict(state)
    assert restored.version == before
    assert bits(restored) == bits(undisturbed)
    for seed in range(before, before + 4):
        assert step(restored, seed) == step(undisturbed, seed)
    assert bits(restored) == bits(undisturbed)


def test_a_restored_engine_shares_no_memory_with_the_state(model_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    step(engine, 0)
    state = saved(engine.state_dict())
    kept = bits(engine)
    engine.load_state_dict(state)
    step(engine, 1)
    engine.load_state_dict(state)
    assert bits(engine) == kept


def test_a_frozen_engine_has_a_state_too(model_path):
    trained, frozen = Fsdp2TrainEngine(model_path, CONFIG), Fsdp2TrainEngine(model_path, None)
    frozen.load_state_dict(saved(Fsdp2TrainEngine(model_path, None).state_dict()))
    with pytest.raises(EngineError, match="does not fit a frozen engine"):
        frozen.load_state_dict(trained.state_dict())


def test_a_state_of_another_model_is_refused_and_changes_nothing(model_path, tmp_path):
    wider = Fsdp2TrainEngine(write_tiny_model(tmp_path / "wide", hidden=48, layers=1), CONFIG)
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    kept = bits(engine)
    with pytest.raises(WeightSyncError, match=r"another model: .*layers\.1.* is missing; .* has shape"):
        engine.load_state_dict(wider.state_dict())
    state = engine.state_dict()
    state["optimizer"]["lm_hed"] = {}
    with pytest.raises(WeightSyncError, match="the optimizer's 'lm_hed' is unknown"):
        engine.load_state_dict(state)
    assert bits(engine) == kept


def test_a_checkpoint_on_disk_brings_back_all_and_the_random_state(model_path, tmp_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    step(engine, 0)
    for _ in range(2):  # The second one takes the first one's place.
        engine.save_checkpoint(tmp_path / "kept")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    kept, drawn = bits(engine), [random.random(), np.random.random(), float(torch.rand(()))]
    step(engine, 1)
    engine.load_checkpoint(tmp_path / "kept")
    assert (bits(engine), engine.version) == (kept, 1)
    assert [random.random(), np.random.random(), float(torch.rand(()))] == drawn
    engine.meta()
    engine.load_checkpoint(tmp_path / "kept")
    assert bits(engine) == kept


def test_a_write_that_was_killed_leaves_the_old_checkpoint_and_the_next_one_cleans_up(model_path, tmp_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    step(engine, 0)
    engine.save_checkpoint(tmp_path / "kept")
    kept = bits(engine)
    # Killed after it had moved the old one aside, before the new one was in its place.
    (tmp_path / "kept").rename(tmp_path / ".kept.old-0123")
    (tmp_path / ".kept.new-4567").mkdir()
    step(engine, 1)
    engine.load_checkpoint(tmp_path / "kept")
    assert bits(engine) == kept
    engine.save_checkpoint(tmp_path / "kept")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    engine.load_checkpoint(tmp_path / "kept")
    assert bits(engine) == kept


def test_a_checkpoint_that_is_not_there_or_of_something_else_is_refused(model_path, tmp_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    with pytest.raises(EngineError, match="no checkpoint at '.*nothing'"):
        engine.load_checkpoint(tmp_path / "nothing")
    engine.save_checkpoint(tmp_path / "kept")
    wider = Fsdp2TrainEngine(write_tiny_model(tmp_path / "wide", hidden=48, layers=1), CONFIG)
    kept = bits(wider)
    with pytest.raises(EngineError, match=r"of another model: it has model/model\.embed_tokens\.weight of shape"):
        wider.load_checkpoint(tmp_path / "kept")
    with pytest.raises(EngineError, match=r"of another model: it also has optimizer/"):
        Fsdp2TrainEngine(model_path, None).load_checkpoint(tmp_path / "kept")
    assert bits(wider) == kept


def test_all_random_states_come_back():
    state = saved(get_random_state())

    def draw():
        return random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), float(torch.rand(()))

    first = draw()
    assert draw() != first
    set_random_state(state)
    assert draw() == first
