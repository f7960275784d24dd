# SPDX-License-Identifier: Apache-2.0
"""Generations in an object store: killed and replaced writers, stores that fail, and damage."""

import errno
import io

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from dlrover.python.rl.common.disk_space import DiskWait, is_transient
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.runtime.checkpoint.commits import Generation
from dlrover.python.rl.runtime.checkpoint.object_store import ObjectStore, read_from, store_errors
from dlrover.python.rl.runtime.checkpoint.state_file import write_state

URL = "memory://bucket/run"
NAMES = ("ACTOR-0", "trainer")


class Killed(BaseException):
    """The writer's process has ended."""


class Upload(io.BytesIO):
    """An object appears when it is committed."""

    def __init__(self, bucket, path):
        super().__init__()
        self.bucket, self.path, self.content = bucket, path, b""

    def close(self):
        if not self.closed:
            self.content = self.getvalue()
        super().close()

    def commit(self):
        self.bucket.change(lambda: self.bucket.put(self.path, self.content))

    def discard(self):
        pass


class Bucket(MemoryFileSystem):
    """A separate store. ``fault(number, is_done)`` is called before and after each of its changes, and may raise."""

    cachable = False

    def __init__(self):
        super().__init__()
        self.store, self.pseudo_dirs, self.changes = {}, [""], 0
        self.end_faults()

    def end_faults(self):
        self.fault = lambda number, is_done: None

    def fail_at(self, number, is_done, error):
        def fail(*change):
            if change == (number, is_done):
                raise error

        self.fault = fail

    def change(self, act):
        number, self.changes = self.changes, self.changes + 1
        self.fault(number, False)
        act()
        self.fault(number, True)

    def _open(self, path, mode="rb", **options):
        return Upload(self, path) if mode == "wb" else super()._open(path, mode)

    def pipe_file(self, path, value, mode="overwrite", **options):
        self.change(lambda: self.put(self._strip_protocol(path), value))

    def rm_file(self, path):
        self.change(lambda: MemoryFileSystem.rm_file(self, self._strip_protocol(path)))

    def rm(self, path, recursive=False, maxdepth=None):
        path = self._strip_protocol(path)
        for name in [name for name in list(self.store) if name == path or name.startswith(f"{path}/")]:
            self.rm_file(name)

    def put(self, name, content):
        self.store[name] = MemoryFile(self, name, content)


@pytest.fixture
def bucket():
    return Bucket()


def claimed(bucket, epoch=1, **options):
    store = ObjectStore(URL, "r", fs=bucket, **options)
    store.claim(epoch)
    return store


@pytest.fixture
def store(bucket):
    return claimed(bucket)


def tree(step, name):
    return {"step": step, "name": name, "weights": np.full(1000, step, dtype=np.float32)}


def write(store, folder, step, epoch):
    """A generation, as the workers and the trainer write it."""
    files = {}
    for name in NAMES:
        local = write_state(folder / f"{name}.{step}.state", {"step": step}, tree(step, name), durable=False)
        files[name] = store.put(folder, step, epoch, local)
    return store.commit(step, epoch, files)


def write_steps(store, folder, *steps):
    return [write(store, folder, step, 1) for step in steps]


def newest(bucket):
    """The step of the newest generation, of which every file can be read."""
    store = ObjectStore(URL, "r", fs=bucket)
    for manifest in store.manifests():
        if store.valid(manifest):
            for name in NAMES:
                assert store.read(manifest, name)["weights"][0] == manifest.step
            return manifest.step
    return 0


def test_newest_two_generations_stay_in_order(bucket, store, tmp_path):
    write_steps(store, tmp_path, 10, 20, 30)
    assert [manifest.step for manifest in store.manifests()] == [30, 20]
    assert not [name for name in bucket.store if "step-00000010" in name]
    assert write(store, tmp_path, 30, 1) == store.manifests()[0], "the same again is the same"


def writing(bucket, folder, done):
    store = claimed(bucket)
    for step in (10, 20, 30, 40):
        write(store, folder, step, 1)
        done.append(step)


