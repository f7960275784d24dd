# SPDX-License-Identifier: Apache-2.0
"""A job that waits at a step for its test, run by the command line in a separate process."""

import json
import os

from tests.support import commands
from tests.support.commands import wait_for

TEXT = """
name: held
trainer: {module: held_job_classes, class: Held, device_type: CPU, device_per_node: 2}
workload: {actor: {module: held_job_classes, class: Counter}}
checkpoint: {commit_every: 1}  # it is resumed with other settings
config: {steps: 6, hold: 0}
"""

CLASSES = """
import json

from dlrover.rl import BaseTrainer, BaseWorkload, trainer_invocation


class Counter(BaseWorkload):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.total = 0

    @trainer_invocation()
    def add(self, number):
        self.total += number
        return self.total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class Held(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        for step in self.steps(self.config.steps):
            if step == self.config.hold:
                (self.job_dir / "waiting").touch()
                with open(self.job_dir.parent / f"{self.job_dir.name}.gate") as gate:
                    gate.read()
            (total,) = self.RG_ACTOR.add(step)
            self.log(step, {"total": total})
            with (self.job_dir / "steps.jsonl").open("a") as file:
                file.write(json.dumps([step, total]) + "\\n")
"""


class Desk(commands.Desk):
    """A working directory with the job."""

    def __init__(self, folder):
        super().__init__(folder)
        (folder / "job.yaml").write_text(TEXT)
        (folder / "held_job_classes.py").write_text(CLASSES)

    def end(self, process):
        """Wait until a process has ended, and return what it said."""
        process.wait(120)
        return process.said()

    def held(self, name, *arguments, step=4):
        """Start a run in the folder ``name`` that waits before ``step``, and return once it waits."""
        os.mkfifo(self.folder / f"{name}.gate")
        process = self.start("run", "job.yaml", f"job_dir={name}", f"hold={step}", *arguments)
        wait_for(lambda: (self.folder / name / "waiting").exists() or process.poll() is not None)
        assert process.poll() is None, self.end(process)
        return process

    def release(self, name):
        with open(self.folder / f"{name}.gate", "w"):
            pass

    def steps(self, name):
        """The steps that were run in a folder, in order; the totals must equal an undisturbed run's."""
        file = self.folder / name / "steps.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        assert all(total == step * (step + 1) // 2 for step, total in rows), rows
        return [step for step, _ in rows]

    def owner(self, name):
        (record,) = (self.folder / name).glob("owner.*.json")
        return json.loads(record.read_text())
