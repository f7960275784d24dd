# SPDX-License-Identifier: Apache-2.0
"""Generations of state files: the newest valid one is used, whatever happened to the others."""

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.runtime.checkpoint import store as module
from dlrover.python.rl.runtime.checkpoint.runs import newest_of
from dlrover.python.rl.runtime.checkpoint.state_file import (
    StateFile,
    check_file,
    check_size,
    copy_file,
    read_state,
    write_state,
)
from dlrover.python.rl.runtime.checkpoint.store import (
    MANIFEST,
    CheckpointStore,
    Manifest,
    decode,
    encode,
    read_manifest,
)
from tests.support import disks
from tests.support.disks import system_calls

MEMBERS = ("ACTOR-0", "ACTOR-1", "trainer")
DAMAGES = [range(300), pytest.param(range(300, 1000), marks=pytest.mark.slow)]
"""Seeds: some for every run, and the others of the thousand."""


def state_of(name, step, size=600):
    return {"name": name, "step": step, "w": np.random.RandomState(step).rand(size)}


def commit(store, step, epoch=1, size=600):
    files = {
        name: store.write(step, epoch, f"{name}.{epoch}.state", {"who": name, "step": step}, state_of(name, step, size))
        for name in MEMBERS
    }
    return store.commit(step, epoch, files)


def is_whole(store, manifest, size=600):
    for name in MEMBERS:
        found, right = store.read(manifest, name), state_of(name, manifest.step, size)
        if (found["name"], found["step"]) != (name, manifest.step) or not np.array_equal(found["w"], right["w"]):
            return False
    return True


def newest_valid(store, at_most=None, verify=check_file):
    """The newest intact generation up to step ``at_most``; damaged ones are set aside."""
    early = (manifest for manifest in store.manifests() if at_most is None or manifest.step <= at_most)
    return next((manifest for manifest in early if store.valid(manifest, verify)), None)


def generations(store):
    return sorted(name for name in os.listdir(store.root) if name.startswith("step"))


@pytest.fixture(params=[False, True], ids=["memory", "durable"])
def store(request, tmp_path):
    store = CheckpointStore(tmp_path / "run1", "run1", durable=request.param)
    store.claim(1)
    return store


# -- generations ------------------------------------------------------------------------------------------------------


def test_a_committed_generation_is_found_by_another_process(store):
    before = time.time()
    manifest = commit(store, 7)
    again = CheckpointStore(store.root, "run1", store.durable)
    found = newest_valid(again)
    assert found == manifest
    assert (found.step, found.epoch, found.run) == (7, 1, "run1")
    assert set(found.files) == set(MEMBERS)
    assert before <= found.committed_at <= time.time()
    assert is_whole(again, found)


def test_nothing_is_found_before_the_first_commit(store, tmp_path):
    store.folder(1, 1)
    assert newest_valid(store) is None
    assert newest_valid(CheckpointStore(tmp_path / "nowhere", "run1", durable=True)) is None


def test_the_newest_two_are_kept_and_leftovers_go(store):
    for step in (1, 2, 3):
        commit(store, step)
    assert generations(store) == ["step-00000002.e1", "step-00000003.e1"]
    (store.folder(4, 1) / ".half.tmp").touch()
    (store.folder(6, 1) / "ACTOR-0.1.state").touch()
    (store.folder(5, 1) / ".ACTOR-0.1.state.0.tmp").touch()
    (store.root / "step-00000001.e1.gone").mkdir()
    (store.root / ".EPOCH.0.tmp").touch()
    manifest = commit(store, 5)
    assert generations(store) == ["step-00000003.e1", "step-00000005.e1", "step-00000006.e1"]
    spare = [] if store.durable else ["spare"]
    assert sorted(os.listdir(store.root)) == ["EPOCH", "LOCK", *spare, *generations(store)]
    assert sorted(os.listdir(store.root / manifest.folder)) == sorted(
        [MANIFEST, *(file.name for file in manifest.files.values())]
    )


