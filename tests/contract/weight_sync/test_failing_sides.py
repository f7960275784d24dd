# SPDX-License-Identifier: Apache-2.0
"""A side of a sync when its disk, its memory or its address fails."""

import errno
import io
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, InvalidJob, WeightsLost, WeightSyncError
from dlrover.python.rl.engine.weight_sync import weight_server
from dlrover.python.rl.engine.weight_sync.base import Ticket, WeightTable
from dlrover.python.rl.engine.weight_sync.buckets import MappedWeights, WeightFile
from dlrover.python.rl.engine.weight_sync.disk import _read_exactly
from dlrover.python.rl.engine.weight_sync.weight_server import PublishedVersions
from tests.support.sync_sides import PATIENT, ToySource, Wire, equal, toy_weights, transport


@pytest.mark.parametrize("kind", ["pull", "broadcast"])
def test_a_leader_without_an_address_takes_its_part(kind, tmp_path):
    sender = transport(kind, tmp_path, replace(PATIENT, address="192.0.2.1", timeout_s=0.5))  # of no machine
    source = ToySource(toy_weights(), version=1)
    taken = []
    ticket = sender.offer(source)
    source.halt = taken.append
    with pytest.raises(InvalidJob, match="not an address of this machine"):
        sender.send(ticket, source)
    assert taken == list(range(len(source.weights)))
    sender.close()


@pytest.mark.parametrize("kind", ["disk", "pull"])
def test_only_floats_are_sent_in_the_receivers_dtype(kind, tmp_path):
    wire = Wire(kind, tmp_path, settings=replace(PATIENT, dtype=torch.bfloat16))
    weights = toy_weights()
    _, (received,) = wire.sync(ToySource(weights, version=1))
    cast = {name: each.bfloat16() if each.is_floating_point() else each for name, each in weights.items()}
    assert equal(received, cast)
    wire.close()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_memory_that_is_cut_off_is_an_error_and_no_signal(is_mapped):
    table = WeightTable.of(toy_weights().items())
    descriptor, _ = WeightFile(table).lend()
    weights = MappedWeights(descriptor, table, {}) if is_mapped else None
    os.truncate(f"/proc/self/fd/{descriptor}", 100)
    with pytest.raises(WeightSyncError, match="is truncated: 100 of"):
        weights.progress() if is_mapped else MappedWeights(descriptor, table, {})


def test_a_version_on_disk_has_its_name_once_it_is_there(tmp_path, monkeypatch):
    wire, synced, sync = Wire("disk", tmp_path), [], os.fsync

    def seen(descriptor):
        synced.append({path.suffix for path in tmp_path.iterdir()})
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    wire.sync(ToySource(toy_weights(), version=1))
    assert synced == [{".sender", ".part"}]
    wire.close()


@pytest.mark.parametrize(
    ("number", "raised"),
    [
        (errno.ENOSPC, OSError),
        (errno.EDQUOT, OSError),
        (errno.EIO, WeightSyncError),
        (errno.ESTALE, WeightSyncError),
        (errno.EROFS, EngineError),
        (errno.EACCES, EngineError),
    ],
)
def test_an_error_of_the_disk_is_named_after_what_helps(tmp_path, monkeypatch, number, raised):
    sender, source = transport("disk", tmp_path), ToySource(toy_weights(), version=1)
    ticket = sender.offer(source)

    def failing(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises((OSError, EngineError)) as caught:
        sender.send(ticket, source)
    assert type(caught.value) is raised
    assert raised is OSError or caught.value.retryable == (raised is WeightSyncError)
    sender.close()


def test_a_file_that_ends_early_is_an_error():
    with pytest.raises(WeightSyncError, match="was truncated at byte 2"):
        _read_exactly(io.BytesIO(b"ab"), memoryview(bytearray(4)))


def test_a_version_on_disk_that_is_kept_is_renewed(tmp_path):
    wire, source = Wire("disk", tmp_path), ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    wire.source.send(ticket, source)
    files = list(tmp_path.iterdir())
    for path in files:
        os.utime(path, (0, 0))
    assert wire.source.keeps(ticket)
    assert len(files) == 2 and all(time.time() - path.stat().st_mtime < 3600 for path in files)
    wire.sinks[0].close()
    assert equal(transport("disk", tmp_path).receive(ticket), source.weights)
    wire.source.close()
    assert not wire.source.keeps(ticket)


@pytest.mark.parametrize("kind", ["disk", "pull"])
def test_the_last_version_is_there_until_the_next_is_whole(kind, tmp_path):
    wire, first, second = Wire(kind, tmp_path), *(ToySource(toy_weights(seed), version=seed) for seed in (1, 2))
    ticket, received = wire.source.offer(first), []
    wire.source.send(ticket, first)
    second.rounds = 1  # the offer's does not count
    second.halt = lambda number: received.append(wire.sinks[0].receive(ticket)) if number == 3 else None
    wire.source.send(wire.source.offer(second), second)
    assert received and all(equal(each, first.weights) for each in received)
    wire.close()


def test_what_is_not_sent_is_not_waited_for(tmp_path):
    wire, source = Wire("pull", tmp_path), ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    source.version = 2
    with pytest.raises(WeightSyncError, match="the source is at 2"):
        wire.source.send(ticket, source)
    began_s = time.monotonic()
    with pytest.raises(WeightsLost):
        wire.sinks[0].receive(ticket)
    assert time.monotonic() - began_s < PATIENT.timeout_s / 2
    wire.close()


def written(versions, number):
    table = WeightTable.of([("weight", torch.zeros(number))])
    ticket = Ticket(f"{number:032x}", number, "ACTOR[0]", table)
    versions.expect(ticket.id)
    with versions.writing(ticket) as file:
        file.write(ticket, iter([(0, torch.zeros(number).view(torch.uint8))]))
    return ticket


def test_a_version_stays_until_the_second_after_it():
    versions = PublishedVersions(WeightFile)
    tickets = [written(versions, number) for number in (1, 2, 3)]
    opened = [versions.open(ticket.id, 0.0, WeightFile.lend) for ticket in tickets]
    assert opened[0] is None and [table for _, table in opened[1:]] == [ticket.table for ticket in tickets[1:]]
    for descriptor, _ in opened[1:]:
        os.close(descriptor)


def test_a_version_that_fails_is_given_to_no_receiver():
    versions = PublishedVersions(WeightFile)
    first = written(versions, 1)
    ticket = replace(first, id=f"{2:032x}")
    with pytest.raises(ZeroDivisionError), versions.writing(ticket):
        raise ZeroDivisionError
    assert versions.open(ticket.id, 0.0, WeightFile.lend) is None and not versions.is_writing(ticket.id)
    descriptor, _ = versions.open(first.id, 0.0, WeightFile.lend)
    os.close(descriptor)


@pytest.mark.parametrize("end", ["close", "stop_waiting"])
def test_who_waits_for_a_version_is_answered_at_the_end(end):
    versions, answers = PublishedVersions(WeightFile), []
    versions.expect("a" * 32)
    waiting = threading.Thread(
        target=lambda: answers.append(versions.open("a" * 32, 60.0, WeightFile.lend)), daemon=True
    )
    waiting.start()
    getattr(versions, end)()
    waiting.join(20.0)
    assert answers == [None]


@pytest.mark.parametrize("is_other", [False, True])
def test_another_user_of_the_host_gets_no_weights(monkeypatch, is_other):
    own = os.getuid()
    side, other = socket.socketpair()
    with side, other:
        monkeypatch.setattr(os, "getuid", lambda: own + is_other)
        served = []
        weight_server._serve(side, served.append)
        assert served == ([] if is_other else [side])
