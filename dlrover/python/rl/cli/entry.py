# SPDX-License-Identifier: Apache-2.0
"""The command ``dlrover-rl``, which answers Ctrl-C with one line even while its modules are imported."""

import os
import signal
from types import FrameType


def _end(_: int, __: FrameType | None) -> None:
    """Exit at once: a library that is being imported may swallow a ``KeyboardInterrupt``."""
    os.write(2, b"interrupted before anything was started\n")
    os._exit(130)


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    from dlrover.python.rl.cli.commands import main as run  # takes the first half second
    from dlrover.python.rl.runtime.interrupts import hangup_terminates

    signal.signal(signal.SIGINT, before)
    hangup_terminates()
    run()
