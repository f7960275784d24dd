from difflib import SequenceMatcher

import dlrover.rl as rl
from dlrover.python.rl.recipe.tiny import write_tiny_model


class SayItAgain:
    def reset(self, extra_info):
        return f"Make up word number {extra_info['seed']}: "

    def step(self, state, action, extra_info):
        if "first" not in extra_info:
            return {"next_state": f"{state}{action}\nSay it again: ", "reward": 0.0, "done": False,
                    "extra_info": {**extra_info, "first": action}}
        likeness = SequenceMatcher(None, extra_info["first"], action).ratio()
        return {"next_state": None, "reward": likeness, "score": float(likeness == 1.0), "done": True}


run = rl.train_grpo(write_tiny_model("runs/tiny"), env=SayItAgain, steps=2, prompts_per_step=4, data={"eval_rows": 4},
                    rollout={"samples_per_prompt": 4, "max_new_tokens": 6, "max_turns": 2}, optimizer={"lr": 1e-3})
print([(step["reward/mean"], step["reward/score"]) for step in run.steps], run.summary)
print({key: run.samples[-1][key] for key in ("prompt", "completion", "reward", "score")})
