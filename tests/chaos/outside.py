# SPDX-License-Identifier: Apache-2.0
"""SIGKILL from outside: ``make chaos-outside``.

Each run is ``dlrover-rl run examples/arithmetic/grpo.yaml``. From its first actor on, random ones of its processes
(workers, trainer, master; with ``--rays-own`` the raylet and Ray's agents, too) are killed, at exponential gaps; it
must end in the bits of an undisturbed run, and leave no process and no memory. If rollouts run ahead, the bits depend
on time, and it must end without a violation. This process knows only the command line and the process table.
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf

from tests.chaos.verdict import row_differences, violations
from tests.support.commands import CLI, process_table, processes_below, say
from tests.support.commands import ROOT as REPOSITORY

SPARED = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")  # Ray's own; all others are actors of the job
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "raylet")
MEMORY = Path(f"/dev/shm/dlrover-rl-{os.geteuid()}")
_GONE_S = 20.0
_POLL_S = 0.05
_LIMIT_S = 900.0


@dataclass
class Ended:
    """One run: its exit code, what was killed when, digests of its results, and what should not be there any more."""

    code: int
    seconds: float
    killed: list[tuple[float, str]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    first_step_s: float = math.inf
    faults: list[str] = field(default_factory=list)
    same: bool = False


def victims(pid: int, rays_own: bool = False) -> dict[int, str]:
    """Processes that may be killed, by a short name; none before the first actor of the job."""
    names = {child: Path(name.split()[0]).name for child, name in processes_below(pid).items() if name}
    actors = {child: name for child, name in names.items() if name.startswith("ray::") and name not in SPARED}
    more = {child: name for child, name in names.items() if name in RAYS_OWN} if rays_own and actors else {}
    return actors | more


def left_over(seen: Iterable[int], folder: Path) -> list[str]:
    """Return the processes and shared memory of a run into ``folder`` that are left after some time."""
    until_s, left = time.monotonic() + _GONE_S, [""]
    while left and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        table = process_table()
        left = [f"process {pid}: {table[pid][:100]}" for pid in seen if table.get(pid)]
        runs = [json.loads(file.read_text())["run"] for file in folder.glob("owner.*.json")]
        left += [str(path) for path in MEMORY.glob("arithmetic-grpo-*") if path.name.rpartition("-")[2] in runs]
    return left


@dataclass(frozen=True)
class Kills:
    count: int = 0
    seed: int = 0
    mean_s: float = 6.0
    rays_own: bool = False
    in_training: bool = False  # from the first step on, instead of from the first actor on
    names: str = ""  # a pattern of the names of processes that are killed


def run(folder: Path, settings: Sequence[str], kills: Kills = Kills()) -> Ended:
    """One run into ``folder`` with these settings, ``key=value``."""
    choice, began_s, metrics = random.Random(kills.seed), time.monotonic(), folder / "metrics.jsonl"
    command = [*CLI, "run", str(REPOSITORY / "examples/arithmetic/grpo.yaml"), *settings, f"job_dir={folder}"]
    with open(f"{folder}.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder.parent, stdout=log, stderr=subprocess.STDOUT)
    ended = Ended(-1, 0.0)
    next_s, seen = None, set[int]()
    while process.poll() is None:
        now_s = time.monotonic()
        if now_s - began_s > _LIMIT_S:
            process.kill()
        seen |= processes_below(process.pid).keys()
        # The first line may be of the evaluation before training.
        if ended.first_step_s == math.inf and metrics.exists() and metrics.read_text().count("\n") > 1:
            ended.first_step_s = now_s - began_s
        may_kill = len(ended.killed) < kills.count and (ended.first_step_s < math.inf or not kills.in_training)
        alive = victims(process.pid, kills.rays_own) if may_kill else {}
        alive = {pid: name for pid, name in alive.items() if re.search(kills.names, name)}
        if alive and next_s is None:
            next_s = now_s + choice.expovariate(1 / kills.mean_s)
        if alive and next_s is not None and now_s >= next_s:
            victim = choice.choice(sorted(alive))
            os.kill(victim, signal.SIGKILL)
            ended.killed.append((round(now_s - began_s, 2), alive[victim]))
            next_s = now_s + choice.expovariate(1 / kills.mean_s)
        time.sleep(_POLL_S)
    ended.code, ended.seconds = process.wait(), time.monotonic() - began_s
    ended.digests, ended.left = digests(folder), left_over(seen, folder)
    return ended


def digests(folder: Path) -> dict[str, str]:
    """Return digests of the model's file, of each sample and of each step's metrics without times."""
    sums = {}
    for name in ("model/model.safetensors", "samples.jsonl"):
        file = folder / name
        sums[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "missing"
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    values = [[row[key] for key in ("step", "reward/mean", "loss", "grad_norm")] for row in rows if row["step"]]
    sums["metrics.jsonl"] = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return sums


def find_faults(ended: Ended, folder: Path, expected: Ended, undisturbed: Path) -> list[str]:
    """Return the faults of a run into ``folder`` that should have ended as the ``undisturbed`` one."""
    left = [f"left: {item}" for item in ended.left]
    if ended.code:
        return [f"exit code {ended.code}", *left]
    config = OmegaConf.load(folder / "job.yaml").config
    if config.rollout.max_staleness:
        return [*violations(folder, config), *left]
    different = [f"other bits in {name}" for name, digest in expected.digests.items() if ended.digests[name] != digest]
    first = row_differences("samples.jsonl", undisturbed, folder) if different else ()
    return [*different, *first, *left]


def prepare(folder: Path) -> None:
    """The data of the example, and the model that its warm-up makes."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    example = runpy.run_path(str(REPOSITORY / "examples/arithmetic/demo.py"))
    Path("build/demo").mkdir(parents=True, exist_ok=True)
    shape = {"hidden": 96, "heads": 3, "kv_heads": 3, "intermediate": 384}
    example["write_tiny_model"](Path("build/demo/random-model"), layers=2, max_positions=64, seed=0, **shape)
    example["write_data"](0)
    sft = [*CLI, "run", str(REPOSITORY / "examples/arithmetic/sft.yaml"), "--local", "job_dir=build/demo/sft", "seed=0"]
    subprocess.run(sft, check=True, timeout=_LIMIT_S)


