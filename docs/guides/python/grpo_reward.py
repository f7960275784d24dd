import dlrover.rl as rl


def vowels(completion, want):
    return -abs(sum(letter in "aeiou" for letter in completion) - want)


rows = [{"prompt": f"Say {n} vowels: ", "want": n} for n in range(1, 9)]
run = rl.train_grpo("tiny", rows, reward=vowels, steps=2, prompts_per_step=2,
                    num_generations=4, max_completion_length=8, learning_rate=1e-4)
print(run.metrics[["reward/mean", "loss"]])
print(run.model, run.samples[0]["completion"], run.samples[0]["reward"])