def test_in_memory_the_pages_of_the_generation_removed_last_are_used_again(tmp_path):
    store = CheckpointStore(tmp_path / "run1", "run1", durable=False)
    store.claim(1)
    sizes = {1: 600, 2: 500, 3: 400, 4: 300, 5: 700, 6: 700}
    inodes = {}
    for step, size in sizes.items():
        manifest = commit(store, step, size=size)
        inodes[step] = {path.stat().st_ino for path in store.root.glob(f"{manifest.folder}/*.state")}
        assert is_whole(store, newest_valid(store), size)
    assert inodes[4] == inodes[1]
    assert inodes[6] == inodes[3]
    assert store.free_space(5, pinned=False)
    assert sorted(os.listdir(store.root)) == ["EPOCH", "LOCK", "step-00000005.e1", "step-00000006.e1"]
    assert is_whole(store, commit(store, 7))


def test_what_is_being_read_while_it_is_written_over_is_never_taken_for_good(tmp_path):
    """As by a process that has looked up the newest generation and is stopped for three steps."""
    store = CheckpointStore(tmp_path / "run1", "run1", durable=False)
    store.claim(1)
    old = commit(store, 1)
    for step in (2, 3):
        commit(store, step)
    with open(store.root / "spare" / "ACTOR-0.1.state", "rb", buffering=0) as late:
        commit(store, 4)
        (tmp_path / "seen").write_bytes(late.read())
    with pytest.raises(CheckpointCorrupt):
        read_state(tmp_path / "seen", replace(old.files["ACTOR-0"], name="seen"))
    assert not store.valid(old)
    assert generations(store) == ["step-00000003.e1", "step-00000004.e1"]


def test_a_generation_that_is_removed_takes_no_memory(store):
    removed = weakref.ref(commit(store, 1))
    for step in (2, 3, 4):
        commit(store, step)
    assert removed() is None


def test_a_pinned_generation_is_kept_until_it_is_copied(store, tmp_path):
    manifest = commit(store, 1)
    store.pinned.add(1)
    for step in (2, 3, 4):
        commit(store, step)
    far = CheckpointStore(tmp_path / "far", "run1", durable=True)
    far.claim(1)
    target = far.folder(1, 1)
    files = {name: copy_file(store.root / manifest.folder, target, file, True) for name, file in manifest.files.items()}
    assert is_whole(far, far.commit(1, 1, files))
    store.pinned.discard(1)
    commit(store, 5)
    assert generations(store) == ["step-00000004.e1", "step-00000005.e1"]


def test_committing_again_what_is_committed_changes_nothing(store):
    manifest = commit(store, 1)
    assert store.commit(1, 1, manifest.files) == manifest
    assert store.manifests() == [manifest]


@pytest.mark.feature(135)
def test_newest_means_committed_last_so_going_back_and_on_again_works(store):
    for step in (1, 2, 3):
        commit(store, step)
    assert newest_valid(store, at_most=2).step == 2
    assert newest_valid(store, at_most=1) is None
    store.claim(2)
    commit(store, 2, epoch=2)
    assert [(found.step, found.epoch) for found in store.manifests()] == [(2, 2), (3, 1)]


def test_a_durable_generation_is_on_disk_before_the_commit_returns(tmp_path):
    store = CheckpointStore(tmp_path / "made" / "now" / "run1", "run1", durable=True)
    with system_calls("fsync", "replace") as called:
        store.claim(1)
    assert called == ["fsync"] * 3 + ["fsync", "replace", "fsync"], "three new folders, then the epoch"
    file = write_state(store.folder(1, 1) / "a", {}, 1, durable=True)
    with system_calls("fsync", "replace") as called:
        store.commit(1, 1, {"a": file})
    assert called == ["fsync", "replace", "fsync", "fsync"], "manifest, its name, the folder, the root"


def test_commit_whose_name_is_not_on_disk_is_none(tmp_path, monkeypatch):
    store, fsync = CheckpointStore(tmp_path / "run1", "run1", durable=True), os.fsync
    store.claim(1)
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
def test_a_commit_whose_files_are_not_there_is_no_generation(store):
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


def test_a_node_without_manifests_drops_what_is_old(store):
    for step in (1, 2, 3):
        store.folder(step, 1)
    store.pinned.add(1)
    store.drop_older(3)
    assert generations(store) == ["step-00000001.e1", "step-00000003.e1"]
    store.pinned.clear()
    store.drop_older(3)
    assert generations(store) == ["step-00000003.e1"]


