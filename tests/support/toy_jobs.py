# SPDX-License-Identifier: Apache-2.0
"""Toy trainers and workloads for jobs that run in one process."""

import os
import sys

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.trainer.plan import TrainerPlan
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation

CLOSED = []
"""Names of the workloads closed, in order; a test that looks clears it first."""


class Loop(BaseTrainer):
    """Adds numbers for ``config.steps`` steps."""

    def init(self):
        self.job_was_ready = self.job_dir.is_dir()

    def fit(self):
        assert self.job_was_ready
        for step in self.steps(self.config.get("steps", 2)):
            self.log(step, loss=sum(self.RG_ACTOR.add(step)))


class NoFit(BaseTrainer):
    def init(self):
        pass


class DataFault(Loop):
    def fit(self):
        raise DataError("row 3 is empty")


class FailingInit(Loop):
    def init(self):
        raise ValueError("the user's own words\nin two lines")


class ExitingFit(Loop):
    def fit(self):
        sys.exit(0)


class InterruptedFit(Loop):
    def fit(self):
        self.log(1)
        raise KeyboardInterrupt


def calling(call):
    """A loop that makes no steps but one call of its actors."""
    return type("Calling", (Loop,), {"fit": call})


CallsFail = calling(lambda self: self.RG_ACTOR.fail(bad_rank=1))
LeavesCalls = calling(lambda self: self.RG_ACTOR.fail.options(blocking=False)(bad_rank=1))
CallsWrongly = calling(lambda self: self.RG_ACTOR.add(1, 2, 3))
CallsExit = calling(lambda self: self.RG_ACTOR.leave())
Stopper = calling(lambda self: self.RG_ACTOR.stop_here())


class LosesMember(Loop):
    """A worker is lost outside of durable steps, in the first incarnation or several."""

    times = 1

    def fit(self):
        if self.restart_info.count < self.times:
            self.actors[0].port.kill("ACTOR", 1)
        self.RG_ACTOR.add(1)


class LosesMemberInAStep(Loop):
    """Both workers of a role are lost, one after the other, inside durable steps."""

    def fit(self):
        for step in self.steps(3):
            if step > 1:
                self.actors[0].port.kill("ACTOR", step - 2)
            self.log(step, loss=sum(self.RG_ACTOR.add(step)))


class AlwaysLosesMember(LosesMember):
    times = 10


class Picky(Loop):
    @classmethod
    def check_config(cls, config, roles):
        if config.get("steps", 1) < 1:
            yield ConfigError("config.steps", "is below 1")
        if roles["ACTOR"] > 3:
            yield ConfigError("workload.actor.num", f"{roles['ACTOR']} is more than 3")
        if config.get("broken"):
            raise RuntimeError("the check itself broke")


class Plan(TrainerPlan):
    def check_config(self, config, roles):
        if not config["steps"]:
            yield ConfigError("config.steps", f"is 0, says the plan of {self.trainer.__name__}")

    def complete_config(self, config, devices):
        return {**config, "unit": 7}

    def describe_config(self, config, roles):
        return [f"{config['steps']} step"]


class Planned(Loop):
    plan = Plan


class Adder(BaseWorkload):
    """Keeps a sum."""

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.total = 0

    def add(self, number):
        self.total += number
        return self.total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]

    def who(self):
        return self.name, self.rank, os.environ["RANK"], os.environ.get("FROM_JOB"), self.get_device_collocation()

    def fail(self, bad_rank):
        if self.rank == bad_rank:
            raise ValueError("the user's own words")

    def leave(self):
        sys.exit(3)

    def stop_here(self):
        breakpoint()

    @trainer_invocation(blocking=False)
    def change(self, values):
        values["list"].append("changed")
        return values["list"]

    def close(self):
        CLOSED.append(self.name)


class FailingClose(Adder):
    def close(self):
        super().close()
        raise RuntimeError("cannot close")


class FailingStart(Adder):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        if self.rank == 1:
            raise ValueError("no such model")


class ExitingStart(Adder):
    def __init__(self, master_handle, config):
        sys.exit("gone")


class Collective(Adder):
    needs_own_process = True


NOT_A_CLASS = 3


def toy_job(path, trainer="Loop", actor="Adder", members=2, **config):
    """A job of toys that writes to ``path``."""
    builder = JobBuilder().device_type("CPU").device_per_node(8).config(config).global_env({"FROM_JOB": "yes"})
    builder.trainer("tests.support.toy_jobs", trainer).actor("tests.support.toy_jobs", actor).total(members)
    builder.reward("tests.support.toy_jobs", "Adder").total(members).with_collocation("actor", "reward")
    job = builder.spec("toy")
    object.__setattr__(job, "job_dir", path)
    return job
