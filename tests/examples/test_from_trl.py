# SPDX-License-Identifier: Apache-2.0
"""The translation of TRL's fields by ``examples/trl/dlrover_trl.py``. A stand-in for ``GRPOConfig`` has those that it
reads; ``tests/slow/test_example_trl.py`` has TRL's own."""

import importlib.util
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlrover.python.rl.algorithm.registry import make_algorithm

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl" / "dlrover_trl.py"
FIELDS = {
    "output_dir": "out", "use_cpu": True, "bf16": False, "learning_rate": 1e-6, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "warmup_steps": 0, "seed": 42, "num_generations": 8, "max_completion_length": 256,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "mask_truncated_completions": False, "num_iterations": 1,
    "beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "delta": None, "entropy_coef": 0.0, "loss_type": "dapo",
    "scale_rewards": "group", "importance_sampling_level": "token", "adam_beta1": 0.9, "adam_beta2": 0.999,
    "lr_scheduler_type": "linear", "max_steps": -1, "num_train_epochs": 3.0, "gradient_accumulation_steps": 1,
    "steps_per_generation": 1, "generation_batch_size": 32, "eval_steps": None, "eval_strategy": "no",
    "gradient_checkpointing": False, "use_vllm": False, "chat_template_kwargs": None,
}  # fmt: skip
GRPOConfig = make_dataclass("GRPOConfig", [(name, object, value) for name, value in FIELDS.items()])


@pytest.fixture
def keys_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=GRPOConfig))
    spec = importlib.util.spec_from_file_location("dlrover_trl", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda rows=64, **fields: module.keys_of(GRPOConfig(**fields), rows)


def algorithm_of(keys):
    options = dict(keys["algorithm"])
    return make_algorithm(options.pop("name"), options)


def test_cispo_bounds_the_weight_by_epsilon_high_alone(keys_of):
    algorithm = algorithm_of(keys_of(loss_type="cispo", epsilon_high=5.0))
    ratio = torch.tensor([0.01, 0.9, 4.9, 6.0])
    columns = {"advantage": torch.ones(4), "weight": torch.ones(4), "old_logprobs": -ratio.log()}
    leaf = torch.zeros(4, requires_grad=True)
    algorithm.surrogate(leaf, columns)[0].sum().backward()
    assert -leaf.grad == pytest.approx(ratio.clamp(max=5.0), rel=1e-5)
    with pytest.raises(ValueError, match=r"epsilon_high of at least 1, the bound of the weight, not 0\.2"):
        keys_of(loss_type="cispo")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "grpo"),
        ({"loss_type": "bnpo"}, "grpo"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo"),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "gspo"),
    ],
)
@pytest.mark.parametrize(("scale", "normalize"), [("group", "std_unbiased"), ("none", "none"), (False, "none")])
def test_rewards_are_scaled_for_every_algorithm(keys_of, fields, name, scale, normalize):
    keys = keys_of(scale_rewards=scale, **fields)
    algorithm = algorithm_of(keys)
    assert keys["algorithm"]["name"] == name
    assert (algorithm.normalize, algorithm.std_eps) == (normalize, 1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "dr_grpo"}, "set scale_rewards='none'"),
        ({"scale_rewards": "batch"}, "no loss_type 'dapo' with scale_rewards 'batch'"),
        ({"importance_sampling_level": "sequence"}, "only with 'grpo'"),
        ({"loss_type": "dr_grpo", "scale_rewards": "none", "importance_sampling_level": "sequence"}, "only with 'grp"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, "2 is not a multiple of gradient_acc"),
    ],
)
def test_what_cannot_be_expressed_is_refused(keys_of, fields, message):
    with pytest.raises(ValueError, match=message):
        keys_of(**fields)


def test_dr_grpo_is_that_of_the_paper(keys_of):
    algorithm = algorithm_of(keys_of(loss_type="dr_grpo", scale_rewards="none"))
    assert (algorithm.averaging, algorithm.max_tokens) == ("constant", 256)


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize(
    ("fields", "steps", "every"),
    [
        ({}, 48, None),
        ({"num_train_epochs": 0.5}, 8, None),
        ({"eval_strategy": "epoch"}, 48, 16),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, 48, 12),
    ],
)
def test_an_epoch_is_of_all_prompts(keys_of, iterations, fields, steps, every):
    keys = keys_of(num_iterations=iterations, steps_per_generation=4, gradient_accumulation_steps=2, **fields)
    assert (keys["prompts_per_step"], keys["updates_per_step"], keys["epochs"]) == (4, 2, iterations)
    assert (keys["steps"], keys.get("eval_every")) == (steps, every)


def test_optimizer_steps_become_steps(keys_of):
    fields = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 5}
    keys = keys_of(**fields, max_steps=200, eval_strategy="steps", eval_steps=50)
    assert (keys["steps"], keys["eval_every"]) == (20, 5)
    keys = keys_of(**fields, max_steps=201, eval_strategy="steps", eval_steps=51)
    assert (keys["steps"], keys["eval_every"]) == (21, 6)
