# SPDX-License-Identifier: Apache-2.0
"""The jobs that recovery is measured on: workers that are busy for a given time, in a loop with and without steps."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload

REPOSITORY = Path(__file__).parents[1]
CALLS = "calls.jsonl"

HANG_S = 20.0
"""Seconds without progress after which a process is treated as hung; importing torch on busy cores takes some of it."""

_MANY = 100_000
_CHUNK = 96
_MODULE = "benchmarks._recovery_job"


def crunch(chunks: int) -> float:
    """Multiply matrices ``chunks`` times: the same work, and the same result, each time."""
    left = np.eye(_CHUNK) * 0.999
    for _ in range(chunks):
        left = left @ left.T
    return float(left[0, 0])


def chunks_per_second() -> float:
    """Return how much of the work one core does in a second, now."""
    began_s = time.perf_counter()
    crunch(2000)
    return 2000 / (time.perf_counter() - began_s)


class Member(BaseWorkload):
    """Works for a given time, and notes each finished call. It imports torch, as a real one does."""

    def work(self, step: int, chunks: int, sleep_s: float) -> float:
        """Be busy for ``chunks``, then idle for ``sleep_s`` seconds, as one that waits for a device."""
        began_s = time.time()
        result = crunch(chunks)
        if sleep_s:
            time.sleep(sleep_s)
        self.note(step, began_s)
        return result

    def note(self, step: int, began_s: float) -> None:
        """Add the call to the list of finished ones, unless that is not wanted."""
        if not self.config.notes:
            return
        process_name = f"{self.role}[{self.rank}]"
        line = {"who": process_name, "pid": os.getpid(), "began_s": began_s, "at_s": time.time(), "step": step}
        with open(Path(self.config.folder) / CALLS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class StatefulMember(Member):
    """One with a state of some megabytes, which every call changes."""

    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)
        self.weights = torch.zeros(config.state_mb, 1 << 18)

    def work(self, step: int, chunks: int, sleep_s: float) -> float:
        """Like any worker's, and change the state."""
        self.weights[step % len(self.weights)] += 1
        return super().work(step, chunks, sleep_s)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.weights = state["weights"]


class Rank(StatefulMember):
    """One whose ranks meet in a collective at each call."""

    needs_own_process = True

    @classmethod
    def keeps_process(cls, config: Any) -> bool:
        """Ranks that are left form another group."""
        return True

    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)
        rendezvous = Rendezvous(self.rank, self.world_size, self.torch_master_addr, self.torch_master_port)
        self.ranks = Ranks.connect(rendezvous)

    def work(self, step: int, chunks: int, sleep_s: float) -> float:
        """Like any worker's, after all ranks have met."""
        dist.all_reduce(torch.ones(1))
        return super().work(step, chunks, sleep_s)


class DurableLoop(BaseTrainer):
    """The loop as it is meant to be written."""

    def init(self) -> None:
        """Nothing to prepare."""
        self.state["seen"] = 0

    def fit(self) -> None:
        """Every worker works in every step, one role after the other."""
        for step in self.steps(self.config.steps):
            self.body(step)
            self.state["seen"] += 1

    def body(self, step: int) -> None:
        """One step."""
        began_s = time.time()
        self.RG_ROLLOUT.work(step, self.config.chunks, self.config.sleep_s)
        self.RG_ACTOR.work(step, self.config.chunks, self.config.sleep_s)
        self.log(step, began_s=began_s, at_s=time.time())


class PlainLoop(DurableLoop):
    """The loop as it is without steps: nothing is committed, and any death begins it again."""

    def fit(self) -> None:
        """Run the same steps."""
        for step in range(1, self.config.steps + 1):
            self.body(step)


def bench_job(name: str, folder: Path, trainer: str = "DurableLoop", standby: int = 0, **config: Any) -> JobSpec:
    """A job of one stateful ACTOR, or several that meet in collectives, and ROLLOUT workers.

    Args:
        name: of the job.
        folder: where it writes.
        trainer: the class of the loop.
        standby: processes kept ready for each role.
        config: ``steps``, ``chunks``, ``sleep_s``, ``state_mb``, ``ranks`` (of a group, if more than one),
            ``rollouts``, ``nodes``, ``notes``.
    """
    settings = {"folder": str(folder), "steps": 1_000_000, "chunks": 0, "sleep_s": 0.02, "state_mb": 1, "notes": True}
    settings |= {"rollouts": 1, "nodes": 1, "ranks": 1} | config
    folder.mkdir(parents=True, exist_ok=True)
    builder = JobBuilder().device_type("CPU").device_per_node(8).node_num(settings["nodes"]).config(settings)
    builder.trainer(_MODULE, trainer).trainer_hang_after(HANG_S)
    actor = "Rank" if settings["ranks"] > 1 else "StatefulMember"
    builder.actor(_MODULE, actor).total(settings["ranks"]).standby(standby).hang_after(HANG_S)
    builder.rollout(_MODULE, "Member").total(settings["rollouts"]).standby(standby).hang_after(HANG_S)
    if settings["nodes"] > 1:
        builder.per_node(1)
    builder.restart_limits(job_max_restart=_MANY, trainer_max_restart=_MANY, backoff_s=0.0, node_max_failures=_MANY)
    job = builder.spec(name, (str(REPOSITORY),))
    master = replace(job.master, max_restart=_MANY)
    return replace(job, job_dir=folder / "out", work_dir=str(REPOSITORY), master=master)


def with_hang_after(job: JobSpec, seconds: float) -> JobSpec:
    """The job with another patience, for calls that take long."""
    workloads = {RLRoleType(role): replace(spec, hang_after_s=seconds) for role, spec in job.workloads.items()}
    return replace(job, trainer=replace(job.trainer, hang_after_s=seconds), workloads=workloads)
