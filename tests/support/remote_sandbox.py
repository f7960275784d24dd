# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of sandboxes: a remote service with its client, and the command line of Docker."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class Remote:
    """A service whose client takes the files to another folder and runs the program there."""

    def command(self, arguments, folder, shown, limits):
        files = [str(path) for path in shown]
        return [sys.executable, __file__, str(limits.timeout_s), str(folder), *files, "--", *arguments]


class Broken:
    def command(self, arguments, folder, shown, limits):
        return [sys.executable, "-c", "raise SystemExit('the service is away')"]


def run_elsewhere(folder, files, arguments, timeout_s):
    """Run Python where ``folder`` and ``files`` have other paths, and end as it has ended."""
    with tempfile.TemporaryDirectory() as elsewhere:
        paths = {file: shutil.copy(file, elsewhere) for file in files}
        command = [sys.executable, *(paths.get(word, word) for word in arguments)]
        process = subprocess.Popen(command, cwd=elsewhere, env={"ELSEWHERE": folder}, start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def run_like_docker():
    """Parse the arguments of ``docker run`` strictly, and run the program of the image in another folder."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("verb", choices=["run"])
    for flag in ("--rm", "--interactive", "--read-only"):
        parser.add_argument(flag, action="store_true", required=True)
    values = (
        "pull",
        "log-driver",
        "network",
        "cap-drop",
        "security-opt",
        "user",
        "memory",
        "memory-swap",
        "cpus",
        "pids-limit",
    )
    for name in (*values, "tmpfs", "workdir"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("ulimit", "env", "volume"):
        parser.add_argument(f"--{name}", action="append", default=[])
    parser.add_argument("image", choices=["python:3.11-slim", "mine"])
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    assert (options.network, options.cap_drop, options.memory) == ("none", "ALL", options.memory_swap)
    assert options.tmpfs.split(":")[0] == options.workdir
    files = [volume.split(":")[0] for volume in options.volume if volume.endswith(":ro")]
    timeout, _, signal_name, seconds, python, *arguments = options.program
    assert (timeout, signal_name, python) == ("timeout", "KILL", "python3")
    return run_elsewhere(options.workdir, files, arguments, float(seconds))


def main():
    if Path(sys.argv[0]).name == "docker":
        return run_like_docker()
    timeout_s, folder, *words = sys.argv[1:]
    cut = words.index("--")
    return run_elsewhere(folder, words[:cut], words[cut + 1 :], float(timeout_s))


if __name__ == "__main__":
    raise SystemExit(abs(main()))
