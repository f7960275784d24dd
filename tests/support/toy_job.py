# SPDX-License-Identifier: Apache-2.0
"""A job whose end is known to the last bit, and whose config says what its processes do in which step.

``config`` has ``folder`` (of all notes), ``steps``, ``step_s`` (the least time of each), and ``faults``: a list of
``process:method:step:act``, e.g. ``ROLLOUT-1:generate:3:kill``. The first process of that worker to get there does it;
a mark in the folder keeps the next one from doing it again. The acts::

    kill   SIGKILL, to itself            stop   SIGSTOP, to itself
    loop   never return                  error  raise an exception of the user's
    leave  sys.exit                      own    raise an exception of a class that only the job can import
    die    kill every process that gets there      hold   wait for the file <mark>.go
    ecc, nccl, rendezvous, odd           raise such an error; "odder" in every process that gets there

While the folder has a file ``hang``, no step begins; a run whose config says to ``hold`` a step waits before it until
the file ``<job_dir>.gate`` has been written. The module needs nothing of the tests: it can be copied.
"""

import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import yaml
from omegaconf import OmegaConf

from dlrover.python.rl.trainer.shard import Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation

ROWS = 6
SETTINGS = ("steps", "step_s", "faults", "ends", "secret_settings", "hold")


def toy_text(
    folder,
    roles=None,
    trainer="Loop",
    actor="Worker",
    rollout="Worker",
    module="tests.support.toy_job",
    devices=2,
    **keys,
):
    """Return the job's file, and make its folder where it can be made; ``rollout``: the class of all roles but the
    actor; ``keys``: of the config, or of the file."""
    with suppress(FileNotFoundError):
        Path(folder).mkdir(exist_ok=True)
    config = {"folder": str(folder), "steps": 5, "step_s": 0.05}
    config |= {key: keys.pop(key) for key in SETTINGS if key in keys}
    workload = {
        role: {"module": module, "class": actor if role == "actor" else rollout, "num": num}
        for role, num in (roles or {"actor": 1}).items()
    }
    about_trainer = {"module": module, "class": trainer, "device_type": "CPU", "device_per_node": devices}
    return yaml.safe_dump({"trainer": about_trainer, "workload": workload, "config": config, **keys})


def expected_totals(steps, rollouts=True):
    """Return the total after each step of an undisturbed run."""
    totals = [0.0]
    for step in range(1, steps + 1):
        rows = [math.cos(totals[-1] * (row + step) + step) for row in range(ROWS)]
        totals.append(totals[-1] + (sum(rows) if rollouts else step))
    return totals[1:]


ERRORS = {
    "ecc": "CUDA error: uncorrectable ECC error encountered",
    "nccl": "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
    "rendezvous": "Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "odd": "an internal assertion of a library failed",
    "odder": "an internal assertion of a library failed",
}


SIGNALS = {"kill": signal.SIGKILL, "die": signal.SIGKILL, "stop": signal.SIGSTOP}


class DistStoreError(RuntimeError):
    """The error of a store of torch, by its name."""


class OwnError(Exception):
    pass


def commit_faults(config, process, method, step):
    """Commit faults of ``config.faults`` that are meant for ``process`` at this place and were not committed yet."""
    for fault in config.get("faults", []):
        *place, act = fault.split(":")
        mark = mark_of(config.folder, fault)
        if place != [process, method, str(step)] or (mark.exists() and act not in ("die", "odder")):
            continue
        mark.touch()
        commit_fault(act, mark)


def mark_of(folder, fault):
    """The file that exists once a fault was committed."""
    return Path(folder) / fault.replace(":", "_")


