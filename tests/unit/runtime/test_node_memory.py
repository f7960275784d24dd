# SPDX-License-Identifier: Apache-2.0
"""A run's folder in the node's memory: its own, and nobody's once its process is killed."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from dlrover.python.rl.runtime.checkpoint import node_memory
from dlrover.python.rl.runtime.checkpoint.node_memory import (
    forget_memory,
    known_in_memory,
    memory_name,
    memory_root,
    save_from_memory,
)
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore

HOLDER = "import sys, time; from dlrover.python.rl.runtime.checkpoint.node_memory import memory_root; "
HOLDER += "memory_root(*sys.argv[1:]); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path))
    return tmp_path / f"dlrover-rl-{os.geteuid()}"


def runs(memory):
    return sorted(os.listdir(memory)) if memory.exists() else []


def test_the_memory_folder_is_the_runs_own(tmp_path):
    root = memory_root("checkpoints-test", f"{os.getpid():x}")
    try:
        assert root == memory_root("checkpoints-test", f"{os.getpid():x}")
        assert root.name == f"checkpoints-test-{os.getpid():x}"
        assert root.stat().st_mode & 0o7777 == 0o700
        assert root.parent.stat().st_mode & 0o7777 == 0o700
    finally:
        CheckpointStore(root, "x", durable=False).remove()
    assert not root.exists()


def test_processes_that_see_the_same_memory_name_it_alike(memory, monkeypatch):
    code = "from dlrover.python.rl.runtime.checkpoint.node_memory import memory_name; print(memory_name())"
    before = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    memory_root("job", "1")
    assert memory_name() == before
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(memory.parent / "another"))
    assert memory_name() != before


@pytest.mark.parametrize("place", ["", "job-1"], ids=["all runs", "one run"])
@pytest.mark.parametrize("how", ["link", "open", "foreign"])
def test_a_folder_of_somebody_else_is_refused(memory, place, how, monkeypatch):
    folder = memory / place
    if how == "link":
        (memory.parent / "theirs").mkdir(mode=0o700)
        memory.mkdir(mode=0o700) if place else None
        folder.symlink_to(memory.parent / "theirs")
    else:
        folder.mkdir(mode=0o700, parents=True)
        memory.chmod(0o700)
        folder.chmod(0o770 if how == "open" else 0o700)
    if how == "foreign":
        somebody = os.geteuid() + 1
        monkeypatch.setattr(node_memory.os, "geteuid", lambda: somebody)
        monkeypatch.setattr(node_memory, "_memory_folder", lambda: memory)
    with pytest.raises(PermissionError, match="is not a folder that only you can use"):
        memory_root("job", "1")
    assert how != "link" or not list((memory.parent / "theirs").iterdir())


def test_commits_are_for_the_user_only(memory):
    root = memory_root("job", "1")
    store = CheckpointStore(root, "1", durable=False)
    store.claim(1)
    store.commit(1, 1, {"trainer": store.write(1, 1, "trainer.state", {"role": "trainer", "step": 1}, {"x": 1})})
    modes = {path.stat().st_mode & 0o777 for path in root.rglob("*") if not path.is_symlink()}
    assert modes == {0o600, 0o700}


def test_runs_of_a_job_that_live_keep_what_they_have_and_killed_ones_do_not(memory):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, "job", "1"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        (memory / "job-2").mkdir()
        (memory / "job-other-3").mkdir()
        forget_memory("job")
        assert runs(memory) == ["job-1", "job-other-3"]
        (memory / "job-2").mkdir()
        (memory / "job-4").mkdir()
        forget_memory("job", "2", if_free=True)
        assert runs(memory) == ["job-1", "job-4", "job-other-3"]
        holder.send_signal(signal.SIGKILL)
        forget_memory("job", patience_s=10.0)
        assert runs(memory) == ["job-other-3"]
    finally:
        holder.kill()
        holder.communicate()
    forget_memory("job-other", "3")
    assert not memory.exists()


def test_a_run_that_has_ended_may_be_removed_by_who_has_held_it(memory):
    for _ in range(2):
        root = memory_root("job", "1")
        forget_memory("job")
        forget_memory("job", "1", if_free=True)
        assert root.exists()
        forget_memory("job", "1")
        assert not root.exists()


def test_the_removal_of_a_run_waits_for_the_processes_that_hold_its_memory(memory):
    code = HOLDER.replace("sys.argv[1:]", "*sys.argv[1:3]").replace("**", "*")
    code = code.replace("time.sleep(600)", "time.sleep(0.5); open(sys.argv[3], 'w').close()")
    last_file = memory / "job-1" / "written at the end"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, "job", "1", str(last_file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        forget_memory("job", "1", patience_s=30.0)
        assert not memory.exists()
        assert holder.wait(timeout=10) == 0, "it could still write"
    finally:
        holder.kill()
        holder.communicate()


def test_a_commit_in_memory_is_saved_though_a_later_trainer_has_claimed_the_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    roots = Roots("job", "1", 2, tmp_path / "out/checkpoints/1")
    memory = roots.commit_store("")
    memory.claim(2)
    memory.commit(8, 2, {"trainer": memory.write(8, 2, "trainer.state", {"role": "trainer", "step": 8}, {"x": 1})})
    copies = roots.durable_store()
    copies.claim(3)
    forget_memory("job", "1")
    (manifest,) = copies.manifests()
    assert (manifest.step, copies.read(manifest, "trainer")) == (8, {"x": 1})


def test_nodes_that_have_a_part_of_a_commit_each_save_it_together(tmp_path, monkeypatch):
    durable = tmp_path / "out/checkpoints/1"
    durable.parent.mkdir(parents=True)

    def on(node):
        monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / node))
        memory = Roots("job", "1", 1, durable).commit_store("")
        memory.claim(1)
        return memory

    files = {}
    for number, node in enumerate("bca"):
        name, memory = f"ACTOR-{number}", on(node)
        file = memory.write(8, 1, f"{name}.1.state", {"role": "ACTOR", "rank": number, "step": 8}, {"rank": number})
        files[name] = replace(file, node=node)
    files["trainer"] = memory.write(8, 1, "trainer.state", {"role": "trainer", "step": 8}, {"x": 1})
    memory.commit(8, 1, {**files, "ACTOR-2": replace(files["ACTOR-2"], node="")}, extra={"nodes": {"ACTOR-0": ["b"]}})

    found = {node: on(node) and known_in_memory("job", "1") for node in "abc"}
    assert (found["b"], found["c"], len(found["a"])) == ([], [], 1)
    saved = [on(node) and save_from_memory("job", "1", *found["a"]) for node in "abca"]
    assert saved == [False, False, True, True]
    copies = CheckpointStore(durable, "1", durable=True)
    (manifest,) = copies.manifests()
    assert copies.valid(manifest) and "nodes" not in manifest.extra
    assert [copies.read(manifest, f"ACTOR-{number}") for number in range(3)] == [{"rank": rank} for rank in range(3)]
    assert copies.read(manifest, "trainer") == {"x": 1}


def committed(store, step):
    store.claim(1)
    file = store.write(step, 1, "trainer.state", {"role": "trainer", "step": step}, {"x": step})
    return store.commit(step, 1, {"trainer": file})


def test_memory_that_cannot_be_saved_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    roots = Roots("job", "1", 1, tmp_path / "out/checkpoints/1")
    memory = roots.commit_store("")
    committed(memory, 8)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/checkpoints").write_text("in the way")
    forget_memory("job", "1")
    assert [manifest.step for manifest in memory.manifests()] == [8]


def test_memory_with_a_later_copy_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    roots = Roots("job", "1", 1, tmp_path / "out/checkpoints/1")
    committed(roots.commit_store(""), 6)
    committed(roots.durable_store(), 8)
    forget_memory("job", "1")
    assert [manifest.step for manifest in roots.durable_store().manifests()] == [8]


def test_saving_a_last_step_removes_no_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    roots = Roots("job", "1", 1, tmp_path / "out/checkpoints/1")
    stores = {"memory": roots.commit_store(""), "copies": roots.durable_store(keep=10)}
    for name, steps in (("copies", range(1, 6)), ("memory", [8])):
        for step in steps:
            committed(stores[name], step)
    forget_memory("job", "1")
    assert [manifest.step for manifest in stores["copies"].manifests()] == [8, 5, 4, 3, 2, 1]
