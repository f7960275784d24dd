# SPDX-License-Identifier: Apache-2.0
"""Compare the cost of role-group calls with Ray alone, verl's and OpenRLHF's groups: ``make bench NAME=dispatch``.

One cluster, and in it a job whose trainer makes the same calls through every kind of group, interleaved, with durable
steps on. Then a job of five roles whose workers rest for a second in each step, next to Ray's actors that do so.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import ray

from benchmarks._dispatch_jobs import CALLS, OWN, RAW, ROLES, race_job, share_job
from benchmarks._dispatch_sides import PEERS, is_installed
from benchmarks._results import RESULTS, keep, machine
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_on_ray
from tests.chaos.tables import markdown
from tests.ray.two_nodes import two_nodes

_SIZES = (8, 16)
_SHARE_SIZE = 8  # workers of each of five roles


def _run(job: JobSpec, found: Path) -> Any:
    status = run_on_ray(check_job(job), connected=True)
    if status.phase is not Phase.FINISHED:
        raise RuntimeError(f"{job.name} ended as {status.phase}: {status.reason}")
    return json.loads(found.read_text())


def _race(folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Kind of call to side to its seconds and its ratios to Ray's, one of each round."""
    times: dict[str, dict[str, list[float]]] = {kind: {} for kind in CALLS}
    for _, kind, side, seconds in _run(race_job(folder, size, rounds), folder / "found.json"):
        times[kind].setdefault(side, []).append(seconds)
    return {
        kind: {
            side: {
                "ms": 1000 * median(found),
                "ratios": [own / raw for own, raw in zip(found, sides[RAW], strict=True)],
            }
            for side, found in sides.items()
        }
        for kind, sides in times.items()
    }


def _table(results: dict[str, Any]) -> str:
    sides = [OWN, *(peer for peer in PEERS if peer in results["versions"])]
    head = ["members", "call", "Ray, ms", *(f"{side} over Ray" for side in sides)]
    rows = [
        [size, kind, f"{found[RAW]['ms']:.2f}", *(_spread(found[side]["ratios"]) for side in sides)]
        for size, kinds in results["race"].items()
        for kind, found in kinds.items()
    ]
    race = markdown(head, rows)
    if (share := results.get("share")) is None:
        return race
    last = (
        f"A step of {len(ROLES)} roles x {_SHARE_SIZE} workers that rest for a second takes {share[OWN]:.3f} s with its"
        f" commit; the same calls by Ray alone {share[RAW]:.3f} s: {100 * (share[OWN] / share[RAW] - 1):+.2f} %."
    )
    return f"{race}\n\n{last}"


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds of 4 workers, to try it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="workers; 16 of four kinds take 16 GB")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    sizes, rounds, steps = ((4,), 2, 3) if options.quick else (options.sizes, options.rounds, 20)
    file = "dispatch-quick" if options.quick else "dispatch"
    versions = {peer: metadata.version(peer.lower()) for peer in PEERS if is_installed(peer)}
    results: dict[str, Any] = {"machine": machine(1, ray=ray.__version__), "versions": versions, "rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="dlrover-rl-dispatch-") as name, two_nodes(workers=0, head_cpus=80):
        results["race"] = {}
        for size in sizes:
            results["race"][size] = _race(Path(name), size, rounds)
            keep(options.out, file, results, _table(results))  # the larger sizes may not fit
        took = _run(share_job(Path(name), _SHARE_SIZE, steps), Path(name) / "found.json")
    results["share"] = {side: median(found) for side, found in took.items()}
    keep(options.out, file, results, _table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
