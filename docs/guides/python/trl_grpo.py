from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def close(completions, target, **kwargs):
    return [-abs(len(text) - n) for text, n in zip(completions, target, strict=True)]


rows = Dataset.from_list([{"prompt": f"Say {n} letters: ", "target": n} for n in range(1, 9)])
arguments = GRPOConfig(output_dir="runs/grpo", max_steps=2, learning_rate=1e-6)
GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=close, args=arguments, train_dataset=rows).train()
