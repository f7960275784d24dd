# SPDX-License-Identifier: Apache-2.0
"""The READMEs of RL2 and RLFusion, and TRL's fields: their rows, presets, commands and snippets run here.

A stand-in for TRL's ``GRPOConfig`` has the fields that are read; ``tests/slow/test_other_libraries.py`` has TRL's own.
"""

import importlib.util
import json
import re
import shlex
import shutil
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.data.conversation import SFT_ROWS
from dlrover.python.rl.data.pairs import PAIR_ROWS
from dlrover.python.rl.data.prompts import load_prompts
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.commands import ROOT, run_python
from tests.support.processes import free_port

GUIDES = ROOT / "docs" / "guides"
DATA = GUIDES / "from_rl2"
COMMANDS = re.findall(r"^torchrun (.*)$", (GUIDES / "from-rl2.md").read_text(encoding="utf-8"), re.MULTILINE)


def torchrun(folder, *arguments):
    run_python(folder, "-m", "torch.distributed.run", f"--master_port={free_port()}", *arguments)


@pytest.mark.feature(66, 74)
def test_rows_of_rl2_are_read():
    assert [row["response"] for row in SFT_ROWS.read(DATA / "sft.json")] == ["Beijing.", "Paris."]
    assert [len(row["messages"]) for row in SFT_ROWS.read(DATA / "sft_messages.json")] == [2, 2]
    assert [len(PAIR_ROWS.read(DATA / name)) for name in ("pairs.json", "pairs_messages.json")] == [2, 2]
    for name in ("ppo.json", "ppo_messages.json"):
        assert [row.extra_info for row in load_prompts(DATA / name)] == [{"answer": "Beijing"}, {"answer": "Paris"}]


@pytest.mark.feature(111, 112, 114)
def test_presets_of_rl2_equal_its_readme():
    ppo = make_algorithm("openai_ppo")
    assert (ppo.kl_in, ppo.kl_estimator, type(ppo)) == ("reward", "k1", type(make_algorithm("ppo")))
    grpo = make_algorithm("deepseek_grpo")
    assert (grpo.averaging, grpo.kl_in, grpo.kl_estimator, grpo.normalize) == ("sequence", "loss", "k3", "std")
    spelled = {"averaging": "sequence", "kl_in": "loss", "kl_estimator": "k3", "normalize": "std", "kl_coef": 0.04}
    assert make_algorithm("grpo", spelled) == grpo
    assert make_algorithm("dr_grpo").averaging == "token"


@pytest.mark.feature(4)
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.split("recipe.")[1].split()[0])
def test_command_for_rl2_runs_twice_in_one_folder(tmp_path, command):
    write_tiny_model(tmp_path / "runs" / "tiny", hidden=32, layers=2)
    shutil.copytree(DATA, tmp_path / "docs" / "guides" / "from_rl2")
    for count in (1, 2):
        torchrun(tmp_path, *shlex.split(command))
        assert len(list((tmp_path / "runs").glob("*/*/model/*.safetensors"))) == count


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_rows_trains_on_any_number_of_ranks(tmp_path, processes, rows):
    write_tiny_model(tmp_path / "model", hidden=32, layers=1)
    sft = [{"prompt": f"{row}: ", "response": f"{row}."} for row in range(rows)]
    ppo = [{"prompt": f"{row}? ", "extra_info": {"answer": str(row)}} for row in range(rows)]
    (tmp_path / "sft.json").write_text(json.dumps(sft))
    (tmp_path / "ppo.json").write_text(json.dumps(ppo))
    sizes = "rollout.samples_per_prompt=2 rollout.max_new_tokens=4"
    for arguments in (
        f"sft model=model data.train=sft.json batch_size={rows} steps=2",
        f"ppo model=model data.train=ppo.json prompts_per_step={rows} steps=1 {sizes}",
        f"grpo model=model data.train=ppo.json prompts_per_step={rows} steps=1 {sizes}",
    ):
        torchrun(tmp_path, f"--nproc_per_node={processes}", "-m", *f"dlrover.python.rl.recipe.{arguments}".split())


def ran(script, tmp_path):
    """Run a script of the guide with a tiny model in the place of its models; what it printed."""
    write_tiny_model(tmp_path / "tiny", hidden=32, layers=2)
    text = (GUIDES / "from_rlfusion" / script).read_text(encoding="utf-8")
    code, count = re.subn(r'"Qwen/[^"]+"', repr(str(tmp_path / "tiny")), text)
    assert count
    (tmp_path / script).write_text(code, encoding="utf-8")
    return run_python(tmp_path, script).stdout


@pytest.mark.slow
def test_blocks_of_rlfusion_train_and_save_twice_in_one_folder(tmp_path):
    for number, script in enumerate(["sft.py", "grpo.py", "distillation.py"] * 2, 1):
        ran(script, tmp_path)
        lines = (tmp_path / "outputs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [step for line in lines if (step := json.loads(line)["step"])] == [1, 2]
        for name in ("step_2", "final"):
            assert AutoModelForCausalLM.from_pretrained(tmp_path / "outputs" / name)
        assert len(list(tmp_path.glob("outputs/runs/*/2*"))) == number


@pytest.mark.slow
def test_evaluator_of_rlfusion_writes_its_files(tmp_path):
    assert "'num_samples': 8" in ran("evaluate.py", tmp_path)
    lines = (tmp_path / "outputs/evaluation/results.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 8


EXAMPLE = ROOT / "examples" / "trl" / "dlrover_trl.py"
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


def test_trl_cispo_bounds_the_weight_by_epsilon_high(keys_of):
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
def test_trl_scale_rewards_holds_for_every_algorithm(keys_of, fields, name, scale, normalize):
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
def test_trl_fields_without_counterpart_are_refused(keys_of, fields, message):
    with pytest.raises(ValueError, match=message):
        keys_of(**fields)


def test_trl_dr_grpo_equals_the_paper(keys_of):
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
def test_trl_epoch_has_all_prompts(keys_of, iterations, fields, steps, every):
    keys = keys_of(num_iterations=iterations, steps_per_generation=4, gradient_accumulation_steps=2, **fields)
    assert (keys["prompts_per_step"], keys["updates_per_step"], keys["epochs"]) == (4, 2, iterations)
    assert (keys["steps"], keys.get("eval_every")) == (steps, every)


def test_trl_optimizer_steps_become_steps(keys_of):
    fields = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 5}
    keys = keys_of(**fields, max_steps=200, eval_strategy="steps", eval_steps=50)
    assert (keys["steps"], keys["eval_every"]) == (20, 5)
    keys = keys_of(**fields, max_steps=201, eval_strategy="steps", eval_steps=51)
    assert (keys["steps"], keys["eval_every"]) == (21, 6)
