# SPDX-License-Identifier: Apache-2.0
"""Workloads with an engine: the size of their states before anything starts, and the settings behind these."""

import shutil

import pytest
import torch

from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.data.state_tree import dump
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.workloads import ActorWorkload, CriticWorkload, ScorerWorkload
from dlrover.python.rl.trainer.workload import Setting
from tests.support.rollout_member import actor


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=64, layers=2, max_positions=64))


@pytest.mark.parametrize(
    ("optimizer", "engine"),
    [
        ({}, {}),
        ({"name": "sgd"}, {}),
        ({"name": "sgd", "momentum": 0.9}, {}),
        ({}, {"lora": {"rank": 4}}),
        ({"name": "adamw_8bit"}, {}),
        ({"name": "adamw_8bit"}, {"lora": {"rank": 4}}),
    ],
    ids=["adamw", "sgd", "sgd with momentum", "adapters", "adamw in 8 bits", "adapters in 8 bits"],
)
def test_state_bytes_are_right_within_a_few_percent(model, optimizer, engine):
    if optimizer.get("name") == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    lora = LoraSettings(**engine["lora"]) if engine else None
    trained = actor(model, EngineConfig(threads=1, lora=lora), OptimizerConfig(**optimizer))
    config = {"model": model, "engine": {"device": "cpu", **engine}, "optimizer": optimizer}
    state = sum(memoryview(buffer).nbytes for buffer in dump(trained.state_dict()).buffers)
    measured = state - torch.get_rng_state().nbytes
    assert ActorWorkload.state_bytes(config, 1) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "score")])
def test_state_bytes_of_an_adapted_reward_model_have_the_head(model, targets):
    lora = LoraSettings(rank=1, targets=targets)
    scorer = ScorerWorkload(None, {})
    scorer.init_model(model, EngineConfig(threads=1, lora=lora), OptimizerConfig(), RewardModel())
    trained = sum(tensor.numel() for tensor in scorer.state_dict()["engine"]["model"].values())
    config = {"model": model, "engine": {"device": "cpu", "lora": {"rank": 1, "targets": targets}}}
    assert ScorerWorkload.state_bytes(config, 1) == 12 * trained
    scorer.close()


def test_state_bytes_are_divided_like_the_model(model):
    config = {"model": model, "engine": {"device": "cpu"}}
    whole = ActorWorkload.state_bytes(config, 1)
    assert ActorWorkload.state_bytes(config, 2) == whole
    assert ActorWorkload.state_bytes({**config, "engine": {"device": "cuda"}}, 2) == whole // 2
    parallel = {"ddp_size": 2, "tensor_parallel_size": 2}
    assert ActorWorkload.state_bytes({**config, "engine": {"device": "cuda", "parallel": parallel}}, 8) == whole // 4


def test_state_bytes_of_a_critic_are_its_own(model, tmp_path):
    small = str(write_tiny_model(tmp_path / "S", hidden=32, layers=1))
    config = {"model": model, "engine": {"device": "cpu", "lora": {"rank": 4}}}
    policy = ActorWorkload.state_bytes({**config, "engine": {"device": "cpu"}}, 1)
    assert CriticWorkload.state_bytes(config, 1) == policy + 12 * 64, "a score for each of 64 outputs"
    own = {**config, "critic": {"model": small, "optimizer": {"name": "sgd"}}}
    assert CriticWorkload.state_bytes(own, 1) < CriticWorkload.state_bytes(config, 1) / 3


def test_state_bytes_are_unknown_without_the_models_files():
    assert ActorWorkload.state_bytes({"model": "some/hub-name", "engine": {"device": "cpu"}}, 1) is None


def test_state_depends_on_engine_adapters_and_optimizer(model):
    config = {"model": model, "engine": {"device": "cpu", "lora": {"rank": 4}}, "optimizer": {"lr": 1e-3}}
    named = ActorWorkload.settings_of_state(config)
    assert (named["engine"]["train"], named["engine"]["lora"]["rank"]) == ("fsdp2", 4)
    assert named["optimizer"] == {"name": "adamw", "momentum": Setting(0.0, kind=False)}
    critic = CriticWorkload.settings_of_state({**config, "critic": {"optimizer": {"name": "sgd"}}})
    assert critic["engine"] == {"train": "fsdp2", "lora": None} and "optimizer" not in critic
    assert critic["critic.optimizer"] == {"name": "sgd", "momentum": Setting(0.0, kind=False)}
    faster = {**config, "optimizer": {"lr": 1.0}, "engine": {**config["engine"], "max_batch": 7}}
    assert ActorWorkload.settings_of_state(faster) == named


def test_state_depends_on_the_layers_with_adapters(model):
    def settings(targets, folder=model):
        config = {"model": folder, "engine": {"device": "cpu", "lora": {"targets": targets}}}
        return ActorWorkload.settings_of_state(config)

    names = ["up_proj", "down_proj", "gate_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    assert settings("all-linear") == settings(names) == settings([*names, "q_proj"])
    assert settings("all-linear") != settings(names[1:])
    assert settings("all-linear") != settings([*names[:-1], "self_attn.o_proj"])
    assert settings("all-linear", "some/hub-name") != settings(names, "some/hub-name"), "its layers are not known"
    assert str(settings(names[:2])["engine"]["lora"]["targets"]) == "[down_proj, up_proj]"


def test_state_depends_on_the_weights_it_began_with(model, tmp_path, monkeypatch):
    def weights(folder, workload=ActorWorkload, key="model", **config):
        return workload.settings_of_state({"model": str(folder), "engine": {}, **config})[key]

    moved = shutil.copytree(model, tmp_path / "hub/models--or--moved/snapshots/1a")
    other = write_tiny_model(tmp_path / "other", hidden=64, layers=2, max_positions=64, seed=1)
    assert weights(moved) == weights(model) != weights(other)
    assert (weights(model).value, weights(tmp_path / "none").kind, weights("or/moved").kind) == (model, None, None)
    (moved.parents[1] / "refs").mkdir()
    (moved.parents[1] / "refs/main").write_text("1a")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert weights("or/moved") == weights(model)
    key = "critic.model"
    assert weights(model, CriticWorkload, key) == weights(other, CriticWorkload, key, critic={"model": model})
    (moved / "model.safetensors").write_bytes(b"")
    assert weights(moved).kind is None


def test_state_depends_on_momentum_being_there(model):
    def momentum(value):
        optimizer = {"name": "sgd", "momentum": value}
        settings = ActorWorkload.settings_of_state({"model": model, "engine": {}, "optimizer": optimizer})
        return settings["optimizer"]["momentum"]

    assert momentum(0.9) == momentum(0.5) != momentum(0.0)
    assert str(momentum(0.9)) == "0.9"


@pytest.mark.parametrize(
    ("engine", "stays"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cuda"}, False),
        ({"device": "cuda", "train_options": {"keep_processes": True}}, True),
        ({"device": "cuda", "train_options": {"keep_processes": False}}, False),
        ({"device": "cpu", "train": "deepspeed"}, False),
    ],
)
def test_keeps_process_on_devices_needs_the_option(engine, stays):
    assert ActorWorkload.keeps_process({"engine": {"train": "fsdp2", **engine}}) is stays
