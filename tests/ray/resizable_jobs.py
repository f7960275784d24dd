# SPDX-License-Identifier: Apache-2.0
"""A job whose rollouts tell how many they are, and whose committed steps can be counted."""

import json
import time
from pathlib import Path

from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation


class Counter(BaseWorkload):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.steps = []

    def add(self, step, sizes):
        self.steps.append([step, sizes])
        return self.steps

    def state_dict(self):
        return {"steps": json.dumps(self.steps)}

    def load_state_dict(self, state):
        self.steps = json.loads(state["steps"])


class Echo(BaseWorkload):
    @trainer_invocation(auto_shard=False)
    def size(self, step):
        return [self.rank, self.world_size]


class CountingTrainer(BaseTrainer):
    """Writes what the actor has counted when it ends; ends when it has done ``config.steps`` steps."""

    def init(self):
        pass

    def fit(self):
        seen = []
        for step in self.steps(self.config.steps):
            time.sleep(self.config.step_s)
            sizes = self.RG_ROLLOUT.size(step)
            (seen,) = self.RG_ACTOR.add(step, sizes)
            self.log(step, rollouts=float(len(sizes)))
        (Path(self.config.folder) / "seen.json").write_text(json.dumps(seen))


JOB = """
trainer: {module: tests.ray.resizable_jobs, class: CountingTrainer, device_type: CPU, device_per_node: 4}
workload:
  actor: {module: tests.ray.resizable_jobs, class: Counter}
  rollout: {module: tests.ray.resizable_jobs, class: Echo, num: 2}
  reward: {module: tests.ray.resizable_jobs, class: Echo}
config: {folder: FOLDER, steps: 150, step_s: 0.1}
"""
