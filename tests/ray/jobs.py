# SPDX-License-Identifier: Apache-2.0
"""Trainers and workloads of whole jobs under a real master."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import InvocationTimeout
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation


class OwnError(Exception):
    pass


class Worker(BaseWorkload):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        if config.get("broken_rank", -1) == self.rank:
            raise ValueError("the constructor does not like this rank")

    def work(self, value):
        return value + 1

    def boom(self):
        raise KeyError("the user's own mistake")

    def die_once(self, folder):
        """Rank 1 kills itself, the first time."""
        mark = Path(folder) / "died"
        if self.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rank

    def die_always(self):
        os._exit(7)

    def leave(self):
        sys.exit(5)

    @trainer_invocation(blocking=False)
    def later(self, value):
        time.sleep(0.2)
        return value + self.rank

    @trainer_invocation(blocking=False)
    def die_later(self, folder):
        self.die_once(folder)
        return self.rank

    @trainer_invocation(is_async=True, timeout=1.0)
    def get_stuck(self, rank):
        time.sleep(600 if rank == self.rank else 0)

    def own_exception(self):
        raise OwnError("of a module that only the job's processes can import")

    def doze(self):
        time.sleep(60)

    def master_status(self):
        import ray

        return str(ray.get(self.master_handle.status.remote(), timeout=10).phase)


class Trainer(BaseTrainer):
    """Counts its runs in a file, then does what ``config.act`` says."""

    def init(self):
        with open(Path(self.config.folder) / "count", "a") as runs:
            runs.write("run\n")

    def fit(self):
        getattr(self, self.config.act)()

    def steps_only(self):
        for step in self.steps(3):
            self.log(step, reward=float(sum(self.RG_ACTOR.work(step))))

    def user_error(self):
        self.RG_ACTOR.boom()

    def rays_own_functions(self):
        import ray

        refs = self.RG_ACTOR.later(1)
        assert ray.get(list(refs)) == ray.get(refs) == refs.result() == [1, 2]
        done, pending = ray.wait(self.RG_ACTOR.later(3), num_returns=2)
        assert [ref.result() for ref in done] == [3, 4] and not pending

        async def gathered():
            return [await ref for ref in self.RG_ACTOR.later(5)]

        assert asyncio.run(gathered()) == [5, 6]
        assert ray.get(self.actors[1].work.remote(refs[0])) == 2
        assert self.RG_ACTOR.work(self.RG_ACTOR.later(7)) == [8, 9]
        assert len(repr(refs)) < 100 and len(repr(refs[0])) < 100
        self.steps_only()

    def loses_what_it_gets(self):
        import ray

        for step in self.steps(3):
            self.log(step, reward=float(sum(ray.get(list(self.RG_ACTOR.die_later(self.config.folder))))))

    def replaces_the_late(self):
        for step in self.steps(2):
            with pytest.raises(InvocationTimeout) as late:
                self.RG_ACTOR.get_stuck(step % 2)
            self.replace_late(late.value)
            self.log(step, reward=float(sum(self.RG_ACTOR.work(step))))

    def own_error(self):
        raise RuntimeError("the trainer's own mistake")

    def death(self):
        self.RG_ACTOR.die_once(self.config.folder)
        self.steps_only()

    def swallowed_death(self):
        try:
            self.RG_ACTOR.die_once(self.config.folder)
        except Exception as error:
            raise RuntimeError("something went wrong") from error
        self.steps_only()

    def leave(self):
        self.RG_ACTOR.leave()

    def leave_trainer(self):
        sys.exit(6)

    def own_exception(self):
        self.RG_ACTOR.own_exception()

    def busy(self):
        self.log(1, reward=0.0)
        self.RG_ACTOR.doze()

    def deaths(self):
        self.RG_ACTOR.die_always()

    def trainer_death(self):
        mark = Path(self.config.folder) / "died"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps_only()

    def ask_and_step(self):
        assert set(self.RG_ACTOR.master_status()) == {"running"}
        self.steps_only()

    def endless(self):
        for step in self.steps(100_000):
            self.log(step, reward=0.0)
            time.sleep(0.1)