def test_free_space_removes_pinned_generations_only_if_told(store):
    for step in (1, 2, 3):
        store.folder(step, 1)
    store.pinned.add(1)
    assert store.free_space(3, pinned=False)
    assert generations(store) == ["step-00000001.e1", "step-00000003.e1"]
    assert store.free_space(3, pinned=True)
    assert generations(store) == ["step-00000003.e1"]
    assert not store.free_space(3, pinned=True)


def test_removal_leaves_nothing_and_nothing_is_written_after_it(tmp_path):
    store = CheckpointStore(tmp_path / "jobs" / "run1", "run1", durable=False)
    store.claim(1)
    manifest = commit(store, 1)
    store.remove()
    assert os.listdir(tmp_path) == []
    for write in (lambda: store.folder(2, 1), lambda: store.commit(1, 1, manifest.files), lambda: commit(store, 2)):
        with pytest.raises(CheckpointMissing):
            write()
    assert os.listdir(tmp_path) == []
    store.remove()


def test_a_folder_that_is_removed_while_its_lock_is_waited_for_is_missing(tmp_path, monkeypatch):
    root = tmp_path / "commits"
    root.mkdir()
    monkeypatch.setattr(module, "take_lock", lambda handle, path, timeout_s: shutil.rmtree(root))
    closed, close = [], os.close
    monkeypatch.setattr(module.os, "close", lambda handle: (closed.append(handle), close(handle)))
    with (
        pytest.raises(CheckpointMissing, match="commits is not there"),
        module.EpochFence(root, False, lambda: 0).locked(),
    ):
        pass
    assert len(closed) == len(set(closed)) > 0


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        CheckpointStore(tmp_path, "run1", durable=False, keep=0)


# -- the manifest -----------------------------------------------------------------------------------------------------


def test_a_manifest_comes_back_the_same():
    manifest = Manifest(3, 2, "ab12", {"ü": StateFile("x", 1, 2, "n")}, {"deep": [1, {"a": None}]}, 9, 1.5)
    assert decode(encode(manifest)) == manifest


def test_a_flipped_bit_is_seen_in_every_byte_of_a_manifest(tmp_path):
    folder = tmp_path / "step-00000003.e1"
    folder.mkdir()
    whole = encode(Manifest(3, 1, "run1", {"ACTOR-0": StateFile("a", 10, 0xABCDEF)}, {"x": 1}))
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        (folder / MANIFEST).write_bytes(damaged)
        with pytest.raises(CheckpointCorrupt, match="not a manifest"):
            read_manifest(folder, "run1")


def test_a_commit_of_calls_is_passed_over_for_the_newest_whole_state(store, caplog):
    """Earlier versions committed the calls of a step between whole states."""
    for step in (1, 2):
        commit(store, step)
    path = store.root / "step-00000002.e1" / MANIFEST
    fields = json.loads(path.read_bytes())["manifest"]
    fields["earlier"] = {"ACTOR-0": [["step-00000001.e1", fields["files"]["ACTOR-0"]]]}
    body = json.dumps(fields, sort_keys=True).encode()
    path.write_bytes(b'{"crc32": "%08x", "manifest": %s}\n' % (zlib.crc32(body), body))
    again = CheckpointStore(store.root, "run1", store.durable)
    assert newest_valid(again).step == 1
    assert "step 2 was committed as calls, by an earlier version of this package; the newest whole" in caplog.text
    assert generations(store) == ["step-00000001.e1", "step-00000002.e1"], "nothing is taken for damaged"
    commit(store, 3)
    assert newest_valid(store).step == 3