def commit_fault(act, mark):
    if act in ERRORS:
        raise (DistStoreError if act == "rendezvous" else RuntimeError)(ERRORS[act])
    if act in SIGNALS:
        os.kill(os.getpid(), SIGNALS[act])
    if act == "loop":
        while True:
            pass
    if act == "error":
        raise KeyError("the user's own mistake")
    if act == "own":
        raise OwnError("of a module that only the job's processes can import")
    if act == "leave":
        sys.exit(5)
    if act == "hold":
        until_s = time.monotonic() + 60.0
        while not mark.with_name(mark.name + ".go").exists():
            assert time.monotonic() < until_s, "it was not let go"
            time.sleep(0.02)


class Worker(BaseWorkload):
    """ACTOR keeps a total, from which ROLLOUT samples; each notes its calls."""

    total = 0.0

    def note(self, method, step):
        with open(Path(self.config.folder) / "calls", "a") as calls:
            calls.write(f"{self.role}-{self.rank} {method} {step} {os.getpid()}\n")
        commit_faults(self.config, f"{self.role}-{self.rank}", method, step)

    def publish(self, step):
        self.note("publish", step)
        return self.total

    def receive(self, total, step):
        self.note("receive", step)
        self.total = total

    def generate(self, rows, step):
        self.note("generate", step)
        return self.rank, self.world_size, [math.cos(self.total * row + step) for row in rows]

    def update(self, number, step):
        self.note("update", step)
        self.total += number
        return self.total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]

    @trainer_invocation(blocking=False)
    def later(self, step):
        self.note("later", step)
        return step + self.rank

    def master_phase(self):
        import ray

        return str(ray.get(self.master_handle.status.remote(), timeout=10).phase)

    def secrets(self):
        names = ("API_KEY", "MEMBER_TOKEN", "CLUSTER_API_KEY")
        variables = {name: os.environ[name] for name in names if name in os.environ}
        return {**variables, "config": OmegaConf.to_container(self.config.secret_settings)}

    def fail_with_secrets(self):
        """Say all secrets of the job, as they are and as ``repr`` writes them."""
        import logging

        secrets = self.secrets()
        secrets.pop("CLUSTER_API_KEY", None)
        logging.getLogger("dlrover.toy_job").warning("secrets: %s", secrets["config"].get("pem"))
        raise RuntimeError(f"it fails as it was told to, with {secrets}\n{secrets['config'].get('pem')}")


class Sampler(Worker):
    """ROLLOUT without a state, which can be resized."""

    state_dict = BaseWorkload.state_dict


class Team(Worker):
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

    def update(self, number, step):
        total = super().update(number, step)
        if self.rank == 0 and step == 2 and self.restart_info.count == 0:
            assert sys.modules["torch.distributed"].aborted.wait(60)
            self.total = math.nan
        return total


class Ranked(Worker):
    """ACTOR whose two ranks form a process group; rank 0 sends weights to rank 1."""

    def meet(self):
        from dlrover.python.rl.engine.api.base import Rendezvous
        from dlrover.python.rl.engine.model.ranks import Ranks
        from dlrover.python.rl.engine.weight_sync.base import SyncSettings
        from dlrover.python.rl.engine.weight_sync.collective import BroadcastTransport

        address, port = self.torch_master_addr, self.torch_master_port
        ranks = Ranks.connect(Rendezvous(self.rank, self.world_size, address, port, timeout_s=60.0))
        self.transport = BroadcastTransport(SyncSettings(is_leader=self.rank == 0, address=address))
        assert ranks.gather(self.rank) == [0, 1]
        return self.transport.offer(self)

    version = 1

    def named_weights(self):
        import torch

        yield "weight", torch.ones(1000)

    def sync(self, ticket):
        if self.rank == 0:
            self.transport.send(ticket, self)
        else:
            assert self.transport.receive(ticket).tensor("weight").sum() == 1000
        return self.torch_master_port


