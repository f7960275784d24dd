# SPDX-License-Identifier: Apache-2.0
"""Receivers on another host than the sender's: one of them fetches the weights, the others take them from it."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import WeightsLost
from dlrover.python.rl.engine.weight_sync import pull, weight_server
from dlrover.python.rl.engine.weight_sync.buckets import CrcTally
from tests.support.sync_sides import (
    PATIENT,
    ToySource,
    equal,
    hear,
    kill,
    process,
    receive_side,
    toy_weights,
    transport,
)

LATEST_S = 60.0


@pytest.fixture
def streams(monkeypatch):
    """The bytes of each version that has left the sender's host."""
    sent, stream = [], weight_server._stream

    def counting(connection, descriptor, table, is_writing):
        sent.append(table.nbytes)
        stream(connection, descriptor, table, is_writing)

    monkeypatch.setattr(weight_server, "_stream", counting)
    return sent


def from_afar(ticket):
    """The ticket as processes of other hosts see it, where no process listens at the sender's name."""
    return replace(ticket, address={**ticket.address, "local_name": "of another host"})


def sent(sender, version, **waiting):
    source = ToySource(toy_weights(version), version, **waiting)
    ticket = sender.offer(source)
    sender.send(ticket, source)
    return from_afar(ticket)


def sinks(count):
    return [transport("pull", None, replace(PATIENT, name=f"ROLLOUT[{rank}]")) for rank in range(count)]


class Midway:
    """A source that waits before its last tensor until :meth:`go_on`."""

    def __init__(self):
        self._is_there, self._goes_on = threading.Event(), threading.Event()
        self.source = ToySource(toy_weights(6), 6, self._halt)

    def _halt(self, number):
        if number == len(toy_weights()) - 1:
            self._is_there.set()
            assert self._goes_on.wait(LATEST_S)

    def wait(self):
        assert self._is_there.wait(LATEST_S)

    def go_on(self):
        self._goes_on.set()


def wait_for(holds):
    deadline_s = time.monotonic() + LATEST_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.feature(102)
def test_the_weights_come_to_a_host_once_however_many_receive_there(streams):
    sender, receivers = transport("pull", None), sinks(4)
    for version in (1, 2, 3):
        ticket = sent(sender, version)
        with ThreadPoolExecutor(4) as pool:
            received = list(pool.map(lambda sink: sink.receive(ticket), receivers))  # noqa: B023 - they end here
        assert all(equal(snapshot, toy_weights(version)) for snapshot in received)
        assert streams == [ticket.table.nbytes] * version
    assert sum(sink._stop_relay is not None for sink in receivers) == 1
    late = sinks(1)[0].receive(ticket)
    assert equal(late, toy_weights(3))
    assert len(streams) == 3
    sender.close()
    for sink in receivers:
        sink.close()


def test_those_who_follow_begin_before_the_last_byte_has_come(monkeypatch, streams):
    followed, update = set(), CrcTally.update

    def following(tally, window, base, stop):
        update(tally, window, base, stop)
        followed.add(threading.get_ident())

    monkeypatch.setattr(CrcTally, "update", following)
    sender, (first, second) = transport("pull", None), sinks(2)
    midway = Midway()
    ticket = sender.offer(midway.source)
    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(sender.send, ticket, midway.source)
        midway.wait()
        received = [pool.submit(sink.receive, from_afar(ticket)) for sink in (first, second)]
        wait_for(lambda: len(followed) == 3)  # the sender and both
        midway.go_on()
        assert sending.result(LATEST_S) == midway.source.stamp()
        assert all(equal(each.result(LATEST_S), toy_weights(6)) for each in received)
        assert len(streams) == 1
    sender.close()


@contextmanager
def half_received_by_another(streams):
    """A sender that waits midway, its ticket, the sending, and the process that receives it so far from afar."""
    sender, midway = transport("pull", None), Midway()
    ticket = sender.offer(midway.source)
    with process(receive_side, "pull", "") as (child, pipe), ThreadPoolExecutor(1) as pool:
        assert hear(pipe) == "up"
        sending = pool.submit(sender.send, ticket, midway.source)
        try:
            midway.wait()
            pipe.send(from_afar(ticket))
            wait_for(lambda: streams)
            yield from_afar(ticket), midway, child
        finally:
            midway.go_on()
        assert sending.result(LATEST_S) == midway.source.stamp()
    sender.close()


