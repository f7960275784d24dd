# SPDX-License-Identifier: Apache-2.0
"""A sync that is cut leaves what was served before, says who is gone, and the next one works."""

import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.weight_sync.collective import BroadcastGroup
from tests.support.sync_sides import (
    KINDS,
    LATEST_S,
    PATIENT,
    WAITING,
    ToySource,
    Wire,
    equal,
    hear,
    kill,
    process,
    receive_side,
    send_side,
    toy_weights,
    transport,
)

FILES = ("disk",)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_file = pytest.mark.parametrize("kind", FILES)


def received_by(sink, ticket):
    """Return a sink's snapshot or error, and the seconds that it took."""
    began_s = time.monotonic()
    try:
        outcome = sink.receive(ticket)
    except WeightSyncError as error:
        outcome = error
    return outcome, time.monotonic() - began_s


@each_kind
def test_two_processes(kind, tmp_path):
    with process(send_side, kind, tmp_path, 4, None) as (_, pipe):
        sink = transport(kind, tmp_path, replace(PATIENT, name="ROLLOUT[0]"))
        ticket = hear(pipe)
        pipe.send(ticket)
        snapshot = sink.receive(ticket)
        assert equal(snapshot, toy_weights(4))
        assert hear(pipe) == snapshot.stamp
        pipe.send(None)


@pytest.mark.feature(104)
@each_kind
def test_a_sender_killed_midway_is_named_and_nothing_arrives(kind, tmp_path):
    with process(send_side, kind, tmp_path, 4, 6) as (child, pipe):
        sink = transport(kind, tmp_path, replace(PATIENT, name="ROLLOUT[0]"))
        ticket = hear(pipe)
        pipe.send(ticket)
        if kind in FILES:
            assert hear(pipe) == "midway"
            kill(child)
            outcome, took_s = received_by(sink, ticket)
        else:
            outcome, took_s = _killed_while_receiving(child, pipe, sink, ticket)
    assert isinstance(outcome, WeightSyncError)
    assert "ACTOR[0]" in str(outcome)
    if kind in FILES:
        assert f"(process {child.pid}) has ended before it was" in str(outcome)
    assert took_s < PATIENT.timeout_s / 2


def _killed_while_receiving(child, pipe, sink, ticket):
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(received_by, sink, ticket)
        assert hear(pipe) == "midway"
        at_s = time.monotonic()
        kill(child)
        outcome, _ = receiving.result(PATIENT.timeout_s * 2)
        return outcome, time.monotonic() - at_s


@each_file
def test_a_sender_that_takes_the_place_of_a_killed_one_sends_with_the_same_ticket(kind, tmp_path):
    sink = transport(kind, tmp_path, replace(PATIENT, name="ROLLOUT[0]"))
    with process(send_side, kind, tmp_path, 4, 6) as (child, pipe):
        ticket = hear(pipe)
        pipe.send(ticket)
        assert hear(pipe) == "midway"
        kill(child)
    with process(send_side, kind, tmp_path, 4, None) as (_, pipe):
        hear(pipe)
        pipe.send(ticket)
        assert hear(pipe) == ToySource(toy_weights(4), 4).stamp()
        assert equal(sink.receive(ticket), toy_weights(4))
        pipe.send(None)


@each_file
def test_a_receiver_that_takes_the_place_of_a_killed_one_gets_the_same_version(kind, tmp_path):
    sender = transport(kind, tmp_path)
    source = ToySource(toy_weights(2), 2)
    ticket = sender.offer(source)
    with process(receive_side, kind, tmp_path) as (child, pipe):
        assert hear(pipe) == "up"
        pipe.send(ticket)
        kill(child)
    stamp = sender.send(ticket, source)
    with process(receive_side, kind, tmp_path) as (_, pipe):
        assert hear(pipe) == "up"
        pipe.send(ticket)
        assert hear(pipe) == stamp
        pipe.send(None)
    sender.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", WAITING)
