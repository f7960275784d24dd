# SPDX-License-Identifier: Apache-2.0
"""A small GRPO job for tests: a tiny random model, a few additions."""

import json
from pathlib import Path

from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

JOB = Path(__file__).parents[2] / "examples" / "arithmetic" / "grpo.yaml"


def write_inputs(folder, problems=40):
    """A model of two small layers, and additions of one-digit numbers."""
    model, data = folder / "model", folder / "problems.jsonl"
    write_tiny_model(model, hidden=32, layers=2, heads=4, kv_heads=2, max_positions=32)
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(1, 10) for b in range(1, 10)][:problems]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))


def grpo_job(folder, *overrides):
    """The demo's own job file on the small inputs."""
    if not (folder / "model").exists():
        write_inputs(folder)
    return load_job(JOB, [*inputs(folder), "steps=1", f"job_dir={folder / 'out'}", *overrides])


def inputs(folder):
    """Return the settings for the inputs of a folder."""
    paths = [f"model={folder / 'model'}", f"data.train={folder / 'problems.jsonl'}"]
    return [*paths, "data.eval_rows=8", "prompts_per_step=4"]


def samples(job_dir):
    """Prompt, index and reward of the first step's samples."""
    rows = [json.loads(line) for line in (job_dir / "samples.jsonl").read_text().splitlines()]
    return [
        (row["prompt_id"], row["sample_index"], row["completion"], row["reward"]) for row in rows if row["step"] == 1
    ]
