# SPDX-License-Identifier: Apache-2.0
"""Defaults of configurations by devices and engines, and keys of other libraries."""

import dataclasses
import json

import pytest
from transformers import AutoModelForCausalLM

from dlrover.python.rl.algorithm.registry import make_algorithm, option_names
from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.plain import from_plain, to_plain
from dlrover.python.rl.config.typed import Translation, list_keys, rename_keys, require
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import EXAMPLE_NAMES, POLICY_NAMES, EngineConfig, PolicyConfig
from dlrover.python.rl.recipe.base.model_files import count_parameters
from dlrover.python.rl.recipe.distill import DistillationConfig
from dlrover.python.rl.recipe.dpo import DPOTrainer
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.ppo import PPOTrainer
from dlrover.python.rl.recipe.rm import RMTrainer
from dlrover.python.rl.recipe.sft import SFTConfig, SFTTrainer
from dlrover.python.rl.recipe.trainers.recipe_plan import complete_config, describe_engines
from dlrover.python.rl.trainer.plan import plan_of

GIVEN = {"model": "m", "data": {"train": "d.jsonl"}}


@pytest.mark.parametrize(
    ("devices", "cuda_is_here", "expected"),
    [
        ("CPU", False, ("cpu", "fp32", "torch", False, 128, 64, 16)),
        ("GPU", False, ("cuda", "bf16", "vllm", "auto", 256, 1024, 64)),
        ("HERE", False, ("cpu", "fp32", "torch", False, 128, 64, 16)),
        ("HERE", True, ("cuda", "bf16", "vllm", "auto", 256, 1024, 64)),
    ],
)
def test_defaults_depend_on_the_jobs_devices(monkeypatch, devices, cuda_is_here, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda_is_here)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    cfg = complete_config(PolicyConfig, GIVEN, devices)
    engine = cfg.engine
    settings_found = (engine.device, engine.precision, engine.rollout, engine.gradient_checkpointing, engine.max_batch)
    assert (*settings_found, cfg.rollout.max_new_tokens, cfg.prompts_per_step) == expected


def test_given_values_stay(monkeypatch):
    engine = {"precision": "fp32", "rollout": "torch", "gradient_checkpointing": False, "max_batch": 7}
    config = {**GIVEN, "engine": engine, "rollout": {"max_new_tokens": 9}, "prompts_per_step": 3}
    cfg = complete_config(PolicyConfig, config, "GPU")
    assert {name: getattr(cfg.engine, name) for name in engine} == engine
    assert (cfg.rollout.max_new_tokens, cfg.prompts_per_step) == (9, 3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    cfg = complete_config(PolicyConfig, {**GIVEN, "engine": {"device": "cpu"}}, "HERE")
    assert cfg.engine.precision == "fp32", "one process may compute on a CPU beside a GPU"


def test_vllm_is_the_default_only_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert complete_config(PolicyConfig, GIVEN, "GPU").engine.rollout == "torch"


@pytest.mark.parametrize(
    ("devices", "device", "message"),
    [
        ("GPU", "cpu", "its GPUs would be idle; write trainer.device_type=CPU or engine.device=auto"),
        ("CPU", "cuda", "no GPU is reserved; write trainer.device_type=GPU or engine.device=auto"),
        ("CPU", "cuda:1", "no GPU is reserved"),
        ("HERE", "cuda", "PyTorch finds no CUDA device here"),
    ],
)
def test_engine_on_other_devices_than_the_jobs_is_refused(monkeypatch, devices, device, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidJob, match=message):
        complete_config(PolicyConfig, {**GIVEN, "engine": {"device": device}}, devices)


@pytest.mark.parametrize("devices", ["CPU", "GPU"])
@pytest.mark.parametrize("trainer", [GRPOTrainer, PPOTrainer, SFTTrainer, DPOTrainer, RMTrainer])
def test_complete_configuration_is_read_as_itself(trainer, devices):
    config = {**GIVEN, "log": {"trackers": ["${not} a reference"]}}
    complete = plan_of(trainer).complete_config(config, devices)
    again = require(trainer.config_class, to_plain(from_plain(complete)), "config")
    assert dataclasses.asdict(again) == complete
    assert again.log.trackers == ("${not} a reference",)


@pytest.mark.parametrize("name", ["grpo", "deepseek_grpo", "dapo", "gspo"])
def test_complete_config_has_every_option_of_its_algorithm(name):
    complete = plan_of(GRPOTrainer).complete_config({**GIVEN, "algorithm": {"name": name}}, "CPU")["algorithm"]
    assert complete.pop("name") == name
    assert make_algorithm(name, complete) == make_algorithm(name)
    assert set(complete) == option_names(name)


@pytest.mark.parametrize(
    ("schema", "names"),
    [(PolicyConfig, POLICY_NAMES), (SFTConfig, EXAMPLE_NAMES), (DistillationConfig, DistillationConfig.other_names)],
)
def test_keys_of_other_libraries_have_existing_targets(schema, names):
    own = {key for key, _ in list_keys(schema)}
    targets = [name.name if isinstance(name, Translation) else name for name in names.values()]
    assert [name for name in targets if name not in own and not name.startswith("algorithm.")] == []
    assert not own & names.keys()


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ({"adv": {"norm_var": True}}, {"normalize": "std_unbiased"}),
        ({"adv": {"norm_var": False}}, {"normalize": "none"}),
        ({"adv": {"estimator": "gae"}, "kl": {"type": "reward"}}, {"name": "ppo", "kl_in": "reward"}),
        ({"adv": {"estimator": "reinforce"}}, {"name": "dr_grpo"}),
    ],
)
def test_rl2_values_are_translated(settings, algorithm):
    values, lines = rename_keys(PolicyConfig, settings, "config")
    assert values == {"algorithm": algorithm}
    assert len(lines) == len(algorithm)


