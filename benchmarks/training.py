# SPDX-License-Identifier: Apache-2.0
"""Measure how fast training is: ``make bench NAME=training`` (``ARGS=--quick`` to try it), in an environment with TRL.

It trains a model of 0.9 M parameters in fp32, or ``--model`` in bf16, on an eighth of the work and without the
slower settings of TRL.

Each round lets every side do its work once, one after the other in changing order, in one process on one machine. All
have the same model, examples, prompts, lengths, rows per optimizer step, and threads:

* sft: an epoch over examples of 16 to 512 tokens, 16 to a step. What counts is real tokens per second.
* grpo: steps of 8 prompts of 32 tokens with 8 completions of 64 tokens each, generation included. What counts is
  seconds per step.

TRL is compared with at the best of its settings; its defaults are printed beside them, and the time that the products
of the linear layers alone take.
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import trl

from benchmarks._results import RESULTS, describe, keep, machine
from benchmarks._training_sides import BEST, MatrixProducts, OwnGrpo, OwnSft, Precision, Side, TrlGrpo, TrlSft, Work
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

SHAPE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "max_positions": 512}
GOAL = 1.5


def sides(model: Path, folder: Path, defaults: bool, precision: Precision) -> dict[str, list[Side]]:
    """The sides by kind of work; this project's first."""
    best = {"bf16": precision == "bf16", **BEST}
    grouped = {"train_sampling_strategy": "group_by_length"}
    passes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    fastest = [
        TrlSft(model, f"group_by_length in passes of 4, {precision}", folder, **best, **grouped, **passes),
        TrlSft(model, f"wrapped packing, {precision}", folder, **best, packing=True, packing_strategy="wrapped"),
    ]
    slower = [
        TrlSft(model, f"group_by_length, {precision}", folder, **best, **grouped),
        TrlSft(model, f"no packing, {precision}", folder, **best),
    ]
    by_kind: dict[str, list[Side]] = {
        "sft": [OwnSft(model, precision), MatrixProducts(model, precision), *fastest],
        "grpo": [OwnGrpo(model, precision), TrlGrpo(model, precision, folder, **best)],
    }
    if precision == "fp32":
        by_kind["sft"] += slower
    if defaults:
        by_kind["sft"].append(TrlSft(model, "defaults", folder))
        by_kind["grpo"].append(TrlGrpo(model, "defaults", folder))
    return by_kind


def measure(chosen: dict[str, list[Side]], work: Work, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by kind of work and side, after a round that does not count."""
    seconds: dict[str, dict[str, list[float]]] = {kind: {one.name: [] for one in ones} for kind, ones in chosen.items()}
    order = [(kind, side) for kind, ones in chosen.items() for side in ones]
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)
        for kind, side in order:
            taken = side.run(work)
            if number:
                seconds[kind][side.name].append(taken)
    return seconds


def summary(results: dict[str, Any]) -> str:
    """The tables of a run."""
    lines = []
    for kind, found in results["seconds"].items():
        own, *peers = found
        raced = [name for name in peers if name.startswith("TRL") and not name.endswith("defaults")]
        best = min(raced, key=lambda name: median(found[name]))
        ratio = median(found[best]) / median(found[own])
        lines += [f"### {kind}: {ratio:.2f}x {best} (goal {GOAL}x)", ""]
        unit = "tokens/s" if kind == "sft" else "s per step"
        lines += [f"| side | {unit}, median | quartiles | time, this project's = 1 |", "|---|---|---|---|"]
        for name, times in found.items():
            cells = [_format_value(kind, value, results) for value in [median(times), *_quartiles(times)]]
            lines.append(
                f"| {name} | {cells[0]} | {cells[1]} to {cells[2]} | {median(times) / median(found[own]):.2f} |"
            )
        lines.append("")
    at = results["machine"]
    lines.append(
        f"{results['rounds']} rounds; {at['threads']} threads, {at['cores']} cores, torch {at['torch']},"
        f" transformers {at['transformers']}, TRL {at['trl']}; model: {results['model']}."
    )
    return "\n".join(lines)


def _format_value(kind: str, seconds: float, results: dict[str, Any]) -> str:
    return f"{results['tokens'] / seconds:,.0f}" if kind == "sft" else f"{seconds / results['steps']:.2f}"


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return low, high


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a little of everything, to try it")
    parser.add_argument("--rounds", type=int, help="how often each side does its work (default 7; quick: 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the process (default: all cores)")
    parser.add_argument("--no-defaults", action="store_true", help="leave out TRL's defaults, which take minutes")
    parser.add_argument("--model", type=Path, help="a folder, for a model that is trained in bf16")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    rounds = options.rounds or (1 if options.quick else 7)
    torch.set_num_threads(options.threads)
    work = Work.make(16, 1, 2) if options.model else Work.make(32, 1) if options.quick else Work.make(128, 3)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_tiny_model(Path(folder) / "model", **SHAPE)
        compared = sides(model, Path(folder) / "trl", not options.no_defaults, "bf16" if options.model else "fp32")
        seconds = measure(compared, work, rounds)
    results = {
        "model": describe(options.model, SHAPE),
        "machine": machine(options.threads, trl=trl.__version__),
        "rounds": rounds,
        "tokens": work.tokens,
        "steps": work.steps,
        "seconds": seconds,
    }
    keep(options.out, f"training{'-real' * bool(options.model)}{'-quick' * options.quick}", results, summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
