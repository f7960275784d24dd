# SPDX-License-Identifier: Apache-2.0
"""Generations of state files: the newest valid one is used, whatever happened to the others."""

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import time
import weakref
import zlib
from dataclasses import replace

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.runtime.checkpoint import store as module
from dlrover.python.rl.runtime.checkpoint.runs import newest_of
from dlrover.python.rl.runtime.checkpoint.state_file import StateFile, check_size, copy_file, read_state, write_state
from dlrover.python.rl.runtime.checkpoint.store import MANIFEST, CheckpointStore, read_manifest
from tests.support import disks
from tests.support.disks import DAMAGES, damage_byte, frozen, reports_of_a_killed_writer, system_calls, thaw
from tests.support.manual_clock import within

MEMBERS = ("ACTOR-0", "ACTOR-1", "trainer")


def state_of(name, step, size=600):
    return {"name": name, "step": step, "w": np.random.RandomState(step).rand(size)}


def commit(store, step, epoch=1, size=600):
    files = {
        name: store.write(step, epoch, f"{name}.{epoch}.state", {"who": name, "step": step}, state_of(name, step, size))
        for name in MEMBERS
    }
    return store.commit(step, epoch, files)


def commit_steps(store, *steps):
    return [commit(store, step) for step in steps]


def is_whole(store, manifest, size=600):
    for name in MEMBERS:
        state, expected = store.read(manifest, name), state_of(name, manifest.step, size)
        if (state["name"], state["step"]) != (name, manifest.step) or not np.array_equal(state["w"], expected["w"]):
            return False
    return True


def newest_valid(store, at_most=None, verify=module.check_file):
    """The newest intact generation up to step ``at_most``; damaged ones are moved away."""
    early = (manifest for manifest in store.manifests() if at_most is None or manifest.step <= at_most)
    return next((manifest for manifest in early if store.valid(manifest, verify)), None)


def generations(store):
    return sorted(name for name in os.listdir(store.root) if name.startswith("step"))


def claimed(folder, run="run1", epoch=1, **options):
    store = CheckpointStore(folder, run, **{"durable": False, **options})
    store.claim(epoch)
    return store


@pytest.fixture(params=[False, True], ids=["memory", "durable"])
def store(request, tmp_path):
    return claimed(tmp_path / "run1", durable=request.param)


@pytest.fixture
def memory(tmp_path):
    return claimed(tmp_path / "run1")


def test_committed_generation_is_found_by_another_process(store, tmp_path):
    store.folder(7, 1)
    assert newest_valid(store) is None
    assert newest_valid(CheckpointStore(tmp_path / "nowhere", "run1", durable=True)) is None
    before = time.time()
    manifest = commit(store, 7)
    again = CheckpointStore(store.root, "run1", store.durable)
    assert newest_valid(again) == manifest
    assert (manifest.step, manifest.epoch, manifest.run, set(manifest.files)) == (7, 1, "run1", set(MEMBERS))
    assert before <= manifest.committed_at <= time.time()
    assert is_whole(again, manifest)


def test_newest_two_generations_stay_and_leftovers_go(store):
    removed = weakref.ref(commit(store, 1))
    commit_steps(store, 2, 3)
    assert generations(store) == ["step-00000002.e1", "step-00000003.e1"]
    (store.folder(4, 1) / ".half.tmp").touch()
    (store.folder(6, 1) / "ACTOR-0.1.state").touch()
    (store.folder(5, 1) / ".ACTOR-0.1.state.0.tmp").touch()
    (store.root / "step-00000001.e1.gone").mkdir()
    (store.root / ".EPOCH.0.tmp").touch()
    manifest = commit(store, 5)
    assert generations(store) == ["step-00000003.e1", "step-00000005.e1", "step-00000006.e1"]
    assert removed() is None, "it takes no memory"
    spare = [] if store.durable else ["spare"]
    assert sorted(os.listdir(store.root)) == ["EPOCH", "LOCK", *spare, *generations(store)]
    files = {file.name for file in manifest.files.values()}
    assert {*os.listdir(store.root / manifest.folder)} == {MANIFEST, *files}


