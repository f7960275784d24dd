# SPDX-License-Identifier: Apache-2.0
"""Power cuts while a run begins, computes, or is resumed: ext4 on a loop device is shut down without a flush, and
``resume`` continues the run after each, in the bits of an undisturbed one."""

import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples/fault_tolerance"
SHUTDOWN, WITHOUT_FLUSH = 0x8004587D, 2  # of ext4: EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH
CUTS = 20
SETTINGS = ["steps=12", "pulls_per_step=8", "checkpoint.commit_to=job_dir", "checkpoint.commit_every=1"]
WITHIN_S = 120.0


class Machine:
    """A disk whose power can be cut, and the memory and processes that go with it."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.memory, self.log = folder / "disk", folder / "memory", folder / "log"
        self._image = folder / "image"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["dlrover.python.rl.cli.commands", "dlrover.python.rl.runtime.local"])
        self.disk.mkdir()

    def format(self) -> bool:
        """Return False where loop devices cannot be mounted."""
        with open(self._image, "wb") as image:
            image.truncate(64 << 20)
        return _succeeds("mkfs.ext4", "-q", self._image) and self.mount()

    def mount(self) -> bool:
        return _succeeds("mount", "-o", "loop", self._image, self.disk)

    def unmount(self) -> bool:
        return _succeeds("umount", self.disk)

    def begin(self, *arguments: object):
        """Start a command of the command line, in a separate session."""
        process = self._context.Process(target=_command, args=(list(map(str, arguments)), self.memory, self.log))
        process.start()
        return process

    def run(self, *arguments: object) -> int:
        process = self.begin(*arguments)
        process.join(WITHIN_S)
        assert process.exitcode is not None, f"{arguments} takes longer than {WITHIN_S} s"
        return process.exitcode

    def cut_power(self, process) -> None:
        handle = os.open(self.disk, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, SHUTDOWN, struct.pack("I", WITHOUT_FLUSH))
        finally:
            os.close(handle)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        shutil.rmtree(self.memory, ignore_errors=True)
        assert self.unmount() and self.mount()


def _succeeds(*command: object) -> bool:
    if shutil.which(str(command[0])) is None:
        return False
    return subprocess.run(list(map(str, command)), capture_output=True, check=False).returncode == 0


def _command(arguments, memory, log):
    os.setsid()
    os.chdir(EXAMPLE)
    os.environ["DLROVER_RL_MEMORY"] = str(memory)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from dlrover.python.rl.cli.commands import main

    sys.argv = ["dlrover-rl", *arguments]
    main()


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    if not machine.format():
        pytest.skip("no ext4 on a loop device can be mounted here")
    yield machine
    machine.unmount()


def test_run_resumes_after_a_power_cut_at_any_moment(machine):
    rng = random.Random(0)
    begun_s = time.monotonic()
    assert machine.run("run", "job.yaml", "--local", f"job_dir={machine.disk / 'calm'}", *SETTINGS) == 0
    whole_s = time.monotonic() - begun_s
    expected = (machine.disk / "calm/learnt.json").read_bytes()
    committed, again = 0, 0
    for number in range(CUTS):
        folder = machine.disk / f"run{number}"
        if number % 2:  # a run that has ended, whose folder was on the disk long ago
            assert machine.run("run", "job.yaml", "--local", f"job_dir={folder}", *SETTINGS, "steps=3") == 0
            os.sync()
            process = machine.begin("resume", folder, "--local", "steps=12")
        else:
            process = machine.begin("run", "job.yaml", "--local", f"job_dir={folder}", *SETTINGS)
        process.join(rng.uniform(0.0, whole_s))
        has_committed = bool(number % 2) or any(folder.glob("commits/*/step-*[1-9]*/manifest*"))
        machine.cut_power(process)
        committed += has_committed
        if has_committed or list(folder.glob("owner.*.json")):
            code = machine.run("resume", folder, "--local", "steps=12")
        else:  # nothing had begun
            again += 1
            code = machine.run("run", "job.yaml", "--local", f"job_dir={folder}", *SETTINGS)
        assert code == 0, (number, sorted(map(str, folder.rglob("*"))), machine.log.read_text()[-3000:])
        assert (folder / "learnt.json").read_bytes() == expected, number
    assert committed > CUTS // 2 and again < CUTS // 2, (committed, again)
