# SPDX-License-Identifier: Apache-2.0
"""A job on Ray whose config names one fault: ``kind role rank seconds``; the trainer notes how long each step takes."""

import json
import os
import signal
import time
from pathlib import Path

from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload

STEPS, FAULT_STEP = 9, 5
CALL_S, HANG_AFTER_S = {"ROLLOUT": 0.25, "ACTOR": 0.2}, 3.0


def describe(name, folder, fault):
    builder = JobBuilder().device_type("CPU").device_per_node(8).trainer("tests.support.slowed_job", "Loop")
    builder.config({"fault": fault, "folder": str(folder)})
    builder.actor("tests.support.slowed_job", "Rank").total(2).hang_after(HANG_AFTER_S)
    builder.rollout("tests.support.slowed_job", "Sampler").total(3).hang_after(HANG_AFTER_S)
    builder.restart_limits(job_max_restart=5, backoff_s=0.1)
    return builder.spec(name, (str(Path(__file__).parents[2]),))


class Sampler(BaseWorkload):
    def work(self, step):
        kind, role, rank, seconds = self.config.fault.split()
        mark = Path(self.config.folder, "struck")
        if (role, int(rank)) != (self.role, self.rank) or step < FAULT_STEP:
            return time.sleep(CALL_S[self.role])
        if kind == "slow":
            return time.sleep(CALL_S[self.role] + float(seconds))
        if kind == "none" or mark.exists():
            return time.sleep(CALL_S[self.role])
        mark.touch()
        time.sleep(3600 if kind == "hang" else 0.1)
        return os.kill(os.getpid(), signal.SIGKILL)


class Rank(Sampler):
    """An actor whose ranks restart together."""

    needs_own_process = True

    def state_dict(self):
        return {"rank": self.rank}

    def load_state_dict(self, state):
        assert state == {"rank": self.rank}


class Loop(BaseTrainer):
    def init(self):
        self.times = {}

    def fit(self):
        for step in self.steps(STEPS):
            began_s = time.monotonic()
            self.RG_ROLLOUT.work(step)
            self.RG_ACTOR.work(step)
            self.times[step] = time.monotonic() - began_s
            self.log(step, loss=0.0)
        Path(self.config.folder, "times").write_text(json.dumps(self.times))
