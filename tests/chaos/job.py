# SPDX-License-Identifier: Apache-2.0
"""A GRPO job small enough to be disturbed hundreds of times: a random model, a few additions, steps of a fraction of
a second. The same arguments give the same bits at the end."""

import json
from pathlib import Path

from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

REPOSITORY = Path(__file__).parents[2]
WORKLOADS = "dlrover.python.rl.recipe.workloads"

SHAPE = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 32, "seed": 7}
"""68 thousand parameters."""


def write_inputs(folder: Path) -> None:
    """The model, and additions of one-digit numbers; left as they are where they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_tiny_model(folder / "model", **SHAPE)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def tiny_job(folder: Path | str, steps: int, *, reference: bool = False, **config) -> JobSpec:
    """One actor, two rollouts, one reward, and a reference where asked for; it writes to ``folder/out``."""
    folder = Path(folder)
    write_inputs(folder)
    builder = JobBuilder().device_type("CPU").device_per_node(8).config(_config(folder, steps, reference) | config)
    builder.trainer("dlrover.python.rl.recipe.grpo", "GRPOTrainer")
    builder.actor(WORKLOADS, "ActorWorkload").total(1)
    builder.rollout(WORKLOADS, "RolloutWorkload").total(2)
    builder.reward(WORKLOADS, "RewardWorkload").total(1)
    if reference:
        builder.reference(WORKLOADS, "ReferenceWorkload").total(1)
    job = builder.spec("tiny", search_path=(str(REPOSITORY),))
    object.__setattr__(job, "job_dir", folder / "out")
    return job


def _config(folder: Path, steps: int, reference: bool) -> dict:
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "problems.jsonl"), "eval": None, "eval_rows": 4},
        "steps": steps,
        "prompts_per_step": 8,
        "seed": 11,
        "eval_every": 0,
        "algorithm": {"name": "grpo", "kl_coef": 0.01 if reference else 0.0},
        "optimizer": {"lr": 3e-4, "warmup_steps": 5, "weight_decay": 0.01},
        "rollout": {"samples_per_prompt": 8, "max_new_tokens": 12, "temperature": 1.0},
        "reward": {"function": "tests.chaos.graded:graded", "timeout_s": 5.0, "workers": 1},
        "engine": {"threads": 1},
    }
