# SPDX-License-Identifier: Apache-2.0
"""Measure how fast weights get to another process: ``make bench NAME=weight-sync`` (``--quick`` to try it).

All figures are of one run on one machine, interleaved: in each round one plain copy of the same bytes between memory
that is in use already (by one thread, with nothing beside it), then each way once. A sync is measured from the offer to
the receiver's answer: ``arrived`` once it has all of the weights, verified; ``serving`` once it has copied them into
its own tensors, as an engine does.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._results import RESULTS, keep, machine
from dlrover.python.rl.engine.api.weights import WeightSnapshot, take_snapshot, verify_snapshot
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, WeightTransport
from dlrover.python.rl.engine.weight_sync.collective import BroadcastTransport
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from tests.chaos.tables import markdown

_LATEST_S = 300.0
_BUCKETS = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)

Named = dict[str, torch.Tensor]


def weights(megabytes: int) -> Named:
    """Tensors of the shapes of a small Qwen2, as many layers as fill ``megabytes``."""
    width, wide, vocabulary = 896, 4864, 8192
    named = {"embed": torch.randn(vocabulary, width)}
    layer = {"q": (width, width), "k": (128, width), "v": (128, width), "o": (width, width)}
    layer |= {"gate": (wide, width), "up": (wide, width), "down": (width, wide), "norm": (width,), "bias": (width,)}
    number = 0
    while sum(tensor.nbytes for tensor in named.values()) < megabytes << 20:
        named |= {f"layers.{number}.{name}": torch.randn(shape) for name, shape in layer.items()}
        number += 1
    return named


class Source:
    """Weights that change between syncs."""

    def __init__(self, named: Named) -> None:
        self.version, self._named = 0, named

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """All of them."""
        yield from self._named.items()

    def step(self) -> None:
        """Change one number of each tensor."""
        self.version += 1
        for tensor in self._named.values():
            tensor.view(-1)[self.version % tensor.numel()] += 1.0


def transports(settings: SyncSettings) -> dict[str, WeightTransport]:
    """Each way, by the name that the tables give it."""
    return {
        "pull, shared memory": PullTransport(settings),
        "pull, TCP": PullTransport(settings, maps_pages=False),
        "shared bucket": CudaIpcTransport(settings),
        "broadcast, gloo": BroadcastTransport(settings),
    }


def sink(settings: SyncSettings, pipe: Any) -> None:
    """The receiving process."""
    torch.set_num_threads(1)
    made: dict[SyncSettings, dict[str, WeightTransport]] = {}
    served: Named = {}
    while (request := pipe.recv()) is not None:
        way, bucket_bytes, ticket = request
        settings = replace(settings, bucket_bytes=bucket_bytes)
        ways = made.setdefault(settings, transports(settings))
        snapshot = ways[way].receive(ticket)
        pipe.send(snapshot.stamp)
        _serve(snapshot, served)
        pipe.send("serving")
        del snapshot


def _serve(snapshot: WeightSnapshot, served: Named) -> None:
    if not served:
        served.update({name: torch.zeros(shape) for name, shape in snapshot.shapes.items()})
    verify_snapshot(snapshot, snapshot.shapes, serving=-1)
    for name, tensor in served.items():
        tensor.copy_(snapshot.tensor(name))


class Bench:
    """The sending process, and the pipe to the other one."""

    def __init__(self, megabytes: int, pipe: Any) -> None:
        named = weights(megabytes)
        self.source, self.nbytes = Source(named), sum(tensor.nbytes for tensor in named.values())
        self._named, self._copy = named, {name: tensor.clone() for name, tensor in named.items()}
        self._pipe = pipe
        self._ways: dict[int, dict[str, WeightTransport]] = {}

    def plain(self) -> float:
        """Seconds of a plain copy."""
        began_s = time.perf_counter()
        for name, tensor in self._named.items():
            self._copy[name].copy_(tensor)
        return time.perf_counter() - began_s

    def sync(self, way: str, bucket_bytes: int) -> tuple[float, float]:
        """Seconds of a sync until the weights have arrived, and until they serve."""
        settings = SyncSettings(name="ACTOR[0]", bucket_bytes=bucket_bytes)
        transport = self._ways.setdefault(bucket_bytes, transports(settings))[way]
        self.source.step()
        began_s = time.perf_counter()
        ticket = transport.offer(self.source)
        self._pipe.send((way, bucket_bytes, ticket))
        sent = transport.send(ticket, self.source)
        arrived = self._heard()
        arrived_s = time.perf_counter() - began_s
        self._heard()
        serving_s = time.perf_counter() - began_s
        if sent != arrived:
            raise RuntimeError(f"{way}: {sent} was sent and {arrived} arrived")
        return arrived_s, serving_s

    def _heard(self) -> Any:
        if not self._pipe.poll(_LATEST_S):
            raise TimeoutError("the receiver is silent")
        return self._pipe.recv()

    def check(self) -> None:
        """Check that the fingerprints equal the plain way's."""
        self.source.step()
        transport = next(iter(self._ways.values()))["pull, shared memory"]
        ticket = transport.offer(self.source)
        if transport.send(ticket, self.source) != take_snapshot(self._named.items(), self.source.version).stamp:
            raise RuntimeError("a sync's fingerprint is not the snapshot's")

    def close(self) -> None:
        """End all transports."""
        for ways in self._ways.values():
            for transport in ways.values():
                transport.close()


