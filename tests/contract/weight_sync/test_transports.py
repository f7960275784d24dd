# SPDX-License-Identifier: Apache-2.0
"""Weights arrive whole and unchanged over all transports; a cut sync leaves the version before it."""

import errno
import os
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import DLRoverRLError, WeightsLost, WeightSyncError
from dlrover.python.rl.engine.api.weights import verify_snapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.weight_sync import weight_server
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, Ticket, WeightTable
from dlrover.python.rl.engine.weight_sync.buckets import MappedWeights, WeightFile
from dlrover.python.rl.engine.weight_sync.weight_server import PublishedVersions
from tests.support import sync_sides
from tests.support.commands import wait_for
from tests.support.manual_clock import within
from tests.support.sync_sides import KINDS, LATEST_S, PATIENT, ToySource, equal, hear, process, toy_weights, transport

each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_dtypes_and_shapes_arrive_bit_for_bit_under_one_stamp(kind, connect):
    """All transports give the fingerprint of a snapshot, but for the one that leaves the weights on the device."""
    wire = connect(kind, sinks=2)
    for version in (1, 2):
        source = ToySource(toy_weights(version), version)
        stamp, received = wire.sync(source)
        assert [each.stamp for each in received] == [stamp, stamp] == [source.stamp(kind)] * 2
        assert (stamp == source.stamp()) == (kind != "cuda_ipc")
        assert all(equal(each, source.weights) for each in received)
    assert received[0].version == 2


def test_only_floats_are_cast_to_the_receivers_dtype(connect):
    weights = toy_weights()
    wire = connect("pull", settings=replace(PATIENT, dtype=torch.bfloat16))
    _, (received,) = wire.sync(ToySource(weights, version=1))
    cast = {name: each.bfloat16() if each.is_floating_point() else each for name, each in weights.items()}
    assert equal(received, cast)


@pytest.mark.feature(105)
@each_kind
@pytest.mark.parametrize("bucket_bytes", [1 << 10, 10_000, 1 << 20])
def test_bucket_size_changes_nothing(kind, connect, bucket_bytes):
    wire = connect(kind, settings=replace(PATIENT, bucket_bytes=bucket_bytes))
    assert equal(wire.sync(ToySource(toy_weights(), version=1))[1][0], toy_weights())


@each_kind
def test_earlier_versions_stay_as_they_were(wire):
    received = {}
    for version in range(1, 6):
        received[version] = wire.sync(ToySource(toy_weights(version), version))[1][0]
        for earlier, snapshot in received.items():
            assert equal(snapshot, toy_weights(earlier))


@each_kind
def test_memory_without_references_is_used_again(wire):
    places = set()
    for version in range(8):
        _, (received,) = wire.sync(ToySource(toy_weights(version), version))
        buffer = received.buffers["long"]
        places.add(buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data_ptr())
        del buffer, received
    assert len(places) <= 3


@pytest.mark.feature(101)
@each_kind
def test_ticket_has_no_byte_of_a_weight(kind, connect):
    sizes = []
    for rows in (512, 2048):
        weights = {f"layers.{number}.weight": torch.full((rows, 64), float(number)) for number in range(40)}
        ticket = connect(kind).source.offer(ToySource(weights, version=1))
        sizes.append(len(pickle.dumps(ticket)))
    assert sizes[0] < 100 * len(weights) + 1000
    assert abs(sizes[1] - sizes[0]) < 100


@each_kind
def test_names_are_gathered_for_the_first_ticket_only(wire):
    source = ToySource(toy_weights(), version=1)
    wire.sync(source)
    assert source.rounds == 2
    wire.sync(source)
    assert source.rounds == 3


@pytest.mark.feature(103)
@each_kind
def test_renamed_tensor_is_refused_on_both_sides_at_once(wire):
    source = ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    source.weights = {("embedding" if name == "norm" else name): each for name, each in source.weights.items()}
    with within(PATIENT.timeout_s / 2):
        sent, received = wire.attempt(ticket, source)
    assert isinstance(received, WeightSyncError)
    with pytest.raises(WeightSyncError, match=r"'embedding' float32\[3\] where it offered 'norm' float32\[3\]"):
        raise sent


@pytest.mark.feature(103)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named.pop("norm"), "has nothing where it offered 'norm'"),
        (lambda named: named.update(more=torch.zeros(2)), r"has 'more' float32\[2\] where it offered nothing"),
        (lambda named: named.update(norm=torch.zeros(4)), r"'norm' float32\[4\] where it offered 'norm' float32\[3\]"),
        (lambda named: named.update(norm=named["norm"].double()), r"'norm' float64\[3\] where it offered 'norm'"),
    ],
)
def test_source_changed_after_its_offer_can_offer_again(connect, change, message):
    wire = connect("pull")
    source = ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    change(source.weights)
    with pytest.raises(WeightSyncError, match=message):
        wire.source.send(ticket, source)
    with pytest.raises(WeightsLost, match=r"version 1 from ACTOR\[0\] is not there"):
        wire.sinks[0].receive(ticket)
    assert equal(wire.sync(source)[1][0], source.weights)