def seeds_of(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 unless every run has ended as it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.outside", description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-10"))
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--mean-s", type=float, default=6.0)
    parser.add_argument("--rays-own", action="store_true", help="Kill the raylet and Ray's agents, too.")
    parser.add_argument("--in-training", action="store_true", help="Kill from the first step on.")
    parser.add_argument("--names", default="", help="a pattern of the names of processes that are killed")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "outside")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the job")
    options = parser.parse_args(argv)
    folder = (options.out / time.strftime("%Y%m%d-%H%M%S")).resolve()
    prepare(folder)
    # A busy machine must not let a reward function be late: its sample would be dropped.
    settings = [f"steps={options.steps}", "reward.timeout_s=60", *options.settings]
    expected = run(folder / "undisturbed", settings)
    say(f"undisturbed: exit code {expected.code} in {expected.seconds:.0f} s")
    results = {"undisturbed": vars(expected)}
    wrong = [] if expected.code == 0 else ["undisturbed"]
    for seed in options.seeds:
        plan = (options.kills, seed, options.mean_s, options.rays_own, options.in_training, options.names)
        ended = run(folder / f"seed-{seed}", settings, Kills(*plan))
        ended.faults = find_faults(ended, folder / f"seed-{seed}", expected, folder / "undisturbed")
        ended.same = not ended.faults and bool(ended.killed)
        wrong += [] if ended.same else [f"seed {seed}"]
        names = ", ".join(f"{name.removeprefix('ray::')} at {at_s:g} s" for at_s, name in ended.killed)
        verdict = "as undisturbed" if ended.same else "WRONG"
        often = f"{len(ended.killed)} of {options.kills} kills before its end"
        say(f"seed {seed}: {verdict}, exit code {ended.code} in {ended.seconds:.0f} s, {often}: {names}")
        for fault in ended.faults:
            say(f"  {fault}")
        results[f"seed {seed}"] = vars(ended)
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    say(f"wrong: {', '.join(wrong) or 'none'}; kept in {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
