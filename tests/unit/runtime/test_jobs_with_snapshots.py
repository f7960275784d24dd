# SPDX-License-Identifier: Apache-2.0
"""Jobs whose states are written while the members go on."""

import threading
from pathlib import Path

import pytest
from durable_toys import CLASSES, Policy, Stage, kill, kill_trainer

from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints
from dlrover.python.rl.runtime.checkpoint.roots import Roots
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore


def files_of_each_commit(stage):
    """Step to the files of the first actor in its commit."""
    found = {}

    def look(self, step):
        (manifest, *_) = CheckpointStore(stage.path / "memory", "run1", durable=False).manifests()
        pieces = manifest.pieces_of("ACTOR-0")
        found[step] = [f"{piece.folder[10:13]}{Path(piece.file.name).suffix}" for piece in pieces]

    stage.progress = type("Look", (), {"append": look})()
    return found


def test_commits_follow_from_the_state_once_all_members_have_written_it(tmp_path):
    stage = Stage(tmp_path, steps=6, every=100, commit_every=3)
    found = files_of_each_commit(stage)
    stage.run()
    assert found == {
        1: ["000.state", "001.calls"],
        2: ["000.state", "001.calls", "002.calls"],
        3: ["000.state", "001.calls", "002.calls", "003.calls"],
        4: ["003.state", "004.calls"],
        5: ["003.state", "004.calls", "005.calls"],
        6: ["003.state", "004.calls", "005.calls", "006.calls"],
    }
    copies = CheckpointStore(tmp_path / "durable", "run1", durable=True).manifests()
    assert [(copy.step, [piece.file.name for piece in copy.pieces_of("ACTOR-0")]) for copy in copies] == [
        (6, ["ACTOR-0.1.state"])
    ]


def test_the_commit_of_the_states_stands_alone_from_then_on(tmp_path):
    """It needs no earlier folder, which is gone soon, and other settings can go on from it."""
    stage = Stage(tmp_path, steps=5, every=100, commit_every=3)

    class Ended(BaseException):
        pass

    def end(self, step):
        if step == 5:
            raise Ended

    stage.progress = type("End", (), {"append": end})()
    with pytest.raises(Ended):
        stage.run()
    store = CheckpointStore(tmp_path / "memory", "run1", durable=False)
    assert {manifest.step: manifest.since for manifest in store.manifests()} == {3: 3, 4: 3, 5: 3}
    assert all(store.valid(manifest) for manifest in store.manifests())
    before = StoreCheckpoints(
        Roots("job", "run2", 1, tmp_path / "copies", tmp_path / "other"), before=store, settings="x"
    )
    assert before.newest() == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_at_the_end_all_copy_their_calls_if_one_cannot_write_its_state(tmp_path, monkeypatch, rank):
    write = CheckpointStore.write

    def failing(self, step, epoch, name, header, tree):
        if threading.current_thread().name == "dlrover-copy-4" and name.startswith(f"ACTOR-{rank}"):
            raise OSError("no such luck")
        return write(self, step, epoch, name, header, tree)

    monkeypatch.setattr(CheckpointStore, "write", failing)
    stage = Stage(tmp_path, steps=4, every=100, commit_every=100)
    stage.run()
    copies = CheckpointStore(tmp_path / "durable", "run1", durable=True).manifests()
    assert [(copy.step, len(copy.pieces_of("ACTOR-0")), len(copy.pieces_of("ACTOR-1"))) for copy in copies] == [
        (4, 5, 5),
        (0, 1, 1),
    ]


@pytest.mark.parametrize("actor", [Policy, type("Alone", (Policy,), {"needs_own_process": False})])
def test_if_one_member_has_not_written_its_state_none_is_used(tmp_path, monkeypatch, actor):
    """And others are written at the next commit."""
    failed, write = [], CheckpointStore.write

    def failing(self, step, epoch, name, header, tree):
        if threading.current_thread().name == "dlrover-copy-3" and name.startswith("ACTOR-1"):
            failed.append(name)
            raise OSError("no such luck")
        return write(self, step, epoch, name, header, tree)

    options = {"steps": 7, "every": 100, "commit_every": 3, "classes": {**CLASSES, "ACTOR": actor}}
    expected = Stage(tmp_path / "undisturbed", **options).run()
    monkeypatch.setattr(CheckpointStore, "write", failing)
    stage = Stage(tmp_path / "job", **options)
    found = files_of_each_commit(stage)
    assert stage.run() == expected
    assert len(failed) == 1
    assert found[4] == ["000.state", "001.calls", "002.calls", "003.calls", "004.calls"]
    assert (found[6], found[7]) == (["005.state", "006.calls"], ["005.state", "006.calls", "007.calls"])


@pytest.mark.parametrize("fault", [kill("ACTOR", 1), kill_trainer], ids=["actor", "trainer"])
def test_a_fault_while_states_are_written_costs_no_step(tmp_path, monkeypatch, fault):
    """Each background thread ends only after the fault, or never."""
    expected = Stage(tmp_path / "undisturbed", steps=6, every=100, commit_every=3).run()
    stage = Stage(tmp_path / "job", steps=6, every=100, commit_every=3)
    strike, go_on = threading.Event(), threading.Event()
    write = CheckpointStore.write

    def slowly(self, step, epoch, name, header, tree):
        if threading.current_thread().name == "dlrover-copy-3" and not go_on.is_set():
            strike.set()
            go_on.wait(30)
        return write(self, step, epoch, name, header, tree)

    monkeypatch.setattr(CheckpointStore, "write", slowly)
    submit, struck = type(stage.port).__mro__[1].submit, []

    def striking(role, rank, call):
        if strike.is_set() and not struck:
            struck.append(call.method)
            try:
                fault(stage.port)
            finally:
                threading.Timer(0.1, go_on.set).start()
        return submit(stage.port, role, rank, call)

    stage.port.submit = striking
    assert stage.run() == expected
    assert struck and stage.progress == list(range(1, 7))