def test_pages_of_the_generation_removed_last_are_used_again(memory):
    store, inodes = memory, {}
    for step, size in enumerate((600, 500, 400, 300, 700, 700), 1):
        manifest = commit(store, step, size=size)
        inodes[step] = {path.stat().st_ino for path in store.root.glob(f"{manifest.folder}/*.state")}
        assert is_whole(store, newest_valid(store), size)
    assert inodes[4] == inodes[1]
    assert inodes[6] == inodes[3]
    assert store.free_space(5, pinned=False)
    assert sorted(os.listdir(store.root)) == ["EPOCH", "LOCK", "step-00000005.e1", "step-00000006.e1"]
    assert is_whole(store, commit(store, 7))


def test_state_written_over_while_it_is_read_is_refused(memory):
    """The reader has looked up the newest generation and is stopped for three steps."""
    generation = commit(memory, 1)
    commit_steps(memory, 2, 3)
    copy = memory.root.with_name("seen")
    with open(memory.root / "spare" / "ACTOR-0.1.state", "rb", buffering=0) as late:
        commit(memory, 4)
        copy.write_bytes(late.read())
    with pytest.raises(CheckpointCorrupt):
        read_state(copy, replace(generation.files["ACTOR-0"], name="seen"))
    assert not memory.valid(generation)
    assert generations(memory) == ["step-00000003.e1", "step-00000004.e1"]


def test_pinned_generation_stays_until_it_is_copied(store, tmp_path):
    manifest = commit(store, 1)
    store.pinned.add(1)
    commit_steps(store, 2, 3, 4)
    far = claimed(tmp_path / "far", durable=True)
    target = far.folder(1, 1)
    files = {name: copy_file(store.root / manifest.folder, target, file, True) for name, file in manifest.files.items()}
    assert is_whole(far, far.commit(1, 1, files))
    store.pinned.discard(1)
    commit(store, 5)
    assert generations(store) == ["step-00000004.e1", "step-00000005.e1"]


def test_commit_made_again_changes_nothing(store):
    manifest = commit(store, 1)
    assert store.commit(1, 1, manifest.files) == manifest
    assert store.manifests() == [manifest]


@pytest.mark.feature(135)
def test_newest_generation_is_the_one_committed_last(store):
    commit_steps(store, 1, 2, 3)
    assert newest_valid(store, at_most=2).step == 2
    assert newest_valid(store, at_most=1) is None
    store.claim(2)
    commit(store, 2, epoch=2)
    assert [(manifest.step, manifest.epoch) for manifest in store.manifests()] == [(2, 2), (3, 1)]


def test_durable_generation_is_on_disk_before_commit_returns(tmp_path):
    store = CheckpointStore(tmp_path / "made" / "now" / "run1", "run1", durable=True)
    with system_calls("fsync", "replace") as called:
        store.claim(1)
    assert called == ["fsync"] * 3 + ["fsync", "replace", "fsync"], "three new folders, then the epoch"
    file = write_state(store.folder(1, 1) / "a", {}, 1, durable=True)
    with system_calls("fsync", "replace") as called:
        store.commit(1, 1, {"a": file})
    assert called == ["fsync", "replace", "fsync", "fsync"], "manifest, its name, the folder, the root"


def test_commit_whose_name_is_not_on_disk_is_none(tmp_path, monkeypatch):
    store, fsync = claimed(tmp_path / "run1", durable=True), os.fsync
    commit(store, 1)
    file = store.write(2, 1, "trainer.1.state", {}, 1)

    def fail_for_folders(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EIO, "no answer")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(OSError, match="no answer"):
        store.commit(2, 1, {"trainer": file})
    assert newest_valid(store).step == 1


@pytest.mark.feature(135)
def test_commit_without_its_files_is_no_generation(store):
    commit(store, 1)
    folder = store.folder(2, 1)
    file = write_state(folder / "a", {}, 1, store.durable)
    with pytest.raises(CheckpointMissing, match="b is not there"):
        store.commit(2, 1, {"a": file, "b": StateFile("b", 1, 1)})
    with pytest.raises(CheckpointCorrupt, match="bytes instead of"):
        store.commit(2, 1, {"a": StateFile("a", file.nbytes + 1, file.checksum)})
    assert newest_valid(store).step == 1
    with pytest.raises(CheckpointMissing, match="has no 'x'"):
        store.read(newest_valid(store), "x")


def test_files_on_other_nodes_are_taken_on_trust(store, tmp_path):
    here = CheckpointStore(store.root, "run1", store.durable, node="n1")
    files = {"far": StateFile("far", 5, 5, node="n2"), "near": StateFile("near", 5, 5, node="n1")}
    here.folder(1, 1)
    with pytest.raises(CheckpointMissing, match="near"):
        here.commit(1, 1, files)
    (here.folder(1, 1) / "near").write_bytes(b"12345")
    assert here.commit(1, 1, files).files == files


