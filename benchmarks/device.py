# SPDX-License-Identifier: Apache-2.0
"""Measure engines' memory on a device, and their speed: ``python -m benchmarks.device --device cuda``.

A model with random weights of the shape of Qwen2.5-0.5B, in one process:

* an SFT step, an update of GRPO, and a step of it (weights to the rollout engine on the device, 64 completions, the
  update): seconds, peak memory, and the share of what a large matrix product reaches here; a step whose engines leave
  for each other
* tokens a second of the rollout engine, next to ``generate`` of transformers, interleaved
* weights from the train engine to the rollout engine, next to a plain copy of as many bytes on the device
* the completions while a thread writes the train engine's state, as commits do, and without
* after each call that moves an engine: the bytes that it accounts for, and on a GPU those that torch has allocated
* the memory that training takes with several settings, next to what ``dlrover-rl check`` computes

Needs neither Ray nor vLLM, and on a GPU about three minutes. On a CPU, which tries the command, the host stands in for
the device, and the model is tiny.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._device_sides import QWEN_HALF_BILLION, SMALL, Bench, Transformers, memory_folder
from benchmarks._results import RESULTS, keep
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig

Results = dict[str, Any]

WAYS = {"host": "through the host", "device": "on the device"}


def medians(bench: Bench, calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of calls, interleaved; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            took_s = bench.timed(call)
            seconds[name] += [took_s] if number else []
    return {name: median(values) for name, values in seconds.items()}


def training(bench: Bench, parameters: int, rounds: int) -> Results:
    """Steps, and the memory that they take beyond what the engines hold."""
    calls = {"sft step": bench.sft_step, "grpo update": bench.grpo_update, "grpo step": bench.grpo_step}
    seconds, rate = medians(bench, calls, rounds), bench.product_flops()
    flops = bench.shape.flops(parameters)
    bench.drop_kept_weights()
    in_turns_s = medians(bench, {"step": bench.grpo_step_in_turns}, rounds)["step"]
    bench.rollout.cuda()
    return {
        "product_tflops": rate / 1e12,
        "grpo step in turns": in_turns_s,
        **{
            name: {
                "seconds": seconds[name],
                "tokens_per_s": bench.shape.rows * bench.shape.length / seconds[name],
                "share_of_product": flops / seconds[name] / rate,
                "peak_bytes": bench.peak(call),
            }
            for name, call in calls.items()
        },
    }


def rollouts(bench: Bench, model: Path, rounds: int) -> Results:
    """The engine against ``generate``."""
    seconds = medians(bench, {"engine": bench.draw, "transformers": Transformers(model, bench).draw}, rounds)
    return {name: {"seconds": took_s, "tokens_per_s": bench.shape.tokens / took_s} for name, took_s in seconds.items()}


def syncs(bench: Bench, rounds: int) -> Results:
    """The weights, and a plain copy of them."""
    seconds = medians(bench, {"host": bench.sync, "device": bench.sync_on_device}, rounds)
    bench.drop_kept_weights()
    copy_s, nbytes = bench.copy()
    ways = {"host": "pull", "device": "cuda_ipc"} if importlib.util.find_spec("peft") else {}
    return {
        "seconds": seconds,
        "copy_seconds": copy_s,
        "weight_bytes": nbytes,
        "adapters": {through: bench.adapter_syncs(rounds, way) for through, way in ways.items()},
    }


def commits(bench: Bench, rounds: int) -> Results:
    """Completions with and without the state on its way to the node's memory."""
    folder, written, drawing_s = memory_folder(), dict[str, float](), list[float]()

    def draw_and_write() -> None:
        with bench.writing(folder) as record:
            drawing_s.append(bench.timed(bench.draw))
        written.update(record)

    def write() -> None:
        with bench.writing(folder):
            pass

    try:
        seconds = medians(bench, {"draw": bench.draw, "both": draw_and_write, "write": write}, rounds)
    finally:
        shutil.rmtree(folder)
    return {**seconds, "draw_meanwhile": median(drawing_s[1:]), "state_bytes": written["bytes"]}


def places(bench: Bench) -> dict[str, Results]:
    """Return the memory held after each call, and the seconds that the call took."""
    results: dict[str, Results] = {"both built": {"seconds": None, **bench.held()}}
    for name, call in (
        ("train.step()", bench.grpo_update),
        ("rollout.receive()", bench.sync),
        ("rollout.generate()", bench.draw),
        ("rollout.cpu()", bench.rollout.cpu),
        ("train.cpu()", bench.train.cpu),
        ('rollout.cuda("weights")', lambda: bench.rollout.cuda("weights")),
        ('rollout.cuda("kv_cache")', lambda: bench.rollout.cuda("kv_cache")),
        ("rollout.meta()", bench.rollout.meta),
        ("train.cuda()", bench.train.cuda),
        ("train.cpu() again", bench.train.cpu),
        ("train.cuda() again", bench.train.cuda),
        ("train.meta()", bench.train.meta),
    ):
        results[name] = {"seconds": bench.timed(call), **bench.held()}
    return results


