# SPDX-License-Identifier: Apache-2.0
"""GSM8K in small: a random model learns word problems from worked solutions, then by GRPO from right and wrong alone.

    python examples/word_problems/train.py [SEED]

The columns and the reward are GSM8K's, so a real model and ``openai/gsm8k:main`` need other sizes only.
"""

import random
import sys

import dlrover.rl as rl
from dlrover.python.rl.recipe.tiny import write_tiny_model

NAMES, THINGS = ("Ann", "Ben", "Eva", "Tom"), ("pens", "cups", "eggs")
EXAMPLES, PROBLEMS, HELD_OUT = 600, 2000, 200


def write_problem(rng: random.Random) -> dict[str, str]:
    a, b = rng.randrange(10, 60), rng.randrange(1, 40)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    question = f"{name} has {a} {thing} and gets {b}. How many {thing}?\n"
    return {"question": question, "answer": f"{a}+{b}={a + b}\n#### {a + b}"}


def main(seed: int) -> None:
    rng = random.Random(seed)
    rows = {row["question"]: row for row in (write_problem(rng) for _ in range(2 * (EXAMPLES + PROBLEMS)))}
    examples, problems = list(rows.values())[:EXAMPLES], list(rows.values())[EXAMPLES : EXAMPLES + PROBLEMS]
    shape = {"hidden": 96, "heads": 3, "kv_heads": 3, "intermediate": 384}
    model = write_tiny_model("build/word-problems/model", layers=2, max_positions=128, seed=seed, **shape)
    warm = rl.train_sft(
        model,
        [{"prompt": row["question"], "response": row["answer"]} for row in examples],
        name="word-problems-sft",
        epochs=32,
        batch_size=64,
        optimizer={"lr": 1.5e-3, "warmup_steps": 20, "betas": [0.9, 0.99]},
        seed=seed,
    )
    run = rl.train_grpo(
        warm.model,
        problems,
        reward="gsm8k",
        name="word-problems-grpo",
        data={"keys": {"prompt": "question"}, "eval_rows": HELD_OUT},
        steps=100,
        prompts_per_step=32,
        rollout={"samples_per_prompt": 8, "max_new_tokens": 24},
        optimizer={"lr": 4e-4, "warmup_steps": 10, "weight_decay": 0.0},
        seed=seed,
    )
    for name, value in run.summary.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
