# SPDX-License-Identifier: Apache-2.0
"""One state file: whole or not there, and never decoded before every byte has been checked."""

import os
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, DataError
from dlrover.python.rl.runtime.checkpoint import state_file
from dlrover.python.rl.runtime.checkpoint.state_file import check_file, copy_file, read_state, write_part, write_state
from tests.support import disks
from tests.support.disks import flips_of, largest_file, system_calls

HEADER = {"role": "ACTOR", "rank": 0, "step": 3}
TREE = {"w": np.arange(5e3), "t": torch.ones(7, dtype=torch.bfloat16), 3: ("x", b"bytes", None), "e": np.ones((0, 2))}


def is_tree(state):
    arrays = np.array_equal(state["w"], TREE["w"]) and torch.equal(state["t"], TREE["t"])
    return list(state) == list(TREE) and arrays and state[3] == TREE[3] and state["e"].shape == (0, 2)


@pytest.fixture(params=[False, True], ids=["memory", "durable"])
def durable(request):
    return request.param


@pytest.fixture
def far(tmp_path):
    (tmp_path / "far").mkdir()
    return tmp_path / "far"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ACTOR-0.1.state"


def test_state_comes_back_whole_and_writable(path, durable):
    file = write_state(path, HEADER, TREE, durable)
    assert (file.name, file.nbytes) == (path.name, path.stat().st_size)
    for state in (read_state(path), read_state(path, file, HEADER), read_state(path, None, {"step": 3})):
        assert is_tree(state)
        state["w"][0] = state["t"][0] = 1
    check_file(path.parent, file)
    assert write_state(path, HEADER, TREE, not durable) == file
    other = write_state(path, HEADER, {"other": 1}, durable)
    assert read_state(path, other) == {"other": 1}
    with pytest.raises(CheckpointCorrupt):
        read_state(path, file)
    assert os.listdir(path.parent) == [path.name]


@settings(max_examples=40, deadline=None)
@given(st.lists(hnp.arrays(np.uint8, st.integers(0, 300)), max_size=8))
def test_arrays_of_every_size_stand_at_multiples_of_64_bytes(tmp_path_factory, arrays):
    path = tmp_path_factory.getbasetemp() / "aligned.state"
    write_state(path, {}, arrays, durable=False)
    state = read_state(path)
    assert [array.tolist() for array in state] == [array.tolist() for array in arrays]
    assert all(array.ctypes.data % 64 == 0 for array in state if len(array))


def test_durable_file_is_synced_before_and_after_its_name(path, tmp_path, far):
    with system_calls("fsync", "replace") as called:
        file = write_state(path, HEADER, TREE, durable=True)
    assert called == ["fsync", "replace", "fsync"]
    with system_calls("fsync", "replace") as called:
        copy_file(tmp_path, far, file, durable=True)
    assert called == ["fsync", "replace", "fsync"]
    with system_calls("fsync", "replace") as called:
        write_state(path, HEADER, TREE, durable=False)
    assert called == ["replace"]


def test_state_of_an_unknown_type_leaves_nothing(path):
    with pytest.raises(DataError, match="'bad'"):
        write_state(path, HEADER, {"bad": {1}}, durable=False)
    assert os.listdir(path.parent) == []


def test_full_disk_leaves_the_old_file_and_nothing_else(path, durable):
    old = write_state(path, HEADER, TREE, durable)
    for room in (0, 100, 5000, old.nbytes, 70_000):
        with largest_file(room), pytest.raises(OSError, match="too large"):
            write_state(path, HEADER, {**TREE, "more": np.ones(9000)}, durable)
        assert os.listdir(path.parent) == [path.name]
        assert is_tree(read_state(path, old))


def test_state_larger_than_the_free_space_is_refused(path):
    file = write_state(path, {}, 1, durable=True)
    with pytest.raises(OSError, match="do not fit"):
        copy_file(path.parent, path.parent, replace(file, nbytes=1 << 60), durable=True)
    assert read_state(path) == 1


def test_room_of_overwritten_file_counts(path, tmp_path):
    disk, slack = os.statvfs(tmp_path), 1 << 40
    file, old = state_file.StateFile(path.name, disk.f_bavail * disk.f_frsize + slack, 0), tmp_path / "old"
    with old.open("wb") as sparse:
        sparse.truncate(2 * slack)
    with pytest.raises(OSError, match="do not fit"):
        write_part(tmp_path, file, 0, b"part")
    write_part(tmp_path, file, 0, b"part", recycled=old)
    assert not old.exists()


