# SPDX-License-Identifier: Apache-2.0
"""Host memory that a device reads by itself: what CUDA is called with, and on a GPU what comes of it."""

import gc
import mmap
import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlrover.python.rl.engine.memory import offload
from dlrover.python.rl.engine.memory.offload import HostBlock, HostPages

NBYTES = 3 * mmap.PAGESIZE
CUDA = torch.device("cuda", 0)

needs_cuda = pytest.mark.needs("cuda")


@pytest.fixture
def driver(monkeypatch):
    """Stands in for the CUDA driver: the memory that is locked, by address, and what it answers."""
    made = SimpleNamespace(locked={}, answer=0, tries=0)

    def register(address, nbytes, flags):
        made.tries += 1
        if not made.answer:
            made.locked[address] = nbytes, flags
        return made.answer

    def unregister(address):
        del made.locked[address]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(offload, "_forget_error", lambda device: None)
    offload._warn.cache_clear()
    return made


def address_of(mapping):
    return np.frombuffer(mapping, dtype=np.uint8).ctypes.data


def read_only():
    descriptor = os.memfd_create("pages")
    os.truncate(descriptor, NBYTES)
    try:
        return mmap.mmap(descriptor, NBYTES, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def test_pages_are_locked_once_and_until_nothing_needs_them(driver):
    mapping = mmap.mmap(-1, NBYTES)
    pages = HostPages(mapping)
    assert not driver.locked
    assert pages.lock(CUDA) and pages.lock(CUDA)
    assert driver.locked == {address_of(mapping): (NBYTES, 0)} and driver.tries == 1
    del pages
    assert not driver.locked
    mapping.close()


def test_a_mapping_for_reading_is_locked_for_reading(driver):
    mapping = read_only()
    pages = HostPages(mapping, read_only=True)
    assert pages.lock(CUDA)
    assert driver.locked == {address_of(mapping): (NBYTES, 8)}


def test_on_a_host_nothing_is_locked(driver):
    assert not HostPages(mmap.mmap(-1, NBYTES)).lock(torch.device("cpu"))
    assert not HostBlock(NBYTES, torch.device("cpu")).is_for_cuda
    assert driver.tries == 0


def test_memory_that_cannot_be_locked_is_used_as_it_is_and_said_once(driver, caplog):
    driver.answer = 2
    block, other = HostBlock(NBYTES, CUDA), HostBlock(NBYTES, CUDA)
    assert not block._pages.lock(CUDA) and not other._pages.is_locked
    assert driver.tries == 2 and len(caplog.records) == 1
    assert "because memory cannot be locked: cudaHostRegister gives 2" in caplog.text
    block.bytes.fill_(7)
    assert block.bytes.tolist() == [7] * NBYTES


def test_a_block_is_as_large_as_asked_for_zero_and_locked_as_long_as_it_lives(driver):
    block = HostBlock(NBYTES + 1, CUDA)
    assert len(block.bytes) == NBYTES + 1 and not block.bytes.any()
    assert driver.locked == {block.bytes.data_ptr(): (NBYTES + 1, 0)}
    del block
    gc.collect()
    assert not driver.locked
    assert HostBlock(0, CUDA).bytes.tolist() == []


def test_a_forked_process_unlocks_nothing(driver, monkeypatch):
    block = HostBlock(NBYTES, CUDA)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del block
    gc.collect()
    assert len(driver.locked) == 1


@needs_cuda
@pytest.mark.parametrize("writable", [True, False])
def test_cuda_takes_locked_memory_for_page_locked(writable):
    mapping = mmap.mmap(-1, NBYTES) if writable else read_only()
    tensor = torch.from_dlpack(np.frombuffer(mapping, dtype=np.uint8))
    pages = HostPages(mapping, read_only=not writable)
    assert not tensor.is_pinned()
    assert pages.lock(CUDA) and tensor.is_pinned()
    assert torch.equal(tensor.cuda(), torch.zeros(NBYTES, dtype=torch.uint8, device=CUDA))
    del pages
    assert not tensor.is_pinned()


@needs_cuda
def test_on_cuda_a_refusal_is_of_no_consequence(caplog):
    offload._warn.cache_clear()
    pages = HostPages(read_only())  # without the flag that CUDA needs
    assert not pages.lock(CUDA)
    assert "cannot be locked" in caplog.text
    assert torch.ones(3, device=CUDA).sum().item() == 3


@needs_cuda
def test_a_block_on_cuda_is_page_locked():
    block = HostBlock(NBYTES, CUDA)
    assert block.bytes.is_pinned()
    block.bytes.copy_(torch.full((NBYTES,), 5, dtype=torch.uint8, device=CUDA))
    assert block.bytes.tolist() == [5] * NBYTES