@pytest.mark.feature(102)
def test_if_the_one_that_passes_them_on_is_killed_another_one_does(monkeypatch, streams):
    monkeypatch.setattr(pull, "_TURN_S", 0.0)
    (sink,) = sinks(1)
    with half_received_by_another(streams) as (ticket, midway, child), ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(sink.receive, ticket)
        wait_for(lambda: sink._mapped_process == child.pid)
        assert len(streams) == 1
        kill(child)
        wait_for(lambda: len(streams) == 2)
        midway.go_on()
        assert equal(receiving.result(LATEST_S), toy_weights(6))


@pytest.mark.parametrize("follows", [False, True], ids=["before", "while it is followed"])
def test_one_that_is_stopped_while_it_passes_them_on_does_not_hold_up_the_others(monkeypatch, streams, follows):
    monkeypatch.setattr(pull, "_TURN_S", 0.0)
    sink = transport("pull", None, replace(PATIENT, name="ROLLOUT[0]", timeout_s=1.0))
    with half_received_by_another(streams) as (ticket, midway, child), ThreadPoolExecutor(1) as pool:
        if follows:
            receiving = pool.submit(sink.receive, ticket)
            wait_for(lambda: sink._mapped_process == child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        try:
            midway.go_on()
            receiving = receiving if follows else pool.submit(sink.receive, ticket)
            assert equal(receiving.result(LATEST_S), toy_weights(6))
            assert len(streams) == 2
        finally:
            os.kill(child.pid, signal.SIGCONT)


def test_memory_for_others_is_given_back_when_the_sender_comes_to_this_host():
    sender, (sink,) = transport("pull", None), sinks(1)
    assert equal(sink.receive(sent(sender, 1)), toy_weights(1))
    assert sink._stop_relay is not None and sink._fetched._files
    source = ToySource(toy_weights(2), 2)
    near = sender.offer(source)
    sender.send(near, source)
    assert equal(sink.receive(near), toy_weights(2))
    assert sink._stop_relay is None and not sink._fetched._files
    sender.close()


def test_one_that_passes_them_on_forgets_what_it_had_of_another(streams):
    sender, (sink,) = transport("pull", None), sinks(1)
    with process(receive_side, "pull", "") as (child, pipe):
        assert hear(pipe) == "up"
        ticket = sent(sender, 1)
        pipe.send(ticket)
        assert hear(pipe).version == 1
        assert equal(sink.receive(ticket), toy_weights(1))
        (mapped,) = sink._maps
        kill(child)
    for version in (2, 3, 4):
        assert equal(sink.receive(sent(sender, version)), toy_weights(version))
    assert mapped not in sink._maps
    assert len(streams) == 4
    sender.close()


def test_one_that_follows_others_holds_no_memory_for_them(streams):
    sender, (sink,) = transport("pull", None), sinks(1)
    assert equal(sink.receive(sent(sender, 1)), toy_weights(1))
    assert sink._stop_relay is not None
    with process(receive_side, "pull", "") as (child, pipe):
        assert hear(pipe) == "up"
        ticket = sent(sender, 2)
        pipe.send(ticket)
        assert hear(pipe).version == 2
        assert equal(sink.receive(ticket), toy_weights(2))
    assert sink._stop_relay is None
    assert len(streams) == 2
    sender.close()


def test_what_the_sender_no_longer_has_is_lost_for_all():
    sender, receivers = transport("pull", None), sinks(3)
    old = sent(sender, 1)
    for version in (2, 3):
        sent(sender, version)
    with ThreadPoolExecutor(3) as pool:
        for lost in [pool.submit(sink.receive, old) for sink in receivers]:
            with pytest.raises(WeightsLost, match="has a later version"):
                lost.result(LATEST_S)
    assert all(equal(sink.receive(sent(sender, 4)), toy_weights(4)) for sink in receivers)
    sender.close()
    with pytest.raises(WeightsLost, match="cannot be fetched"):
        receivers[0].receive(sent_by_none(old))


def sent_by_none(ticket):
    """Start another sync of a sender that has ended."""
    return replace(ticket, id="0" * 32)


def test_where_no_memory_is_shared_each_fetches_its_own(streams):
    sender = transport("pull_copied", None)
    more_sinks = [transport("pull_copied", None, replace(PATIENT, name=f"ROLLOUT[{rank}]")) for rank in range(3)]
    ticket = sent(sender, 7)
    assert all(equal(sink.receive(ticket), toy_weights(7)) for sink in more_sinks)
    assert len(streams) == 3
    sender.close()
