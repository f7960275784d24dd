# SPDX-License-Identifier: Apache-2.0
"""A job of arithmetic whose ranks meet in collectives, and fail when the config says so."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.trainer.shard import Replicate
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation


class Adder(BaseWorkload):
    """Adds the values of all ranks to a sum that each rank keeps."""

    needs_own_process = True

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.total = torch.zeros(4, dtype=torch.float64)
        if config.fault.where == "start" and self.rank == config.fault.rank:
            raise RuntimeError("told not to start")

    def meet(self):
        where = f"tcp://{self.torch_master_addr}:{self.torch_master_port}"
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", where, limit, world_size=self.world_size, rank=self.rank)

    def add(self, step, values):
        fault = self.config.fault
        if (step, self.rank) == (fault.step, fault.rank) and not Path(fault.once).exists():
            Path(fault.once).touch()
            self.fail(fault.where)
        share = sum(values) * torch.arange(1, 5, dtype=torch.float64)
        dist.all_reduce(share)
        self.total = (self.total + share) * 1.1
        return float(self.total[0]), self.rank

    def fail(self, where):
        if where == "raise":
            raise ArithmeticError("told to fail")
        if where == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "leave":
            os._exit(3)

    @trainer_invocation(blocking=False)
    def part(self):
        return [float(value) for value in self.total[self.rank * 2 : self.rank * 2 + 2]]

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()


class Raiser(BaseWorkload):
    """Raises in its second step."""

    def act(self, step):
        if step == 2:
            if self.config.fault == "data":
                raise DataError([ConfigError("rows", "told to")])
            raise {"interrupt": KeyboardInterrupt, "fail": ArithmeticError}[self.config.fault]("told to")


class ActingTrainer(BaseTrainer):
    """Makes no steps where it ``commits`` nothing."""

    def init(self):
        pass

    def fit(self):
        for step in self.steps(2) if self.config.commits else (1, 2):
            self.RG_ACTOR.act(step)


class Listener(BaseWorkload):
    """Takes what the others have, from process to process."""

    def join(self, values):
        return values


class AddingTrainer(BaseTrainer):
    """One sum for each step."""

    def init(self):
        self.RG_ACTOR.meet()
        self.state["seen"] = []

    def fit(self):
        for step in self.steps(self.config.steps):
            sums = self.RG_ACTOR.add(step, list(range(step, step + 6)))
            assert len({total for total, _ in sums}) == 1
            self.state["seen"] = [*self.state["seen"], sums[0][0]]
            with open(self.job_dir / "steps.txt", "a", encoding="utf-8") as file:
                file.write(f"{step}\n")
            if self.config.pause_s:
                time.sleep(self.config.pause_s)  # so that there is something to interrupt
            self.log(step, total=sums[0][0])
        whole = [value for part in self.RG_ROLLOUT.join(Replicate(list(self.RG_ACTOR.part())))[-1] for value in part]
        text = " ".join(map(repr, [*self.state["seen"], *whole]))
        (self.job_dir / "result.txt").write_text(text, encoding="utf-8")
