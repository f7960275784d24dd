# SPDX-License-Identifier: Apache-2.0
"""A toy job that waits at a step for its test, run by the command line in a separate process."""

import json
import os

from tests.support import commands
from tests.support.commands import wait_for
from tests.support.toy_job import toy_text


class Desk(commands.Desk):
    """A working directory with the job."""

    def __init__(self, folder):
        super().__init__(folder)
        settings = {"steps": 6, "step_s": 0.0, "hold": 0, "name": "held"}
        # A commit in each step, since it is resumed with other settings.
        (folder / "job.yaml").write_text(toy_text(folder / "notes", checkpoint={"commit_every": 1}, **settings))

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
        assert all(total == step * (step + 1) / 2 for step, total in rows), rows
        return [step for step, _ in rows]

    def owner(self, name):
        (record,) = (self.folder / name).glob("owner.*.json")
        return json.loads(record.read_text())
