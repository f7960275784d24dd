# SPDX-License-Identifier: Apache-2.0
"""A sync that is cut leaves the version before it, names the side that is gone, and the next one works."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dlrover.python.rl.common.errors import WeightsLost, WeightSyncError
from dlrover.python.rl.engine.weight_sync import weight_server
from dlrover.python.rl.engine.weight_sync.base import Ticket, WeightTable
from dlrover.python.rl.engine.weight_sync.buckets import MappedWeights, WeightFile
from dlrover.python.rl.engine.weight_sync.weight_server import PublishedVersions
from tests.support.sync_sides import (
    KINDS,
    PATIENT,
    ToySource,
    equal,
    hear,
    kill,
    process,
    send_side,
    toy_weights,
    transport,
)


@pytest.mark.feature(104)
@pytest.mark.parametrize("kind", KINDS)
def test_sender_killed_midway_is_named(kind, tmp_path):
    sink = transport(kind, tmp_path, replace(PATIENT, name="ROLLOUT[0]"))
    with process(send_side, kind, tmp_path, 4, 6) as (child, pipe), ThreadPoolExecutor(1) as pool:
        ticket = hear(pipe)
        pipe.send(ticket)
        receiving = pool.submit(sink.receive, ticket)
        assert hear(pipe) == "midway"
        kill(child)
        error = receiving.exception(PATIENT.timeout_s / 2)
    assert isinstance(error, WeightSyncError)
    assert "ACTOR[0]" in str(error)
    if kind == "disk":
        assert f"(process {child.pid}) has ended before it was" in str(error)


@pytest.mark.feature(104)
@pytest.mark.parametrize("kind", KINDS)
def test_sync_cut_midway_leaves_old_version_and_works_again(kind, connect):
    wire, is_cut = connect(kind, settings=replace(PATIENT, timeout_s=5.0)), True
    _, (serving,) = wire.sync(ToySource(toy_weights(1), 1))

    def fail(number):
        if is_cut and number == 5:
            raise OSError("the source broke")

    source = ToySource(toy_weights(2), 2, halt=fail)
    ticket = wire.source.offer(source)
    for _ in range(2):
        sent, received = wire.attempt(ticket, source)
        assert isinstance(sent, OSError)
        assert isinstance(received, WeightSyncError)
        assert "version 2 from ACTOR[0]" in str(received)
        assert equal(serving, toy_weights(1))
    is_cut = False
    sent, received = wire.attempt(ticket, source, in_turn=kind != "broadcast")
    assert sent == received.stamp == source.stamp(kind)
    assert equal(received, toy_weights(2))
    assert equal(serving, toy_weights(1))


def test_broadcast_counts_absent_receivers_and_works_again(connect):
    wire = connect("broadcast", sinks=2, settings=replace(PATIENT, timeout_s=0.5))
    wire.sync(ToySource(toy_weights(1), 1))
    source, (late, *more_sinks) = ToySource(toy_weights(2), 2), wire.sinks
    ticket, wire.sinks = wire.source.offer(source), more_sinks
    began_s = time.monotonic()
    sent, received = wire.attempt(ticket, source)
    assert time.monotonic() - began_s < 5.0
    assert "1 of 2 receivers of version 2 joined within 0.5 s" in str(sent)
    assert "version 2 from ACTOR[0]" in str(received)
    wire.sinks = [late, *more_sinks]
    stamp, *received = wire.attempt(ticket, source)
    assert [each.stamp for each in received] == [stamp, stamp]


def test_broadcast_admits_a_replaced_receiver(connect, tmp_path):
    wire = connect("broadcast", sinks=2)
    wire.sync(ToySource(toy_weights(1), 1))
    wire.sinks[1].close()
    wire.sinks[1] = transport("broadcast", tmp_path, replace(PATIENT, name="ROLLOUT[1]", receivers=2))
    stamp, received = wire.sync(ToySource(toy_weights(2), 2))
    assert [each.stamp for each in received] == [stamp, stamp]


def test_sink_follows_the_sender_bucket_by_bucket(tmp_path):
    """The sink has fetched what is there while the sender stands still in the middle."""
    sink = transport("pull", tmp_path, replace(PATIENT, name="ROLLOUT[0]", timeout_s=0.5))
    with process(send_side, "pull", tmp_path, 4, 6) as (_, pipe):
        ticket = hear(pipe)
        pipe.send(ticket)
        assert hear(pipe) == "midway"
        sent = ticket.table.spans()[5][1]
        with pytest.raises(WeightSyncError, match=f"{sent:,} of {ticket.table.nbytes:,} bytes: no progress for 0.5 s"):
            sink.receive(ticket)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_truncated_memory_is_an_error_and_no_signal(is_mapped):
    table = WeightTable.of(toy_weights().items())
    descriptor, _ = WeightFile(table).lend()
    weights = MappedWeights(descriptor, table, {}) if is_mapped else None
    os.truncate(f"/proc/self/fd/{descriptor}", 100)
    with pytest.raises(WeightSyncError, match="is truncated: 100 of"):
        weights.progress() if is_mapped else MappedWeights(descriptor, table, {})


@pytest.mark.parametrize("kind", ["disk", "pull"])
def test_last_version_is_there_until_next_is_whole(kind, wire):
    first, second = (ToySource(toy_weights(seed), version=seed) for seed in (1, 2))
    ticket, received = wire.source.offer(first), []
    wire.source.send(ticket, first)
    second.rounds = 1  # the offer's does not count
    second.halt = lambda number: received.append(wire.sinks[0].receive(ticket)) if number == 3 else None
    wire.source.send(wire.source.offer(second), second)
    assert received and all(equal(each, first.weights) for each in received)


def test_refused_version_is_not_waited_for(connect):
    wire, source = connect("pull"), ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    source.version = 2
    with pytest.raises(WeightSyncError, match="the source is at 2"):
        wire.source.send(ticket, source)
    began_s = time.monotonic()
    with pytest.raises(WeightsLost):
        wire.sinks[0].receive(ticket)
    assert time.monotonic() - began_s < PATIENT.timeout_s / 2


def written(versions, number):
    table = WeightTable.of([("weight", torch.zeros(number))])
    ticket = Ticket(f"{number:032x}", number, "ACTOR[0]", table)
    versions.expect(ticket.id)
    with versions.writing(ticket) as file:
        file.write(ticket, iter([(0, torch.zeros(number).view(torch.uint8))]))
    return ticket


def test_published_version_stays_until_second_after_it():
    versions = PublishedVersions(WeightFile)
    tickets = [written(versions, number) for number in (1, 2, 3)]
    opened = [versions.open(ticket.id, 0.0, WeightFile.lend) for ticket in tickets]
    assert opened[0] is None and [table for _, table in opened[1:]] == [ticket.table for ticket in tickets[1:]]
    for descriptor, _ in opened[1:]:
        os.close(descriptor)


def test_failed_version_is_given_to_no_receiver():
    versions = PublishedVersions(WeightFile)
    first = written(versions, 1)
    ticket = replace(first, id=f"{2:032x}")
    with pytest.raises(ZeroDivisionError), versions.writing(ticket):
        raise ZeroDivisionError
    assert versions.open(ticket.id, 0.0, WeightFile.lend) is None and not versions.is_writing(ticket.id)
    descriptor, _ = versions.open(first.id, 0.0, WeightFile.lend)
    os.close(descriptor)


@pytest.mark.parametrize("end", ["close", "stop_waiting"])
def test_waiting_receiver_is_answered_at_the_end(end):
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
def test_other_user_of_the_host_gets_no_weights(monkeypatch, is_other):
    own = os.getuid()
    side, other = socket.socketpair()
    with side, other:
        monkeypatch.setattr(os, "getuid", lambda: own + is_other)
        served = []
        weight_server._serve(side, served.append)
        assert served == ([] if is_other else [side])
