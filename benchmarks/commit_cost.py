# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of commits by the size of the model: ``make bench NAME=commits``.

GRPO in one process, as many steps with commits (``checkpoint.commit_every: auto``, in memory) as without, in processes
of their own, in turn. Compared are the wall times of the steps; the first ones are a figure of their own, since unused
memory takes several times as long. Then the same job on Ray, whose actor is killed at the worst moment. At the end: how
fast states are written and read here, and what follows from that for models of 7 and 70 billion parameters.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks._commit_kill import kill_at_the_worst_moment
from benchmarks._commit_speed import extrapolate, speeds
from benchmarks._results import RESULTS, keep, machine
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.config.spec import JobSpec
from tests.chaos.tables import markdown
from tests.ray.two_nodes import two_nodes

_SIZES = {  # hidden, layers, intermediate
    "0.3 M": (96, 2, 384),
    "3 M": (216, 4, 864),
    "30 M": (544, 6, 2304),
    "100 M": (864, 8, 3456),
}
_ROUNDS = {"0.3 M": 5, "3 M": 4, "30 M": 2, "100 M": 1}
_KILLS = 1
_FIRST = 20  # steps


def _prepare(folder: Path) -> None:
    """Models with random weights, and additions."""
    from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

    for name, (hidden, layers, intermediate) in _SIZES.items():
        shape = {"hidden": hidden, "heads": hidden // 8, "kv_heads": hidden // 8, "intermediate": intermediate}
        write_tiny_model(folder / name, layers=layers, max_positions=64, seed=0, **shape)
    pairs = random.Random(0).sample([(a, b) for a in range(10, 60) for b in range(10, 60)], 1000)
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    (folder / "problems.jsonl").write_text("\n".join(rows))


def _job(folder: Path, name: str, steps: int, threads: int) -> JobSpec:
    overrides = {
        "model": folder / name,
        "data.train": folder / "problems.jsonl",
        "steps": steps,
        "prompts_per_step": 4,
        "engine.threads": threads,
        "job_dir": folder / "out",
        "overwrite": "true",
        "checkpoint.every": 10 * steps,
        "checkpoint.commit_to": "memory",
        "checkpoint.commit_every": "auto",
    }
    job_file = Path(__file__).parents[1] / "examples" / "arithmetic" / "grpo.yaml"
    return load_job(job_file, [f"{key}={value}" for key, value in overrides.items()])


def _run_job(folder: Path, name: str, steps: int, commits: bool, threads: int) -> dict[str, Any]:
    """Seconds of each step, of its commit, the processor's of the writers, and the most that commits took in memory."""
    from dlrover.python.rl.master.client.run import check_job
    from dlrover.python.rl.master.process.brain import run_local
    from dlrover.python.rl.runtime import local as local_executor
    from dlrover.python.rl.runtime.checkpoint.member_state import _Background
    from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
    from dlrover.python.rl.runtime.run.folder import new_run

    job = _job(folder, name, steps, threads)
    checked = check_job(job, local=True)
    times, commit_s, sizes, largest = [time.perf_counter()], list[float](), [0], [1]
    writers_s, write = list[float](), _Background._run
    run = new_run()
    memory = memory_path(job.name, run)

    def timed(*args: Any) -> None:
        began_s = time.thread_time()
        write(*args)
        writers_s.append(time.thread_time() - began_s)

    def report(step: Any) -> None:
        times.append(time.perf_counter())
        commit_s.append(step.metrics.get("time/commit", 0.0))
        files = [path.stat().st_size for path in memory.rglob("ACTOR*.state")]
        sizes.append(sum(files))
        largest.append(max(files, default=0))

    job = replace(checked.job, run=run)
    if commits:
        with patch.object(_Background, "_run", timed):
            run_local(job, checked.placement, report)
    else:
        with patch.object(local_executor, "checkpoints_of", lambda *of: None):
            run_local(job, checked.placement, report)
    step_s = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return {"step_s": step_s, "commit_s": commit_s, "writers_s": sum(writers_s), "states": max(sizes) / max(largest)}


def _child(folder: Path, name: str, steps: int, commits: bool, threads: int) -> dict[str, Any]:
    arguments = ["--child", str(folder), name, str(steps), str(int(commits)), str(threads)]
    command = [sys.executable, "-m", "benchmarks.commit_cost", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(folder: Path, name: str, steps: int, rounds: int, threads: int) -> dict[str, Any]:
    sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for number in range(rounds):
        for commits in (True, False) if number % 2 else (False, True):
            sides[commits].append(_child(folder, name, steps, commits, threads))
    parts = {"all": slice(None), "first": slice(0, _FIRST), "later": slice(_FIRST, None)}
    ratios = {
        part: [
            sum(own["step_s"][of]) / sum(bare["step_s"][of])
            for own, bare in zip(sides[True], sides[False], strict=True)
        ]
        for part, of in parts.items()
    }
    return {
        "step_s": median(second for side in sides[False] for second in side["step_s"][_FIRST:]),
        "commit_share": median(sum(side["commit_s"][_FIRST:]) / sum(side["step_s"][_FIRST:]) for side in sides[True]),
        "writers_share": median(side["writers_s"] / sum(side["step_s"]) for side in sides[True]),
        "states": max(side["states"] for side in sides[True]),
        "ratios": ratios,
    }


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def _table(results: dict[str, Any]) -> str:
    head = ["parameters", "step, s", "wall time with commits", f"first {_FIRST} steps", "later", "in commits, later"]
    head += ["processor seconds of writers", "states in memory"]
    rows = [
        [
            name,
            f"{found['step_s']:.3f}",
            *(f"{median(found['ratios'][part]):.3f}x" for part in ("all", "first", "later")),
            f"{100 * found['commit_share']:.2f} %",
            f"{100 * found['writers_share']:.2f} %",
            f"{found['states']:.2f}",
        ]
        for name, found in results["sizes"].items()
    ]
    return f"{markdown(head, rows)}\n\n{_kills(results)}\n\n{extrapolate(results['speeds'])}"


def _kills(results: dict[str, Any]) -> str:
    head = ["parameters", "steps again", "R, s", "recovery, s", "beyond R and the steps again, s", "lost", "bits"]
    rows = []
    for name, found in results["kills"].items():
        for one in found["rounds"]:
            beyond_s = one["recovery_s"] - one["raw_s"] - one["steps_again"] * one["step_s"]
            seconds = [f"{one[key]:.2f}" for key in ("raw_s", "recovery_s")]
            bits = "the same" if one["same_bits"] else "others"
            lost = "steps" if one["lost"] else "nothing"
            rows.append([name, one["steps_again"], *seconds, f"{beyond_s:.2f}", lost, bits])
    return markdown(head, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commit_cost", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="One round of the two small models, to try it.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=list(_SIZES), default=list(_SIZES))
    parser.add_argument("--rounds", type=int, help="The same number for all sizes.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        folder, name, steps, commits, threads = options.child
        found = _run_job(Path(folder), name, int(steps), bool(int(commits)), int(threads))
        sys.stdout.write(f"\n{json.dumps(found)}\n")
        return
    names = options.sizes[:2] if options.quick else options.sizes
    steps, rounds = (
        (30, dict.fromkeys(names, 1))
        if options.quick
        else (100, dict.fromkeys(names, options.rounds) if options.rounds else _ROUNDS)
    )
    results = _results(options, steps)
    with tempfile.TemporaryDirectory(prefix="dlrover-rl-commits-") as name:
        _prepare(Path(name))
        results["speeds"] = speeds()
        for size in names:
            results["sizes"][size] = _measure(Path(name), size, steps, rounds[size], options.threads)
            results["rounds"][size] = rounds[size]
            _keep(options, results)
            _say(f"{size}: {results['sizes'][size]['ratios']}")
        with two_nodes(workers=0, head_cpus=16):
            for size in names:
                job = _job(Path(name), size, 30, options.threads)
                place = Path(name) / "killed" / "out"  # whose parent is emptied
                job = replace(job, job_dir=place, checkpoint=replace(job.checkpoint, every=30))
                results["kills"][size] = kill_at_the_worst_moment(
                    job, Path(name) / size, 1 if options.quick else _KILLS
                )
                _keep(options, results)
                _say(f"{size}: {results['kills'][size]}")
    sys.stdout.write(_table(results))


def _results(options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Return earlier results of the sizes that are not measured this time."""
    file = options.out / f"{_name(options)}.json"
    old = json.loads(file.read_text()) if file.is_file() and not options.quick else {}
    kept = {
        part: {size: found for size, found in old.get(part, {}).items() if size not in options.sizes}
        for part in ("sizes", "kills", "rounds")
    }
    return {"machine": machine(options.threads), "steps": steps, **kept}


def _name(options: argparse.Namespace) -> str:
    return "commit_cost-quick" if options.quick else "commit_cost"


def _keep(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Sizes in their order; a run that breaks off leaves what it has measured."""
    for part in ("sizes", "kills"):
        results[part] = {size: results[part][size] for size in _SIZES if size in results[part]}
    with contextlib.redirect_stdout(None):
        keep(options.out, _name(options), results, _table(results))


if __name__ == "__main__":
    main()