def memory(bench: Bench) -> dict[str, Results]:
    """Bytes by arithmetic, and measured, of layouts that this machine has the libraries for."""
    whole = bench.shape.rows * bench.shape.length
    layouts: dict[str, dict[str, Any]] = {
        f"{whole:,} tokens a pass": {"tokens": whole},
        f"{whole // 4:,} tokens a pass": {"tokens": whole // 4},
        "activations recomputed": {"tokens": whole, "recompute": True},
        "optimizer on the host": {"tokens": whole // 4, "optimizer_on_host": True},
    }
    if importlib.util.find_spec("peft"):
        layouts["LoRA"] = {"tokens": whole // 4, "lora": LoraSettings(rank=16)}
    if importlib.util.find_spec("bitsandbytes"):
        layouts["AdamW in 8 bits"] = {"tokens": whole // 4, "optimizer": OptimizerConfig(name="adamw_8bit", lr=1e-5)}
        layouts["QLoRA"] = {"tokens": whole // 4, "lora": LoraSettings(rank=16, quantize_base="nf4")}
    found = {name: bench.layout(**settings) for name, settings in layouts.items()}
    return {name: {"planned_bytes": planned, "peak_bytes": peak} for name, (planned, peak) in found.items()}


def adapter_lines(adapters: Mapping[str, Results]) -> list[str]:
    return [
        f"* adapters of rank 16 alone, {WAYS[through]}, verified and added: {found['seconds'] * 1e3:,.1f} ms for"
        f" {found['adapter_bytes'] / 1e6:,.1f} MB; the first time, with the model,"
        f" {found['first_seconds'] * 1e3:,.1f} ms; at most {found['peak_bytes'] / 1e6:,.0f} MB more on the device"
        for through, found in adapters.items()
    ]


def summary(results: Results) -> str:
    """The tables of a run."""
    shape, sync, commit = results["shape"], results["sync"], results["commit"]
    engine, library = results["rollout"]["engine"], results["rollout"]["transformers"]
    megabytes, training = sync["weight_bytes"] / 1e6, results["training"]
    lines = [
        f"{results['device']}, {results['precision']}, torch {results['torch']}"
        f"{', layers compiled' if results['compiled'] else ''}; {shape['parameters'] / 1e6:,.1f} M"
        f" parameters (hidden {shape['hidden']}, {shape['layers']} layers, vocabulary {shape['vocabulary']:,}),"
        f" {shape['rows']} sequences of {shape['prompt']} + {shape['new_tokens']} tokens.",
        "",
        "| the first time | seconds |",
        "|---|---|",
        *(f"| {name} | {seconds:.2f} |" for name, seconds in results["first"].items()),
        "",
        "| | seconds | tokens/s | of a matrix product's rate | peak memory, GB |",
        "|---|---|---|---|---|",
    ]
    for name in ("sft step", "grpo update", "grpo step"):
        step = training[name]
        lines.append(
            f"| {name} | {step['seconds']:.3f} | {step['tokens_per_s']:,.0f} | {100 * step['share_of_product']:.1f} % |"
            f" {step['peak_bytes'] / 1e9:.1f} |"
        )
    lines += [
        "",
        f"* a GRPO step whose engines leave the device for each other: {training['grpo step in turns']:.3f} s",
        f"* a matrix product reaches {training['product_tflops']:,.1f} TFLOP/s",
        f"* rollout: {engine['tokens_per_s']:,.0f} tokens/s, {library['seconds'] / engine['seconds']:.2f}x of"
        f" transformers' `generate` ({library['tokens_per_s']:,.0f})",
        f"* weight sync through the host, verified: {sync['seconds']['host'] * 1e3:,.1f} ms for {megabytes:,.0f} MB of"
        f" {results['precision']}; where they stay on the device: {sync['seconds']['device'] * 1e3:,.1f} ms; a plain"
        f" copy of them there: {sync['copy_seconds'] * 1e3:,.2f} ms",
        *adapter_lines(sync["adapters"]),
        f"* the state, {commit['state_bytes'] / 1e9:.2f} GB, written to memory: {commit['write']:.2f} s; completions"
        f" take {commit['draw']:.3f} s, {commit['draw_meanwhile']:.3f} s while it is written; until both have ended"
        f" {commit['both']:.2f} s",
        "",
    ]
    columns = [name for name in results["places"]["both built"] if name != "seconds"]
    lines.append(f"| after | seconds | {' | '.join(f'{name}, MB' for name in columns)} |")
    lines.append(f"|---|---|{'---|' * len(columns)}")
    for after, footprint in results["places"].items():
        seconds = "" if footprint["seconds"] is None else f"{footprint['seconds']:.3f}"
        cells = " | ".join(f"{footprint[name] / 1e6:,.1f}" for name in columns)
        lines.append(f"| `{after}` | {seconds} | {cells} |")
    if results["memory"]:
        lines += ["", "| training | by `dlrover-rl check`, GB | measured, GB | |", "|---|---|---|---|"]
    for name, layout in results["memory"].items():
        planned, peak = layout["planned_bytes"], layout["peak_bytes"]
        share = f"{100 * (planned / peak - 1):+.1f} %" if peak else ""
        lines.append(f"| {name} | {planned / 1e9:.2f} | {peak / 1e9:.2f} | {share} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 on a GPU")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="the train engine's layers; the figures have a file of their own",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    on_gpu = torch.device(options.device).type == "cuda"
    shape, precision = QWEN_HALF_BILLION if on_gpu else SMALL, options.precision or ("bf16" if on_gpu else "fp32")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        parameters = shape.write(model)
        bench = Bench(model, shape, options.device, precision, {"compile_layers": options.compile})
        results: Results = {
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "precision": precision,
            "compiled": options.compile,
            "torch": torch.__version__,
            "shape": {**asdict(shape), "parameters": parameters},
            "first": bench.first_calls(),
            "training": training(bench, parameters, options.rounds),
            "rollout": rollouts(bench, model, options.rounds),
            "sync": syncs(bench, options.rounds),
            "commit": commits(bench, options.rounds),
            "places": places(bench),
            "memory": {} if options.compile else memory(bench),  # check computes layers that are not compiled
        }
    name = f"device-{torch.device(options.device).type}{'-compiled' if options.compile else ''}"
    keep(options.out, name, results, summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
