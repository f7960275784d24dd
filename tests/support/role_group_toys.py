# SPDX-License-Identifier: Apache-2.0
"""Workloads that the contract suite calls, on every runtime."""

import os
import signal
import sys
import threading
import time

import numpy as np

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation


class StageTrainer(BaseTrainer):
    """A trainer that the test drives by hand."""

    def init(self):
        pass

    def fit(self):
        pass


class OddError(ValueError):
    """A user's own exception."""


class Toy(BaseWorkload):
    """Answers with what it was given, and counts its calls."""

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.calls = 0
        self.kept = None

    def who(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE")
        seen = {name: os.environ.get(name) for name in names}
        properties = (self.rank, self.world_size, self.word_size, self.local_rank, self.local_world_size)
        return {"env": seen, "properties": properties, "role": str(self.role), "name": self.name, "pid": os.getpid()}

    def address(self):
        return self.torch_master_addr, self.torch_master_port, self.get_device_collocation(), dict(self.config)

    def echo(self, *args, **kwargs):
        self.calls += 1
        return (args, kwargs) if kwargs else args[0] if len(args) == 1 else args

    def call_count(self):
        return self.calls

    async def slowly(self, value):
        return value * 2

    @trainer_invocation(blocking=False)
    def later(self, value):
        return value

    @trainer_invocation(blocking=False)
    def rows(self, count):
        start = 100 * self.rank
        return Batch({"x": np.arange(start, start + count), "text": [f"{self.rank}.{row}" for row in range(count)]})

    @trainer_invocation(blocking=False)
    def late_boom(self):
        raise OddError(f"from rank {self.rank}")

    @trainer_invocation(is_async=True, timeout=0.5)
    def sleepy(self, slow_ranks):
        if self.rank in slow_ranks:
            time.sleep(1.0)
        return self.rank

    @trainer_invocation(target="RANK0")
    def first(self, value):
        return self.rank, value

    @trainer_invocation(auto_shard=False)
    def whole(self, value):
        return value

    @trainer_invocation(pre_func=lambda x: x + 1, post_func=sum)
    def prepared(self, value):
        return value * 10

    @trainer_invocation(pre_func=lambda a, b: (b, a))
    def swapped(self, first, second):
        return first, second

    @trainer_invocation(blocking=False, post_func=len)
    def counted_later(self, value):
        return value

    def boom(self, bad_rank):
        if self.rank == bad_rank:
            raise OddError("the user's own words")
        return self.rank

    def lock(self):
        return threading.Lock()

    def leave(self):
        sys.exit(3)

    def die(self, bad_rank):
        if self.rank == bad_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5.0)
        return self.rank

    def keep(self, value):
        self.kept = value
        return int(np.sum(value))

    def mutate(self, values):
        values.append("changed by the worker")
        return len(values)


class Pairs(Toy):
    """Two consecutive ranks form one model replica."""

    @classmethod
    def data_parallel_size(cls, config, world_size):
        return world_size // 2
