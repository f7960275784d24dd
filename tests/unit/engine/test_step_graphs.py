# SPDX-License-Identifier: Apache-2.0
"""Steps as CUDA graphs: here what would be recorded is run, and on a GPU it is replayed."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import RolloutSettings, SamplingParams
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch import decoder
from dlrover.python.rl.engine.rollout_torch.decoder import StepGraphs, rounded_length, rounded_rows
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine

needs_cuda = pytest.mark.needs("cuda")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=512)


def engine_with(model_path, device, rows, recorded):
    engine = TorchRolloutEngine(model_path, RolloutSettings(device, max_batch=rows))
    engine._decoder._records = recorded
    return engine


def tokens_of(engine, lengths, new_tokens):
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 256, length) for length in lengths]
    batch = Batch({"prompt_id": np.arange(len(rows)), "tokens": Ragged.from_rows(rows, dtype=np.int64)})
    out = engine.generate(batch, SamplingParams(new_tokens, ignore_eos=True), (0,))
    return [row.tolist() for row in out.ragged("tokens")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "rows"), [([5, 40, 17], 8), ([100] * 8, 8), ([3, 90, 200, 4, 150, 6, 7], 3)])
def test_the_generated_tokens_are_the_same(model_path, device, lengths, rows, monkeypatch):
    monkeypatch.setattr(decoder, "_SHORTEST", 64)
    monkeypatch.setattr(decoder, "_FEWEST_ROWS", 2)
    plain = tokens_of(engine_with(model_path, device, rows, False), lengths, 60)
    engine = engine_with(model_path, device, rows, True)
    assert tokens_of(engine, lengths, 60) == plain
    assert len(engine._decoder._graphs._replays) >= 2
    engine.cuda()
    assert len(engine._decoder._graphs._replays) >= 2, "nothing has moved"
    for _ in range(2):  # weights and cache at other addresses
        engine.cpu()
        engine.cuda()
        assert not engine._decoder._graphs._replays
        assert tokens_of(engine, lengths, 60) == plain


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_recorded_once_for_what_is_rounded_to_it(device):
    seen = []

    def step(inputs, longest):
        seen.append((inputs.shape[1], longest))
        return (inputs[0] + inputs[1])[:, None].float()

    recorded = StepGraphs(step, 100, 300, device)
    for _ in range(3):
        for positions in ([3, 70, 5], [9, 9, 127, 4, 8, 8], [128], [299]):
            tokens = torch.arange(len(positions))
            assert recorded(tokens, positions)[:, 0].tolist() == [
                token + position for token, position in enumerate(positions)
            ]
    assert dict.fromkeys(seen) == dict.fromkeys([(8, 128), (8, 256), (8, 300)])


def test_rounding_leaves_few_sizes():
    assert [rounded_rows(rows, 100) for rows in (1, 8, 9, 33, 65, 100)] == [8, 8, 16, 64, 100, 100]
    assert [rounded_length(length, 5000) for length in (1, 128, 129, 1025, 1153, 2049, 4999)] == [
        *(128, 128, 256, 1152, 1280, 2304, 5000)
    ]
    assert len({rounded_length(length, 32768) for length in range(1, 32769)}) == 8 + 5 * 8
