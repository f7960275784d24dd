# SPDX-License-Identifier: Apache-2.0
"""Locks of a device, the memory that each process holds there, and host memory that a device reads by itself."""

import errno
import gc
import mmap
import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.engine.memory import offload
from dlrover.python.rl.engine.memory.device_lock import DeviceLock, DeviceTurns
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, MemoryLedger
from dlrover.python.rl.engine.memory.offload import HostBlock, HostPages
from tests.support.processes import FORKED
from tests.support.served import until
from tests.support.sync_sides import LATEST_S, turn_of


def holder(folder, pipe, owner, nbytes):
    memory = DeviceMemory()
    lock = DeviceLock(folder, owner, memory)
    pipe.send("asking")
    lock.acquire(LATEST_S)
    weights = memory.bring(owner, "weights", torch.zeros(nbytes, dtype=torch.uint8))
    pipe.send("has it")
    pipe.recv()
    del weights
    lock.release()
    pipe.send("gave it")
    pipe.recv()


@pytest.fixture
def start(tmp_path):
    children = []

    def begin(owner, nbytes=1000, waits=False):
        ours, child_end = FORKED.Pipe()
        child = FORKED.Process(target=holder, args=(tmp_path, child_end, owner, nbytes))
        child.start()
        children.append(child)
        assert hear(ours) == "asking"
        assert waits or hear(ours) == "has it"
        return child, ours

    yield begin
    for child in children:
        child.kill()
        child.join(LATEST_S)


def hear(pipe):
    assert pipe.poll(LATEST_S)
    return pipe.recv()


def in_queue(folder):
    return len(list(folder.glob("*.wait")))


def test_roles_have_the_device_in_the_order_of_asking(tmp_path):
    order = []

    def role(name):
        with turn_of(DeviceLock(tmp_path, name)):
            order.append(name)
            time.sleep(0.002)
            order.append(name)

    first, threads = DeviceLock(tmp_path, "first"), []
    first.acquire()
    for number in range(6):
        threads.append(threading.Thread(target=role, args=(f"role {number}",)))
        threads[-1].start()
        until(lambda: in_queue(tmp_path) == number + 2)  # noqa: B023 - at once
    assert order == []
    first.release()
    for thread in threads:
        thread.join(LATEST_S)
    assert order == [f"role {number}" for number in range(6) for _ in range(2)]
    assert in_queue(tmp_path) == 0


def test_timeout_names_the_holder_and_its_memory(tmp_path, start):
    child, pipe = start("ACTOR[0]", nbytes=123_456)
    _, queued = start("REWARD[0]", waits=True)
    until(lambda: in_queue(tmp_path) == 2)
    lock = DeviceLock(tmp_path, "ROLLOUT[0]")
    with pytest.raises(EngineError) as caught:
        lock.acquire(0.2)
    beginning = f"ROLLOUT[0] did not get the device within 0.2 s: ACTOR[0] (process {child.pid}) has had it for "
    assert str(caught.value).startswith(beginning)
    end = "with 123,456 bytes: ACTOR[0]: 123,456 of weights; waiting before it: REWARD[0]"
    assert str(caught.value).endswith(end) and not lock.is_held
    until(lambda: in_queue(tmp_path) == 2)
    pipe.send("give")
    assert hear(queued) == "has it"


@pytest.mark.parametrize("victim", ["holder", "waiting"])
def test_dead_process_holds_no_device(tmp_path, start, victim):
    first, pipe = start("ACTOR[0]")
    second, _ = start("REWARD[0]", waits=True)
    until(lambda: in_queue(tmp_path) == 2)
    mine = DeviceLock(tmp_path, "ROLLOUT[0]")
    got = threading.Event()

    def take():
        mine.acquire(LATEST_S)
        got.set()

    thread = threading.Thread(target=take)
    thread.start()
    until(lambda: in_queue(tmp_path) == 3)
    for child in (second, first) if victim == "waiting" else (first, second):
        assert not got.wait(0.05)
        os.kill(child.pid, signal.SIGKILL)
    assert got.wait(LATEST_S)
    thread.join(LATEST_S)
    mine.close()
    assert in_queue(tmp_path) == 0


def test_full_disk_keeps_no_role_from_the_device(tmp_path, monkeypatch):
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
def test_interrupted_acquire_holds_no_device(tmp_path, monkeypatch, interrupted):
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
    assert in_queue(tmp_path) == 0


def test_second_acquire_and_needless_release_are_refused(tmp_path):
    lock = DeviceLock(tmp_path, "ACTOR[0]")
    with pytest.raises(EngineError, match=r"ACTOR\[0\] does not have the device"):
        lock.release()
    with turn_of(lock), pytest.raises(EngineError, match=r"ACTOR\[0\] has the device already"):
        lock.acquire()
    assert not lock.is_held


