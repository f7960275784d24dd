# SPDX-License-Identifier: Apache-2.0
"""The folder of a run in the memory of its node, and saving its commits from there."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from dlrover.python.rl.runtime.checkpoint import node_memory
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory, memory_name, memory_root
from dlrover.python.rl.runtime.checkpoint.runs import Roots

HOLDER = """
import sys, time
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_root
memory_root("job", "1")
print("held", flush=True)
time.sleep(float(sys.argv[1]))
open(sys.argv[2], "w").close()
"""


@contextmanager
def holder(last_file, lives_s=600):
    """A process that holds the memory of run 1, and writes a file at its end."""
    command = [sys.executable, "-c", HOLDER, str(lives_s), str(last_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path))
    return tmp_path / f"dlrover-rl-{os.geteuid()}"


def runs(memory):
    return sorted(os.listdir(memory)) if memory.exists() else []


def test_memory_name_is_the_same_for_all_its_processes(memory, monkeypatch):
    code = "from dlrover.python.rl.runtime.checkpoint.node_memory import memory_name; print(memory_name())"
    before = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    memory_root("job", "1")
    assert memory_name() == before
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(memory.parent / "another"))
    assert memory_name() != before


@pytest.mark.parametrize("place", ["", "job-1"], ids=["all runs", "one run"])
@pytest.mark.parametrize("how", ["link", "open", "foreign"])
def test_folder_of_another_user_is_refused(memory, place, how, monkeypatch):
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
        another = os.geteuid() + 1
        monkeypatch.setattr(node_memory.os, "geteuid", lambda: another)
        monkeypatch.setattr(node_memory, "_memory_folder", lambda: memory)
    with pytest.raises(PermissionError, match="is not a folder that only you can use"):
        memory_root("job", "1")
    assert how != "link" or not list((memory.parent / "theirs").iterdir())


def test_forget_memory_spares_living_runs_only(memory):
    with holder(memory / "none") as process:
        for name in ("job-2", "job-other-3"):
            (memory / name).mkdir()
        forget_memory("job")
        assert runs(memory) == ["job-1", "job-other-3"]
        for name in ("job-2", "job-4"):
            (memory / name).mkdir()
        forget_memory("job", "2", if_free=True)
        assert runs(memory) == ["job-1", "job-4", "job-other-3"]
        process.send_signal(signal.SIGKILL)
        forget_memory("job", patience_s=10.0)
        assert runs(memory) == ["job-other-3"]
    forget_memory("job-other", "3")
    assert not memory.exists()


def test_forget_memory_of_an_ended_run_by_its_holder(memory):
    for _ in range(2):
        root = memory_root("job", "1")
        forget_memory("job")
        forget_memory("job", "1", if_free=True)
        assert root.exists()
        forget_memory("job", "1")
        assert not root.exists()


def test_forget_memory_waits_for_the_holders_of_a_run(memory):
    with holder(memory / "job-1" / "written at the end", lives_s=0.5) as process:
        forget_memory("job", "1", patience_s=30.0)
        assert not memory.exists()
        assert process.wait(timeout=10) == 0, "it could still write"


def committed(store, step, epoch=1):
    store.claim(epoch)
    file = store.write(step, epoch, "trainer.state", {"role": "trainer", "step": step}, {"x": step})
    return store.commit(step, epoch, {"trainer": file})


@pytest.fixture
def roots(memory, tmp_path):
    return Roots("job", "1", 2, tmp_path / "out/checkpoints/1")


def steps_of(store):
    return [manifest.step for manifest in store.manifests()]


def test_commit_in_memory_is_private_and_outlives_a_later_claim(roots, memory):
    committed(roots.commit_store(""), 8, epoch=2)
    modes = {path.stat().st_mode & 0o7777 for path in (memory, *memory.rglob("*")) if not path.is_symlink()}
    assert modes == {0o600, 0o700}
    copies = roots.durable_store()
    copies.claim(3)
    forget_memory("job", "1")
    (manifest,) = copies.manifests()
    assert (manifest.step, copies.read(manifest, "trainer")) == (8, {"x": 8})


def test_memory_without_a_place_for_its_copy_stays(roots, tmp_path):
    committed(roots.commit_store(""), 8)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/checkpoints").write_text("in the way")
    forget_memory("job", "1")
    assert steps_of(roots.commit_store("")) == [8]


@pytest.mark.parametrize(("step", "copied", "left"), [(6, [8], [8]), (8, range(1, 6), [8, 5, 4, 3, 2, 1])])
def test_memory_is_saved_beside_all_copies_unless_one_is_later(roots, step, copied, left):
    committed(roots.commit_store(""), step)
    copies = roots.durable_store(keep=10)
    for earlier in copied:
        committed(copies, earlier)
    forget_memory("job", "1")
    assert steps_of(copies) == left
