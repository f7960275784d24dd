# SPDX-License-Identifier: Apache-2.0
"""Weights that stay with their sender, from which receivers of its host or of another one fetch them."""

import gc
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import WeightsLost
from dlrover.python.rl.engine.weight_sync import pull, weight_server
from dlrover.python.rl.engine.weight_sync.buckets import CrcTally
from tests.support import sync_sides
from tests.support.commands import wait_for
from tests.support.manual_clock import within
from tests.support.sync_sides import LATEST_S, PATIENT, ToySource, equal, hear, kill, process, toy_weights, transport

each_kind = pytest.mark.parametrize("kind", ["pull", "pull_copied"], indirect=True)
AT_ONCE_S = 2.0


def sent(sender, version):
    source = ToySource(toy_weights(version), version)
    ticket = sender.offer(source)
    assert sender.send(ticket, source) == source.stamp()
    return ticket


@pytest.fixture
def open_transport():
    with ExitStack() as stack:

        def make(kind="pull", rank=None, **settings):
            name = "ACTOR[0]" if rank is None else f"ROLLOUT[{rank}]"
            return stack.enter_context(closing(transport(kind, replace(PATIENT, name=name, **settings))))

        yield make


@pytest.fixture
def kind(request):
    return getattr(request, "param", "pull")


@pytest.fixture
def sender(open_transport, kind):
    return open_transport(kind)


@pytest.fixture
def sink(open_transport, kind):
    return open_transport(kind, rank=0)


def lost(sink, ticket):
    with within(AT_ONCE_S), pytest.raises(WeightsLost, match=rf"version {ticket.version} from ACTOR\[0\]") as caught:
        sink.receive(ticket)
    return str(caught.value)


@each_kind
def test_older_version_than_two_is_lost_at_once(sender, sink):
    tickets = [sent(sender, version) for version in range(4)]
    received = [sink.receive(ticket) for ticket in tickets[2:]]
    for ticket in tickets[:2]:
        assert "has a later version" in lost(sink, ticket)
    sender.close()
    assert all(equal(each, toy_weights(version)) for version, each in enumerate(received, 2))


@each_kind
def test_closed_sender_has_no_thread_and_no_version(kind, sink, open_transport):
    gc.collect()
    before = set(threading.enumerate())
    sender = open_transport(kind)
    ticket = sent(sender, 1)
    sender.close()
    wait_for(lambda: "dlrover-weights" not in {each.name for each in set(threading.enumerate()) - before}, AT_ONCE_S)
    lost(sink, ticket)


@pytest.mark.feature(101)
@each_kind
def test_killed_sender_leaves_nothing(kind, sink):
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    with process(sync_sides.send_side, kind, 4, None) as (child, pipe):
        ticket = hear(pipe)
        pipe.send(ticket)
        stamp = hear(pipe)
        assert sink.receive(ticket).stamp == stamp
        kill(child)
    assert "cannot be fetched" in lost(sink, ticket)
    left = set(Path("/dev/shm").iterdir()) - before if before else set()
    assert [path for path in left if "weights" in path.name] == []


@each_kind
def test_killed_receiver_holds_no_version(kind, sender, sink):
    with process(sync_sides.receive_side, kind) as (child, pipe):
        assert hear(pipe) == "up"
        for version in (1, 2):
            pipe.send(sent(sender, version))
            assert hear(pipe).version == version
        kill(child)
    files = []
    for version in range(3, 9):
        ticket = sent(sender, version)
        files.append(sender._versions._files[ticket.id])
    assert len({id(file) for file in files}) == 2
    assert equal(sink.receive(sent(sender, 9)), toy_weights(9))


@each_kind
def test_ticket_of_another_sender_is_not_served(kind, sender, sink, open_transport):
    address = sent(open_transport(kind), 1).address
    assert "is not there" in lost(sink, replace(sent(sender, 1), address=address))