@pytest.mark.feature(17)
@pytest.mark.parametrize("fails", [False, True])
def test_lingering_role_leaves_once_another_waits(tmp_path, fails):
    locks, left = [DeviceLock(tmp_path / name, "ROLLOUT[0]") for name in "ab"], []

    def leave():
        left.append([lock.is_held for lock in locks])
        if fails:
            raise OSError

    turns = DeviceTurns(locks, leave, lingers=True)
    for _ in range(2):
        with turns.turn(LATEST_S):
            assert left == []
    with turn_of(DeviceLock(tmp_path / "b", "ACTOR[0]")):
        assert left == [[True, True]]
        with pytest.raises(EngineError, match=r"ROLLOUT\[0\] did not get the device"), turns.turn(0.1):
            pass
    with turns.turn(LATEST_S), turn_of(DeviceLock(tmp_path / "c", "ACTOR[0]")):
        pass
    turns.close()
    with pytest.raises(EngineError, match=r"ROLLOUT\[0\] .* has had it"):
        DeviceLock(tmp_path / "b", "ACTOR[0]").acquire(0.1)
    for lock in locks:
        lock.close()
    assert (len(left), in_queue(tmp_path / "a"), in_queue(tmp_path / "b")) == (1, 0, 0)


def test_role_that_does_not_linger_leaves_after_each_turn(tmp_path):
    locks, left = [DeviceLock(tmp_path, "ACTOR[0]")], []
    turns = DeviceTurns(locks, lambda: left.append(locks[0].is_held), lingers=False)
    for _ in range(2):
        with turns.turn(LATEST_S):
            pass
        assert not locks[0].is_held
    assert left == [True, True]


def test_missing_memory_names_other_processes(tmp_path, start):
    child, pipe = start("ACTOR[0]", nbytes=5000)
    memory = DeviceMemory(capacity=100, ledger=MemoryLedger(tmp_path))
    _kept = memory.bring("rollout", "kv_cache", torch.zeros(10))
    with pytest.raises(OutOfDeviceMemory) as caught:
        memory.bring("rollout", "weights", torch.zeros(30))
    assert str(caught.value) == (
        "rollout asks for 120 bytes of weights on cpu: 40 of 100 bytes are in use (rollout: 40 of kv_cache; process"
        f" {child.pid} reports ACTOR[0]: 5,000 of weights)"
    )


def test_memory_of_a_dead_process_is_forgotten(tmp_path, start):
    child, pipe = start("ACTOR[0]")
    ledger = MemoryLedger(tmp_path)
    assert list(ledger.others().values()) == [(child.pid, {"ACTOR[0]": {"weights": 1000}})]
    os.kill(child.pid, signal.SIGKILL)
    child.join(LATEST_S)
    assert ledger.others() == {}
    assert list(tmp_path.glob("*.memory")) == []


def test_memory_is_published_for_each_device_until_closed(tmp_path):
    memory, ledgers = DeviceMemory(), [MemoryLedger(tmp_path / name) for name in ("cuda-0", "cuda-1")]
    locks = [DeviceLock(tmp_path / name, "ACTOR[0]", memory) for name in ("cuda-0", "cuda-1")]
    with turn_of(locks[0]), turn_of(locks[1]):
        _kept = memory.bring("actor", "weights", torch.zeros(10))

    def published():
        return [each for ledger in ledgers for each in ledger.others().values()]

    assert published() == [(os.getpid(), {"actor": {"weights": 40}})] * 2
    for lock in locks:
        lock.close()
    assert published() == []


def test_two_holders_of_one_process_are_both_published(tmp_path):
    memories = [DeviceMemory(), DeviceMemory()]
    locks = list(map(DeviceLock, [tmp_path] * 2, ("ACTOR[0]", "ROLLOUT[0]"), memories))
    weights = []
    for lock, memory, size in zip(locks, memories, (10, 20), strict=True):
        with turn_of(lock):
            weights.append(memory.bring("engine", "weights", torch.zeros(size)))
    third = DeviceMemory(capacity=100, ledger=MemoryLedger(tmp_path))
    with pytest.raises(OutOfDeviceMemory) as caught:
        third.bring("reference", "weights", torch.zeros(30))
    for size in (40, 80):
        assert f"process {os.getpid()} reports engine: {size} of weights" in str(caught.value)
    with turn_of(locks[1]), pytest.raises(EngineError, match="ROLLOUT.* with 80 bytes: engine: 80 of weights"):
        locks[0].acquire(0.01)
    for lock in locks:
        lock.close()