@pytest.mark.parametrize("happens", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fault", [Killed(), RuntimeError("SlowDown")], ids=["killed", "failed"])
def test_writer_stopped_at_any_change_loses_no_commit(tmp_path, fault, happens):
    writing(calm := Bucket(), tmp_path, [])
    assert calm.changes > 15
    for at in range(calm.changes):
        bucket, done = Bucket(), [0]
        bucket.fail_at(at, happens, fault)
        try:
            writing(bucket, tmp_path, done)
        except (Killed, OSError) as error:
            assert str(fault) in str(error)
        bucket.end_faults()
        assert newest(bucket) in (done[-1], done[-1] + 10), "the commit that was under way may be there"
        after = claimed(bucket, epoch=2)
        assert write(after, tmp_path, done[-1] + 20, 2) == after.manifests()[0]
        assert newest(bucket) == done[-1] + 20


def test_replaced_writer_is_refused(bucket, tmp_path):
    former, later = claimed(bucket), ObjectStore(URL, "r", fs=bucket)
    write(former, tmp_path, 10, 1)

    def overtaken(number, is_done):
        """Commit from the other writer while a file is on its way."""
        bucket.end_faults()
        later.claim(2)
        write(later, tmp_path, 20, 2)

    local = write_state(tmp_path / "ACTOR-0.30.state", {"step": 30}, tree(30, "ACTOR-0"), durable=False)
    bucket.fault = overtaken
    uploaded = former.put(tmp_path, 30, 1, local)
    for attempt in (lambda: former.claim(1), lambda: former.commit(30, 1, {"ACTOR-0": uploaded})):
        with pytest.raises(StaleEpoch, match="attempt 1 has ended: attempt 2"):
            attempt()
    assert [(manifest.epoch, manifest.step) for manifest in later.manifests()][0] == (2, 20)


def test_damaged_files_and_manifests_are_never_used_again(bucket, tmp_path):
    store = claimed(bucket, keep=3)
    write_steps(store, tmp_path, 10, 20, 30)
    (manifest,) = [name for name in bucket.store if name.endswith("step-00000030.e1/manifest.json")]
    bucket.put(manifest, b"{}")
    (state,) = [name for name in bucket.store if "step-00000020.e1/ACTOR" in name]
    content = bytearray(bucket.store[state].getvalue())
    content[100] ^= 1
    bucket.put(state, bytes(content))
    first = store.manifests()[0]
    assert first.step == 20
    with pytest.raises(CheckpointCorrupt):
        store.read(first, "ACTOR-0")
    store.quarantine(first.folder, "one bit")
    assert [manifest.step for manifest in store.manifests()] == [10]
    assert sorted(store.damaged()) == ["step-00000020.e1", "step-00000030.e1"]


def test_quarantined_step_counts_once_it_is_written_again(bucket, store, tmp_path):
    write_steps(store, tmp_path, 10, 20)
    store.quarantine(store.manifests()[0].folder, "a test")
    assert newest(bucket) == 10
    write(store, tmp_path, 20, 1)
    assert newest(bucket) == 20 and store.damaged() == []


def test_claim_is_refused_beside_a_later_one(bucket):
    bucket.fault = lambda number, done: bucket.put("/bucket/run/epochs/00000002", b"2") if done else None
    with pytest.raises(StaleEpoch, match="attempt 2 has taken over"):
        ObjectStore(URL, "r", fs=bucket).claim(1)


def test_partly_removed_generation_is_none(bucket, store, tmp_path):
    write_steps(store, tmp_path, 10, 20)
    first = bucket.changes

    def fail(number, done):
        if number > first:
            raise OSError(errno.EIO, "away")

    bucket.fault = fail
    store.drop_older(20)
    assert [manifest.step for manifest in store.manifests()] == [20]


def test_store_out_of_reach_is_not_taken_for_damaged(bucket, store, tmp_path, monkeypatch):
    def away(path, mode, **options):
        raise TimeoutError(errno.ETIMEDOUT, "no answer")

    generation = Generation(store, write(store, tmp_path, 10, 1))
    monkeypatch.setattr(bucket, "_open", away)
    with pytest.raises(OSError, match="no answer"):
        generation.read("trainer", DiskWait(0, 0, 0))


def test_errors_of_a_store_may_be_over_soon():
    for error in (TimeoutError("slow"), RuntimeError("503"), OSError("no number"), OSError(-3, "name service")):
        with pytest.raises(OSError) as caught, store_errors():
            raise error
        assert is_transient(caught.value)
    with pytest.raises(PermissionError) as caught, store_errors():
        raise PermissionError(13, "denied")
    assert not is_transient(caught.value)


def test_read_from_tells_wrong_owners_from_missing_files(bucket, store, tmp_path):
    manifest = write(store, tmp_path, 10, 1)
    file = manifest.files["ACTOR-0"]
    with pytest.raises(CheckpointCorrupt, match="it belongs to"):
        read_from(f"{URL}/{manifest.folder}/{file.name}", file, {"step": 11}, fs=bucket)
    with pytest.raises(CheckpointMissing):
        read_from(f"{URL}/{manifest.folder}/none.state", fs=bucket)
    store.remove()
    assert store.manifests() == [] and not bucket.store
