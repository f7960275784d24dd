# SPDX-License-Identifier: Apache-2.0
"""Measure how much sooner a run ends if its rollouts run ahead: ``make bench NAME=async`` (``--quick`` to try it).

Each sample waits for an answer of its environment, most of them shortly, a few long. With ``max_staleness=0`` a step
waits for the slowest of its samples; above, the others continue. Same job, same number of samples, several
seeds, interleaved; each run is a separate process. What was learnt is the mean reward of the last tenth of the steps,
whose samples are as stale as they may be, and the reward of the last weights' greedy answers to held-out prompts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks._results import RESULTS, keep, machine
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job, run_here
from tests.chaos.tables import markdown
from tests.chaos.verdict import read_rows

REPOSITORY = Path(__file__).parents[1]
WORKLOADS = "dlrover.python.rl.recipe.workloads"
_LATEST_S = 900.0


def job_of(folder: Path, max_staleness: int, seed: int, steps: int) -> JobSpec:
    """A GRPO job over the slow environment; its inputs are written where they are not there."""
    model, data = folder / "model", folder / "prompts.jsonl"
    if not model.exists():
        write_tiny_model(model, hidden=48, layers=2, heads=4, kv_heads=2, max_positions=64, seed=3)
        data.write_text("".join(json.dumps({"prompt": f"Say {number}: "}) + "\n" for number in range(200)))
    config = {
        "model": str(model),
        "data": {"train": str(data), "eval_rows": 40},
        "steps": steps,
        "prompts_per_step": 4,
        "seed": seed,
        "optimizer": {"lr": 3e-3},
        "rollout": {
            "samples_per_prompt": 8,
            "max_new_tokens": 8,
            "max_staleness": max_staleness,
            "env_path": str(REPOSITORY / "benchmarks/_slow_tool.py"),
        },
        "engine": {"threads": 1},
    }
    builder = JobBuilder().device_type("CPU").device_per_node(4).config(config)
    builder.trainer("dlrover.python.rl.recipe.grpo", "GRPOTrainer")
    builder.actor(WORKLOADS, "ActorWorkload").total(1)
    builder.rollout(WORKLOADS, "RolloutWorkload").total(1)
    name = f"ahead-{max_staleness}-{seed}"
    return builder.job_dir(folder / name, overwrite=True).spec(name, search_path=(str(REPOSITORY),))


def run_one(folder: Path, max_staleness: int, seed: int, steps: int) -> dict[str, Any]:
    """One run, in this process."""
    job = job_of(folder, max_staleness, seed, steps)
    status = run_here(check_job(job))
    rows, samples, held_out = (read_rows(job.job_dir / f"{name}.jsonl") for name in ("metrics", "samples", "held_out"))
    rows = [row for row in rows if row["step"]]  # without the evaluation before training
    stale = [row["step"] - 1 - row["min_version"] for row in samples]
    return {
        "phase": status.phase.value,
        "cause": str(status.cause),
        "steps": len(rows),
        "seconds": sum(row["time/step"] for row in rows),
        "first": mean(row["reward/mean"] for row in rows[:3]),
        "reward": mean(row["reward/mean"] for row in rows[-max(steps // 10, 1) :]),
        "held_out": mean(row["reward"] for row in held_out),
        "staleness": [mean(stale), max(stale)],
    }


def measured(folder: Path, max_staleness: int, seed: int, steps: int) -> dict[str, Any]:
    """Run the job in a separate process."""
    command = [sys.executable, "-m", "benchmarks.running_ahead", "--one", str(max_staleness), "--seed", str(seed)]
    command += ["--steps", str(steps), "--work", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    began_s = time.monotonic()
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=_LATEST_S, check=False
    )
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    results: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    if results["phase"] != "finished" or results["steps"] != steps or results["staleness"][1] > max_staleness:
        raise SystemExit(f"a run did not end as it should: {results}")
    return {**results, "wall_s": time.monotonic() - began_s}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the seeds; how many times sooner than the first."""
    first = median(run["seconds"] for run in next(iter(results.values())))
    rows: list[list[object]] = []
    for name, runs in results.items():
        seconds = median(run["seconds"] for run in runs)
        rewards, after = (", ".join(f"{run[part]:.3f}" for run in runs) for part in ("reward", "held_out"))
        stale = [mean(run["staleness"][0] for run in runs), max(run["staleness"][1] for run in runs)]
        start = mean(run["first"] for run in runs)
        rows.append([name, seconds, first / seconds, start, rewards, after, stale[0], stale[1]])
    rewards_of = ["reward at first", "at the end", "of the last weights"]
    return markdown(["max_staleness", "training, s", "times sooner", *rewards_of, "stale by", "at most"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.running_ahead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed and a few steps, to try it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--one", type=int, help="run this max_staleness once, here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "bench-async")
    options = parser.parse_args(argv)
    folder = options.work.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        print(json.dumps(run_one(folder, options.one, options.seed, options.steps)))
        return 0
    steps, seeds = (6, [0]) if options.quick else (options.steps, options.seeds)
    results: dict[str, list[dict[str, Any]]] = {str(allowed): [] for allowed in options.staleness}
    for seed in seeds:
        for allowed in options.staleness:
            results[str(allowed)].append(measured(folder, allowed, seed, steps))
    text = (
        f"{steps} steps of 4 groups of 8 samples, seeds {', '.join(map(str, seeds))}, interleaved; of the "
        f"environment's answers 80 % take 20 ms, 17 % 200 ms, 3 % 2 s\n\n{table(results)}"
    )
    name = "running_ahead-quick" if options.quick else "running_ahead"
    keep(options.out, name, {"steps": steps, "seeds": seeds, "machine": machine(1), "runs": results}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