def test_a_write_without_a_free_inode_says_so(tmp_path):
    with disks.small_disk(tmp_path / "disk", inodes=3) as disk:
        (disk / "first").touch()
        (disk / "second").touch()
        with pytest.raises(OSError, match=r"No space left on device: no inodes are free: remove files: '.*disk'"):
            write_state(disk / "third.state", {}, 1, durable=False)


def test_missing_file_has_another_error_than_a_damaged_one(path):
    file, folder = write_state(path, HEADER, TREE, durable=False), path.parent
    path.unlink()
    for look in (
        lambda: read_state(path),
        lambda: check_file(folder, file),
        lambda: state_file.check_size(folder, file),
        lambda: copy_file(folder, folder, file, durable=False),
    ):
        with pytest.raises(CheckpointMissing, match="ACTOR-0"):
            look()


def test_flipped_bit_or_cut_is_seen_at_every_byte(path):
    file = write_state(path, HEADER, {"w": np.arange(20), "b": b"x"}, durable=False)
    whole = path.read_bytes()
    for damaged in (*flips_of(whole), *(whole[:nbytes] for nbytes in range(len(whole)))):
        path.write_bytes(damaged)
        for look in (lambda: read_state(path), lambda: read_state(path, file), lambda: check_file(path.parent, file)):
            with pytest.raises(CheckpointCorrupt, match="ACTOR-0.1.state: "):
                look()


def test_file_of_another_worker_is_refused(path):
    mine = write_state(path, HEADER, {"w": 1}, durable=False)
    other = write_state(path.with_name("other"), {**HEADER, "rank": 1}, {"w": 2}, durable=False)
    assert mine.nbytes == other.nbytes
    path.with_name("other").rename(path)
    for look in (lambda: read_state(path, mine), lambda: check_file(path.parent, mine)):
        with pytest.raises(CheckpointCorrupt, match="another file than the manifest's"):
            look()
    with pytest.raises(CheckpointCorrupt, match=r"belongs to \{'rank': 1\}"):
        read_state(path, None, HEADER)


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"SOMEBODY"), (8, struct.pack("<I", 9)), (16, b"\1"), (24, b"\xff"), (32, b"\0"), (40, b"[")]
)
def test_other_file_with_a_matching_checksum_is_refused(path, at, value):
    write_state(path, HEADER, TREE, durable=False)
    body = bytearray(path.read_bytes()[:-4])
    body[at : at + len(value)] = value
    for content in (bytes(body) + struct.pack("<I", zlib.crc32(body)), bytes(4)):  # four zeros match theirs, too
        path.write_bytes(content)
        with pytest.raises(CheckpointCorrupt):
            read_state(path)


def test_a_copy_is_the_same_file(path, tmp_path, far, durable):
    file = write_state(path, HEADER, {"w": np.random.default_rng(0).random(400_000)}, durable=False)
    assert copy_file(tmp_path, far, file, durable) == file
    assert (far / file.name).read_bytes() == path.read_bytes()


def in_two_parts(folder, file, content):
    (folder / "old").write_bytes(bytes(2 * len(content)))
    write_part(folder, file, 0, content[:1000], recycled=folder / "old")
    write_part(folder, file, 1000, content[1000:])


@pytest.mark.parametrize("write", [in_two_parts, state_file.write_whole])
def test_copy_from_another_node_has_its_name_only_if_intact(path, far, write):
    file = write_state(path, HEADER, {"w": np.zeros(400)}, durable=False)
    whole = path.read_bytes()
    with pytest.raises(CheckpointCorrupt):
        write(far, file, memoryview(bytes([*whole[:2000], whole[2000] ^ 4, *whole[2001:]])))
    assert not (far / file.name).exists()
    write(far, file, memoryview(whole))
    assert (far / file.name).read_bytes() == whole


def test_damaged_source_is_noticed_while_it_is_copied(path, tmp_path, far):
    file = write_state(path, HEADER, {"w": np.zeros(400_000)}, durable=False)
    old = copy_file(tmp_path, far, file, durable=False)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[2_000_000] ^= 4
    for damaged in (flipped, whole[:-1], whole + b"\0", whole * 2, whole[:1_000_000], b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorrupt):
            copy_file(tmp_path, far, file, durable=False)
        assert os.listdir(far) == [file.name]
        check_file(far, old)
