# SPDX-License-Identifier: Apache-2.0
"""Jobs of trainers on samples, small enough to learn something within a minute of one core."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job, run_here
from tests.support.commands import ROOT
from tests.support.run_files import read_json, steps_of, write_rows

WORKLOADS = "dlrover.python.rl.recipe.workloads"
TRAINERS = {"grpo": ("GRPOTrainer",), "ppo": ("PPOTrainer", "critic"), "distill": ("DistillationTrainer", "teacher")}
"""Of each recipe, and the role that it cannot do without."""
SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 32}
CLASSES = {"reference": "ReferenceWorkload", "critic": "CriticWorkload"}


def policy_job(folder, recipe, *, roles=(), rollouts=1, out="out", module="", **config):
    """A job of a recipe with one worker of each role but rollouts, which writes to the folder ``out`` beside its model
    and data; ``roles``: beside those that the trainer cannot do without; ``module``: another one with the classes."""
    folder = Path(folder)
    write_inputs(folder)
    trainer, *own = TRAINERS[recipe]
    builder = JobBuilder().device_type("CPU").device_per_node(16).config(policy_config(folder) | config)
    builder.trainer(module or f"dlrover.python.rl.recipe.{recipe}", trainer)
    builder.actor(module or WORKLOADS, "ActorWorkload").total(1)
    builder.rollout(module or WORKLOADS, "RolloutWorkload").total(rollouts)
    builder.reward(module or WORKLOADS, "RewardWorkload").total(1)
    for role in (*own, *roles):
        builder.role(role, module or WORKLOADS, CLASSES.get(role, "TeacherWorkload")).total(1)
    job = builder.spec(recipe, search_path=(str(ROOT),))
    object.__setattr__(job, "job_dir", folder / out)
    return job


def grpo_job(folder, *overrides):
    """The example's own job file on the small inputs, four prompts for each step."""
    write_inputs(folder)
    paths = [f"model={folder / 'model'}", f"data.train={folder / 'problems.jsonl'}", f"job_dir={folder / 'out'}"]
    sizes = ["data.eval_rows=8", "prompts_per_step=4", "steps=1"]
    return load_job(ROOT / "examples" / "arithmetic" / "grpo.yaml", [*paths, *sizes, *overrides])


def write_inputs(folder, shape=SHAPE):
    """A model of two small layers, and additions of one-digit numbers; left as they are where they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_tiny_model(folder / "model", **shape)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    write_rows(folder / "problems.jsonl", rows)


def policy_config(folder):
    data = {"train": str(folder / "problems.jsonl"), "eval_rows": 4}
    reward = {"function": "tests.support.policy_rewards:low", "workers": 1, "timeout_s": 60.0}
    rollout = {"samples_per_prompt": 8, "max_new_tokens": 8}
    numbers = {"steps": 3, "prompts_per_step": 4, "optimizer": {"lr": 3e-3}, "engine": {"threads": 1}}
    return {"model": str(folder / "model"), "data": data, "rollout": rollout, "reward": reward, **numbers}


def finished(job):
    """Run a job in this process; its folder and the metrics of its steps from 1 on."""
    status = run_here(check_job(job, local=True))
    assert status.phase is Phase.FINISHED, status.cause
    return job.job_dir, steps_of(job.job_dir)


def write_teacher(folder, name="teacher", sharper=3.0, seed=0):
    """A model of the policy's shape that is surer of what it says; with seed 0 that is what the policy begins with."""
    write_tiny_model(folder / name, **SHAPE, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    model.model.norm.weight.data *= sharper
    model.save_pretrained(folder / name)
    return str(folder / name)


def swap_tokens(model, first, second):
    """Let a model give two tokens each other's ids."""
    tokenizer = read_json(model / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


@torch.no_grad()
def reverse_kl(student, teacher, rows=256, length=8):
    """KL(student || teacher) over the whole vocabulary: the mean over the tokens of samples that the student draws."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in (student, teacher))
    draw = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(b"%d+%d=" % (1 + row % 9, 1 + row // 9 % 9)) for row in range(rows)])
    terms = []
    for _ in range(length):
        p, q = (model(ids).logits[:, -1].double().log_softmax(-1) for model in (student, teacher))
        terms.append((p.exp() * (p - q)).sum(-1).mean())
        ids = torch.cat([ids, torch.multinomial(p.exp(), 1, generator=draw)], dim=1)
    return float(torch.stack(terms).mean())