@pytest.mark.parametrize(
    "remove", [lambda store: store.drop_older(3), lambda store: store.free_space(3, pinned=False)], ids=["age", "room"]
)
def test_pinned_generation_is_removed_only_on_request(store, remove):
    for step in (1, 2, 3):
        store.folder(step, 1)
    store.pinned.add(1)
    remove(store)
    assert generations(store) == ["step-00000001.e1", "step-00000003.e1"]
    assert store.free_space(3, pinned=True)
    assert generations(store) == ["step-00000003.e1"]
    assert not store.free_space(3, pinned=True)


def test_removal_leaves_nothing_and_forbids_writing(tmp_path):
    store = claimed(tmp_path / "jobs" / "run1")
    manifest = commit(store, 1)
    store.remove()
    assert os.listdir(tmp_path) == []
    for write in (lambda: store.folder(2, 1), lambda: store.commit(1, 1, manifest.files), lambda: commit(store, 2)):
        with pytest.raises(CheckpointMissing):
            write()
    assert os.listdir(tmp_path) == []
    store.remove()


def test_folder_removed_during_the_wait_for_its_lock_is_missing(tmp_path, monkeypatch):
    root = tmp_path / "commits"
    root.mkdir()
    monkeypatch.setattr(module, "take_lock", lambda handle, path, timeout_s: shutil.rmtree(root))
    closed, close = [], os.close
    monkeypatch.setattr(module.os, "close", lambda handle: (closed.append(handle), close(handle)))
    fence = module.EpochFence(root, False, lambda: 0)
    with pytest.raises(CheckpointMissing, match="commits is not there"), fence.locked():
        pass
    assert len(closed) == len(set(closed)) > 0


def test_commit_of_calls_by_an_earlier_version_is_passed_over(store, caplog):
    commit_steps(store, 1, 2)
    path = store.root / "step-00000002.e1" / MANIFEST
    fields = json.loads(path.read_bytes())["manifest"]
    fields["earlier"] = {"ACTOR-0": [["step-00000001.e1", fields["files"]["ACTOR-0"]]]}
    body = json.dumps(fields, sort_keys=True).encode()
    path.write_bytes(b'{"crc32": "%08x", "manifest": %s}\n' % (zlib.crc32(body), body))
    again = CheckpointStore(store.root, "run1", store.durable)
    assert newest_valid(again).step == 1
    assert "step 2 was committed as calls, by an earlier version of this package; the newest whole" in caplog.text
    assert generations(store) == ["step-00000001.e1", "step-00000002.e1"], "neither counts as damaged"
    commit(store, 3)
    assert newest_valid(store).step == 3


def test_misplaced_manifest_is_moved_away_but_not_of_another_run(store):
    commit_steps(store, 1, 2)
    shutil.copy(store.root / "step-00000001.e1" / MANIFEST, store.root / "step-00000002.e1" / MANIFEST)
    assert [manifest.step for manifest in store.manifests()] == [1]
    assert CheckpointStore(store.root, "run2", store.durable).manifests() == []
    assert generations(store) == ["step-00000001.e1", "step-00000002.e1.bad.1"]


def test_damaged_generation_is_reported_and_the_older_one_used(store, caplog):
    *_, manifest = commit_steps(store, 1, 2)
    damage_byte(store.root / manifest.folder / "ACTOR-1.1.state", at=-9)
    with pytest.raises(CheckpointCorrupt, match="ACTOR-1"):
        store.read(manifest, "ACTOR-1")
    assert newest_valid(store, verify=check_size).step == 2, "looking at sizes alone does not see it"
    with caplog.at_level(logging.WARNING):
        left = newest_valid(store)
    assert (left.step, is_whole(store, left)) == (1, True)
    assert "step-00000002.e1.bad" in caplog.text
    assert "ACTOR-1.1.state: the content does not match" in caplog.text
    assert generations(store) == ["step-00000001.e1", "step-00000002.e1.bad.1"]


def test_damaged_generation_does_not_cost_the_one_before(store):
    for step in (1, 2):
        manifest = commit(store, step)
    os.truncate(store.root / manifest.folder / "ACTOR-1.1.state", 100)
    commit(store, 3)
    store.quarantine(store.manifests()[0].folder, "a test")
    assert newest_valid(store).step == 1