def test_a_manifest_in_the_wrong_folder_is_set_aside_and_another_runs_is_left_alone(store):
    commit(store, 1)
    commit(store, 2)
    shutil.copy(store.root / "step-00000001.e1" / MANIFEST, store.root / "step-00000002.e1" / MANIFEST)
    assert [found.step for found in store.manifests()] == [1]
    before = generations(store)
    assert CheckpointStore(store.root, "run2", store.durable).manifests() == []
    assert generations(store) == before == ["step-00000001.e1", "step-00000002.e1.bad.1"]


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_generation_is_set_aside_with_a_word_and_the_older_one_is_used(store, caplog):
    commit(store, 1)
    manifest = commit(store, 2)
    path = store.root / manifest.folder / "ACTOR-1.1.state"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="ACTOR-1"):
        store.read(manifest, "ACTOR-1")
    assert newest_valid(store, verify=check_size).step == 2, "looking at sizes alone does not see it"
    with caplog.at_level(logging.WARNING):
        found = newest_valid(store)
    assert (found.step, is_whole(store, found)) == (1, True)
    assert "step-00000002.e1.bad" in caplog.text
    assert "ACTOR-1.1.state: the content does not match" in caplog.text
    assert generations(store) == ["step-00000001.e1", "step-00000002.e1.bad.1"]


def test_a_damaged_generation_does_not_cost_the_one_before_it(store):
    for step in (1, 2):
        manifest = commit(store, step)
    os.truncate(store.root / manifest.folder / "ACTOR-1.1.state", 100)
    commit(store, 3)
    store.quarantine(store.manifests()[0].folder, "a test")
    assert newest_valid(store).step == 1


def test_damaged_ones_are_kept_to_be_looked_at_but_not_for_ever(store, caplog):
    for step in range(1, 7):
        commit(store, step)
        store.quarantine(store.manifests()[0].folder, "a test")
        assert newest_valid(store) is None
    for _ in range(5):
        commit(store, 7)
        store.quarantine(store.manifests()[0].folder, "a test")
    commit(store, 8)
    kept = generations(store)
    assert kept.pop() == "step-00000008.e1"
    assert len(kept) == 2
    assert all(name.startswith("step-00000007.e1.bad") for name in kept)
    assert "removing" in caplog.text


def test_a_damaged_epoch_file_does_not_lower_the_fence(store):
    store.claim(4)
    commit(store, 1, epoch=4)
    for content in (b"", b"3 00000000\n", b"x", None, bytes(12)):
        (store.root / "EPOCH").unlink(missing_ok=True)
        if content is not None:
            (store.root / "EPOCH").write_bytes(content)
        with pytest.raises(StaleEpoch):
            store.claim(3)
    store.claim(5)
    with pytest.raises(StaleEpoch, match="attempt 4 has ended: attempt 5 has taken over"):
        store.folder(2, 4)


def flip_bit(path, rng, others):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path, rng, others):
    os.truncate(path, rng.randrange(path.stat().st_size))


def extend(path, rng, others):
    content = path.read_bytes()
    more = rng.choice([rng.randbytes(rng.randrange(1, 5000)), bytes(4096), content[-512:], content])
    path.write_bytes(content + more)


def zero_page(path, rng, others):
    content = path.read_bytes()
    size = min(rng.choice([512, 4096]), len(content))
    at = rng.randrange(len(content)) // size * size
    path.write_bytes(content[:at] + bytes(len(content[at : at + size])) + content[at + size :])


def delete(path, rng, others):
    path.unlink()


def swap(path, rng, others):
    other = rng.choice(others)
    mine, yours = path.read_bytes(), other.read_bytes()
    path.write_bytes(yours)
    other.write_bytes(mine)


def older(path, rng, others):
    """The content of some other file, as when a directory's entry points to the wrong one."""
    path.write_bytes(rng.choice(others).read_bytes())


def repeat_block(path, rng, others):
    content = path.read_bytes()
    size = rng.choice([64, 512, 4096])
    at, source = rng.randrange(len(content)), rng.randrange(len(content))
    path.write_bytes(content[:at] + content[source : source + size] + content[at + rng.choice([0, size]) :])


def stale_temporary(path, rng, others):
    path.with_name(f".{path.name}.0123.tmp").write_bytes(path.read_bytes()[: rng.randrange(100)])


KINDS = [flip_bit, truncate, extend, zero_page, delete, swap, older, repeat_block, stale_temporary]


