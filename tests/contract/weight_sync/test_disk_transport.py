# SPDX-License-Identifier: Apache-2.0
"""Weights in files of a folder: after a crash, cut, with errors of the operating system, beside files of other runs."""

import errno
import io
import os
import time
from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.disk import DiskTransport, _read_exactly
from tests.support import sync_sides
from tests.support.disks import largest_file
from tests.support.sync_sides import PATIENT, ToySource, Wire, equal, hear, kill, process, toy_weights, transport


@pytest.fixture
def wire(tmp_path):
    wire = Wire("disk", tmp_path)
    yield wire
    wire.close()


@pytest.fixture
def source():
    return ToySource(toy_weights(), version=1)


@pytest.fixture
def ticket(wire, source):
    return sync_sides.publish(wire.source, source)[0]


# -- crashes ----------------------------------------------------------------------------------------------------------
def test_replacement_of_killed_sender_sends_same_ticket(tmp_path):
    sink = transport("disk", tmp_path, replace(PATIENT, name="ROLLOUT[0]"))
    with process(sync_sides.send_side, "disk", tmp_path, 4, 6) as (child, pipe):
        ticket = hear(pipe)
        pipe.send(ticket)
        assert hear(pipe) == "midway"
        kill(child)
    with process(sync_sides.send_side, "disk", tmp_path, 4, None) as (_, pipe):
        hear(pipe)
        pipe.send(ticket)
        assert hear(pipe) == ToySource(toy_weights(4), 4).stamp()
        assert equal(sink.receive(ticket), toy_weights(4))
        pipe.send(None)


def test_files_of_a_crash_are_removed_and_other_files_stay(tmp_path):
    other_file = tmp_path / "REFERENCE.0123.weights"
    other_file.write_bytes(b"another role's")
    for _ in range(3):
        with process(sync_sides.send_side, "disk", tmp_path, 1, 6) as (child, pipe):
            pipe.send(hear(pipe))
            assert hear(pipe) == "midway"
            kill(child)
    wire = Wire("disk", tmp_path)
    for version in range(5):
        wire.sync(ToySource(toy_weights(version), version))
    assert len([path for path in tmp_path.glob("ACTOR.*") if path.suffix in (".weights", ".part")]) <= 2
    wire.close()
    assert list(tmp_path.iterdir()) == [other_file]


@pytest.mark.slow
def test_second_sender_of_a_name_is_refused(tmp_path, source):
    with process(sync_sides.send_side, "disk", tmp_path, 1, 6) as (child, pipe):
        pipe.send(hear(pipe))
        assert hear(pipe) == "midway"
        second = transport("disk", tmp_path, replace(PATIENT, name="ACTOR[1]"))
        with pytest.raises(WeightSyncError, match=rf"ACTOR\[0\] \(process {child.pid}\) sends already"):
            second.send(second.offer(source), source)


# -- changed files ----------------------------------------------------------------------------------------------------
def test_flipped_bit_names_the_tensor(wire, ticket, tmp_path):
    (path,) = tmp_path.glob("*.weights")
    content = bytearray(path.read_bytes())
    content[ticket.table.spans()[2][0]] ^= 4
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match=r"version 1 from ACTOR\[0\] refused: 'half' came with other bytes"):
        wire.sinks[0].receive(ticket)


@pytest.mark.parametrize("length", [0, 4000, 50_000])
def test_cut_file_is_refused_by_name(wire, ticket, tmp_path, length):
    (path,) = tmp_path.glob("*.weights")
    os.truncate(path, length)
    with pytest.raises(WeightSyncError, match=f"{path.name} is truncated: {length:,} of"):
        wire.sinks[0].receive(ticket)


def test_read_past_the_end_of_a_file_is_refused():
    with pytest.raises(WeightSyncError, match="was truncated at byte 2"):
        _read_exactly(io.BytesIO(b"ab"), memoryview(bytearray(4)))


# -- errors of the operating system -----------------------------------------------------------------------------------
def test_missing_space_is_an_error_with_the_figures(wire, source, tmp_path):
    ticket = wire.source.offer(source)
    message = r"no space left for weights: [\d,]+ bytes needed, [\d,]+ free"
    with largest_file(50_000), pytest.raises(WeightSyncError, match=message):
        wire.source.send(ticket, source)
    assert list(tmp_path.glob("*.weights")) == []
    wire.source.send(ticket, source)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".sender", ".weights"]


