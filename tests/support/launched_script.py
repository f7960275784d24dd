# SPDX-License-Identifier: Apache-2.0
"""Trains by constructors, one after the other, in every process that runs it.

Arguments: folder of the model, where to write, samples of a step in all, which trainers.
"""

import json
import os
import sys
from pathlib import Path

from dlrover.python.rl import classic
from tests.support.judging_envs import Share, asked

NAMES = ("Ada", "Emmy", "Sofia", "Grace", "Mary", "Katherine")


def main(model, out, size, *which):
    world = int(os.environ.get("WORLD_SIZE", 1))
    steps = {"num_steps": 2, "saving_steps": 2, "logging_steps": 1, "eval_steps": 1, "batch_size": int(size) // world}
    shared = {**steps, "optimizer_args": {"lr": 1e-3}, "use_accelerate": True, "engine": {"threads": 1}}
    samples, held_out = asked(*NAMES, kind=Share), asked("Alan", "Kurt", "Emil", kind=Share)
    evaluations = {}
    for name in which:
        data = {"train_dataset": samples, "eval_dataset": held_out, "output_dir": Path(out) / name, **shared}
        if name == "sft":
            trainer = classic.SFTTrainer(model, eval_sample_completions=True, max_new_tokens=4, **data)
        elif name == "grpo":
            trainer = classic.GRPOTrainer(model, max_new_tokens=6, **data)
        else:
            teacher = {"teacher_model": f"{model}-teacher"}
            trainer = classic.OnPolicyDistillationTrainer(model, max_new_tokens=6, **teacher, **data)
        trainer.train()
        evaluations[name] = trainer.test()
    (Path(out) / f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(evaluations))


if __name__ == "__main__":
    main(*sys.argv[1:])