def test_ledger_has_the_last_published_memory(tmp_path):
    mine, other = MemoryLedger(tmp_path), MemoryLedger(tmp_path)
    many = {f"engine {number}": {"weights": 10**9} for number in range(2000)}
    for owners in (many, {"a": {"weights": 10_000}}, {"a": {"weights": 1}}, many):
        mine.publish(owners)
        assert list(other.others().values()) == [(os.getpid(), owners)]
    assert mine.others() == {}
    mine.close()
    assert other.others() == {}


# -- host memory that a device reads by itself -------------------------------------------------------------------------
NBYTES = 3 * mmap.PAGESIZE
CUDA = torch.device("cuda", 0)

needs_cuda = pytest.mark.needs("cuda")


@pytest.fixture
def driver(monkeypatch):
    """Stands in for the CUDA driver: it has the memory that is locked, by address, and its answer."""
    driver = SimpleNamespace(locked={}, answer=0, tries=0)

    def register(address, nbytes, flags):
        driver.tries += 1
        if not driver.answer:
            driver.locked[address] = nbytes, flags
        return driver.answer

    def unregister(address):
        del driver.locked[address]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(offload, "_forget_error", lambda device: None)
    offload._warn.cache_clear()
    return driver


def address_of(mapping):
    return np.frombuffer(mapping, dtype=np.uint8).ctypes.data


def read_only():
    descriptor = os.memfd_create("pages")
    os.truncate(descriptor, NBYTES)
    try:
        return mmap.mmap(descriptor, NBYTES, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def test_pages_are_locked_once_and_while_needed(driver):
    mapping = mmap.mmap(-1, NBYTES)
    pages = HostPages(mapping)
    assert not driver.locked
    assert pages.lock(CUDA) and pages.lock(CUDA)
    assert driver.locked == {address_of(mapping): (NBYTES, 0)} and driver.tries == 1
    del pages
    assert not driver.locked
    mapping.close()


def test_read_only_mapping_is_locked_for_reading(driver):
    mapping = read_only()
    pages = HostPages(mapping, read_only=True)
    assert pages.lock(CUDA)
    assert driver.locked == {address_of(mapping): (NBYTES, 8)}


def test_host_locks_nothing(driver):
    assert not HostPages(mmap.mmap(-1, NBYTES)).lock(torch.device("cpu"))
    assert not HostBlock(NBYTES, torch.device("cpu")).is_for_cuda
    assert driver.tries == 0


def test_unlockable_memory_is_used_with_one_warning(driver, caplog):
    driver.answer = 2
    block, other = HostBlock(NBYTES, CUDA), HostBlock(NBYTES, CUDA)
    assert not block._pages.lock(CUDA) and not other._pages.is_locked
    assert driver.tries == 2 and len(caplog.records) == 1
    assert "because memory cannot be locked: cudaHostRegister gives 2" in caplog.text
    block.bytes.fill_(7)
    assert block.bytes.tolist() == [7] * NBYTES


def test_block_is_zero_and_locked_while_it_lives(driver):
    block = HostBlock(NBYTES + 1, CUDA)
    assert len(block.bytes) == NBYTES + 1 and not block.bytes.any()
    assert driver.locked == {block.bytes.data_ptr(): (NBYTES + 1, 0)}
    del block
    gc.collect()
    assert not driver.locked
    assert HostBlock(0, CUDA).bytes.tolist() == []


def test_forked_process_unlocks_nothing(driver, monkeypatch):
    block = HostBlock(NBYTES, CUDA)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del block
    gc.collect()
    assert len(driver.locked) == 1


@needs_cuda
@pytest.mark.parametrize("writable", [True, False])
def test_cuda_sees_locked_memory_as_page_locked(writable):
    mapping = mmap.mmap(-1, NBYTES) if writable else read_only()
    tensor = torch.from_dlpack(np.frombuffer(mapping, dtype=np.uint8))
    pages = HostPages(mapping, read_only=not writable)
    assert not tensor.is_pinned()
    assert pages.lock(CUDA) and tensor.is_pinned()
    assert torch.equal(tensor.cuda(), torch.zeros(NBYTES, dtype=torch.uint8, device=CUDA))
    del pages
    assert not tensor.is_pinned()


@needs_cuda
def test_refused_lock_on_cuda_changes_nothing(caplog):
    offload._warn.cache_clear()
    pages = HostPages(read_only())  # without the flag that CUDA needs
    assert not pages.lock(CUDA)
    assert "cannot be locked" in caplog.text
    assert torch.ones(3, device=CUDA).sum().item() == 3