NORM_VAR = "config.adv.norm_var: must be one of true, false, got"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm_var": "yes"}, f"{NORM_VAR} 'yes'; here it is algorithm.norma"),
        ({"estimator": "gea"}, """config.adv.estimator: must be one of "gae", "reinforce", got 'gea'; here it is al"""),
    ],
)
def test_rl2_values_without_an_equal_are_refused(settings, message):
    with pytest.raises(InvalidJob) as caught:
        rename_keys(PolicyConfig, {"adv": settings}, "config")
    assert str(caught.value.errors[0]).startswith(message)


TARGETS, SUCH_AS = "engine.lora.targets, the last parts", "engine.lora, such as {"


@pytest.mark.parametrize("schema", [PolicyConfig, SFTConfig])
@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ({"lora_rank": 8}, "engine.lora.rank"),
        ({"lora_alpha": 8}, "engine.lora.alpha"),
        ({"lora_target_modules": ["q_proj"]}, TARGETS),
        ({"lora": {"rank": 8}}, SUCH_AS),
        ({"use_peft": True}, SUCH_AS),
        ({"ds": {"lora": {"rank": 8}}}, SUCH_AS),
        ({"engine": {"lora_rank": 8}}, "engine.lora.rank"),
        ({"actor_rollout_ref": {"model": {"target_modules": "all-linear"}}}, TARGETS),
    ],
)
def test_foreign_keys_of_adapters_are_answered_with_their_place(schema, config, answer):
    with pytest.raises(InvalidJob, match=f"unknown key; here it is {answer}"):
        require(schema, {**GIVEN, **config}, "config")
    place = answer.partition(",")[0]
    assert place == "engine.lora" or place in {key for key, _ in list_keys(schema)}


@pytest.mark.parametrize("schema", [PolicyConfig, DistillationConfig])
def test_steps_per_generation_are_micro_batches_and_no_updates(schema):
    with pytest.raises(InvalidJob, match="here it is updates_per_step: steps_per_generation / gradient_accumulation"):
        require(schema, {**GIVEN, "steps_per_generation": 8}, "config")


def test_beta_is_a_kl_coefficient_except_of_distillation():
    assert require(PolicyConfig, {**GIVEN, "beta": 0.1}, "config").algorithm == {"kl_coef": 0.1}
    with pytest.raises(InvalidJob, match=r"config\.beta: unknown key; here it is none: .* GKD's beta=1 .*kl_coef"):
        require(DistillationConfig, {**GIVEN, "beta": 0.5}, "config")
    assert require(DistillationConfig, {**GIVEN, "temperature": 0.5}, "config").rollout.temperature == 0.5


def test_files_missing_from_the_index_are_not_counted(tmp_path):
    folder = write_tiny_model(tmp_path / "m", hidden=32, layers=1)
    whole = count_parameters(folder)
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert count_parameters(folder) == whole
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"one": "model-00001-of-00001.safetensors", "two": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_parameters(folder) == whole


def test_size_of_a_model_is_read_from_its_files(tmp_path):
    folder = write_tiny_model(tmp_path / "m", hidden=32, layers=1)
    stored = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    tied = sum(tensor.numel() for tensor in {tensor.data_ptr(): tensor for tensor in stored.values()}.values())
    assert count_parameters(folder) == tied
    cfg = PolicyConfig(str(folder), engine=EngineConfig().resolve(False))
    for generates, weights, engines in (
        (True, f" {4 * tied / 1e3:.3g} kB of weights to generate,", "train fsdp2, rollout torch, on cpu in fp32"),
        (False, "", "train fsdp2, on cpu in fp32"),
    ):
        size = f"{tied / 1e3:.3g} k parameters;{weights} {16 * tied / 1e3:.3g} kB to train, activations not counted"
        lines = [f"model: {folder}, {size}", f"engines: {engines}"]
        assert describe_engines(cfg, generates=generates) == lines
    (folder / "model.safetensors").write_bytes(b"broken")
    assert count_parameters(folder) is None