@pytest.mark.parametrize("seeds", DAMAGES, ids=str)
def test_a_thousand_kinds_of_damage_are_all_seen_and_the_newest_valid_generation_is_used(tmp_path, caplog, seeds):
    caplog.set_level(logging.ERROR)
    origin = CheckpointStore(tmp_path / "origin", "run1", durable=False, keep=3)
    origin.claim(1)
    manifests = {step: commit(origin, step) for step in (1, 2, 3)}
    before = {path.relative_to(origin.root): path.read_bytes() for path in origin.root.rglob("*") if path.is_file()}
    seen = {kind.__name__: 0 for kind in KINDS}
    store = CheckpointStore(tmp_path / "copy", "run1", durable=False, keep=3)
    for seed in seeds:
        rng = random.Random(seed)
        shutil.rmtree(store.root, ignore_errors=True)
        for name, content in before.items():
            (store.root / name).parent.mkdir(parents=True, exist_ok=True)
            (store.root / name).write_bytes(content)
        for _ in range(rng.choice([1, 1, 2])):
            kind = rng.choice(KINDS)
            step = rng.choice([3, 3, 3, 2])
            files = sorted(path for path in store.root.rglob("step*/*") if path.name[0] != ".")
            path = rng.choice([path for path in files if path.parent.name == manifests[step].folder] or files)
            kind(path, rng, [other for other in files if other != path])
            seen[kind.__name__] += 1
        damaged = {
            step
            for step, manifest in manifests.items()
            if any(
                not (store.root / name).exists() or (store.root / name).read_bytes() != content
                for name, content in before.items()
                if name.parts[0] == manifest.folder
            )
        }
        valid = max({1, 2, 3} - damaged, default=None)
        for step in damaged:
            assert not is_whole_quietly(store, manifests[step]), (seed, step)
        found = newest_valid(store)
        assert (found and found.step) == valid, seed
        if found:
            assert is_whole(store, found), seed
            left = [store.root / manifests[step].folder / MANIFEST for step in damaged if step > valid]
            assert not any(path.exists() for path in left), seed
    assert min(seen.values()) > len(seeds) / 20, seen


def is_whole_quietly(store, manifest):
    """Whether a generation can be read as if nothing were wrong: manifest and all."""
    try:
        return read_manifest(store.root / manifest.folder, "run1") == manifest and is_whole(store, manifest)
    except (CheckpointCorrupt, CheckpointMissing):
        return False


# -- epochs -----------------------------------------------------------------------------------------------------------


def test_an_older_epoch_is_refused_in_a_hundred_races(tmp_path):
    store = CheckpointStore(tmp_path / "run1", "run1", durable=False, keep=3)
    for epoch in range(1, 101):
        store.claim(epoch)
        first = commit(store, epoch * 10, epoch, size=10)
        started, ended, stale = threading.Event(), threading.Event(), []
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(_commit_until_refused, store, epoch, first, (started, ended, stale))
            assert started.wait(10)
            CheckpointStore(store.root, "run1", durable=False).claim(epoch + 1)
            at_claim = store.manifests()
            ended.set()
            running.result(10)
        assert stale, "the old one saw that it has ended"
        assert store.manifests() == at_claim, "nothing was committed after the claim"


def _commit_until_refused(store, epoch, first, between):
    started, ended, stale = between
    step = first.step
    while not stale:
        last_try = ended.is_set()
        step += 1
        try:
            commit(store, step, epoch, size=10)
        except StaleEpoch as error:
            stale.append(error)
        started.set()
        if last_try:
            return


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


