# SPDX-License-Identifier: Apache-2.0
"""The demo: a random model learns to add, first from examples, then by GRPO from right and wrong alone.

    python examples/arithmetic/demo.py [--seed N] [--address HOST:PORT] [key=value ...]

Everything it makes goes to ``build/demo``. Further arguments are overrides of ``grpo.yaml``.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from dlrover.python.rl.recipe.tiny import write_tiny_model

HERE = Path(__file__).parent
OUT = Path("build/demo")
EXAMPLES = 300
PROBLEMS = 2200


def write_data(seed: int) -> None:
    """Additions of two-digit numbers: some as examples with answers, others as problems. None is in both."""
    pairs = [(a, b) for a in range(10, 60) for b in range(10, 60)]
    random.Random(seed).shuffle(pairs)
    examples = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in pairs[:EXAMPLES]]
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs[EXAMPLES : EXAMPLES + PROBLEMS]]
    for name, rows in (("examples", examples), ("problems", problems)):
        (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(*arguments: str) -> None:
    """One ``dlrover-rl`` command, shown before it runs."""
    print(f"\n$ dlrover-rl {' '.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "dlrover.python.rl.master.main", *arguments], check=False).returncode
    if code:
        sys.exit(code)


def replaced(name: str) -> tuple[str, str]:
    """Write to a folder of the demo; an earlier demo's results there are replaced."""
    return f"job_dir={OUT / name}", "overwrite=true"


def accuracy_by_transformers() -> float:
    """The saved model, loaded and asked by transformers alone: its share of right greedy answers."""
    folder = OUT / "grpo" / "model"
    disable_progress_bar()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (OUT / "grpo" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    right = 0
    for row in rows:
        prompt = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=4)
        right += tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True) == row["answer"]
    return right / len(rows)


def check(seconds: float) -> None:
    """Ask the saved model again, without this package, and compare."""
    summary = json.loads((OUT / "grpo" / "summary.json").read_text(encoding="utf-8"))
    reported, again = summary["eval/accuracy"], accuracy_by_transformers()
    print(f"\ntrained in {seconds:.0f} s; reward curve: {OUT / 'grpo' / 'reward.png'}")
    print(f"accuracy of the saved model, by transformers alone: {again:.4f} (reported: {reported:.4f})")
    if abs(again - reported) > 1e-4:
        sys.exit("the saved model does not answer as the run reported")


def main() -> None:
    """Make model and data, warm up, train, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the sampling")
    parser.add_argument("--address", help="of a running Ray cluster; by default one is started")
    parser.add_argument("overrides", nargs="*", help="key=value for grpo.yaml")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    shape = {"hidden": 96, "heads": 3, "kv_heads": 3, "intermediate": 384}  # vLLM on a CPU takes no heads under 32 wide
    write_tiny_model(OUT / "random-model", layers=2, max_positions=64, seed=options.seed, **shape)
    write_data(options.seed)
    began_s = time.monotonic()
    run("run", str(HERE / "sft.yaml"), "--local", *replaced("sft"), f"seed={options.seed}")
    where = ["--address", options.address] if options.address else []
    run("run", str(HERE / "grpo.yaml"), *where, *replaced("grpo"), f"seed={options.seed}", *options.overrides)
    if all(override.lstrip("+").startswith("engine.") for override in options.overrides):
        check(time.monotonic() - began_s)


if __name__ == "__main__":
    main()
