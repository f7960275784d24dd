# SPDX-License-Identifier: Apache-2.0
"""What comes from a device piece by piece; here the device is the host."""

import pytest
import torch

from dlrover.python.rl.data import device_bytes
from dlrover.python.rl.data.device_bytes import DeviceBytes
from dlrover.python.rl.data.state_tree import StateTree, dump
from dlrover.python.rl.runtime.checkpoint import state_file
from dlrover.python.rl.runtime.checkpoint.state_file import read_state, write_state


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(device_bytes, "PIECE", 1000)
    monkeypatch.setattr(device_bytes, "_buffers", {})


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 2000, 2001, 5432])
def test_the_pieces_are_the_whole(length):
    flat = torch.randint(0, 256, (length,), dtype=torch.uint8)
    given = DeviceBytes(flat)
    assert len(given) == length
    assert b"".join(map(bytes, given.pieces())) == flat.numpy().tobytes()


def test_two_buffers_are_used_again_and_again():
    flat = torch.arange(10_000).to(torch.uint8)
    seen = set()
    for _ in range(3):
        seen.update(torch.frombuffer(piece, dtype=torch.uint8).data_ptr() for piece in DeviceBytes(flat).pieces())
    assert len(seen) == 2


def test_a_state_file_of_them_is_the_same(tmp_path):
    state = {"a": torch.randn(700), "b": torch.arange(9, dtype=torch.int16), "none": torch.empty(0), "c": b"xyz"}
    whole = write_state(tmp_path / "whole", {"role": "ACTOR"}, state, durable=False)
    skeleton, buffers = dump(state)
    pieces = [
        DeviceBytes(torch.frombuffer(buffer, dtype=torch.uint8)) if len(buffer) > 9 else buffer for buffer in buffers
    ]
    found = write_state(tmp_path / "pieces", {"role": "ACTOR"}, StateTree(skeleton, pieces), durable=False)
    assert (found.nbytes, found.checksum) == (whole.nbytes, whole.checksum)
    read = read_state(tmp_path / "pieces", found)
    assert all(torch.equal(read[name], state[name]) for name in ("a", "b", "none")) and read["c"] == b"xyz"


def test_a_write_that_fails_leaves_the_buffers_to_others(monkeypatch, tmp_path):
    def refuse(chunk, checksum):
        if device_bytes._one_reader.locked():  # the piece comes from the device
            raise OSError("no such luck")
        return checksum

    monkeypatch.setattr(state_file, "crc32", refuse)
    skeleton, buffers = dump([torch.ones(700)])
    flat = torch.frombuffer(buffers[0], dtype=torch.uint8)
    with pytest.raises(OSError, match="no such luck") as caught:
        write_state(tmp_path / "x", {}, StateTree(skeleton, [DeviceBytes(flat)]), durable=False)
    assert caught.tb is not None, "what was under way is still referred to"
    assert not device_bytes._one_reader.locked()


def test_only_what_is_on_a_device_comes_in_pieces(monkeypatch, tmp_path):
    monkeypatch.setattr(state_file, "dump_in_place", lambda tree: pytest.fail("it is dumped"))
    write_state(tmp_path / "x", {}, StateTree(*dump([torch.ones(3)])), durable=False)
