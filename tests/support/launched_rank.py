# SPDX-License-Identifier: Apache-2.0
"""A process of a launch, for the contract suite: ``python launched_rank.py RANK WORLD_SIZE ADDRESS``."""

import os
import subprocess
import sys
from pathlib import Path

from dlrover.python.rl.runtime.torchrun.links import LaunchEnv, join
from dlrover.python.rl.runtime.torchrun.run import run_follower


class Launcher:
    """Starts the other processes of a world as soon as rank 0 can be found; to them it is where they find it."""

    def __init__(self, world_size, answer=b""):
        self.world_size, self.found, self.children = world_size, answer, []

    def set(self, key, value):
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        self.children = [
            subprocess.Popen([sys.executable, __file__, str(rank), str(self.world_size), value.hex()], env=env)
            for rank in range(1, self.world_size)
        ]

    def get(self, key):
        return self.found


if __name__ == "__main__":
    rank, world_size = map(int, sys.argv[1:3])
    launch = LaunchEnv(rank, world_size, rank, world_size)
    sys.exit(not run_follower(launch, join(launch, Launcher(world_size, bytes.fromhex(sys.argv[3])))))