@pytest.mark.parametrize("kind", ["pull_copied"], indirect=True)
def test_noise_of_strangers_is_ignored(sender, sink):
    ticket = sent(sender, 1)
    address = ticket.address["host"], ticket.address["tcp_port"]
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 32):
        with socket.create_connection(address, AT_ONCE_S) as stranger:
            stranger.sendall(noise)
    assert equal(sink.receive(ticket), toy_weights(1))


def test_dropped_sender_ends_its_thread_and_frees_its_memory():
    def resources():
        names = [thread.name for thread in threading.enumerate()]
        links = []
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed in between
                links.append(os.readlink(path))
        return names.count("dlrover-weights"), sum("dlrover-weights" in link for link in links)

    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "dlrover-weights":
            thread.join(5)  # of senders that earlier tests have dropped
    before = resources()
    sender = transport("pull")
    sent(sender, 1)
    assert resources() == (before[0] + 1, before[1] + 2)  # the image's own descriptor, and its mapping's
    del sender
    gc.collect()
    wait_for(lambda: resources() == before, AT_ONCE_S)


# -- receivers of another host: one of them fetches the weights, the others take them from it -------------------------
@pytest.fixture
def streams(monkeypatch):
    """Lists the bytes of each version that has left the sender's host."""
    sent_bytes, stream = [], weight_server._stream

    def counting(connection, descriptor, table, is_writing):
        sent_bytes.append(table.nbytes)
        stream(connection, descriptor, table, is_writing)

    monkeypatch.setattr(weight_server, "_stream", counting)
    return sent_bytes


def from_afar(ticket):
    """Return the ticket as processes of other hosts see it: no process listens at the sender's name."""
    return replace(ticket, address={**ticket.address, "local_name": "of another host"})


def send_afar(sender, version):
    return from_afar(sent(sender, version))


class Midway:
    """A source that waits before its last tensor until :meth:`end`."""

    def __init__(self):
        self._is_there, self._may_end = threading.Event(), threading.Event()
        self.source = ToySource(toy_weights(6), 6, self._halt)

    def _halt(self, number):
        if number == len(toy_weights()) - 1:
            self._is_there.set()
            assert self._may_end.wait(LATEST_S)

    def wait(self):
        assert self._is_there.wait(LATEST_S)

    def end(self):
        self._may_end.set()


@pytest.mark.feature(102)
def test_weights_come_to_a_host_once_for_all_its_receivers(streams, sender, open_transport):
    receivers = [open_transport(rank=rank) for rank in range(4)]
    for version in (1, 2, 3):
        ticket = send_afar(sender, version)
        with ThreadPoolExecutor(4) as pool:
            received = list(pool.map(lambda sink: sink.receive(ticket), receivers))  # noqa: B023 - they end here
        assert all(equal(snapshot, toy_weights(version)) for snapshot in received)
        assert streams == [ticket.table.nbytes] * version
    assert sum(sink._stop_relay is not None for sink in receivers) == 1
    assert equal(open_transport(rank=5).receive(ticket), toy_weights(3))
    assert len(streams) == 3


def test_followers_begin_before_the_last_byte(monkeypatch, streams, sender, open_transport):
    followed, update = set(), CrcTally.update

    def following(tally, window, base, stop):
        update(tally, window, base, stop)
        followed.add(threading.get_ident())

    monkeypatch.setattr(CrcTally, "update", following)
    midway, receivers = Midway(), [open_transport(rank=rank) for rank in range(2)]
    ticket = sender.offer(midway.source)
    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(sender.send, ticket, midway.source)
        midway.wait()
        received = [pool.submit(sink.receive, from_afar(ticket)) for sink in receivers]
        wait_for(lambda: len(followed) == 3)  # the sender and both
        midway.end()
        assert sending.result(LATEST_S) == midway.source.stamp()
        assert all(equal(each.result(LATEST_S), toy_weights(6)) for each in received)
        assert len(streams) == 1


