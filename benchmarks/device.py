# SPDX-License-Identifier: Apache-2.0
"""What engines hold of a device, and how fast they are on it: ``python -m benchmarks.device --device cuda``.

After each call that moves an engine: the bytes that it accounts for, and on a GPU those that torch says are allocated.
Then how long the weights of a train engine take to a rollout engine beside it, next to a plain copy of as many bytes on
the device; and how many tokens a second the rollout engine draws for 64 prompts. Needs neither Ray nor vLLM. On a CPU
the host stands in for the device, which tries the command.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks._results import RESULTS, keep
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig, RolloutSettings, SamplingParams, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine

ROWS, PROMPT, NEW = 64, 128, 128

Told = dict[str, dict[str, Any]]


class Bench:
    """Engines that share a device.

    Args:
        model: folder of the model.
        device: a torch device.
        precision: of the passes.
    """

    def __init__(self, model: Path, device: str, precision: Any) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.memory = DeviceMemory(device)
        self.train = Fsdp2TrainEngine(
            model, OptimizerConfig(lr=1e-5), TrainSettings(device, precision), memory=self.memory
        )
        self.rollout = TorchRolloutEngine(model, RolloutSettings(device, precision, ROWS), self.memory)

    def held(self) -> dict[str, int]:
        """Bytes on the device now."""
        footprint = {"train": sum(self.train.footprint().values()), "rollout": sum(self.rollout.footprint().values())}
        if self.on_gpu:
            torch.cuda.synchronize()
            footprint["allocated"] = torch.cuda.memory_allocated()
            footprint["reserved"] = torch.cuda.memory_reserved()
        return footprint

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds of a call, the device's work included."""
        if self.on_gpu:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        call()
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def places(self) -> Told:
        """What is held after each call, and how long it took."""
        results: Told = {"both built": {"seconds": None, **self.held()}}
        for name, call in (
            ("train.step()", self.step),
            ("rollout.receive()", self.sync),
            ("rollout.generate()", self.draw),
            ("rollout.cpu()", self.rollout.cpu),
            ("train.cpu()", self.train.cpu),
            ('rollout.cuda("weights")', lambda: self.rollout.cuda("weights")),
            ('rollout.cuda("kv_cache")', lambda: self.rollout.cuda("kv_cache")),
            ("rollout.meta()", self.rollout.meta),
            ("train.cuda()", self.train.cuda),
            ("train.meta()", self.train.meta),
        ):
            results[name] = {"seconds": self.timed(call), **self.held()}
        return results

    def step(self) -> None:
        """One optimizer step on random tokens."""
        generator = np.random.default_rng(0)
        rows = [generator.integers(0, 256, PROMPT + NEW) for _ in range(ROWS)]
        tokens = Ragged.from_rows(rows, dtype=np.int64)
        chosen = [np.arange(PROMPT + NEW) >= PROMPT] * ROWS
        batch = Batch(
            {
                "tokens": tokens,
                "action_mask": Ragged.from_rows(chosen, dtype=np.bool_),
                "old_logprobs": tokens.like(np.full(len(tokens.values), -5.5, dtype=np.float32)),
                "advantage": np.resize(np.array([1.0, -1.0], dtype=np.float32), ROWS),
                "weight": np.full(ROWS, 1 / (ROWS * NEW), dtype=np.float32),
            }
        )
        self.train.step(batch, make_algorithm("grpo", {}).loss)

    def sync(self) -> None:
        """The train engine's weights to the rollout engine, verified."""
        self.rollout.receive(self.train.publish(), rewind=True)

    def draw(self) -> None:
        """Complete 64 prompts."""
        generator = np.random.default_rng(1)
        prompts = [generator.integers(0, 256, PROMPT) for _ in range(ROWS)]
        prompt_batch = Batch({"prompt_id": np.arange(ROWS), "tokens": Ragged.from_rows(prompts, dtype=np.int64)})
        self.rollout.generate(prompt_batch, SamplingParams(NEW, ignore_eos=True), (0,))

    def copy(self) -> tuple[float, int]:
        """Seconds of a plain copy of the weights on the device, and their bytes."""
        named = [tensor.detach().to(self.memory.device, copy=True) for _, tensor in self.train.named_weights()]
        other = [torch.empty_like(tensor) for tensor in named]
        seconds = [self.timed(lambda: [to.copy_(of) for to, of in zip(other, named, strict=True)]) for _ in range(5)]
        return median(seconds), sum(tensor.nbytes for tensor in named)


def measure(made: Bench, rounds: int) -> dict[str, Any]:
    """Everything, the speeds interleaved; the first round warms up."""
    made.sync()
    speeds: dict[str, list[float]] = {"sync_s": [], "copy_s": [], "draw_s": []}
    nbytes = 0
    for number in range(rounds + 1):
        copy_s, nbytes = made.copy()
        timings = {"sync_s": made.timed(made.sync), "copy_s": copy_s, "draw_s": made.timed(made.draw)}
        for name, seconds in timings.items():
            speeds[name] += [seconds] if number else []
    medians = {name: median(seconds) for name, seconds in speeds.items()}
    return {
        "weight_bytes": nbytes,
        **medians,
        "sync_share_of_copy": medians["copy_s"] / medians["sync_s"],
        "tokens_per_s": ROWS * NEW / medians["draw_s"],
        "places": made.places(),
    }


def summary(results: dict[str, Any]) -> str:
    """The tables of a run."""
    lines = [
        f"{results['device']}, {results['precision']}, torch {results['torch']}; model: {results['model']},"
        f" {results['weight_bytes'] / 1e6:,.0f} MB of float32 weights.",
        "",
        f"* rollout: {results['tokens_per_s']:,.0f} tokens/s at {ROWS} sequences of {PROMPT} + {NEW} tokens",
        f"* weight sync in one process, verified: {results['sync_s'] * 1e3:.1f} ms,"
        f" {100 * results['sync_share_of_copy']:.1f} % of a plain copy there ({results['copy_s'] * 1e3:.2f} ms)",
        "",
    ]
    columns = [name for name in next(iter(results["places"].values())) if name != "seconds"]
    lines.append(f"| after | seconds | {' | '.join(f'{name}, MB' for name in columns)} |")
    lines.append(f"|---|---|{'---|' * len(columns)}")
    for after, footprint in results["places"].items():
        seconds = "" if footprint["seconds"] is None else f"{footprint['seconds']:.3f}"
        cells = " | ".join(f"{footprint[name] / 1e6:,.1f}" for name in columns)
        lines.append(f"| `{after}` | {seconds} | {cells} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 on a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, help="width of the model (default: 1024 on a GPU, else 128)")
    parser.add_argument("--layers", type=int, help="its layers (default: 16 on a GPU, else 2)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    on_gpu = torch.device(options.device).type == "cuda"
    hidden, layers = options.hidden or (1024 if on_gpu else 128), options.layers or (16 if on_gpu else 2)
    precision = options.precision or ("bf16" if on_gpu else "fp32")
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "precision": precision,
        "torch": torch.__version__,
        "model": f"hidden {hidden}, layers {layers}",
    }
    with tempfile.TemporaryDirectory() as folder:
        heads = max(hidden // 64, 2)
        shape = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": heads // 2}
        model = write_tiny_model(Path(folder) / "model", **shape, max_positions=1024)
        results |= measure(Bench(model, options.device, precision), options.rounds)
    keep(options.out, f"device-{torch.device(options.device).type}", results, summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
