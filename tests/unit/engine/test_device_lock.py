# SPDX-License-Identifier: Apache-2.0
"""A device is held by one role at a time, in the order of asking; who died has let go."""

import errno
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.engine.memory.device_lock import DeviceLock
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, MemoryLedger

LATEST_S = 240.0


def holder(folder, pipe, owner, nbytes):
    """A process that takes the device, tells so, and gives it back when told."""
    memory = DeviceMemory()
    lock = DeviceLock(folder, owner, memory)
    pipe.send("asking")
    lock.acquire(LATEST_S)
    kept = memory.bring(owner, "weights", torch.zeros(nbytes, dtype=torch.uint8))
    pipe.send("has it")
    pipe.recv()
    del kept
    lock.release()
    pipe.send("gave it")
    pipe.recv()


@pytest.fixture
def start(tmp_path):
    """Starts holders; kills what is left of them."""
    context, children = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload([DeviceLock.__module__])

    def begin(owner, nbytes=1000):
        ours, theirs = context.Pipe()
        child = context.Process(target=holder, args=(tmp_path, theirs, owner, nbytes))
        child.start()
        children.append(child)
        assert hear(ours) == "asking"
        return child, ours

    yield begin
    for child in children:
        child.kill()
        child.join(LATEST_S)


def hear(pipe):
    assert pipe.poll(LATEST_S)
    return pipe.recv()


def until(condition):
    deadline_s = time.monotonic() + LATEST_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def waiting(folder, count):
    until(lambda: len(list(folder.glob("*.wait"))) == count)


def test_one_role_at_a_time_in_the_order_of_asking(tmp_path):
    order, together, most = [], 0, 0

    def role(name):
        nonlocal together, most
        with DeviceLock(tmp_path, name).acquired(LATEST_S):
            together += 1
            most = max(most, together)
            order.append(name)
            together -= 1

    first = DeviceLock(tmp_path, "first")
    first.acquire()
    threads = []
    for number in range(6):
        threads.append(threading.Thread(target=role, args=(f"role {number}",)))
        threads[-1].start()
        waiting(tmp_path, number + 2)
    assert order == []
    first.release()
    for thread in threads:
        thread.join(LATEST_S)
    assert order == [f"role {number}" for number in range(6)]
    assert most == 1
    assert list(tmp_path.glob("*.wait")) == []


def test_processes_hand_over(tmp_path, start):
    _, first = start("ACTOR[0]")
    assert hear(first) == "has it"
    _, second = start("ROLLOUT[0]")
    waiting(tmp_path, 2)
    assert not second.poll(0.1)
    first.send("give")
    assert hear(second) == "has it"


def test_who_waits_too_long_is_told_who_has_it_since_when_and_with_how_much(tmp_path, start):
    child, pipe = start("ACTOR[0]", nbytes=123_456)
    assert hear(pipe) == "has it"
    _, queued = start("REWARD[0]")
    waiting(tmp_path, 2)
    lock = DeviceLock(tmp_path, "ROLLOUT[0]")
    with pytest.raises(EngineError) as caught:
        lock.acquire(0.2)
    told = str(caught.value)
    assert f"ROLLOUT[0] did not get the device within 0.2 s: ACTOR[0] (process {child.pid}) has had it for " in told
    assert told.endswith("with 123,456 bytes: ACTOR[0]: 123,456 of weights; waiting before it: REWARD[0]")
    assert not lock.is_held
    waiting(tmp_path, 2)
    pipe.send("give")
    assert hear(queued) == "has it"


@pytest.mark.parametrize("victim", ["holder", "waiting"])
def test_who_dies_has_let_go(tmp_path, start, victim):
    first, pipe = start("ACTOR[0]")
    assert hear(pipe) == "has it"
    second, _ = start("REWARD[0]")
    waiting(tmp_path, 2)
    mine = DeviceLock(tmp_path, "ROLLOUT[0]")
    got = threading.Event()

    def take():
        mine.acquire(LATEST_S)
        got.set()

    thread = threading.Thread(target=take)
    thread.start()
    waiting(tmp_path, 3)
    for child in (second, first) if victim == "waiting" else (first, second):
        assert not got.wait(0.05)
        os.kill(child.pid, signal.SIGKILL)
    assert got.wait(LATEST_S)
    thread.join(LATEST_S)
    mine.close()
    assert list(tmp_path.glob("*.wait")) == []


