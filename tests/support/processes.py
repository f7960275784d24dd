# SPDX-License-Identifier: Apache-2.0
"""A function on several processes of this machine, with a deadline; none of them outlives the call."""

import gc
import multiprocessing
import os
import queue
import socket
import time
import traceback
from contextlib import contextmanager

import psutil
import torch

from dlrover.python.rl.common.sockets import HeldPort
from tests.support.commands import is_alive, wait_for

FORKED = multiprocessing.get_context("forkserver")
"""All processes of tests are forked from one that has imported what takes seconds."""
FORKED.set_forkserver_preload(
    ["dlrover.python.rl.engine.fsdp2.engine", "transformers.models.qwen2.modeling_qwen2", "pytest", "psutil"]
)


def run(world_size, function, *arguments, timeout_s=280.0):
    """``function(rank, world_size, port, *arguments)`` on each rank; the results in the ranks' order.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or took longer than ``timeout_s``.
    """
    results = FORKED.Queue()
    with held_ports(1) as (port,):
        ranks = [
            FORKED.Process(target=_one, args=(results, function, rank, world_size, port, arguments), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, results, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.join(timeout=10)
                process.kill()
                process.join()


def _collect(ranks, results, deadline):
    answers = {}
    while len(answers) < len(ranks):
        try:
            rank, result, failure = results.get(timeout=1.0)
        except queue.Empty:
            dead = [rank for rank, process in enumerate(ranks) if rank not in answers and process.exitcode]
            assert not dead, f"ranks {dead} died"
            assert time.monotonic() < deadline, f"no answer from ranks {sorted(set(range(len(ranks))) - set(answers))}"
            continue
        assert not failure, f"rank {rank}:\n{failure}"
        answers[rank] = result
    return [answers[rank] for rank in range(len(ranks))]


def _one(results, function, rank, world_size, port, arguments):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.freeze()  # What it was forked with stays: no collection need look through it.
    try:
        result, failure = function(rank, world_size, port, *arguments), ""
    except BaseException:  # noqa: BLE001 - the boundary of the process: it goes to the test
        result, failure = None, traceback.format_exc()
    results.put((rank, result, failure))


def children():
    """The processes that this one has started."""
    return {child.pid for child in psutil.Process().children()}


def wait_until_gone(pid, limit_s=15.0):
    wait_for(lambda: not is_alive(pid), limit_s)


def free_port():
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def held_ports(count):
    """Ports where ranks can meet, which no other process is given until then."""
    ports = [HeldPort() for _ in range(count)]
    try:
        yield [port.take(address="127.0.0.1") for port in ports]
    finally:
        for port in ports:
            port.give_back()
