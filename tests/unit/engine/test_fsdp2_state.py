# SPDX-License-Identifier: Apache-2.0
"""The train engine's state, from which it continues bit for bit, and the folder of a checkpoint."""

import random

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.training.backend import present, write_folder
from tests.support.fsdp2_toys import step
from tests.support.processes import run
from tests.support.train_exercise import digest, saved

CONFIG = OptimizerConfig(lr=1e-3, warmup_steps=6, weight_decay=0.1, max_grad_norm=0.5)


def trainer(path, config=CONFIG):
    return Fsdp2TrainEngine(path, config)


@pytest.mark.parametrize("used", [0, 2])
def test_a_restored_engine_continues_bit_for_bit(model_path, used):
    undisturbed, restored = trainer(model_path), trainer(model_path)
    step(undisturbed, 0)
    state, start = saved(undisturbed.state_dict()), digest(undisturbed)
    for seed in range(used):  # It may have continued, and be taken back.
        step(restored, seed + 100)
    restored.load_state_dict(state)
    assert (restored.version, digest(restored)) == (1, start)
    for seed in range(1, 5):
        assert step(restored, seed) == step(undisturbed, seed)
    assert digest(restored) == digest(undisturbed)
    restored.load_state_dict(state)
    assert digest(restored) == start, "it shares no memory with the state"


def test_a_state_of_another_model_is_refused_and_changes_nothing(model_path, tmp_path):
    wider = trainer(write_tiny_model(tmp_path / "wide", hidden=48, layers=1))
    engine = trainer(model_path)
    before = digest(engine)
    with pytest.raises(WeightSyncError, match=r"another model: .*layers\.1.* is missing; .* has shape"):
        engine.load_state_dict(wider.state_dict())
    state = engine.state_dict()
    state["optimizer"]["lm_hed"] = {}
    with pytest.raises(WeightSyncError, match="the optimizer's 'lm_hed' is unknown"):
        engine.load_state_dict(state)
    assert digest(engine) == before


def draw():
    return random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), float(torch.rand(()))


def test_a_checkpoint_brings_back_state_and_random_numbers(model_path, tmp_path):
    engine = trainer(model_path)
    step(engine, 0)
    for _ in range(2):  # The second one takes the first one's place.
        engine.save_checkpoint(tmp_path / "kept")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    before, numbers = digest(engine), draw()
    step(engine, 1)
    engine.load_checkpoint(tmp_path / "kept")
    assert (digest(engine), engine.version) == (before, 1)
    assert draw() == numbers
    engine.meta()
    engine.load_checkpoint(tmp_path / "kept")
    assert digest(engine) == before


def test_a_killed_write_leaves_the_old_checkpoint(model_path, tmp_path):
    engine = trainer(model_path)
    step(engine, 0)
    engine.save_checkpoint(tmp_path / "kept")
    before = digest(engine)
    # Killed after it had moved the old one aside, before the new one was in its place.
    (tmp_path / "kept").rename(tmp_path / ".kept.old-0123")
    (tmp_path / ".kept.new-4567").mkdir()
    step(engine, 1)
    engine.load_checkpoint(tmp_path / "kept")
    assert digest(engine) == before
    engine.save_checkpoint(tmp_path / "kept")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    engine.load_checkpoint(tmp_path / "kept")
    assert digest(engine) == before


def test_a_checkpoint_of_another_model_is_refused(model_path, tmp_path):
    engine = trainer(model_path)
    engine.save_checkpoint(tmp_path / "kept")
    wider = trainer(write_tiny_model(tmp_path / "wide", hidden=48, layers=1))
    before = digest(wider)
    with pytest.raises(EngineError, match=r"of another model: it has model/model\.embed_tokens\.weight of shape"):
        wider.load_checkpoint(tmp_path / "kept")
    with pytest.raises(EngineError, match=r"of another model: it also has optimizer/"):
        trainer(model_path, None).load_checkpoint(tmp_path / "kept")
    assert digest(wider) == before


# -- the folder -------------------------------------------------------------------------------------------------------


def write_twice(rank, world_size, port, path):
    """The second time rank 1 finds the disk full."""
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=60))
    results = []
    for content in ("first", "second"):

        def write(folder, content=content):
            if (rank, content) == (1, "second"):
                raise OSError(28, "No space left on device")
            (folder / str(rank)).write_text(content)

        try:
            write_folder(path, ranks, write)
        except EngineError as error:
            results.append(str(error))
        results.append(sorted((file.name, file.read_text()) for file in path.iterdir()))
    ranks.close()
    return results


@pytest.mark.slow
def test_a_rank_unable_to_write_leaves_the_old_folder(tmp_path):
    path = tmp_path / "kept"
    first = [("0", "first"), ("1", "first")]
    error = f"rank 1: the checkpoint '{path}' cannot be written: [Errno 28] No space left on device"
    assert run(2, write_twice, path) == [[first, error, first]] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_a_folders_name_is_no_pattern(tmp_path):
    write_folder(tmp_path / "a[1]*", Ranks(), lambda folder: None)
    (tmp_path / ".a1.old-0").mkdir()
    (tmp_path / "a[1]*").rename(tmp_path / ".a[1]*.old-1")
    assert present(tmp_path / "a[1]*").name == ".a[1]*.old-1"


def test_the_last_folder_moved_away_is_the_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # killed before it removed anything
    for content in "0123456789":
        write_folder(path, Ranks(), lambda folder, content=content: (folder / "content").write_text(content))
    path.rename(tmp_path / "gone")
    assert (present(path) / "content").read_text() == "8"