def test_two_damaged_generations_are_kept(store, caplog):
    for step in range(1, 7):
        commit(store, step)
        store.quarantine(store.manifests()[0].folder, "a test")
        assert newest_valid(store) is None
    for _ in range(5):
        commit(store, 7)
        store.quarantine(store.manifests()[0].folder, "a test")
    commit(store, 8)
    names = [name.rpartition(".bad")[0] or name for name in generations(store)]
    assert names == ["step-00000007.e1", "step-00000007.e1", "step-00000008.e1"]
    assert "removing" in caplog.text


def test_damaged_epoch_file_does_not_lower_the_fence(store):
    store.claim(4)
    commit(store, 1, epoch=4)
    for content in (b"", b"3 00000000\n", b"x", None, bytes(12)):
        (store.root / "EPOCH").unlink(missing_ok=True)
        if content is not None:
            (store.root / "EPOCH").write_bytes(content)
        with pytest.raises(StaleEpoch):
            store.claim(3)
    for _ in range(2):
        store.claim(5)
    commit(store, 2, epoch=5)
    assert newest_valid(store).epoch == 5
    with pytest.raises(StaleEpoch, match="attempt 4 has ended: attempt 5 has taken over"):
        store.folder(3, 4)


def swap(path, rng, siblings):
    sibling = rng.choice(siblings)
    content = path.read_bytes()
    path.write_bytes(sibling.read_bytes())
    sibling.write_bytes(content)


def leave_temporary(path, rng, siblings):
    path.with_name(f".{path.name}.0123.tmp").write_bytes(path.read_bytes()[: rng.randrange(100)])


def damage_content(kind):
    return lambda path, rng, siblings: path.write_bytes(kind(path.read_bytes(), rng))


KINDS = {
    **{kind.__name__: damage_content(kind) for kind in DAMAGES},
    "delete": lambda path, rng, siblings: path.unlink(),
    "swap": swap,
    "another file": lambda path, rng, siblings: path.write_bytes(rng.choice(siblings).read_bytes()),
    "temporary file": leave_temporary,
}
"""Damage of a file, by a source of chance, and with the other files there."""


def is_readable(store, manifest):
    try:
        return read_manifest(store.root / manifest.folder, "run1") == manifest and is_whole(store, manifest)
    except (CheckpointCorrupt, CheckpointMissing):
        return False


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 1000), marks=pytest.mark.slow)], ids=str)
def test_damage_is_seen_and_the_newest_valid_generation_used(tmp_path, caplog, seeds):
    caplog.set_level(logging.ERROR)
    origin = claimed(tmp_path / "origin", keep=3)
    manifests = {step: commit(origin, step) for step in (1, 2, 3)}
    contents = {path.relative_to(origin.root): path.read_bytes() for path in origin.root.rglob("*") if path.is_file()}
    seen = dict.fromkeys(KINDS, 0)
    store = CheckpointStore(tmp_path / "copy", "run1", durable=False, keep=3)
    for seed in seeds:
        rng = random.Random(seed)
        shutil.rmtree(store.root, ignore_errors=True)
        shutil.copytree(origin.root, store.root)
        for _ in range(rng.choice([1, 1, 2])):
            kind = rng.choice(list(KINDS))
            step = rng.choice([3, 3, 3, 2])
            files = sorted(path for path in store.root.rglob("step*/*") if path.name[0] != ".")
            path = rng.choice([path for path in files if path.parent.name == manifests[step].folder] or files)
            KINDS[kind](path, rng, [sibling for sibling in files if sibling != path])
            seen[kind] += 1
        changed = {
            name.parts[0]
            for name, content in contents.items()
            if not (store.root / name).exists() or (store.root / name).read_bytes() != content
        }
        damaged = {step for step, manifest in manifests.items() if manifest.folder in changed}
        valid = max({1, 2, 3} - damaged, default=None)
        for step in damaged:
            assert not is_readable(store, manifests[step]), (seed, step)
        newest = newest_valid(store)
        assert (newest and newest.step) == valid, seed
        if newest:
            assert is_whole(store, newest), seed
            left = [store.root / manifests[step].folder / MANIFEST for step in damaged if step > valid]
            assert not any(path.exists() for path in left), seed
    assert min(seen.values()) > len(seeds) / 20, seen


def test_commit_after_the_claim_of_a_later_epoch_is_refused(store):
    commit(store, 1)
    file = store.write(2, 1, "trainer.1.state", {}, 1)
    claimed(store.root, epoch=2)
    with pytest.raises(StaleEpoch):
        store.commit(2, 1, {"trainer": file})
    assert newest_valid(store).step == 1


