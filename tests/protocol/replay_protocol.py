# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.protocol.replay_protocol steps SEED`` shows one simulated run of steps, or of ``masters``;
``--seeds N --jobs 2`` tries many."""

import argparse
import gc
import multiprocessing
import sys
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.protocol import masters_run, steps_run

RUNS = {"steps": steps_run.run, "masters": masters_run.run}
CHUNK = 20  # seeds


def chunk(which, seeds):
    """Return what was reached in the runs of these seeds, and what was broken."""
    reached, broken = Counter(), []
    gc.freeze()  # what is imported stays: no collection need look through it
    for seed in seeds:
        try:
            reached += RUNS[which](seed).reached
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is a finding
            broken.append(f"seed {seed}: {type(error).__name__}: {error}")
    return reached, broken


def try_all(which, seeds, jobs):
    """Run many seeds, in processes."""
    reached, broken = Counter(), []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        parts = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
        for more, faults in pool.map(partial(chunk, which), parts):
            reached += more
            broken += faults
    return reached, broken


def reached_by(which, seeds, jobs=2):
    """Count what happened in the runs of these seeds, all of which hold."""
    reached, broken = try_all(which, seeds, jobs)
    assert not broken, "\n".join(broken)
    return reached


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=RUNS)
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.seed is not None:
        try:
            lines = RUNS[options.which](options.seed).lines
        except Exception as error:  # noqa: BLE001 -- as above
            traceback.print_exc()
            lines = error.lines
        sys.stdout.write("\n".join(lines) + "\n")
        return
    seeds = range(options.first, options.first + options.seeds)
    reached, broken = try_all(options.which, seeds, options.jobs)
    sys.stdout.write("\n".join(broken[:20]) + f"\n{len(broken)} of {len(seeds)} are broken\n")
    for name, count in sorted(reached.items()):
        sys.stdout.write(f"{count:6d} {name}\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
