import dlrover.rl as rl
from dlrover.python.rl.recipe.tiny import write_tiny_model


def in_range(completion, first, last):
    return sum(first <= letter <= last for letter in completion) / max(len(completion), 1)


def varied(completion):
    return len(set(completion)) / max(len(completion), 1)


model = write_tiny_model("runs/tiny")
ranges = [("a", "m"), ("n", "z"), ("A", "M"), ("N", "Z"), ("0", "9"), (" ", "/"), ("a", "z"), ("A", "Z")]
rows = [{"prompt": f"Only {first} to {last}: ", "first": first, "last": last} for first, last in ranges]
sampling = {"samples_per_prompt": 4, "max_new_tokens": 12}
run = rl.train_grpo(model, rows, reward={in_range: 1.0, varied: 0.1}, eval_dataset=rows[:2], steps=2,
                    prompts_per_step=4, rollout=sampling, optimizer={"lr": 1e-3})
for step in run.steps:
    print({name: value for name, value in step.items() if name.startswith(("step", "loss", "reward/"))})
print(run.summary, run.samples[-1], sep="\n")
