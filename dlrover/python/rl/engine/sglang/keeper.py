"""Runs a command for as long as the process that started it lives.

``python -m dlrover.python.rl.engine.sglang.keeper FOLDER COMMAND...`` in a session of its own, with a pipe as standard
input: when the pipe closes, as it does when its owner is killed, the keeper removes FOLDER, which was its owner's, and
kills its whole process group.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading


def main(folder: str, command: list[str]) -> int:
    """Run ``command`` and return its status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_owner, args=(folder,), daemon=True).start()
    return child.wait()  # waits: as long as the server serves; its owner ends both


def _end_with_owner(folder: str) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
