import dlrover.rl as rl


def close(completion, target):
    return -abs(len(completion) - target)


rows = [{"prompt": f"Say {n} letters: ", "target": n} for n in range(1, 9)]
run = rl.train_grpo("Qwen/Qwen2.5-0.5B-Instruct", rows, reward=close, steps=2, optimizer={"lr": 1e-6})
print(run.model, run.summary)
