# SPDX-License-Identifier: Apache-2.0
"""The end of a run whose commits are in the memories of three nodes."""

import asyncio
import os
from dataclasses import replace

import pytest

from dlrover.python.rl.runtime.checkpoint import state_file
from dlrover.python.rl.runtime.checkpoint.node_memory import save_from_memory
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore
from dlrover.python.rl.runtime.ray.cluster import api as node_commits
from dlrover.python.rl.runtime.ray.cluster.api import forget_on_nodes


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
