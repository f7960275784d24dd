from dataclasses import dataclass

import dlrover.rl as rl
import numpy as np
from dlrover.python.rl.algorithm.losses.policy_gradient import PolicyGradient
from dlrover.python.rl.recipe.tiny import write_tiny_model

@dataclass(frozen=True)
class Tournament(PolicyGradient):  # wins less losses against the others of the group; losers count less
    mercy: float = 0.5
    def advantages(self, samples):
        wins = np.zeros(len(samples.reward))
        for prompt in np.unique(samples.prompt_id):
            group = (samples.prompt_id == prompt) & samples.counted
            wins[group] = [np.sign(mine - samples.reward[group]).mean() for mine in samples.reward[group]]
        return samples.spread(wins)
    def surrogate(self, logprobs, columns):
        losses, metrics = super().surrogate(logprobs, columns)
        lost = (columns["advantage"] < 0).to(losses.dtype)
        return losses * (1 - self.mercy * lost), {**metrics, "lost": (columns["weight"] * lost).sum()}
rows = [{"prompt": f"No more than {n} capitals: ", "most": n} for n in range(12)]
run = rl.train_grpo(write_tiny_model("runs/tiny"), rows, lambda completion, most: -abs(sum(map(str.isupper, completion)) - most),
    algorithm=Tournament(mercy=0.3), steps=2, prompts_per_step=4, num_generations=4, max_completion_length=10, learning_rate=1e-3)
print([(step["reward/mean"], step["policy/lost"], step["policy/entropy"]) for step in run.steps])
