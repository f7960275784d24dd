# SPDX-License-Identifier: Apache-2.0
"""The API of the cluster: ends of processes and actors, and commits in the memories of nodes."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import ActorDiedError, ActorUnavailableError

from dlrover.python.rl.runtime.checkpoint import state_file
from dlrover.python.rl.runtime.checkpoint.node_memory import save_from_memory
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore
from dlrover.python.rl.runtime.ray.cluster import api as module
from dlrover.python.rl.runtime.ray.cluster import api as node_commits
from dlrover.python.rl.runtime.ray.cluster.api import ActorPlacement, RayClusterApi, forget_on_nodes, kill_and_wait

SLEEP = ["-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def start(name):
    """A process of this name, which the kernel shows a moment after it has begun."""
    process = subprocess.Popen([name, *SLEEP], executable=sys.executable)
    deadline_s = time.monotonic() + 10
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return process


def test_ray_workers_are_dead_afterwards_and_a_reused_pid_is_left_alone():
    worker, other = start("ray::Member"), start("other")
    try:
        kill_and_wait([worker.pid, other.pid, 0])
        assert worker.wait(timeout=5) == -9
        assert other.poll() is None
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


def test_an_actor_outside_groups_is_kept_off_excluded_nodes():
    assert ActorPlacement({"cpu": 1.0}, excluded=("a", "b")).to_ray()["label_selector"] == {
        "ray.io/node-id": "!in(a,b)"
    }
    assert "label_selector" not in ActorPlacement({"cpu": 1.0}).to_ray()


ALIVE, DEAD = ActorTableData.ActorState.ALIVE, ActorTableData.ActorState.DEAD
ID = bytes(range(16))


class Handle:
    def __init__(self, *answers):
        self.state, self.pings, self.answers = ALIVE, 0, [None, *answers]
        self.dlrover_ping = SimpleNamespace(remote=self._ping)

    def _ping(self):
        self.pings += 1
        answered = asyncio.get_running_loop().create_future()
        answer = self.answers.pop(0)
        answered.set_result(True) if answer is None else answered.set_exception(answer)
        return answered

    def _get_local_state(self):
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.001)


def test_a_living_actor_is_asked_once():
    async def run():
        handle = Handle()
        waiting = asyncio.create_task(RayClusterApi().until_ended(handle))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert handle.pings == 1
        waiting.cancel()

    asyncio.run(run())


def test_each_learns_of_its_own_end_and_why():
    async def run():
        ends = RayClusterApi()
        broken, dead = ActorUnavailableError("its connection broke", ID), ActorDiedError()
        first, second = Handle(broken, dead), Handle(ActorDiedError())
        waiting = [asyncio.create_task(ends.until_ended(handle)) for handle in (first, second)]
        await asyncio.sleep(0.01)
        first.state = DEAD
        assert await asyncio.wait_for(waiting[0], 5) is dead
        assert not waiting[1].done()
        second.state = DEAD
        assert isinstance(await asyncio.wait_for(waiting[1], 5), ActorDiedError)

    asyncio.run(run())


def test_one_that_is_watched_after_all_others_have_ended_is_looked_at_too():
    async def run():
        ends = RayClusterApi()
        for _ in range(2):
            handle = Handle(ActorDiedError())
            handle.state = DEAD
            await asyncio.wait_for(ends.until_ended(handle), 5)
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_those_who_wait_hear_that_no_end_would_be_noticed():
    async def run():
        handle = Handle()
        handle.state = RuntimeError("Ray is not connected")
        with pytest.raises(RuntimeError, match="not connected"):
            await asyncio.wait_for(RayClusterApi().until_ended(handle), 5)

    asyncio.run(run())


class Nodes:
    """Calls a function on a node as there: with the memory of that node."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch, self.lost, self.limits = folder, monkeypatch, set(), {}

    def enter(self, node):
        self.monkeypatch.setenv("DLROVER_RL_MEMORY", str(self.folder / node))
        return Roots("job", "run1", 1, self.folder / "out/checkpoints/run1").commit_store("")

    async def run_on(self, node, function, *arguments, limit_s=None):
        await asyncio.sleep(0)
        self.limits[function.__name__] = limit_s
        if node in self.lost or (node, function) in self.lost:
            return None
        self.enter(node)
        return function(*arguments)

    def left(self):
        return {node for node in "abc" if (self.folder / node / f"dlrover-rl-{os.geteuid()}" / "job-run1").exists()}


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Each has a worker's state after step 8, node a the commit too, and all of the one before."""
    monkeypatch.setattr(node_commits, "_RELEASED_S", 0.1)  # the locks are this process's own
    made, files = Nodes(tmp_path, monkeypatch), {}
    (tmp_path / "out/checkpoints").mkdir(parents=True)
    for rank, node in enumerate("bca"):
        memory = made.enter(node)
        memory.claim(1)
        file = memory.write(8, 1, f"ACTOR-{rank}.1.state", {"role": "ACTOR", "rank": rank, "step": 8}, {"rank": rank})
        files[f"ACTOR-{rank}"] = replace(file, node=node if node != "a" else "")
    before = memory.write(7, 1, "trainer.state", {"role": "trainer", "step": 7}, {})
    memory.commit(7, 1, {"trainer": before})
    files["trainer"] = memory.write(8, 1, "trainer.state", {"role": "trainer", "step": 8}, {})
    memory.commit(8, 1, files)
    return made