def refusal_of(call, *arguments):
    """Return the message of a call's error, which the operating system caused, and whether repeating may help."""
    with pytest.raises(EngineError) as caught:
        call(*arguments)
    assert isinstance(caught.value.__cause__, OSError)
    return str(caught.value), caught.value.retryable


def test_unusable_folder_is_named_with_the_reason(tmp_path, source):
    (tmp_path / "file").touch()
    below_file = transport("disk", tmp_path / "file/weights")
    refusal = refusal_of(below_file.send, below_file.offer(source), source)
    assert refusal == (f"weights cannot be written to {tmp_path}/file/weights: Not a directory", False)

    taken = transport("disk", tmp_path / "taken")
    ticket = taken.offer(source)
    (tmp_path / f"taken/ACTOR.{ticket.id}.part").mkdir(parents=True)
    refusal = refusal_of(taken.send, ticket, source)
    assert refusal == (f"weights cannot be written to {tmp_path}/taken: Is a directory", True)
    (tmp_path / f"taken/ACTOR.{ticket.id}.weights").mkdir()
    refusal = refusal_of(taken.receive, ticket)
    assert refusal == (f"weights cannot be read from {tmp_path}/taken: Is a directory", True)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, OSError),
        (errno.EDQUOT, OSError),
        (errno.EIO, WeightSyncError),
        (errno.ESTALE, WeightSyncError),
        (errno.EROFS, EngineError),
        (errno.EACCES, EngineError),
    ],
)
def test_write_error_names_the_folder_but_a_full_disk(wire, source, tmp_path, monkeypatch, number, kind, call):
    ticket, true = wire.source.offer(source), getattr(os, call)

    def fail(descriptor, *arguments):
        if "part" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        return true(descriptor, *arguments)

    with monkeypatch.context() as patch, pytest.raises(kind, match=os.strerror(number)) as caught:
        patch.setattr(os, call, fail)
        wire.source.send(ticket, source)
    assert type(caught.value) is kind or kind is OSError
    assert (f"cannot be written to {tmp_path}: " in str(caught.value)) == (kind is not OSError)
    assert kind is OSError or caught.value.retryable == (kind is WeightSyncError)
    assert wire.source.send(ticket, source) == wire.sinks[0].receive(ticket).stamp == source.stamp()


# -- the life of a file -----------------------------------------------------------------------------------------------
def test_version_is_synced_before_it_has_its_name(wire, source, tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def record(descriptor):
        synced.append({path.suffix for path in tmp_path.iterdir()})
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    wire.sync(source)
    assert synced == [{".sender", ".part"}]


def test_kept_version_is_renewed(wire, source, ticket, tmp_path):
    files = list(tmp_path.iterdir())
    for path in files:
        os.utime(path, (0, 0))
    assert wire.source.keeps(ticket)
    assert len(files) == 2 and all(time.time() - path.stat().st_mtime < 3600 for path in files)
    wire.sinks[0].close()
    assert equal(transport("disk", tmp_path).receive(ticket), source.weights)
    wire.source.close()
    assert not wire.source.keeps(ticket)


def test_runs_sharing_a_folder_keep_their_weights(tmp_path, source):
    sides = [DiskTransport(SyncSettings(folder=tmp_path, channel=f"ACTOR-{run}")) for run in ("one", "two")]
    tickets = [sync_sides.publish(side, source)[0] for side in sides]
    assert [side.receive(ticket).version for side, ticket in zip(sides, tickets, strict=True)] == [1, 1]
    sides[0].close()
    assert sides[1].receive(tickets[1]).version == 1
    (abandoned,) = tmp_path.glob("*.weights")
    os.utime(abandoned, (0, 0))  # of a run that was killed long ago
    sync_sides.publish(sides[0], source)
    assert not abandoned.exists() and len(list(tmp_path.glob("*.weights"))) == 1


@pytest.mark.parametrize("name", ["", "A.B", "A/B"])
def test_ambiguous_channel_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a sender"):
        DiskTransport(SyncSettings(folder=tmp_path, channel=name))