@pytest.mark.feature(104)
@each_kind
def test_seal_of_another_version_than_the_ticket_is_refused(wire, kind, monkeypatch):
    source = ToySource(toy_weights(), version=3)
    fingerprint = source.stamp(kind).fingerprint
    ticket = wire.source.offer(source)
    sync_sides.forged(monkeypatch, 4)
    sent, received = wire.attempt(ticket, source)
    assert sent.version == 4
    assert isinstance(received, WeightSyncError)
    assert f"version 4 ({fingerprint}) was sent, but the ticket describes version 3 ({fingerprint})" in str(received)


@pytest.mark.feature(104)
@each_kind
def test_ticket_with_other_version_or_names_is_refused(wire):
    source = ToySource(toy_weights(), version=3)
    ticket = wire.source.offer(source)
    entries = ticket.table.entries
    renamed = WeightTable((entries[0]._replace(name="other"), *entries[1:]))
    for wrong in (replace(ticket, version=4), replace(ticket, table=renamed)):
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(wire.source.send, ticket, source)
            if wire.kind != "broadcast":
                sending.result(LATEST_S)
            with pytest.raises(WeightSyncError, match=r"version 3 \([0-9a-f]{16}\) was sent"):
                wire.sinks[0].receive(wrong)
            sending.result(LATEST_S)


@pytest.mark.feature(104)
@each_kind
def test_source_at_a_later_version_is_refused(wire):
    source = ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    source.version = 2
    with pytest.raises(WeightSyncError, match="version 1 was offered, and the source is at 2"):
        wire.source.send(ticket, source)


@each_kind
def test_following_rank_gathers_and_sends_nothing(wire, kind):
    follower = transport(kind, replace(PATIENT, is_leader=False))
    source = ToySource(toy_weights(), version=1)
    taken = []
    source.halt = taken.append
    follower.offer(source)
    assert follower.send(wire.source.offer(ToySource(toy_weights(), version=1)), source) is None
    assert taken == list(range(len(source.weights)))


@each_kind
def test_failing_leader_still_takes_part_in_gathering(kind):
    memory = DeviceMemory(capacity=4096)  # of a bucket
    settings = replace(PATIENT, address="192.0.2.1", timeout_s=0.5, memory=memory)  # of no machine
    sender, source, taken = transport(kind, settings), ToySource(toy_weights(), version=1), []
    ticket = sender.offer(source)
    source.halt = taken.append
    with pytest.raises((DLRoverRLError, OSError)):
        sender.send(ticket, source)
    assert taken == list(range(len(source.weights)))
    sender.close()


def test_broadcast_holds_a_bucket_on_each_device(connect):
    """A host stands in for the devices; they have no room for the weights."""
    bucket = 8192
    source, sink = (DeviceMemory(capacity=bucket) for _ in range(2))
    settings = replace(PATIENT, bucket_bytes=bucket)
    wire = connect("broadcast", settings=replace(settings, memory=source))
    wire.sinks = [transport("broadcast", replace(settings, memory=sink))]
    _, (received,) = wire.sync(ToySource(toy_weights(), version=1))
    assert received.nbytes > 8 * bucket
    assert (source.peak, sink.peak) == (bucket, bucket)
    wire.close()
    wait_for(lambda: not source.total() + sink.total(), 5.0)  # gloo's own thread lets go of what it has sent


def test_bucket_size_depends_on_the_device():
    assert SyncSettings().bucket == 1 << 20
    assert SyncSettings(device="cuda:1").bucket == 1 << 26
    assert SyncSettings(device="cuda:1", bucket_bytes=1000).bucket == 1024


@each_kind
def test_waiting_for_a_silent_sender_has_an_end(kind):
    hurried = replace(PATIENT, timeout_s=0.3)
    sender, sink = (transport(kind, replace(hurried, name=name)) for name in ("ACTOR[0]", "me"))
    ticket = sender.offer(ToySource(toy_weights(), version=9))
    with pytest.raises(WeightSyncError, match=r"version 9 from ACTOR\[0\]"):
        sink.receive(ticket)
    sender.close()


def test_snapshot_is_checked_again_in_another_process(connect):
    _, (received,) = connect("pull").sync(ToySource(toy_weights(), version=1))
    copy = pickle.loads(pickle.dumps(received))
    assert (received.checked, copy.checked) == (True, False)
    copy.buffers["norm"].flags.writeable = True
    copy.buffers["norm"][0] ^= 1
    with pytest.raises(WeightSyncError, match="'norm' does not match"):
        verify_snapshot(copy, {name: tuple(tensor.shape) for name, tensor in toy_weights().items()}, serving=0)


