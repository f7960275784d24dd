# SPDX-License-Identifier: Apache-2.0
"""A GRPO job small enough to be disturbed hundreds of times: a random model, a few additions, steps of a fraction of
a second. The same arguments give the same bits at the end."""

from pathlib import Path

from dlrover.python.rl.config.spec import JobSpec
from tests.support.policy_jobs import WORKLOADS, policy_job, write_inputs

__all__ = ["SHAPE", "WORKLOADS", "tiny_job"]
SHAPE = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 32, "seed": 7}
"""68 thousand parameters."""


def tiny_job(folder: Path | str, steps: int, *, reference: bool = False, **config) -> JobSpec:
    """One actor, two rollouts, one reward, and a reference where asked for; it writes to ``folder/out``."""
    write_inputs(Path(folder), SHAPE)
    defaults = {
        "algorithm": {"name": "grpo", "kl_coef": 0.01 if reference else 0.0},
        "optimizer": {"lr": 3e-4, "warmup_steps": 5, "weight_decay": 0.01},
        "rollout": {"samples_per_prompt": 8, "max_new_tokens": 12, "temperature": 1.0},
        "reward": {"function": "tests.chaos.graded:graded", "timeout_s": 5.0, "workers": 1},
    }
    defaults |= {"steps": steps, "prompts_per_step": 8, "seed": 11, "eval_every": 0}
    return policy_job(folder, "grpo", roles=["reference"] * reference, rollouts=2, **defaults | config)
