# SPDX-License-Identifier: Apache-2.0
"""The API of the cluster: ends of processes and actors, and commits in the memories of nodes."""

import asyncio
import os
import subprocess
import sys
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
from dlrover.python.rl.runtime.ray.cluster import api
from dlrover.python.rl.runtime.ray.cluster.api import ActorPlacement, RayClusterApi, forget_on_nodes, kill_and_wait
from tests.support.commands import wait_for

SLEEP = ["-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
ALIVE, DEAD = ActorTableData.ActorState.ALIVE, ActorTableData.ActorState.DEAD
EVERYWHERE = {"a": (), "b": (), "c": ()}


def start(name):
    """A process of this name, which the kernel shows a moment after it has begun."""
    process = subprocess.Popen([name, *SLEEP], executable=sys.executable)
    wait_for(Path(f"/proc/{process.pid}/cmdline").read_bytes)
    return process


def test_kill_and_wait_ends_ray_workers_and_no_reused_pid():
    worker, other = start("ray::Member"), start("other")
    try:
        kill_and_wait([worker.pid, other.pid, 0])
        assert worker.wait(timeout=5) == -9
        assert other.poll() is None
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


def test_actor_outside_groups_is_kept_off_excluded_nodes():
    excluding = ActorPlacement({"cpu": 1.0}, excluded=("a", "b")).to_ray()
    assert excluding["label_selector"] == {"ray.io/node-id": "!in(a,b)"}
    assert "label_selector" not in ActorPlacement({"cpu": 1.0}).to_ray()


class Handle:
    def __init__(self, *answers, state=ALIVE):
        self.state, self.pings, self.answers = state, 0, [None, *answers]
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


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(api, "_LOOK_S", 0.001)
    return RayClusterApi()


async def test_until_ended_pings_each_actor_once_until_it_ends(ends):
    unavailable, died = ActorUnavailableError("its connection broke", bytes(range(16))), ActorDiedError()
    first, second = Handle(unavailable, died), Handle(ActorDiedError())
    waiting = [asyncio.create_task(ends.until_ended(handle)) for handle in (first, second)]
    await asyncio.sleep(0.05)
    assert first.pings == second.pings == 1 and not waiting[0].done()
    first.state = DEAD
    assert await asyncio.wait_for(waiting[0], 5) is died
    assert not waiting[1].done()
    second.state = DEAD
    assert isinstance(await asyncio.wait_for(waiting[1], 5), ActorDiedError)
    await asyncio.sleep(0.01)  # all that were watched have ended
    assert isinstance(await asyncio.wait_for(ends.until_ended(Handle(ActorDiedError(), state=DEAD)), 5), ActorDiedError)


async def test_until_ended_fails_where_no_end_would_be_noticed(ends):
    with pytest.raises(RuntimeError, match="not connected"):
        await asyncio.wait_for(ends.until_ended(Handle(state=RuntimeError("Ray is not connected"))), 5)


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
        """The steps of the copies, and the nodes that still have commits in memory."""
        store = CheckpointStore(self.folder / "out/checkpoints/run1", "run1", durable=True)
        copies = [manifest.step for manifest in store.manifests() if store.valid(manifest)]
        assert not any("nodes" in manifest.extra for manifest in store.manifests()), "a copy needs no node"
        user = f"dlrover-rl-{os.geteuid()}"
        return copies, {node for node in "abc" if (self.folder / node / user / "job-run1").exists()}


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Each has a worker's state after step 8, node a the commit too, and all of the one before."""
    monkeypatch.setattr(api, "_RELEASED_S", 0.1)  # the locks are this process's own
    cluster, files = Nodes(tmp_path, monkeypatch), {}
    (tmp_path / "out/checkpoints").mkdir(parents=True)
    for rank, node in enumerate("bca"):
        memory = cluster.enter(node)
        memory.claim(1)
        file = memory.write(8, 1, f"ACTOR-{rank}.1.state", {"role": "ACTOR", "rank": rank, "step": 8}, {"rank": rank})
        files[f"ACTOR-{rank}"] = replace(file, node=node if node != "a" else "")
    before = memory.write(7, 1, "trainer.state", {"role": "trainer", "step": 7}, {})
    memory.commit(7, 1, {"trainer": before})
    files["trainer"] = memory.write(8, 1, "trainer.state", {"role": "trainer", "step": 8}, {})
    memory.commit(8, 1, files, extra={"nodes": {"ACTOR-0": ["b"]}})
    return cluster


@pytest.mark.parametrize(
    ("lost", "left", "message"),
    [
        ([], ([8], set()), None),
        ([("b", save_from_memory)], ([], {"a", "b", "c"}), "step 8 stays in the memory of its nodes"),
        (["b"], ([7], {"b"}), "step 8 is lost with the nodes that had parts of it"),
    ],
)
async def test_forget_on_nodes_saves_the_last_commit_first(nodes, caplog, lost, left, message):
    nodes.lost.update(lost)
    is_done = await forget_on_nodes(nodes, EVERYWHERE, "job", "run1")
    assert (bool(is_done), nodes.left()) == (len(left[1]) < 3, left)
    assert message is None or message in caplog.text


async def test_processes_of_a_node_end_before_its_commits_are_listed(nodes, monkeypatch):
    ended, known_in_memory = [], api.known_in_memory

    def list_commits(job, run):
        assert ended
        return known_in_memory(job, run)

    monkeypatch.setattr(api, "kill_and_wait", ended.append)
    monkeypatch.setattr(api, "known_in_memory", list_commits)
    await forget_on_nodes(nodes, {"a": (7,), "b": (8, 9)}, "job", "run1")
    assert ended == [(7,), (8, 9)]


async def test_forget_on_nodes_reads_no_copy_again(nodes, monkeypatch):
    nodes.lost = {(node, api._forget) for node in EVERYWHERE}
    await forget_on_nodes(nodes, EVERYWHERE, "job", "run1")
    assert nodes.left() == ([8], {"a", "b", "c"})
    nodes.lost = set()
    monkeypatch.setattr(state_file, "check_file", None)
    await forget_on_nodes(nodes, EVERYWHERE, "job", "run1")
    monkeypatch.undo()
    assert nodes.left() == ([8], set())
    assert nodes.limits["_forget"] == nodes.limits["save_from_memory"]
