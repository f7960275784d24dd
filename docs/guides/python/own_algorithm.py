from dataclasses import dataclass

import numpy as np

import dlrover.rl as rl
from dlrover.python.rl.algorithm.losses.policy_gradient import PolicyGradient


@dataclass(frozen=True)
class Best(PolicyGradient):
    """Train on the samples whose reward is within margin of their group's best."""

    margin: float = 0.0

    def advantages(self, samples):
        top = {p: samples.reward[(samples.prompt_id == p) & samples.counted].max(initial=-np.inf)
               for p in np.unique(samples.prompt_id)}
        best = np.array([top[p] for p in samples.prompt_id])
        return samples.spread((samples.counted & (samples.reward >= best - self.margin)).astype(np.float64))


def short(completion):
    return -len(completion)


rows = [{"prompt": f"Count to {n}: "} for n in range(1, 9)]
run = rl.train_grpo("tiny", rows, reward=short, algorithm=Best(margin=1.0), steps=2, prompts_per_step=2,
                    rollout={"samples_per_prompt": 4, "max_new_tokens": 8})
print(run.metrics[["reward/mean", "loss"]])
