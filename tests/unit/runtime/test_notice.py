# SPDX-License-Identifier: Apache-2.0
"""How a process is told that its node will go."""

import os
import signal
import subprocess
import sys

from dlrover.python.rl.runtime.member.heartbeat import DepartureNotice

TOLD = """
import os, signal
from dlrover.python.rl.runtime.member.heartbeat import DepartureNotice

notice = DepartureNotice()
os.kill(os.getpid(), signal.SIGTERM)
print(notice.read(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still there")
"""


def test_the_first_sigterm_is_a_notice_and_the_second_ends_the_process():
    process = subprocess.run([sys.executable, "-c", TOLD], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert process.stdout == "it was sent SIGTERM\n"
    assert process.returncode == -signal.SIGTERM


def test_a_file_is_a_notice_once_it_is_there(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    try:
        notice = DepartureNotice(str(tmp_path / "leave"))
        assert notice.read() == ""
        (tmp_path / "leave").touch()
        assert notice.read() == f"{tmp_path / 'leave'} exists"
        os.remove(tmp_path / "leave")
        assert notice.read(), "what was told stays"
    finally:
        signal.signal(signal.SIGTERM, before)
