# SPDX-License-Identifier: Apache-2.0
"""The passes of a run: chosen once, for all ranks and their replacements."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.model.model_shape import ModelShape
from dlrover.python.rl.recipe.base import memory_plan
from dlrover.python.rl.recipe.base.auto import complete_config
from dlrover.python.rl.recipe.base.config import EngineConfig, PolicyConfig
from dlrover.python.rl.recipe.base.engine_workload import DeviceShare, TrainedWorkload
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.reporting.passes import choose_passes, smallest_device
from dlrover.python.rl.recipe.sft import SFTConfig, SFTTrainer
from dlrover.python.rl.trainer.port import Outcome, Pending, Ref, RestartInfo

ACTOR = RLRoleType.ACTOR
GIVEN = {"model": "m", "data": {"train": "d"}, "steps": 1, "batch_size": 1}
SMALL = ModelShape.of_dense(
    {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
)


class Port:
    def wait(self, refs, timeout_s):
        return [Outcome(ref.token) for ref in refs]


class Group:
    """Members of a role, of which two compute on the same rows, and their devices."""

    workload_class = TrainedWorkload

    def __init__(self, *shares):
        self.shares, self.asked = shares, 0
        self.device_share = SimpleNamespace(options=lambda blocking: self._ask)

    def _ask(self, engine):
        self.asked += 1
        return Pending([Ref(Port(), share) for share in self.shares], replica=2)


def device(name, gigabytes, in_turn=False):
    return DeviceShare(name, gigabytes * 1e9, in_turn)


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_plan, "shape_of", lambda model, fallback=None: SMALL)
    return SimpleNamespace(
        job_dir=tmp_path,
        restart_info=RestartInfo(),
        model_uses=SFTTrainer.model_uses,
        actor_handles={ACTOR: [None, None]},
        RG_ACTOR=Group(device("a/cuda-0", 80), device("a/cuda-1", 80)),
    )


def chosen(trainer, **engine):
    found = choose_passes(trainer, complete_config(SFTConfig, {**GIVEN, "engine": engine}, "GPU"))
    assert found.device_memory_gb == engine.get("device_memory_gb")
    return found.max_tokens_per_microbatch, found.gradient_checkpointing


def test_they_fit_the_smallest_device_that_any_member_has(trainer):
    assert chosen(trainer) == (16384, False)
    trainer.RG_ACTOR = Group(device("a/cuda-0", 80), device("a/cuda-1", 12))
    assert chosen(trainer) == (16384, True)
    assert chosen(trainer, device_memory_gb=80) == (16384, False)


def test_what_is_given_needs_no_call(trainer):
    assert chosen(trainer, max_tokens_per_microbatch=100, gradient_checkpointing=True) == (100, True)
    assert trainer.RG_ACTOR.asked == 0
    assert list(trainer.job_dir.iterdir()) == []


def test_a_trainer_that_replaces_another_one_takes_over_its_choice(trainer):
    assert chosen(trainer) == (16384, False)
    trainer.RG_ACTOR = Group(device("b/cuda-0", 12))
    trainer.restart_info = RestartInfo(count=1)
    assert chosen(trainer) == (16384, False)
    assert trainer.RG_ACTOR.asked == 0
    trainer.restart_info = RestartInfo()
    assert chosen(trainer) == (16384, True), "another run chooses anew"
    assert json.loads((trainer.job_dir / "passes.json").read_text()) == {"tokens": 16384, "recompute": True}


def test_roles_that_are_on_a_device_together_are_sized_with_care(trainer):
    trainer.RG_ACTOR = Group(device("a/cuda-0", 80), device("a/cuda-0", 80))
    assert chosen(trainer) == (16384, True)
    trainer.RG_ACTOR = Group(device("a/cuda-0", 80, in_turn=True), device("a/cuda-0", 80, in_turn=True))
    assert chosen(trainer) == (16384, False)
    trainer.RG_ACTOR = Group(None, None)
    assert chosen(trainer) == (16384, True)


def test_of_no_devices_nothing_is_known():
    engine = EngineConfig(device="cuda")
    assert smallest_device(engine, []) is None
    assert smallest_device(replace(engine, device_memory_gb=2), [None]) == 2e9


@pytest.mark.parametrize(
    ("data", "rollout", "bounded"),
    [
        ({"max_prompt_tokens": 100}, {}, True),
        ({}, {}, False),
        ({"max_prompt_tokens": 100}, {"env_path": "dlrover.python.rl.environment.verifiers:exact"}, False),
    ],
)
def test_prompts_and_turns_without_a_bound_may_be_longer_than_what_is_planned(data, rollout, bounded):
    config = {"model": "m", "data": {"train": "d", **data}, "rollout": rollout}
    cfg = complete_config(PolicyConfig, config, "GPU")
    assert GRPOTrainer.model_uses(cfg, {ACTOR: 1})[ACTOR].bounded == bounded


def test_a_member_says_which_device_it_has():
    workload = TrainedWorkload(None, {})
    assert workload.device_share(EngineConfig(device="cpu")) is None
    engine = EngineConfig(device="cuda:1", device_memory_gb=3)
    share = workload.device_share(engine)
    assert (share.place.rpartition("/")[2], share.nbytes, share.in_turn) == ("cuda-1", 3e9, False)