def test_a_frozen_process_that_has_the_lock_holds_nobody_up_and_harms_nothing_later(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TAKE_OVER_S", 0.2)
    frozen = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    try:
        assert frozen.stdout.readline() == "in the middle\n"
        frozen.send_signal(signal.SIGSTOP)
        store = CheckpointStore(tmp_path / "run", "run", durable=False)
        began_s = time.monotonic()
        store.claim(2)
        assert newest_valid(store).step == 1
        commit(store, 2, epoch=2)
        assert time.monotonic() - began_s < 5.0
        frozen.send_signal(signal.SIGCONT)
        frozen.stdin.write("\n")
        frozen.stdin.flush()
        assert frozen.stdout.readline() == "FileNotFoundError\n", "its files are removed"
        assert frozen.stdout.readline() == "StaleEpoch\n"
        newest = newest_valid(store)
        assert (newest.step, newest.epoch) == (2, 2) and is_whole(store, newest)
        commit(store, 3, epoch=2)
        assert [manifest.step for manifest in store.manifests()][0] == 3
    finally:
        frozen.kill()
        frozen.communicate()


def test_an_epoch_may_claim_again_and_write_on(store):
    store.claim(3)
    store.claim(3)
    commit(store, 1, epoch=3)
    assert newest_valid(store).epoch == 3


# -- crashes and disks ------------------------------------------------------------------------------------------------


def test_a_writer_killed_at_any_point_leaves_the_last_commit_whole(tmp_path):
    store = CheckpointStore(tmp_path / "run1", "run1", durable=False)
    rng = random.Random(1)
    for epoch in range(1, 61):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _commit_for_ever(store, epoch, writer)
        os.close(writer)
        last = sum(len(os.read(reader, 1)) for _ in range(rng.randrange(1, 4)))
        until = time.perf_counter() + rng.random() * 0.004
        while time.perf_counter() < until:
            pass
        os.kill(child, 9)
        os.waitpid(child, 0)
        while more := os.read(reader, 4096):
            last += len(more)
        os.close(reader)
        found = newest_valid(store)
        assert found.epoch == epoch
        assert found.step - epoch * 1000 in (last, last + 1)
        assert is_whole(store, found, size=20_000)
        assert not [name for name in os.listdir(store.root) if ".bad" in name], "a crash is no damage"
    commit(store, 99_999, epoch + 1)
    assert all("tmp" not in name and "gone" not in name for name in os.listdir(store.root))


def _commit_for_ever(store, epoch, writer):
    try:
        store.claim(epoch)
        for step in range(epoch * 1000 + 1, epoch * 1000 + 999):
            commit(store, step, epoch, size=20_000)
            os.write(writer, b".")
    finally:
        os._exit(1)


@pytest.fixture
def small_disk(tmp_path):
    with disks.small_disk(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("needs the right to mount a file system")
        yield disk


def test_a_full_disk_leaves_the_generations_that_are_there(small_disk):
    store = CheckpointStore(small_disk / "run1", "run1", durable=True)
    store.claim(1)
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


def test_a_read_only_disk_can_be_read_even_where_it_is_damaged(small_disk):
    store = CheckpointStore(small_disk / "run1", "run1", durable=True)
    store.claim(1)
    commit(store, 1)
    (store.root / commit(store, 2).folder / "trainer.1.state").write_bytes(b"")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert newest_valid(store).step == 1
    with pytest.raises(OSError, match="Read-only"):
        store.folder(3, 1)
    with pytest.raises(OSError, match="Read-only"):
        store.claim(2)


def test_who_reads_while_old_ones_are_removed_never_takes_them_for_damaged(tmp_path):
    store = CheckpointStore(tmp_path / "run1", "run1", durable=False)
    store.claim(1)
    commit(store, 1)
    ended = threading.Event()

    def read_on():
        found = []
        while not ended.is_set():
            found.append(newest_valid(store))
        return found

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_on)
        for step in range(2, 150):
            commit(store, step, size=50)
        ended.set()
        found = reading.result(20)
    assert any(found)
    assert not [name for name in os.listdir(store.root) if ".bad" in name]


# -- folders ----------------------------------------------------------------------------------------------------------


def test_the_newest_generation_is_that_of_the_run_that_committed_last(tmp_path):
    def newest():
        return newest_of(CheckpointStore(root, root.name, durable=True) for root in tmp_path.iterdir())

    assert newest() is None
    for run, step in (("aa", 30), ("bb", 10), ("cc", 20)):
        store = CheckpointStore(tmp_path / run, run, durable=True)
        store.claim(1)
        commit(store, step)
    store, manifest = newest()
    assert (store.run, manifest.step) == ("cc", 20)
    (tmp_path / "cc" / manifest.folder / "trainer.1.state").write_bytes(b"x")
    store, manifest = newest()
    assert (store.run, manifest.step) == ("bb", 10)
    assert (tmp_path / "cc" / "step-00000020.e1.bad.1").is_dir()