FROZEN = """
import sys
from pathlib import Path
from dlrover.python.rl.runtime.checkpoint import store as module
from test_store import commit
write = module.write_manifest
def slow(*arguments):
    print("in the middle", flush=True)
    sys.stdin.readline()
    return write(*arguments)
store = module.CheckpointStore(Path(sys.argv[1]), "run", durable=False)
store.claim(1)
commit(store, 1)
module.write_manifest = slow
for step in (2, 3):
    try:
        commit(store, step)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


def test_process_frozen_with_the_lock_neither_blocks_nor_harms(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TAKE_OVER_S", 0.2)
    with frozen(FROZEN, tmp_path / "run") as writer:
        with within(5.0):
            store = claimed(tmp_path / "run", "run", epoch=2)
            assert newest_valid(store).step == 1
            commit(store, 2, epoch=2)
        thaw(writer)
        assert writer.stdout.readline() == "FileNotFoundError\n", "its files are removed"
        assert writer.stdout.readline() == "StaleEpoch\n"
        newest = newest_valid(store)
        assert (newest.step, newest.epoch) == (2, 2) and is_whole(store, newest)
        commit(store, 3, epoch=2)
        assert [manifest.step for manifest in store.manifests()][0] == 3


def test_writer_killed_at_any_point_leaves_the_last_commit_whole(tmp_path):
    store, rng = CheckpointStore(tmp_path / "run1", "run1", durable=False), random.Random(1)

    def commit_for_ever(report):
        store.claim(epoch)
        for step in range(epoch * 1000 + 1, epoch * 1000 + 999):
            commit(store, step, epoch, size=20_000)
            report()

    for epoch in range(1, 61):
        commits = reports_of_a_killed_writer(commit_for_ever, rng.randrange(1, 4), rng.random() * 0.004)
        newest = newest_valid(store)
        assert newest.epoch == epoch
        assert newest.step - epoch * 1000 in (commits, commits + 1)
        assert is_whole(store, newest, size=20_000)
        assert not [name for name in os.listdir(store.root) if ".bad" in name], "a crash is no damage"
    commit(store, 99_999, epoch + 1)
    assert all("tmp" not in name and "gone" not in name for name in os.listdir(store.root))


@pytest.fixture
def small_disk(tmp_path):
    with disks.small_disk(tmp_path / "disk") as disk:
        yield disk


def test_full_disk_leaves_earlier_generations(small_disk):
    store = claimed(small_disk / "run1", durable=True)
    commit(store, 1)
    with pytest.raises(OSError, match="do not fit"):
        commit(store, 2, size=300_000)
    assert os.listdir(store.root / "step-00000002.e1") == []
    folder = store.folder(2, 1)
    file = write_state(folder / "a", {}, 1, durable=True)
    with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(bytes(4096))
    with pytest.raises(OSError, match="No space"):
        store.commit(2, 1, {"a": file})
    assert os.listdir(folder) == ["a"]
    assert is_whole(store, newest_valid(store))
    (small_disk / "filler").unlink()
    assert store.commit(2, 1, {"a": file}) == newest_valid(store)


def test_read_only_disk_can_be_read_despite_damage(small_disk):
    store = claimed(small_disk / "run1", durable=True)
    commit(store, 1)
    (store.root / commit(store, 2).folder / "trainer.1.state").write_bytes(b"")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert newest_valid(store).step == 1
    with pytest.raises(OSError, match="Read-only"):
        store.folder(3, 1)
    with pytest.raises(OSError, match="Read-only"):
        store.claim(2)


def test_newest_of_is_the_run_with_the_last_commit(tmp_path):
    def newest():
        return newest_of(CheckpointStore(root, root.name, durable=True) for root in tmp_path.iterdir())

    assert newest() is None
    for run, step in (("aa", 30), ("bb", 10), ("cc", 20)):
        commit(claimed(tmp_path / run, run, durable=True), step)
    store, manifest = newest()
    assert (store.run, manifest.step) == ("cc", 20)
    (tmp_path / "cc" / manifest.folder / "trainer.1.state").write_bytes(b"x")
    store, manifest = newest()
    assert (store.run, manifest.step) == ("bb", 10)
    assert (tmp_path / "cc" / "step-00000020.e1.bad.1").is_dir()