def test_a_full_disk_keeps_no_role_from_the_device_and_no_device_from_the_roles(tmp_path, monkeypatch):
    first, second = (DeviceLock(tmp_path, owner, DeviceMemory()) for owner in ("ACTOR[0]", "ROLLOUT[0]"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for lock in (first, second, first):
        lock.acquire(LATEST_S)
        lock.release()
    first.acquire(LATEST_S)
    with pytest.raises(EngineError, match="an unknown role .* has had it"):
        second.acquire(0.0)
    first.release()


@pytest.mark.parametrize("interrupted", ["waiting_s", "since_s"])
def test_who_is_interrupted_while_it_asks_has_let_go(tmp_path, monkeypatch, interrupted):
    first, second = DeviceLock(tmp_path, "ACTOR[0]"), DeviceLock(tmp_path, "ROLLOUT[0]")
    write = first._write

    def interrupt(descriptor, time_key):
        write(descriptor, time_key)
        if time_key == interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(first, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.acquire(LATEST_S)
    assert not first.is_held
    second.acquire(1.0)
    second.release()
    assert not list(tmp_path.glob("*.wait"))


def test_taking_twice_and_giving_what_one_has_not_are_errors(tmp_path):
    lock = DeviceLock(tmp_path, "ACTOR[0]")
    with pytest.raises(EngineError, match=r"ACTOR\[0\] does not have the device"):
        lock.release()
    with lock.acquired(), pytest.raises(EngineError, match=r"ACTOR\[0\] has the device already"):
        lock.acquire()
    assert not lock.is_held


def test_out_of_memory_names_what_other_processes_hold(tmp_path, start):
    child, pipe = start("ACTOR[0]", nbytes=5000)
    assert hear(pipe) == "has it"
    memory = DeviceMemory(capacity=100, ledger=MemoryLedger(tmp_path))
    kept = memory.bring("rollout", "kv_cache", torch.zeros(10))
    with pytest.raises(OutOfDeviceMemory) as caught:
        memory.bring("rollout", "weights", torch.zeros(30))
    assert str(caught.value) == (
        "rollout asks for 120 bytes of weights on cpu: 40 of 100 bytes are in use (rollout: 40 of kv_cache; process"
        f" {child.pid} reports ACTOR[0]: 5,000 of weights)"
    )
    assert kept is not None


def test_what_a_dead_process_held_is_forgotten(tmp_path, start):
    child, pipe = start("ACTOR[0]")
    assert hear(pipe) == "has it"
    ledger = MemoryLedger(tmp_path)
    assert list(ledger.others().values()) == [(child.pid, {"ACTOR[0]": {"weights": 1000}})]
    os.kill(child.pid, signal.SIGKILL)
    child.join(LATEST_S)
    assert ledger.others() == {}
    assert list(tmp_path.glob("*.memory")) == []


def test_a_closed_lock_tells_no_more_also_when_its_memory_is_used_on(tmp_path):
    memory, other = DeviceMemory(), MemoryLedger(tmp_path)
    lock = DeviceLock(tmp_path, "ACTOR[0]", memory)
    with lock.acquired():
        kept = [memory.bring("actor", "weights", torch.zeros(10))]
    assert [owners for _, owners in other.others().values()] == [{"actor": {"weights": 40}}]
    lock.close()
    kept.append(memory.bring("actor", "weights", torch.zeros(10)))
    assert other.others() == {}
    assert list(tmp_path.glob("*.memory")) == []
    assert len(kept) == 2


def test_of_several_devices_each_is_told_what_a_process_holds(tmp_path):
    memory, ledgers = DeviceMemory(), [MemoryLedger(tmp_path / name) for name in ("cuda-0", "cuda-1")]
    locks = [DeviceLock(tmp_path / name, "ACTOR[0]", memory) for name in ("cuda-0", "cuda-1")]
    with locks[0].acquired(), locks[1].acquired():
        kept = memory.bring("actor", "weights", torch.zeros(10))
    told = [each for ledger in ledgers for each in ledger.others().values()]
    assert told == [(os.getpid(), {"actor": {"weights": 40}})] * 2
    assert kept is not None
    for lock in locks:
        lock.close()


def test_a_ledger_tells_the_last_that_was_published_until_it_is_closed(tmp_path):
    mine, other = MemoryLedger(tmp_path), MemoryLedger(tmp_path)
    mine.publish({"a": {"weights": 10_000}})
    mine.publish({"a": {"weights": 1}})
    assert list(other.others().values()) == [(os.getpid(), {"a": {"weights": 1}})]
    assert mine.others() == {}
    mine.close()
    assert other.others() == {}


def test_holders_of_one_process_do_not_hide_each_other(tmp_path):
    memories = [DeviceMemory(), DeviceMemory()]
    locks = [
        DeviceLock(tmp_path, name, memory) for name, memory in zip(("ACTOR[0]", "ROLLOUT[0]"), memories, strict=True)
    ]
    kept = []
    for lock, memory, size in zip(locks, memories, (10, 20), strict=True):
        with lock.acquired():
            kept.append(memory.bring("engine", "weights", torch.zeros(size)))
    third = DeviceMemory(capacity=100, ledger=MemoryLedger(tmp_path))
    with pytest.raises(OutOfDeviceMemory) as caught:
        third.bring("reference", "weights", torch.zeros(30))
    for size in (40, 80):
        assert f"process {os.getpid()} reports engine: {size} of weights" in str(caught.value)
    with locks[1].acquired(), pytest.raises(EngineError, match="ROLLOUT.* with 80 bytes: engine: 80 of weights"):
        locks[0].acquire(0.01)
    for lock in locks:
        lock.close()


def test_a_ledger_tells_of_any_number_of_owners(tmp_path):
    mine, other = MemoryLedger(tmp_path), MemoryLedger(tmp_path)
    many = {f"engine {number}": {"weights": 10**9} for number in range(2000)}
    for held in (many, {"a": {"weights": 1}}, many):
        mine.publish(held)
        assert [owners for _, owners in other.others().values()] == [held]
    mine.close()
