# SPDX-License-Identifier: Apache-2.0
"""A tiny GRPO job on a cluster from which nodes go, and to which they come: a separate program, since the tests'
process is connected to another cluster. ``python nodes_stage.py SCENE FOLDER`` prints what it saw as JSON."""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.control.events import MemberStarted
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.master.job import check_job, run_on_ray
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_name
from dlrover.python.rl.runtime.ray.processes.actors import ask, find
from tests.chaos.job import tiny_job
from tests.ray.two_nodes import two_nodes

STEPS = 60
_DEADLINE_S = 150.0


class Play:
    """One run of the job: everything is on the head but the third rollout."""

    def __init__(self, folder, nodes, **role):
        job = tiny_job(folder, STEPS)
        rollout = replace(job.workloads["ROLLOUT"], **{"num": 3, "per_node": 2, **role})
        actor = replace(job.workloads["ACTOR"], resource={"cpu": 1.0, "node0": 0.01})
        self.job = replace(
            job,
            workloads={**job.workloads, "ACTOR": actor, "ROLLOUT": rollout},
            trainer=replace(job.trainer, node_number=2, device_per_node=4),
        )
        self.folder, self.nodes, self.step, self.sizes = folder, nodes, 0, []

    def run(self, act=lambda: None):
        """Run ``act`` during the job, in this thread, which starts nodes."""
        with ThreadPoolExecutor() as pool:
            job = pool.submit(lambda: run_on_ray(check_job(self.job), self.report, connected=True))
            act()
            status = job.result()
        return {
            "phase": status.phase.value,
            "reason": status.reason,
            "model": hashlib.sha256((self.folder / "out/model/model.safetensors").read_bytes()).hexdigest(),
            "sizes": self.sizes,
            "events": [type(event).__name__ for event in self.events()],
        }

    def report(self, report):
        self.step = report.step
        size = self.status().roles.get("ROLLOUT", 0)
        if not self.sizes or self.sizes[-1] != size:
            self.sizes.append(size)

    def status(self):
        return ask(find(f"{self.job.name}/master").status.remote, 60)

    def until(self, reached):
        deadline_s = time.monotonic() + _DEADLINE_S
        while not reached():
            assert time.monotonic() < deadline_s
            time.sleep(0.1)

    def events(self):
        return [event for _, event in decode(read_lines(self.folder / "out/journal.jsonl"))]

    def on(self, index):
        """Process ids of the workers on a node."""
        places = {
            (event.role, event.rank): event.process for event in self.events() if isinstance(event, MemberStarted)
        }
        return [process.pid for process in places.values() if process.node == self.nodes.node_id(index)]


def fewer(folder, nodes):
    """The second node is lost, and not replaced for a while."""
    play = Play(folder, nodes, min=1)

    def act():
        play.until(lambda: play.step >= 5)
        nodes.kill_node(1)
        play.until(lambda: len(play.sizes) > 1)
        nodes.add_node()

    return play.run(act)


def told(folder, nodes):
    """A worker on the second node is told that the node will go, and a third one is there."""
    play = Play(folder, nodes)
    seen = {}

    def act():
        play.until(lambda: play.step >= 5)
        nodes.add_node()
        seen["before"] = len(play.on(1))
        os.kill(play.on(1)[0], signal.SIGTERM)
        play.until(lambda: play.on(2))
        seen["after"] = [len(play.on(index)) for index in (1, 2)]

    return {**play.run(act), **seen}


def undisturbed(folder, nodes):
    return Play(folder, nodes).run()


class Apart(Play):
    """Three nodes, each with its own memory; nothing but the head's own is on the head. Each has a rollout."""

    def __init__(self, folder, nodes):
        super().__init__(folder, nodes, per_node=1)
        actor = replace(self.job.workloads["ACTOR"], resource={"cpu": 1.0})
        checkpoint = replace(self.job.checkpoint, every=20)
        self.job = replace(
            self.job,
            workloads={**self.job.workloads, "ACTOR": actor},
            trainer=replace(self.job.trainer, node_number=3),
            checkpoint=checkpoint,
        )
        self.steps = []

    def report(self, report):
        super().report(report)
        self.steps.append(report.step)

    def lose(self, count):
        """The node of the actor, and the next ones; with their memories."""
        self.until(lambda: self.step >= 25)
        indices = [index for index in range(1, len(self.nodes.nodes)) if self.on(index)]
        ring = sorted(indices, key=lambda index: name_of(memory_of(self.folder, index)))
        (actors,) = [event for event in self.events() if isinstance(event, MemberStarted) and event.role == "ACTOR"]
        at = [self.nodes.node_id(index) for index in ring].index(actors.process.node)
        lost = [ring[(at + number) % len(ring)] for number in range(count)]
        for index in lost:
            self.nodes.kill_node(index)
            shutil.rmtree(memory_of(self.folder, index))
        for _ in lost:
            self.nodes.add_node()

    def run_without(self, count):
        seen = self.run(lambda: self.lose(count) if count else None)
        log = (self.folder / "out/logs/trainer.log").read_text()
        return {**seen, "steps": self.steps, "log": log}


def memory_of(folder, index):
    return folder / f"memory{index}"


def name_of(memory):
    """Return the node's name among workers there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLROVER_RL_MEMORY", str(memory))
        return memory_name()


def apart(folder, nodes):
    return Apart(folder, nodes).run_without(0)


def apart_without_one(folder, nodes):
    return Apart(folder, nodes).run_without(1)


def apart_without_two_neighbours(folder, nodes):
    return Apart(folder, nodes).run_without(2)


if __name__ == "__main__":
    scene, where = globals()[sys.argv[1]], Path(sys.argv[2])
    options = {"workers": 1, "head_cpus": 4}
    if sys.argv[1].startswith("apart"):
        options = {
            "workers": 3,
            "head_cpus": 0,
            "environment": lambda index: {"DLROVER_RL_MEMORY": str(memory_of(where, index))},
        }
    with two_nodes(cpus=4, **options) as cluster:
        sys.stdout.write(json.dumps(scene(where, cluster)) + "\n")