@contextmanager
def half_received_by_another(streams, sender):
    """Make a sender wait midway; yields its ticket, what it waits for, and the process that receives it from afar."""
    midway = Midway()
    ticket = sender.offer(midway.source)
    with process(sync_sides.receive_side, "pull") as (child, pipe), ThreadPoolExecutor(1) as pool:
        assert hear(pipe) == "up"
        sending = pool.submit(sender.send, ticket, midway.source)
        try:
            midway.wait()
            pipe.send(from_afar(ticket))
            wait_for(lambda: streams)
            yield from_afar(ticket), midway, child
        finally:
            midway.end()
        assert sending.result(LATEST_S) == midway.source.stamp()


@pytest.mark.feature(102)
def test_killed_relay_is_replaced(monkeypatch, streams, sender, sink):
    monkeypatch.setattr(pull, "_TURN_S", 0.0)
    with half_received_by_another(streams, sender) as (ticket, midway, child), ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(sink.receive, ticket)
        wait_for(lambda: sink._mapped_process == child.pid)
        assert len(streams) == 1
        kill(child)
        wait_for(lambda: len(streams) == 2)
        midway.end()
        assert equal(receiving.result(LATEST_S), toy_weights(6))


@pytest.mark.parametrize("follows", [False, True], ids=["before", "while it is followed"])
def test_stopped_relay_does_not_hold_up_others(monkeypatch, streams, sender, open_transport, follows):
    monkeypatch.setattr(pull, "_TURN_S", 0.0)
    sink = open_transport(rank=0, timeout_s=1.0)
    with half_received_by_another(streams, sender) as (ticket, midway, child), ThreadPoolExecutor(1) as pool:
        if follows:
            receiving = pool.submit(sink.receive, ticket)
            wait_for(lambda: sink._mapped_process == child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        try:
            midway.end()
            receiving = receiving if follows else pool.submit(sink.receive, ticket)
            assert equal(receiving.result(LATEST_S), toy_weights(6))
            assert len(streams) == 2
        finally:
            os.kill(child.pid, signal.SIGCONT)


def test_relay_memory_is_freed_when_the_sender_is_near(sender, sink):
    assert equal(sink.receive(send_afar(sender, 1)), toy_weights(1))
    assert sink._stop_relay is not None and sink._fetched._files
    assert equal(sink.receive(sent(sender, 2)), toy_weights(2))
    assert sink._stop_relay is None and not sink._fetched._files


def test_relay_drops_the_mapping_of_an_ended_one(streams, sender, sink):
    with process(sync_sides.receive_side, "pull") as (child, pipe):
        assert hear(pipe) == "up"
        ticket = send_afar(sender, 1)
        pipe.send(ticket)
        assert hear(pipe).version == 1
        assert equal(sink.receive(ticket), toy_weights(1))
        (mapped,) = sink._maps
        kill(child)
    for version in (2, 3, 4):
        assert equal(sink.receive(send_afar(sender, version)), toy_weights(version))
    assert mapped not in sink._maps
    assert len(streams) == 4


def test_follower_holds_no_memory_for_others(streams, sender, sink):
    assert equal(sink.receive(send_afar(sender, 1)), toy_weights(1))
    assert sink._stop_relay is not None
    with process(sync_sides.receive_side, "pull") as (child, pipe):
        assert hear(pipe) == "up"
        ticket = send_afar(sender, 2)
        pipe.send(ticket)
        assert hear(pipe).version == 2
        assert equal(sink.receive(ticket), toy_weights(2))
    assert sink._stop_relay is None
    assert len(streams) == 2


@pytest.mark.parametrize("kind", ["pull_copied"], indirect=True)
def test_receivers_without_shared_memory_fetch_their_own(kind, streams, sender, open_transport):
    ticket = send_afar(sender, 7)
    for rank in range(3):
        assert equal(open_transport(kind, rank).receive(ticket), toy_weights(7))
    assert len(streams) == 3
