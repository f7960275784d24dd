# SPDX-License-Identifier: Apache-2.0
"""The jobs in which calls are raced: within steps, so that role groups do all that makes a step durable."""

import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks._dispatch_sides import PEERS, RaySide, RoleGroupSide, Side, is_installed
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload

REPOSITORY = Path(__file__).parents[1]
CALLS = {"empty": 100, "broadcast": 10, "shard": 10, "chain": 5}
"""Kind of call to how many of them are timed at once."""

OWN, RAW = "role groups", "Ray"
_SIDES, _JOBS = "benchmarks._dispatch_sides", "benchmarks._dispatch_jobs"
_ROWS, _COLUMNS = 2048, 1024  # 8 MB
REST_S = 0.2
ROLES = ("ACTOR", "ROLLOUT", "REWARD", "REFERENCE", "CRITIC")


class Race(BaseTrainer):
    """Every side makes every kind of call, once a round, in another order each time; a step for each."""

    def init(self) -> None:
        size = len(self.actors)
        self.sides: dict[str, Side] = {OWN: RoleGroupSide(self), RAW: RaySide(size)}
        self.sides |= {peer: PEERS[peer](size) for peer in PEERS if is_installed(peer)}
        self.array = np.random.default_rng(0).standard_normal((_ROWS, _COLUMNS), np.float32)
        for name, side in self.sides.items():
            for kind in ("shard", "chain"):
                factor = 2 if kind == "shard" else 4
                np.testing.assert_array_equal(getattr(side, kind)(self.array), factor * self.array, err_msg=name)

    def fit(self) -> None:
        plan = [
            (number, kind, side)
            for number in range(self.config.rounds + 1)
            for kind in CALLS
            for side in random.Random(f"{number} {kind}").sample(sorted(self.sides), len(self.sides))
        ]
        timings: list[tuple[int, str, str, float]] = []
        for step in self.steps(len(plan)):
            number, kind, side = plan[step - 1]
            timings.append((number, kind, side, self._time(self.sides[side], kind)))
        Path(self.config.out).write_text(json.dumps([each for each in timings if each[0] > 0]))

    def _time(self, side: Side, kind: str) -> float:
        """Seconds for each call."""
        call: Callable[..., object] = getattr(side, kind)
        if kind != "empty":
            call = partial(call, self.array)
        began_s = time.perf_counter()
        for _ in range(CALLS[kind]):
            call()
        return (time.perf_counter() - began_s) / CALLS[kind]


class Resting(BaseWorkload):
    """A worker that leaves the cores to the others."""

    def rest(self) -> None:
        """Sleep as long as a model would compute."""
        time.sleep(REST_S)


@ray.remote(num_cpus=0)
class _Resting:
    def rest(self) -> None:
        time.sleep(REST_S)


class Share(BaseTrainer):
    """Five roles rest one after the other, in a step of a second; actors of Ray alone do so in every other one."""

    def init(self) -> None:
        sizes = [len(self.actor_handles[role]) for role in ROLES]
        self.actors_of_ray = [[_Resting.remote() for _ in range(size)] for size in sizes]  # type: ignore[attr-defined]

    def fit(self) -> None:
        took: dict[str, list[float]] = {OWN: [], RAW: []}
        began_s, side = time.perf_counter(), None
        for step in self.steps(2 * self.config.steps + 1):
            ended_s = time.perf_counter()
            if side == OWN:  # with its commit
                took[OWN].append(ended_s - began_s)
            began_s, side = ended_s, OWN if step % 2 else RAW
            if side == OWN:
                for role in ROLES:
                    getattr(self, f"RG_{role}").rest()
            else:
                for actors in self.actors_of_ray:
                    ray.get([actor.rest.remote() for actor in actors])
                took[RAW].append(time.perf_counter() - began_s)
        Path(self.config.out).write_text(json.dumps(took))


def race_job(folder: Path, size: int, rounds: int) -> JobSpec:
    builder = _builder(folder, rounds=rounds).trainer(_JOBS, "Race")
    builder.actor(_SIDES, "Worker").total(size)
    return builder.spec("bench-dispatch", search_path=(str(REPOSITORY),))


def share_job(folder: Path, size: int, steps: int) -> JobSpec:
    builder = _builder(folder, steps=steps).trainer(_JOBS, "Share")
    for role in ROLES:
        builder.role(role, _JOBS, "Resting").total(size)
    return builder.spec("bench-dispatch", search_path=(str(REPOSITORY),))


def _builder(folder: Path, **config: Any) -> JobBuilder:
    builder = JobBuilder().device_type("CPU").device_per_node(48).job_dir(folder / "job", overwrite=True)
    return builder.config({"out": str(folder / "found.json"), **config})
