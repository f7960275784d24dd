# SPDX-License-Identifier: Apache-2.0
"""Verifiers with bad habits, for child processes."""

import asyncio
import os
import signal
import sys
from contextlib import suppress


def level(completion, answer, level=1):
    return level


def length(completion, answer, extra_info):
    return len(completion) + extra_info.get("bonus", 0)


async def awaited(completion, answer, extra_info):
    await asyncio.sleep(0)
    return 5


def obedient(completion, answer, extra_info):
    """Does what the completion says."""
    if completion == "loop":
        while True:
            pass
    if completion == "raise":
        raise KeyError("no such thing")
    if completion in HOSTILE:
        return HOSTILE[completion](extra_info)
    if completion == "heavy":
        return len({"torch", "numpy", "pytest", "transformers", "ray"} & set(sys.modules))
    return {"nan": float("nan"), "none": None, "bool": True}.get(completion, 1.0)


def _fill_memory(extra_info):
    return len([bytearray(1 << 28) for _ in range(1 << 6)])


def _bomb(extra_info):
    """Fork processes in separate sessions, up to a harmless number."""
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
    with open(extra_info["path"], "a") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        signal.pause()


def _daemon(extra_info):
    """Leave a detached process behind, and answer well."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", "import signal; signal.pause()"], {})
        os._exit(0)
    os.wait()
    return 1.0


def _flood(extra_info):
    for _ in range(1000):
        sys.stdout.write("x" * 1_000_000)
        os.write(1, b"y" * 100_000)
    return 1.0


def _forge(extra_info):
    """Write an answer to all open descriptors."""
    _write_everywhere(b'{"number": "guess", "reward": 1000.0}\n')
    return 0.0


def _half_forge(extra_info):
    """Write a reply that never ends."""
    _write_everywhere(b'{"number": ')
    while True:
        signal.pause()


def _write_everywhere(content):
    for descriptor in range(3, 4096):
        with suppress(OSError):
            os.write(descriptor, content)


def _kill_parent(extra_info):
    os.kill(os.getppid(), signal.SIGKILL)
    return 1.0


def _long_words(extra_info):
    raise ValueError("x" * 50_000_000)


HOSTILE = {
    "exit": lambda extra_info: sys.exit(3),
    "segfault": lambda extra_info: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": lambda extra_info: os.abort(),
    "memory": _fill_memory,
    "bomb": _bomb,
    "daemon": _daemon,
    "flood": _flood,
    "forge": _forge,
    "half-forge": _half_forge,
    "kill-parent": _kill_parent,
    "kill-group": lambda extra_info: os.killpg(0, signal.SIGKILL),
    "long-words": _long_words,
    "real-time": lambda extra_info: os.kill(os.getpid(), signal.SIGRTMIN + 1),
    "stop": lambda extra_info: os.kill(os.getpid(), signal.SIGSTOP),
}

not_a_function = 3


def place_in_batch(prompts, completions, **columns):
    if "raise" in completions:
        raise ValueError("not this")
    if "one" in completions:
        return 1.0
    return list(range(len(completions)))
