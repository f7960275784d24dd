# SPDX-License-Identifier: Apache-2.0

from dlrover.python.rl.classic import Evaluator, MathDataset

evaluator = Evaluator(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    dataset=MathDataset(num_samples=8, min_val=0, max_val=50, operand="add"),
    output_dir="./outputs/evaluation",
    max_new_tokens=64,
    batch_size=4,
)
print(evaluator.evaluate())
