# SPDX-License-Identifier: Apache-2.0
"""A job that runs for as long as a file tells it to, for tests of the service."""

import time
from pathlib import Path

from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload


class Adder(BaseWorkload):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.total = 0

    def add(self, step):
        self.total += step
        return self.total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class PacedTrainer(BaseTrainer):
    """Notes its start, then takes ``config.steps`` steps of ``config.step_s`` seconds; hangs while there is a file that
    has the notes' name and ``.hang``."""

    def init(self):
        with open(Path(self.config.notes), "a") as notes:
            notes.write("started\n")

    def fit(self):
        for step in self.steps(self.config.steps):
            time.sleep(self.config.step_s)
            while Path(f"{self.config.notes}.hang").exists():
                time.sleep(0.05)
            self.log(step, reward=float(self.RG_ACTOR.add(step)[0]))


def job_text(notes, steps=5, step_s=0.05):
    return f"""
trainer: {{module: tests.ray.service_jobs, class: PacedTrainer, device_type: CPU, device_per_node: 2}}
workload:
  actor: {{module: tests.ray.service_jobs, class: Adder}}
config: {{notes: {notes}, steps: {steps}, step_s: {step_s}}}
"""