def copies_in(nodes):
    store = CheckpointStore(nodes.folder / "out/checkpoints/run1", "run1", durable=True)
    return [manifest.step for manifest in store.manifests() if store.valid(manifest)]


def test_its_last_commit_is_saved_by_all_of_them_together_and_nothing_is_left(nodes):
    asyncio.run(forget_on_nodes(nodes, {"a": (), "b": (), "c": ()}, "job", "run1"))
    assert (copies_in(nodes), nodes.left()) == ([8], set())


def test_processes_of_a_node_end_before_its_commits_are_listed(nodes, monkeypatch):
    ended, known_in_memory = [], node_commits.known_in_memory

    def list_commits(job, run):
        assert ended
        return known_in_memory(job, run)

    monkeypatch.setattr(node_commits, "kill_and_wait", ended.append)
    monkeypatch.setattr(node_commits, "known_in_memory", list_commits)
    asyncio.run(forget_on_nodes(nodes, {"a": (7,), "b": (8, 9)}, "job", "run1"))
    assert ended == [(7,), (8, 9)]


def test_what_a_node_cannot_save_stays_and_is_said(nodes, caplog):
    nodes.lost.add(("b", save_from_memory))
    assert not asyncio.run(forget_on_nodes(nodes, {"a": (), "b": (), "c": ()}, "job", "run1"))
    assert (copies_in(nodes), nodes.left()) == ([], {"a", "b", "c"})
    assert "step 8 stays in the memory of its nodes" in caplog.text


def test_of_what_a_lost_node_had_part_of_an_older_commit_is_saved(nodes, caplog):
    nodes.lost.add("b")
    assert asyncio.run(forget_on_nodes(nodes, {"a": (), "b": (), "c": ()}, "job", "run1"))
    assert (copies_in(nodes), nodes.left()) == ([7], {"b"})
    assert "step 8 is lost with the nodes that had parts of it" in caplog.text


def test_a_copy_that_is_there_is_not_read_again_and_removing_has_as_long_as_saving(nodes, monkeypatch):
    everywhere = {"a": (), "b": (), "c": ()}
    nodes.lost = {(node, node_commits._forget) for node in everywhere}
    asyncio.run(forget_on_nodes(nodes, everywhere, "job", "run1"))
    assert (copies_in(nodes), nodes.left()) == ([8], {"a", "b", "c"})
    nodes.lost = set()
    monkeypatch.setattr(state_file, "check_file", None)
    asyncio.run(forget_on_nodes(nodes, everywhere, "job", "run1"))
    assert nodes.left() == set()
    assert nodes.limits["_forget"] == nodes.limits["save_from_memory"]
