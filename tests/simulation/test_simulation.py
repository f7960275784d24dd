# SPDX-License-Identifier: Apache-2.0
"""The control room against thousands of simulated disasters.

Each seed is one job with the production machine, journal, journal file and hang detection, on a simulated cluster,
network, clock and disk. ``python tests/simulation/replay.py SEED`` shows one; ``--seeds N --jobs 2`` tries many more.
"""

import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import replay
import sim_modules
from mutations import MUTATIONS
from sim_faults import SITUATIONS
from sim_job import run

SEEDS, MORE_SEEDS, CHUNK = range(400), range(400, 2000), 50
JOBS = 2

REGRESSIONS = (12, 60, 114, 308, 315, 464, 699, 813, 1193, 1261, 1666, 1742)
"""Seeds that were broken once, by the machine or by the simulation itself."""


@pytest.fixture(scope="module")
def modules():
    return sim_modules.load()


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_was_broken_once_holds(seed, modules):
    run(seed, modules)


def reached_by(seeds: range) -> Counter[str]:
    """What happened in the runs of these seeds, all of which hold."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    reached: Counter[str] = Counter()
    broken: list[str] = []
    with ProcessPoolExecutor(JOBS, multiprocessing.get_context("spawn")) as pool:
        for _, more, faults in pool.map(replay.chunk, chunks):
            reached += more
            broken += faults
    assert not broken, "\n".join(broken)
    return reached


def test_every_seed_holds_and_every_fault_meets_every_situation():
    reached = reached_by(SEEDS)
    pairs = {f"{where}/{fault}" for where, faults in SITUATIONS.items() for fault in faults}
    ends = {f"ended {reason}" for reason in ("finished", "stopped", "not_retryable", "restart_limit")}
    falters = {f"{where}/disk_falters" for where in SITUATIONS}
    assert not (pairs | ends | falters | {"a commit of an old epoch was refused"}) - reached.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_seeds_hold():
    assert reached_by(MORE_SEEDS)["ended finished"]


def test_a_seed_is_the_same_run_every_time(modules):
    for seed in range(10):
        assert run(seed, modules).trace_hash == run(seed, sim_modules.load()).trace_hash
    hashes = {run(seed, modules).trace_hash for seed in range(50)}
    assert len(hashes) == 50


def test_a_seed_is_the_same_run_in_another_process(modules):
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, str(Path(replay.__file__)), "3"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.splitlines()[-1] == f"seed 3 holds, trace {run(3, modules).trace_hash}"


def test_a_broken_seed_says_how_to_replay_it():
    broken = sim_modules.load(MUTATIONS["a worker keeps its number"])
    with pytest.raises(AssertionError) as caught:
        run(0, broken)
    assert "python tests/simulation/replay.py 0" in caught.value.__notes__[0]
