import dlrover.rl as rl


class Letter:
    def reset(self, extra_info):
        return f"Say the letter {extra_info['letter']}: "

    def step(self, state, action, extra_info):
        second = extra_info.get("turn", 1) == 2
        right = extra_info["letter"] in action
        return {"next_state": f"{state}{action} Once more: ", "reward": float(right), "done": second,
                "extra_info": {**extra_info, "turn": 2}}


rows = [{"prompt": f"Letter {letter}", "letter": letter} for letter in "abcdefgh"]
run = rl.train_grpo("tiny", rows, env=Letter, steps=2, prompts_per_step=2,
                    rollout={"samples_per_prompt": 4, "max_new_tokens": 8, "max_turns": 2})
print(run.steps[-1]["reward/mean"], run.samples[0])