def test_mapped_snapshot_cannot_be_written(connect):
    _, (received,) = connect("pull").sync(ToySource(toy_weights(), version=1))
    with pytest.raises(ValueError, match="read-only"):
        received.buffers["norm"][0] = np.uint8(0)


@pytest.mark.feature(102)
@pytest.mark.needs("two cuda devices")
def test_nccl_gives_the_same_weights(connect):
    source_side, sink_side = (SyncSettings(device=f"cuda:{number}", who=str(number)) for number in (0, 1))
    wire = connect("broadcast", settings=source_side)
    wire.sinks = [transport("broadcast", sink_side)]
    weights = {name: tensor.to("cuda:0") for name, tensor in toy_weights().items()}
    source = ToySource(weights, version=1)
    assert wire.sync(source)[1][0].stamp == source.stamp()


@pytest.mark.feature(104)
@pytest.mark.parametrize("kind", KINDS)
def test_sender_killed_midway_is_named(kind):
    sink = transport(kind, replace(PATIENT, name="ROLLOUT[0]"))
    with process(sync_sides.send_side, kind, 4, 6) as (child, pipe), ThreadPoolExecutor(1) as pool:
        ticket = hear(pipe)
        pipe.send(ticket)
        receiving = pool.submit(sink.receive, ticket)
        assert hear(pipe) == "midway"
        sync_sides.kill(child)
        error = receiving.exception(PATIENT.timeout_s / 2)
    assert isinstance(error, WeightSyncError)
    assert "ACTOR[0]" in str(error)


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
    with within(5.0):
        sent, received = wire.attempt(ticket, source)
    assert "1 of 2 receivers of version 2 joined within 0.5 s" in str(sent)
    assert "version 2 from ACTOR[0]" in str(received)
    wire.sinks = [late, *more_sinks]
    stamp, *received = wire.attempt(ticket, source)
    assert [each.stamp for each in received] == [stamp, stamp]


def test_broadcast_admits_a_replaced_receiver(connect):
    wire = connect("broadcast", sinks=2)
    wire.sync(ToySource(toy_weights(1), 1))
    wire.sinks[1].close()
    wire.sinks[1] = transport("broadcast", replace(PATIENT, name="ROLLOUT[1]", receivers=2))
    stamp, received = wire.sync(ToySource(toy_weights(2), 2))
    assert [each.stamp for each in received] == [stamp, stamp]


def test_sink_follows_the_sender_bucket_by_bucket():
    sink = transport("pull", replace(PATIENT, name="ROLLOUT[0]", timeout_s=0.5))
    with process(sync_sides.send_side, "pull", 4, 6) as (_, pipe):
        ticket = hear(pipe)
        pipe.send(ticket)
        assert hear(pipe) == "midway"
        sent = ticket.table.spans()[5][1]
        with pytest.raises(WeightSyncError, match=f"{sent:,} of {ticket.table.nbytes:,} bytes: no progress for 0.5 s"):
            sink.receive(ticket)


@pytest.mark.parametrize("kind", ["pull", "pull_copied"])
def test_flipped_bit_names_the_tensor(wire):
    ticket, _ = sync_sides.publish(wire.source, ToySource(toy_weights(), version=1))
    wire.source._versions._files[ticket.id]._data[ticket.table.spans()[2][0]] ^= 4
    with pytest.raises(WeightSyncError, match=r"version 1 from ACTOR\[0\] refused: 'half' came with other bytes"):
        wire.sinks[0].receive(ticket)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_missing_space_is_an_error_with_the_figures(connect, monkeypatch, number):
    wire, source = connect("pull"), ToySource(toy_weights(), version=1)

    def refuse(descriptor, start, nbytes):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        ticket = wire.source.offer(source)
        with pytest.raises(WeightSyncError, match=r"no space left for weights: [\d,]+ bytes needed, [\d,]+ free"):
            wire.source.send(ticket, source)
    assert wire.source.send(ticket, source) == wire.sinks[0].receive(ticket).stamp


@pytest.mark.parametrize("is_mapped", [False, True])
def test_truncated_memory_is_an_error_and_no_signal(is_mapped):
    table = WeightTable.of(toy_weights().items())
    descriptor, _ = WeightFile(table).lend()
    weights = MappedWeights(descriptor, table, {}) if is_mapped else None
    os.truncate(f"/proc/self/fd/{descriptor}", 100)
    with pytest.raises(WeightSyncError, match="is truncated: 100 of"):
        weights.progress() if is_mapped else MappedWeights(descriptor, table, {})


@pytest.mark.parametrize("kind", ["pull"])
def test_last_version_is_there_until_next_is_whole(wire):
    first, second = (ToySource(toy_weights(seed), version=seed) for seed in (1, 2))
    (ticket, _), received = sync_sides.publish(wire.source, first), []
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
    with within(PATIENT.timeout_s / 2), pytest.raises(WeightsLost):
        wire.sinks[0].receive(ticket)


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
