# SPDX-License-Identifier: Apache-2.0
"""Weights that stay with their sender: a receiver, late or again, gets them, or an error that they are gone."""

import gc
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import WeightsLost
from tests.support.sync_sides import (
    PATIENT,
    ToySource,
    equal,
    hear,
    kill,
    process,
    receive_side,
    send_side,
    toy_weights,
    transport,
)

KINDS = ("pull", "pull_copied")
each_kind = pytest.mark.parametrize("kind", KINDS)
AT_ONCE_S = 2.0


def sent(sender, version):
    """The ticket of a version that was sent."""
    source = ToySource(toy_weights(version), version)
    ticket = sender.offer(source)
    assert sender.send(ticket, source) == source.stamp()
    return ticket


def pair(kind):
    return transport(kind, None), transport(kind, None, replace(PATIENT, name="ROLLOUT[0]"))


def lost(sink, ticket):
    """Return a sink's error for a ticket whose weights are gone."""
    began_s = time.monotonic()
    with pytest.raises(WeightsLost, match=rf"version {ticket.version} from ACTOR\[0\]") as caught:
        sink.receive(ticket)
    assert time.monotonic() - began_s < AT_ONCE_S
    return str(caught.value)


@each_kind
def test_who_comes_late_or_again_gets_the_same(kind):
    sender, _ = pair(kind)
    ticket = sent(sender, 4)
    for _ in range(3):
        assert equal(pair(kind)[1].receive(ticket), toy_weights(4))
    sender.close()


@each_kind
def test_two_versions_are_kept_and_an_older_one_is_lost_at_once(kind):
    sender, sink = pair(kind)
    tickets = [sent(sender, version) for version in range(4)]
    assert equal(sink.receive(tickets[2]), toy_weights(2))
    assert equal(sink.receive(tickets[3]), toy_weights(3))
    for ticket in tickets[:2]:
        assert "has a later version" in lost(sink, ticket)
    sender.close()


@each_kind
def test_a_version_that_is_read_stays_whole_and_the_sender_goes_on(kind):
    sender, sink = pair(kind)
    snapshots = [sink.receive(sent(sender, version)) for version in range(5)]
    assert all(equal(snapshot, toy_weights(version)) for version, snapshot in enumerate(snapshots))
    sender.close()
    assert equal(snapshots[0], toy_weights(0))


@each_kind
def test_a_closed_sender_has_nothing(kind):
    gc.collect()
    before = set(threading.enumerate())
    sender, sink = pair(kind)
    ticket = sent(sender, 1)
    sender.close()
    deadline_s = time.monotonic() + AT_ONCE_S
    while any(thread.name == "dlrover-weights" for thread in set(threading.enumerate()) - before):
        assert time.monotonic() < deadline_s
    lost(sink, ticket)


@pytest.mark.feature(101)
@each_kind
def test_a_sender_killed_afterwards_takes_its_weights_along_and_leaves_nothing(kind):
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    sink = pair(kind)[1]
    with process(send_side, kind, "", 4, None) as (child, pipe):
        ticket = hear(pipe)
        pipe.send(ticket)
        stamp = hear(pipe)
        assert sink.receive(ticket).stamp == stamp
        kill(child)
    assert "cannot be fetched" in lost(sink, ticket)
    left = set(Path("/dev/shm").iterdir()) - before if before else set()
    assert [path for path in left if "weights" in path.name] == []


@each_kind
def test_a_receiver_that_is_killed_holds_nothing_back(kind):
    sender, sink = pair(kind)
    with process(receive_side, kind, "") as (child, pipe):
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
    sender.close()


@each_kind
def test_a_ticket_of_another_sender_is_not_served(kind):
    (sender, sink), (other, _) = pair(kind), pair(kind)
    ticket = sent(sender, 1)
    address = sent(other, 1).address
    assert "is not there" in lost(sink, replace(ticket, address=address))
    sender.close()
    other.close()


def test_strangers_and_noise_disturb_nobody():
    sender, sink = pair("pull_copied")
    ticket = sent(sender, 1)
    where = ticket.address["host"], ticket.address["tcp_port"]
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 32):
        with socket.create_connection(where, AT_ONCE_S) as stranger:
            stranger.sendall(noise)
    assert equal(sink.receive(ticket), toy_weights(1))
    sender.close()


def test_a_sender_that_is_dropped_ends_its_thread_and_frees_its_memory():
    def resources():
        names = [thread.name for thread in threading.enumerate()]
        links = [_target(number) for number in os.listdir("/proc/self/fd")]
        return names.count("dlrover-weights"), sum("dlrover-weights" in link for link in links)

    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "dlrover-weights":
            thread.join(5)  # of senders that earlier tests have dropped
    before = resources()
    sender, _ = pair("pull")
    sent(sender, 1)
    assert resources() == (before[0] + 1, before[1] + 2)  # the image's own descriptor, and its mapping's
    del sender
    gc.collect()
    deadline_s = time.monotonic() + AT_ONCE_S
    while resources() != before:
        assert time.monotonic() < deadline_s, resources()


def _target(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # closed in between
        return ""
