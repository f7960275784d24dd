# SPDX-License-Identifier: Apache-2.0
"""Measure how fast rollout engines generate tokens: ``make bench NAME=rollout`` (``--quick`` to try it).

They run a model of 0.9 M parameters in fp32, or ``--model`` in bf16: 16 sequences at a time, at most 128 new
tokens each, and without the slower settings of ``transformers``.

Each round lets every engine do each work once, one after the other in changing order, in one run on one machine. The
engines have the same model, prompts, lengths and cores, and decode 64 sequences at a time:

* equal: 64 prompts of 32 tokens, 64 new tokens each;
* mixed: 256 such prompts, 8 to 256 new tokens each, in random order. An engine that knows continuous batching gives a
  sequence's place to the next one when it ends; ``transformers`` waits for the longest of each batch of 64.

Both are measured in one process with a thread for each core, and in a process for each core with one thread, which is
what two workers of a job's rollout are. ``transformers`` is measured at several settings, and compared with at the best
of them; of this project's engine the better of its two counts. Not among these is a compiled
forward pass, which is compiled for more than a minute before the first token.
"""

import argparse
import importlib.util
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks._results import RESULTS, describe, keep, machine
from benchmarks._rollout_sides import Precision, Processes, Side, Torch, Transformers, Vllm, Work
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

SHAPE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "max_positions": 512}
PROMPT = 32
GOALS = {"equal": 1.7, "mixed": 3.0}


def works(quick: bool, at_a_time: int, longest: int) -> list[Work]:
    """Return prompts and lengths that are the same in every run."""
    generator = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[generator.randrange(256) for _ in range(PROMPT)] for _ in range(count)]

    short = 16 if quick else 64
    equal = Work("equal", prompts(at_a_time), [short] * at_a_time, at_a_time)
    count = at_a_time * (2 if quick or longest < 256 else 4)
    mixed = Work("mixed", prompts(count), [generator.randint(8, longest) for _ in range(count)], at_a_time)
    return [equal, mixed]


def measure(sides: Sequence[Side], chosen: Sequence[Work], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of each work, side and round, after one that does not count."""
    rates: dict[str, dict[str, list[float]]] = {work.name: {side.name: [] for side in sides} for work in chosen}
    order = list(sides)
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)
        for work, side in product(chosen, order):
            started = time.perf_counter()
            counts = side.run(work)
            seconds = time.perf_counter() - started
            if counts != work.lengths:
                raise RuntimeError(f"{side.name} drew {sum(counts)} tokens of {work.tokens}")
            if number:
                rates[work.name][side.name].append(work.tokens / seconds)
    return rates


def best(speeds: dict[str, list[float]], kind: str) -> str:
    """The fastest setting of an engine that needs no lengths beforehand."""
    names = [name for name in speeds if name.startswith(kind) and "beforehand" not in name]
    return max(names, key=lambda name: median(speeds[name]))


def summary(results: dict[str, Any]) -> str:
    """The tables of a run."""
    lines = []
    for name, found in results["tokens_per_s"].items():
        peer, own = best(found, "transformers"), median(found[best(found, Torch.name)])
        ratio = own / median(found[peer])
        lines += [f"### {name}: {ratio:.2f}x transformers generate at its best (goal {GOALS[name]}x)", ""]
        lines += ["| engine | tokens/s, median | quartiles | torch engine is |", "|---|---|---|---|"]
        for side, rates in found.items():
            low, _, high = quantiles(rates, n=4) if len(rates) > 1 else (rates[0],) * 3
            lines.append(f"| {side} | {median(rates):,.0f} | {low:,.0f} to {high:,.0f} | {own / median(rates):.2f}x |")
        lines.append("")
    at = results["machine"]
    lines.append(
        f"{results['rounds']} rounds; {at['threads']} threads, {at['cores']} cores, torch {at['torch']},"
        f" transformers {at['transformers']}; model: {results['model']}."
    )
    return "\n".join(lines)


def _generate(model: Path, precision: Precision, cache: str | None, _: int) -> Transformers:
    return Transformers(model, precision, "sdpa", cache)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a little of everything, to try it")
    parser.add_argument("--rounds", type=int, help="how often each engine does each work (default 7; quick: 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine (default: all cores)")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM (default: this one, if it has)")
    parser.add_argument("--model", type=Path, help="a folder, for a model that is run in bf16")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    rounds = options.rounds or (1 if options.quick else 7)
    torch.set_num_threads(options.threads)
    vllm = options.vllm_python or (sys.executable if importlib.util.find_spec("vllm") else None)
    sides: list[Side] = []
    precision: Precision = "bf16" if options.model else "fp32"
    at_a_time, longest = (16, 128) if options.model else (64, 256)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_tiny_model(Path(folder) / "model", **SHAPE)
        generate = partial(Transformers, model, precision)
        try:
            sides += [Torch(model, precision, at_a_time), generate("sdpa"), generate("sdpa", "static")]
            if not options.model:
                sides += [generate("eager"), generate("sdpa", sort=True)]
            if options.threads > 1:
                sides.append(Processes(options.threads, partial(Torch, model, precision), at_a_time))
                sides += [
                    Processes(options.threads, partial(_generate, model, precision, cache), at_a_time)
                    for cache in ((None,) if options.model else (None, "static"))
                ]
            if vllm:
                sides.append(Vllm(vllm, model, precision, at_a_time, options.threads))
            rates = measure(sides, works(options.quick, at_a_time, longest), rounds)
        finally:
            for side in sides:
                side.close()
    results = {
        "model": describe(options.model, SHAPE),
        "machine": machine(options.threads),
        "rounds": rounds,
        "tokens_per_s": rates,
    }
    keep(options.out, f"rollout{'-real' * bool(options.model)}{'-quick' * options.quick}", results, summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
