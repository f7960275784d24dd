# SPDX-License-Identifier: Apache-2.0
"""A small training whose result is known to the last bit, with faults that its own workers commit when they are told.

``config.faults`` lists ``who:method:step:act``, e.g. ``ROLLOUT-1:generate:3:kill``: the first process of that worker to
get there does it; a mark in ``config.folder`` keeps the next one from doing it again. The acts::

    kill   SIGKILL, to itself            stop   SIGSTOP, to itself
    loop   never return                  error  raise an exception of the user's
    die    kill every process that gets there      hold   wait for the file <mark>.go
    ecc, nccl, rendezvous, odd           raise such an error; "odder" in every process that gets there
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dlrover.python.rl.trainer.shard import Replicate, Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload

DIM, ROWS = 16, 6


class Told(BaseWorkload):
    """Counts what it does, and commits the faults it is told to."""

    def note(self, method, step):
        folder = Path(self.config.folder)
        with open(folder / "calls", "a") as calls:
            calls.write(f"{self.role}-{self.rank} {method} {step} {os.getpid()}\n")
        commit_faults(self.config, f"{self.role}-{self.rank}", method, step)


def commit_faults(config, process, where, step):
    """Commit faults of ``config.faults`` that are meant for ``process`` at this place and were not committed yet."""
    for fault in config.get("faults", []):
        *place, act = fault.split(":")
        mark = mark_of(config.folder, fault)
        if place != [process, where, str(step)] or (mark.exists() and act not in ("die", "odder")):
            continue
        mark.touch()
        commit_fault(act, mark)


def mark_of(folder, fault):
    """The file that is there, since when, once a fault was committed."""
    return Path(folder) / fault.replace(":", "_")


ERRORS = {
    "ecc": "CUDA error: uncorrectable ECC error encountered",
    "nccl": "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
    "rendezvous": "Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "odd": "an internal assertion of a library failed",
    "odder": "an internal assertion of a library failed",
}


class DistStoreError(RuntimeError):
    """The error of a store of torch, by its name."""


def commit_fault(act, mark):
    if act in ERRORS:
        raise (DistStoreError if act == "rendezvous" else RuntimeError)(ERRORS[act])
    if act in ("kill", "die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if act == "loop":
        while True:
            pass
    if act == "error":
        raise KeyError("the user's own mistake")
    if act == "hold":
        wait_for(mark.with_name(mark.name + ".go").exists)


def wait_for(condition, deadline_s=60.0):
    """Wait until ``condition()`` holds, and return what it gave."""
    never, began_s = threading.Event(), time.monotonic()
    while not (outcome := condition()):
        assert time.monotonic() - began_s < deadline_s, f"not within {deadline_s:g} s"
        never.wait(0.02)
    return outcome


class Learner(Told):
    """ACTOR: a vector that is trained; its workers' shares are summed by the trainer."""

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.weights, self.moment = np.zeros(DIM), np.zeros(DIM)

    def publish(self, step):
        self.note("publish", step)
        return self.weights.copy()

    def update(self, gradient, step):
        self.note("update", step)
        self.moment = 0.9 * self.moment + gradient
        self.weights = self.weights - 0.1 * self.moment
        return float(self.weights.sum())

    def state_dict(self):
        return {"weights": self.weights, "moment": self.moment}

    def load_state_dict(self, state):
        self.weights, self.moment = state["weights"].copy(), state["moment"].copy()


class Team(Learner):
    """ACTOR whose ranks recover together."""

    needs_own_process = True


class Keepers(Team):
    """ACTOR whose ranks keep their processes when another is lost."""

    @classmethod
    def keeps_process(cls, config):
        return True


class FakeNccl:
    """A stand-in for ``torch.distributed``: a group on devices that is there until it is aborted."""

    def __init__(self):
        self.aborted = threading.Event()
        self.distributed_c10d = SimpleNamespace(_abort_process_group=self.aborted.set)

    def is_available(self):
        return True

    def is_initialized(self):
        return not self.aborted.is_set()

    def get_backend_config(self):
        return "cpu:gloo,cuda:nccl"


class Waiters(Keepers):
    """Keepers who wait for a lost rank until their group is aborted, and return anything then, as with nccl."""

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        sys.modules["torch.distributed"] = FakeNccl()
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "its watchdog would end the process"

    def update(self, gradient, step):
        total = super().update(gradient, step)
        if self.rank == 0 and step == 2 and self.restart_info.count == 0:
            assert sys.modules["torch.distributed"].aborted.wait(60)
            self.weights[:] = np.nan
        return total


class Sampler(Told):
    """ROLLOUT: stateless but for the weights of the step."""

    def receive(self, weights, step):
        self.note("receive", step)
        self.weights = weights

    def generate(self, rows, step):
        self.note("generate", step)
        return [np.cos(self.weights * row + step) for row in rows]


class Loop(BaseTrainer):
    """Sync, sample, learn; the sums are logged and written at the end."""

    def init(self):
        self.state["sums"] = []

    def fit(self):
        for step in self.steps(self.config.steps):
            weights = self.RG_ACTOR.publish(step)[0]
            self.RG_ROLLOUT.receive(Replicate(weights), step)
            rows = [float(row + step) for row in range(ROWS)]
            parts = self.RG_ROLLOUT.generate(Shard(rows), step)
            self.fault("middle", step)
            gradient = np.sum([row for part in parts for row in part], axis=0)
            total = self.RG_ACTOR.update(Replicate(gradient), step)[0]
            self.state["sums"] = [*self.state["sums"], total]
            self.fault("end", step)
            self.log(step, total=total)
            time.sleep(self.config.get("pause_s", 0.0))
        result = self.RG_ACTOR.publish(self.config.steps + 1)[0]
        np.savez(Path(self.config.folder) / "result.npz", weights=result, sums=np.array(self.state["sums"]))

    def fault(self, where, step):
        commit_faults(self.config, "trainer", where, step)


class Plain(Loop):
    """A loop like :class:`Loop` without durable steps."""

    def fit(self):
        with open(Path(self.config.folder) / "runs", "a") as runs:
            runs.write("run\n")
        for step in range(1, self.config.steps + 1):
            weights = self.RG_ACTOR.publish(step)[0]
            self.RG_ROLLOUT.receive(Replicate(weights), step)
            self.RG_ROLLOUT.generate(Shard([float(row + step) for row in range(ROWS)]), step)


def expected(steps):
    """Return the weights and sums in which an undisturbed run ends."""
    weights, moment, sums = np.zeros(DIM), np.zeros(DIM), []
    for step in range(1, steps + 1):
        rows = [float(row + step) for row in range(ROWS)]
        gradient = np.sum([np.cos(weights * row + step) for row in rows], axis=0)
        moment = 0.9 * moment + gradient
        weights = weights - 0.1 * moment
        sums.append(float(weights.sum()))
    return weights, np.array(sums)
