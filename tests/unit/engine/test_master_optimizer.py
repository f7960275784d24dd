# SPDX-License-Identifier: Apache-2.0
"""Learning rates by hand, and gradient descent beside AdamW."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, EngineInfo, engine_info, find_optimizer_errors
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.training.stepping import compute_learning_rate


def rates(steps=10, **config):
    made = OptimizerConfig(lr=1.0, **config).over(steps)
    return [compute_learning_rate(made, step) for step in range(steps + 2)]


@pytest.mark.feature(141)
def test_warm_up_and_then_the_schedule_by_hand():
    assert rates(4) == [1.0] * 6
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(6, warmup_steps=2, schedule="linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    falls = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in (0, 1, 2, 3, 4, 4)]
    assert rates(6, warmup_steps=2, schedule="cosine", min_lr=0.1) == pytest.approx([0.5, 1.0, *falls])
    assert rates(9, schedule="linear", decay_steps=2) == pytest.approx([1.0, 0.5, *[0.0] * 9])
    assert rates(2, schedule="cosine", warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_what_does_not_go_together_is_refused():
    _, problems = parse(OptimizerConfig, {"momentum": 0.5}, "optimizer")
    assert "only sgd has momentum" in problems[0].what
    _, problems = parse(OptimizerConfig, {"lr": 1e-3, "min_lr": 1e-2}, "optimizer")
    assert "min_lr (0.01) is above lr (0.001)" in problems[0].what
    _, problems = parse(OptimizerConfig, {"name": "sgd", "betas": [0.5, 0.9]}, "optimizer")
    assert "only adamw has betas" in problems[0].what
    for wrong, where in (({"betas": [0.9, 1.0]}, "betas.1"), ({"lr": float("inf")}, "lr")):
        (problem,) = parse(OptimizerConfig, wrong, "optimizer")[1]
        assert problem.where == f"optimizer.{where}"
    for useless in ({"min_lr": 1e-7}, {"decay_steps": 5}):
        _, problems = parse(OptimizerConfig, useless, "optimizer")
        assert "need a schedule that decays: linear or cosine" in problems[0].what
    assert find_optimizer_errors("fsdp2", engine_info(TRAIN_ENGINES, "fsdp2"), OptimizerConfig(name="sgd")) == []
    assert find_optimizer_errors("mine", EngineInfo(), OptimizerConfig(name="sgd")) == []
    assert (
        "does not support sgd"
        in find_optimizer_errors("deepspeed", engine_info(TRAIN_ENGINES, "deepspeed"), OptimizerConfig(name="sgd"))[0]
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1, max_positions=32)


TOKENS = [[1, 2, 3, 4], [5, 6, 7]]
BATCH = Batch(
    {
        "tokens": Ragged.from_rows([np.array(row) for row in TOKENS]),
        "action_mask": Ragged.from_rows([np.arange(len(row)) > 0 for row in TOKENS]),
        "weight": np.full(2, 0.2, dtype=np.float32),
    }
)


@pytest.mark.feature(142)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch_s_own(model, momentum):
    config = OptimizerConfig(lr=0.05, name="sgd", momentum=momentum, weight_decay=0.1, max_grad_norm=None)
    engine = Fsdp2TrainEngine(model, config)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    descent = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=momentum)
    for _ in range(3):
        engine.step(BATCH, EngineLoss(SFT()))
        descent.zero_grad()
        for row in TOKENS:
            ids = torch.tensor([row])
            told = torch.log_softmax(plain(ids).logits[0, :-1], dim=-1)
            (-0.2 * told.gather(1, ids[0, 1:, None]).sum()).backward()
        with torch.no_grad():
            torch._foreach_mul_([parameter for parameter in plain.parameters() if parameter.ndim > 1], 1 - 0.05 * 0.1)
        descent.step()
    trained = dict(engine.named_weights())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), atol=2e-6, rtol=1e-5)


@pytest.mark.feature(142)
def test_sgd_goes_on_from_its_state_and_from_a_checkpoint_and_not_from_another_optimizer(model, tmp_path):
    config = OptimizerConfig(lr=0.05, name="sgd", momentum=0.9)
    first, loss = Fsdp2TrainEngine(model, config), EngineLoss(SFT())
    first.step(BATCH, loss)
    first.save_checkpoint(tmp_path / "kept")
    second, third = Fsdp2TrainEngine(model, config), Fsdp2TrainEngine(model, config)
    second.load_state_dict(first.state_dict())
    third.load_checkpoint(tmp_path / "kept")
    told = [engine.step(BATCH, loss) for engine in (first, second, third)]
    assert told[0] == told[1] == told[2]
    weights = [dict(engine.named_weights()) for engine in (first, second, third)]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]) and torch.equal(tensor, weights[2][name])
    with pytest.raises(WeightSyncError, match="it has another optimizer"):
        Fsdp2TrainEngine(model, OptimizerConfig()).load_state_dict(first.state_dict())


def test_a_falling_rate_needs_to_know_over_how_many_steps(model):
    config = OptimizerConfig(lr=1.0, schedule="linear")
    with pytest.raises(EngineError, match="needs decay_steps"):
        Fsdp2TrainEngine(model, config)
    engine = Fsdp2TrainEngine(model, dataclasses.replace(config, decay_steps=4))
    assert [engine.step(BATCH, EngineLoss(SFT())).lr for _ in range(2)] == [1.0, 0.75]
