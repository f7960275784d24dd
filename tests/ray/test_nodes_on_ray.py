# SPDX-License-Identifier: Apache-2.0
"""Nodes that go and come under a tiny GRPO job: fewer rollouts for a time, the same bits in the end.

Each scene is a separate program, since the tests' process is connected to another cluster: this file, called with the
names of a scene and a folder, prints its observations as JSON.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
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
from tests.support.commands import run_python, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 60


class Play:
    """One run of the job: everything is on the head but the third rollout."""

    def __init__(self, folder, nodes, **role):
        job = tiny_job(folder, STEPS)
        rollout = replace(job.workloads["ROLLOUT"], **{"num": 3, "per_node": 2, **role})
        actor = replace(job.workloads["ACTOR"], resource={"cpu": 1.0, "node0": 0.01})
        workloads = {**job.workloads, "ACTOR": actor, "ROLLOUT": rollout}
        self.job = replace(job, workloads=workloads, trainer=replace(job.trainer, node_number=2, device_per_node=4))
        self.folder, self.nodes, self.step, self.sizes = folder, nodes, 0, []

    def run(self, act=lambda: None):
        """Run ``act`` during the job, in this thread, which starts nodes."""
        with ThreadPoolExecutor() as pool:
            job = pool.submit(lambda: run_on_ray(check_job(self.job), self.report, connected=True))
            act()
            status = job.result()
        assert status.phase.value == "finished", status.reason
        model = hashlib.sha256((self.folder / "out/model/model.safetensors").read_bytes()).hexdigest()
        events = [type(event).__name__ for event in self.events()]
        return {"model": model, "sizes": self.sizes, "events": events}

    def report(self, report):
        self.step = report.step
        size = ask(find(f"{self.job.name}/master").status.remote, 60).roles.get("ROLLOUT", 0)
        if not self.sizes or self.sizes[-1] != size:
            self.sizes.append(size)

    def events(self):
        return [event for _, event in decode(read_lines(self.folder / "out/journal.jsonl"))]

    def on(self, index):
        """Process ids of the workers on a node."""
        started = [event for event in self.events() if isinstance(event, MemberStarted)]
        places = {(event.role, event.rank): event.process for event in started}
        return [process.pid for process in places.values() if process.node == self.nodes.node_id(index)]


def fewer(folder, nodes):
    """The second node is lost, and not replaced for a while."""
    play = Play(folder, nodes, min=1)

    def act():
        wait_for(lambda: play.step >= 5)
        nodes.kill_node(1)
        wait_for(lambda: len(play.sizes) > 1)
        nodes.add_node()

    return play.run(act)


def warned(folder, nodes):
    """A worker on the second node is warned of the node's end, and a third one joins."""
    play = Play(folder, nodes)
    seen = {}

    def act():
        wait_for(lambda: play.step >= 5)
        nodes.add_node()
        seen["before"] = len(play.on(1))
        os.kill(play.on(1)[0], signal.SIGTERM)
        wait_for(lambda: play.on(2))
        seen["after"] = [len(play.on(index)) for index in (1, 2)]

    return {**play.run(act), **seen}


class Apart(Play):
    """Three nodes, each with its own memory; nothing but the head's own is on the head. Each has a rollout."""

    def __init__(self, folder, nodes):
        super().__init__(folder, nodes, per_node=1)
        workloads = {**self.job.workloads, "ACTOR": replace(self.job.workloads["ACTOR"], resource={"cpu": 1.0})}
        trainer, checkpoint = replace(self.job.trainer, node_number=3), replace(self.job.checkpoint, every=20)
        self.job, self.steps = replace(self.job, workloads=workloads, trainer=trainer, checkpoint=checkpoint), []

    def report(self, report):
        super().report(report)
        self.steps.append(report.step)

    def lose(self, count):
        """The node of the actor, and the next ones; with their memories."""
        wait_for(lambda: self.step >= 25)
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


SCENES = {
    "fewer": fewer,
    "warned": warned,
    "undisturbed": lambda folder, nodes: Play(folder, nodes).run(),
    **{f"apart-{lost}": lambda folder, nodes, lost=lost: Apart(folder, nodes).run_without(lost) for lost in (0, 1, 2)},
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Return the observations of a scene of this module."""

    def play(name):
        folder = tmp_path_factory.mktemp(name)
        lines = run_python(folder, __file__, name, folder, within_s=350).stdout.splitlines()
        return json.loads(next(line for line in lines if line.startswith("{")))  # Ray writes there, too

    return play


@pytest.fixture(scope="module")
def expected(scene):
    return scene("undisturbed")["model"]


def test_rollouts_shrink_and_grow_with_the_nodes(scene, expected):
    seen = scene("fewer")
    assert seen["sizes"] == [3, 2, 3]
    assert "Unplaced" in seen["events"] and "Resized" in seen["events"] and "Failed" not in seen["events"]
    assert seen["model"] == expected


def test_node_announcing_its_end_is_left_without_charge(scene, expected):
    seen = scene("warned")
    assert (seen["before"], seen["after"]) == (1, [0, 1])
    assert "NodeLost" in seen["events"] and "Failed" not in seen["events"]
    assert seen["model"] == expected


@pytest.fixture(scope="module")
def expected_apart(scene):
    return scene("apart-0")["model"]


def test_node_lost_with_its_memory_costs_no_committed_step(scene, expected_apart):
    seen = scene("apart-1")
    assert seen["model"] == expected_apart
    assert seen["steps"] == sorted(seen["steps"]), "none but the open step, which was reported, was done again"
    assert "continuing from the copy of that step" not in seen["log"]


def test_two_lost_neighbours_cost_the_steps_since_the_last_copy(scene, expected_apart):
    seen = scene("apart-2")
    assert seen["model"] == expected_apart
    assert "no commit after step 20 is left: continuing from the copy of that step" in seen["log"]


if __name__ == "__main__":
    name, where = sys.argv[1], Path(sys.argv[2])
    options = {"workers": 1, "head_cpus": 4}
    if name.startswith("apart"):
        memories = {"environment": lambda index: {"DLROVER_RL_MEMORY": str(memory_of(where, index))}}
        options = {"workers": 3, "head_cpus": 0, **memories}
    with two_nodes(cpus=4, **options) as cluster:
        sys.stdout.write(json.dumps(SCENES[name](where, cluster)) + "\n")
