# SPDX-License-Identifier: Apache-2.0
"""A script for TRL with its import line changed: a tiny model learns to write digits.

python examples/trl/train.py [SEED]
"""

import sys

from datasets import Dataset
from dlrover_trl import GRPOConfig, GRPOTrainer

from dlrover.python.rl.recipe.tiny import write_tiny_model

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0


def digits(completions: list[str], **columns: list[object]) -> list[float]:
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


model = write_tiny_model(f"build/trl/model-{seed}", hidden=64, layers=2, seed=seed)
rows = Dataset.from_list([{"prompt": f"A number near {n}: "} for n in range(64)])
arguments = GRPOConfig(
    output_dir=f"build/trl/{seed}",
    max_steps=60,
    learning_rate=2e-3,
    lr_scheduler_type="constant",
    num_generations=8,
    per_device_train_batch_size=64,
    max_completion_length=8,
    seed=seed,
    use_cpu=True,
    bf16=False,
)
trainer = GRPOTrainer(str(model), digits, arguments, rows, job_dir=f"build/trl/run-{seed}", overwrite=True)
result = trainer.train()
trainer.save_model()
rewards = [step["reward/mean"] for step in result.steps]
print(f"reward: first 5 steps {sum(rewards[:5]) / 5:.3f}, last 5 {sum(rewards[-5:]) / 5:.3f}; model in {result.model}")