def test_a_receiver_killed_before_it_asks_ends_the_sync_and_the_next_one_works(kind, tmp_path):
    sender = transport(kind, tmp_path, replace(PATIENT, timeout_s=1.0))
    source = ToySource(toy_weights(2), 2)
    sender.offer(source)
    with process(receive_side, kind, tmp_path) as (child, _):
        ticket = sender.offer(source)
        kill(child)
    with pytest.raises(WeightSyncError, match="0 of 1 receivers of version 2 joined within 1 s"):
        sender.send(ticket, source)
    with process(receive_side, kind, tmp_path) as (_, pipe):
        assert hear(pipe) == "up"
        ticket = sender.offer(source)
        pipe.send(ticket)
        stamp = sender.send(ticket, source)
        assert hear(pipe) == stamp
        pipe.send(None)
    sender.close()


@each_file
def test_a_version_read_at_its_time_stays_whole_while_the_next_ones_are_sent(kind, tmp_path):
    wire = Wire(kind, tmp_path)
    snapshots = [wire.sync(ToySource(toy_weights(version), version))[1][0] for version in range(6)]
    assert all(equal(snapshot, toy_weights(version)) for version, snapshot in enumerate(snapshots))
    del snapshots
    for version in range(6, 9):
        wire.sync(ToySource(toy_weights(version), version))
    assert len(list(tmp_path.glob("*.weights"))) <= 2
    wire.close()


@pytest.mark.feature(104)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_cut_in_the_middle_leaves_the_old_version_and_the_same_ticket_works_again(kind, tmp_path):
    wire = Wire(kind, tmp_path, settings=replace(PATIENT, timeout_s=5.0))
    first, cut = ToySource(toy_weights(1), 1), True
    _, (serving,) = wire.sync(first)

    def fail(number):
        if cut and number == 5:
            raise OSError("the source broke")

    source = ToySource(toy_weights(2), 2, halt=fail)
    ticket = wire.source.offer(source)
    for _ in range(2):
        sent, received = wire.attempt(ticket, source)
        assert isinstance(sent, OSError)
        assert isinstance(received, WeightSyncError)
        assert "version 2 from ACTOR[0]" in str(received)
        assert equal(serving, toy_weights(1))
    cut = False
    sent, received = wire.attempt(ticket, source, in_turn=kind not in WAITING)
    assert sent == received.stamp == source.stamp(kind)
    assert equal(received, toy_weights(2))
    assert equal(serving, toy_weights(1))
    wire.close()


@pytest.mark.parametrize("kind", WAITING)
def test_a_receiver_that_never_comes_is_counted_in_the_error_and_the_same_ticket_works_once_it_does(kind, tmp_path):
    wire = Wire(kind, tmp_path, sinks=2, settings=replace(PATIENT, timeout_s=0.5))
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
    wire.close()


def test_a_receiver_that_takes_anothers_place_between_broadcasts_is_let_in_at_once(tmp_path):
    wire = Wire("broadcast", tmp_path, sinks=2)
    wire.sync(ToySource(toy_weights(1), 1))
    wire.sinks[1].close()
    wire.sinks[1] = transport("broadcast", tmp_path, replace(PATIENT, name="ROLLOUT[1]", receivers=2))
    stamp, received = wire.sync(ToySource(toy_weights(2), 2))
    assert [each.stamp for each in received] == [stamp, stamp]
    wire.close()


class StuckDevices:
    """nccl as a host sees it while a rank is missing: a call that does not come back, or work that never ends."""

    def __init__(self, calls_return):
        self.calls_return, self.over, self.aborted = calls_return, threading.Event(), False

    def name(self):
        return "nccl"

    def broadcast(self, tensor, root):
        if not self.calls_return:
            self.over.wait(LATEST_S)
        return self

    def is_completed(self):
        return False

    def exception(self):
        return None

    def abort(self):
        self.aborted = True
        self.over.set()


@pytest.mark.parametrize("calls_return", [True, False])
def test_a_broadcast_between_devices_has_an_end_on_the_host(calls_return):
    stuck = StuckDevices(calls_return)
    group = BroadcastGroup("group", stuck, timeout_s=0.1)
    with pytest.raises(ConnectionError, match=r"has not ended within 0\.1 s"):
        group.broadcast(torch.zeros(1))
    group.leave()
    assert stuck.aborted


