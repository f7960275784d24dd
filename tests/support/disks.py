# SPDX-License-Identifier: Apache-2.0
"""Harm to the files of a writer: full disks, power cuts, flipped bits, and processes that are killed or frozen."""

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest


@contextmanager
def small_disk(folder, inodes=0):
    """A disk of 2 MB at ``folder``, with so few ``inodes`` or any number; it skips where none can be mounted."""
    folder.mkdir()
    options = f"size=2m,nr_inodes={inodes}" if inodes else "size=2m"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def largest_file(nbytes):
    """Let the kernel cut every file of this process off at ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def system_calls(*names):
    """The calls of these functions of ``os``: their order decides what a power cut would find."""
    called, wanted = [], {getattr(os, name): name for name in names}
    sys.setprofile(lambda frame, event, function: event == "c_call" and called.append(wanted.get(function)))
    try:
        yield called
    finally:
        sys.setprofile(None)
        called[:] = [name for name in called if name]


@contextmanager
def frozen(program, *arguments):
    """A process that is stopped once ``program`` has printed "in the middle" and waits for a line; see ``thaw``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout.readline() == "in the middle\n"
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.communicate()


def thaw(process):
    process.send_signal(signal.SIGCONT)
    process.stdin.write("\n")
    process.stdin.flush()


def reports_of_a_killed_writer(write, reports, pause_s=0.0):
    """Run ``write(report)`` in a process that is killed ``pause_s`` after this number of reports; return the count."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            write(lambda: os.write(writer, b"."))
        finally:
            os._exit(1)
    os.close(writer)
    count = sum(len(os.read(reader, 1)) for _ in range(reports))
    end_s = time.perf_counter() + pause_s
    while time.perf_counter() < end_s:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4096):
        count += len(more)
    os.close(reader)
    return count


def flips_of(content, bits=8):
    """Copies of ``content`` with one bit flipped, in one byte after the other."""
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % bits
        yield bytes(damaged)


def damage_byte(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_bit(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def truncate(content, rng):
    return content[: rng.randrange(len(content))]


def extend(content, rng):
    return content + rng.choice([rng.randbytes(rng.randrange(1, 200)), bytes(512), content[-50:], b"\n", b"x\n"])


def zero_block(content, rng):
    size = min(rng.choice([1, 16, 64, 512]), len(content))
    at = rng.randrange(len(content)) // size * size
    return content[:at] + bytes(min(size, len(content) - at)) + content[at + size :]


def repeat_block(content, rng):
    size = rng.choice([16, 64, 512])
    at = rng.randrange(len(content)) // size * size
    return content[: at + size] + content[at:]


def cut_block(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + content[at + rng.choice([1, 16, 64, 512]) :]


DAMAGES = (flip_bit, truncate, extend, zero_block, repeat_block, cut_block)
"""Functions of the content of a file and a source of chance, which return the damaged content."""
