# SPDX-License-Identifier: Apache-2.0
"""Two engines of your own: one generates, one trains a module that you wrote, on the same devices.

::

    python examples/engines_by_hand/tutorial.py
    python examples/engines_by_hand/tutorial.py --model Qwen/Qwen2.5-0.5B-Instruct --executor vllm

Without ``--model`` a tiny one with random weights is written to ``runs/tiny``: it runs anywhere, and says nothing.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2ForCausalLM

import dlrover.rl as rl
from dlrover.python.rl.recipe.tiny import write_tiny_model

PADDING = -100


class MyQwenModel(rl.nn.TrainModule, Qwen2ForCausalLM):
    """Run on each rank of the train engine."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_step(self, rows: list[list[int]], grad_acc_steps: int = 1) -> float:
        # Completions differ in length: they are padded on the right, and the padding is left out of the loss.
        padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PADDING)
        tokens = padded.to(self.device)
        logits = self(input_ids=tokens.clamp(min=0)).logits[:, :-1]
        labels = tokens[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING)
        (loss / grad_acc_steps).backward()
        return loss.item()

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub name")
    parser.add_argument("--executor", default="torch", help="torch, vllm or sglang")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    model = options.model or write_tiny_model(Path("runs/tiny"))

    with rl.init():
        inference = rl.InferenceEngine(model, executor=options.executor).build()
        module = MyQwenModel.from_pretrained(model)  # names and shapes; the ranks read the weights
        inference.meta()
        train = rl.TrainEngine(module, merge="mean").build(colocate_with=inference)
        train.cpu()

        for step in range(options.steps):
            inference.cuda("weights")
            train.p2p_weight_sync(inference)
            inference.cuda("kv_cache")
            rollouts = inference.generate(["你好，世界！", "Hello, world!"] * 8, {"max_new_tokens": 16})
            inference.meta()
            train.cuda()
            rows = [rollout.prompt_token_ids + rollout.outputs[0].token_ids for rollout in rollouts]
            for part in (rows[:8], rows[8:]):
                loss = train.train_step(rl.NeedParallel(part), 2)
            train.optimizer_step()
            train.cpu()
            print(f"step {step + 1}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