@contextmanager
def bench(megabytes: int) -> Iterator[Bench]:
    """Both processes."""
    context = multiprocessing.get_context("spawn")
    parent_pipe, child_pipe = context.Pipe()
    with ExitStack() as stack:
        child = context.Process(target=sink, args=(SyncSettings(name="ROLLOUT[0]"), child_pipe))
        child.start()
        stack.callback(child.join, _LATEST_S)
        stack.callback(child.kill)
        bench_run = Bench(megabytes, parent_pipe)
        stack.callback(bench_run.close)
        yield bench_run
        parent_pipe.send(None)
        child.join(_LATEST_S)


def measure(bench_run: Bench, ways: Sequence[tuple[str, int]], rounds: int) -> dict[str, Any]:
    """Seconds of everything, interleaved; the first two rounds warm up."""
    seconds: dict[str, Any] = {"plain": []} | {f"{way}|{size}": [] for way, size in ways}
    for number in range(rounds + 2):
        plain_s = bench_run.plain()
        timings = {f"{way}|{size}": bench_run.sync(way, size) for way, size in ways}
        if number < 2:
            continue
        seconds["plain"].append(plain_s)
        for name, both_s in timings.items():
            seconds[name].append(both_s)
    return seconds


def table(seconds: dict[str, Any], nbytes: int, head: str, label: int) -> str:
    """Medians, and the share of the plain copy's speed that they are."""
    plain_s = median(seconds["plain"])
    rows: list[list[object]] = [["plain copy", plain_s * 1e3, nbytes / plain_s / 1e9, 100.0, None, None]]
    for name, samples in seconds.items():
        if name != "plain":
            arrived_s, serving_s = (median(each[at] for each in samples) for at in (0, 1))
            text = name.split("|")[label]
            text = text if label == 0 else f"{int(text) // 1024} KiB"
            shares = [100 * plain_s / each for each in (arrived_s, serving_s)]
            rows.append([text, arrived_s * 1e3, nbytes / arrived_s / 1e9, shares[0], serving_s * 1e3, shares[1]])
    return markdown([head, "arrived, ms", "GB/s", "% of plain", "serving, ms", "% of plain"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few of everything, to try it")
    parser.add_argument("--megabytes", type=int, default=256, help="of weights (default 256)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket", type=int, default=SyncSettings().bucket, help="bytes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    megabytes, rounds = (64, 3) if options.quick else (options.megabytes, options.rounds)
    with bench(megabytes) as made:
        names = transports(SyncSettings())
        ways = measure(made, [(name, options.bucket) for name in names], rounds)
        buckets = measure(made, [("pull, shared memory", size) for size in _BUCKETS], rounds)
        made.check()
        nbytes = made.nbytes
    text = (
        f"{nbytes / 1e6:.0f} MB of weights, medians of {rounds} rounds, buckets of {options.bucket // 1024} KiB\n\n"
        f"{table(ways, nbytes, 'way', 0)}\n\n{table(buckets, nbytes, 'pull, shared memory: bucket', 1)}"
    )
    setting = {"bytes": nbytes, "rounds": rounds, "bucket": options.bucket, "machine": machine(1)}
    keep(
        options.out,
        "weight_sync-quick" if options.quick else "weight_sync",
        setting | {"ways_s": ways, "buckets_s": buckets},
        text,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
