# SPDX-License-Identifier: Apache-2.0

# ruff: noqa: T201, E402 -- a script
"""Replay a seed of the simulation, or try many.

``python tests/simulation/replay.py SEED`` prints every event, command and fault of one run;
``python tests/simulation/replay.py --seeds 100000 --start 0 --jobs 2`` tries a range.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import sim_modules
from sim_job import run

CHUNK = 200


def show(seed: int) -> int:
    """Print one run; 1 when it is broken."""
    try:
        outcome = run(seed, sim_modules.load(), keep_lines=True)
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is shown
        print("\n".join(getattr(error, "lines", [])))
        traceback.print_exc()
        return 1
    print("\n".join(outcome.lines))
    print(f"seed {seed} holds, trace {outcome.trace_hash}")
    return 0


def chunk(seeds: range) -> tuple[int, Counter[str], list[str]]:
    """Try a range of seeds: how many, what was reached, what broke."""
    modules, reached, broken = sim_modules.load(), Counter[str](), []
    for seed in seeds:
        try:
            reached += run(seed, modules).sometimes
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is listed
            broken.append(f"seed {seed}: {type(error).__name__}: {error}")
    return len(seeds), reached, broken


def many(start: int, count: int, jobs: int) -> int:
    """Try ``count`` seeds; 1 when one is broken."""
    began_s, done, reached = time.monotonic(), 0, Counter[str]()
    broken: list[str] = []
    chunks = [range(at, min(at + CHUNK, start + count)) for at in range(start, start + count, CHUNK)]
    with ProcessPoolExecutor(jobs) as pool:
        for size, more, faults in pool.map(chunk, chunks):
            done, reached, broken = done + size, reached + more, broken + faults
            for fault in faults:
                print(fault, flush=True)
    took_s = time.monotonic() - began_s
    for name, times in sorted(reached.items()):
        print(f"{times:9d}  {name}")
    print(f"{done} seeds, {len(broken)} broken, {done / took_s:.0f} a second")
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return show(arguments.seed)
    return many(arguments.start, arguments.seeds, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