class Loop(BaseTrainer):
    """Sync, sample, learn; the totals are logged, and written at the end with the numbers of rollouts."""

    def init(self):
        with open(Path(self.config.folder) / "starts", "a") as starts:
            starts.write("started\n")
        self.state["totals"], self.state["sizes"] = [], []

    def fit(self):
        for step in self.steps(self.config.steps):
            self.step(step)
        result = {"totals": self.state["totals"], "sizes": self.state["sizes"]}
        (Path(self.config.folder) / "result.json").write_text(json.dumps(result))

    def step(self, step):
        time.sleep(self.config.get("step_s", 0.0))
        while (Path(self.config.folder) / "hang").exists():
            time.sleep(0.05)
        if step == self.config.get("hold"):
            (self.job_dir / "waiting").touch()
            Path(f"{self.job_dir}.gate").read_text()
        total = self.RG_ACTOR.publish(step)[0]
        number = self.sample(total, step) if self.rollouts else step
        self.fault("middle", step)
        total = self.RG_ACTOR.update(number, step)[0]
        self.state["totals"] = [*self.state["totals"], total]
        self.fault("end", step)
        self.log(step, reward=float(total))
        with open(self.job_dir / "steps.jsonl", "a") as steps:
            steps.write(f"[{step}, {total}]\n")

    def sample(self, total, step):
        self.RG_ROLLOUT.receive(total, step)
        parts = self.RG_ROLLOUT.generate(Shard([float(row + step) for row in range(ROWS)]), step)
        assert [part[:2] for part in parts] == [(rank, len(parts)) for rank in range(len(parts))]
        self.state["sizes"] = [*self.state["sizes"], len(parts)]
        return sum(value for *_, values in parts for value in values)

    def fault(self, method, step):
        commit_faults(self.config, "trainer", method, step)


class Plain(Loop):
    """A loop without durable steps."""

    def fit(self):
        for step in range(1, self.config.steps + 1):
            self.step(step)


class Swallowing(Plain):
    """Hides the cause of a failed call behind another error."""

    def step(self, step):
        try:
            super().step(step)
        except Exception as error:
            raise RuntimeError("something went wrong") from error


class AsksMaster(Loop):
    """Lets its workers ask the master for its state."""

    def step(self, step):
        assert set(self.RG_ACTOR.master_phase()) == {"running"}
        super().step(step)


class GetsByRay(Loop):
    """Takes results that were not waited for by Ray's own functions."""

    def step(self, step):
        import asyncio

        import ray

        async def gathered(pending):
            return [await ref for ref in pending]

        refs, numbers = self.RG_ACTOR.later(step), [step, step + 1]
        assert ray.get(list(refs)) == ray.get(refs) == refs.result() == numbers
        done, pending = ray.wait(self.RG_ACTOR.later(step), num_returns=2)
        assert [ref.result() for ref in done] == numbers and not pending
        assert asyncio.run(gathered(self.RG_ACTOR.later(step))) == numbers
        assert self.RG_ACTOR.later(self.RG_ACTOR.later(step)).result() == [step, step + 2]
        assert len(repr(refs)) < 100 and len(repr(refs[0])) < 100
        if step == 1:
            assert ray.get(self.actors[1].later.remote(refs[0])) == 2
        self.log(step, reward=float(sum(numbers)))


class Holding(Loop):
    """Notes the secrets of its worker in each step; where ``config.ends`` is ``badly`` the worker says them."""

    def fit(self):
        super().fit()
        if self.config.ends == "badly":
            self.RG_ACTOR.fail_with_secrets()

    def step(self, step):
        (secrets,) = self.RG_ACTOR.secrets()
        assert secrets["config"] == OmegaConf.to_container(self.config.secret_settings)
        (Path(self.config.folder) / "held").write_text(json.dumps(secrets))
        super().step(step)


class Meeting(Loop):
    """Notes the ports at which its ranks meet and weights are sent."""

    def init(self):
        super().init()
        self.ticket = self.RG_ACTOR.meet()[0]

    def step(self, step):
        ports = (self.RG_ACTOR.sync(self.ticket)[0], self.ticket.address["tcp_port"])
        file = Path(self.config.folder) / "ports.new"
        file.write_text("\n".join(map(str, ports)))
        file.rename(file.with_name("ports"))
        super().step(step)