@pytest.mark.feature(104)
@each_file
def test_a_sync_cut_by_an_error_leaves_the_version_before_it(kind, tmp_path):
    wire = Wire(kind, tmp_path)
    _, (serving,) = wire.sync(ToySource(toy_weights(1), 1))

    def fail(number):
        if number == 5:
            raise OSError("the source broke")

    ticket = wire.source.offer(ToySource(toy_weights(2), 2))
    broken = ToySource(toy_weights(2), 2, halt=fail)
    broken.rounds = 1
    with pytest.raises(OSError, match="the source broke"):
        wire.source.send(ticket, broken)
    outcome, took_s = received_by(wire.sinks[0], ticket)
    assert "has ended before it was" in str(outcome)
    assert took_s < 2.0
    assert equal(serving, toy_weights(1))
    wire.close()


@each_file
def test_a_flipped_bit_is_an_error_that_names_the_tensor(kind, tmp_path):
    wire = Wire(kind, tmp_path)
    source = ToySource(toy_weights(), 1)
    ticket = wire.source.offer(source)
    wire.source.send(ticket, source)
    (path,) = tmp_path.glob("*.weights")
    start, _ = ticket.table.spans()[2]
    with path.open("r+b") as file:
        file.seek(start)
        byte = file.read(1)[0]
        file.seek(start)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(WeightSyncError, match=r"version 1 from ACTOR\[0\] refused: 'half' came with other bytes"):
        wire.sinks[0].receive(ticket)
    wire.close()


@each_file
@pytest.mark.parametrize("length", [0, 4000, 50_000])
def test_a_cut_file_is_an_error_that_names_it(kind, tmp_path, length):
    wire = Wire(kind, tmp_path)
    source = ToySource(toy_weights(), 1)
    ticket = wire.source.offer(source)
    wire.source.send(ticket, source)
    (path,) = tmp_path.glob("*.weights")
    os.truncate(path, length)
    with pytest.raises(WeightSyncError, match=f"{path.name} is truncated: {length:,} of"):
        wire.sinks[0].receive(ticket)
    wire.close()


@each_file
def test_what_a_crash_has_left_is_used_again_or_removed_and_others_files_are_left_alone(kind, tmp_path):
    other_file = tmp_path / "REFERENCE.0123.weights"
    other_file.write_bytes(b"another role's")
    for _ in range(3):
        with process(send_side, kind, tmp_path, 1, 6) as (child, pipe):
            pipe.send(hear(pipe))
            assert hear(pipe) == "midway"
            kill(child)
    wire = Wire(kind, tmp_path)
    for version in (1, 2):
        wire.sync(ToySource(toy_weights(version), version))
    assert len([path for path in tmp_path.glob("ACTOR.*") if path.suffix in (".weights", ".part")]) <= 2
    wire.close()
    assert list(tmp_path.iterdir()) == [other_file]


@pytest.mark.slow
def test_two_senders_of_one_name_do_not_mix(tmp_path):
    with process(send_side, "disk", tmp_path, 1, 6) as (child, pipe):
        pipe.send(hear(pipe))
        assert hear(pipe) == "midway"
        second = transport("disk", tmp_path, replace(PATIENT, name="ACTOR[1]"))
        source = ToySource(toy_weights(2), 2)
        with pytest.raises(WeightSyncError, match=rf"ACTOR\[0\] \(process {child.pid}\) sends already"):
            second.send(second.offer(source), source)


def test_a_sink_follows_the_sender_bucket_by_bucket(tmp_path):
    """The sink has fetched what is there while the sender stands still in the middle."""
    sink = transport("pull", tmp_path, replace(PATIENT, name="ROLLOUT[0]", timeout_s=0.5))
    with process(send_side, "pull", tmp_path, 4, 6) as (_, pipe):
        ticket = hear(pipe)
        pipe.send(ticket)
        assert hear(pipe) == "midway"
        sent = ticket.table.spans()[5][1]
        with pytest.raises(WeightSyncError, match=f"{sent:,} of {ticket.table.nbytes:,} bytes: no progress for 0.5 s"):
            sink.receive(ticket)


def test_no_space_is_an_error_with_the_figures(tmp_path):
    sender = transport("disk", tmp_path)
    source = ToySource(toy_weights(), 1)
    ticket = sender.offer(source)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(WeightSyncError, match=r"no space left for weights: [\d,]+ bytes needed, [\d,]+ free"):
            sender.send(ticket, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.glob("*.weights")) == []
    sender.send(ticket, source)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".sender", ".weights"]
    sender.close()
