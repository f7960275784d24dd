# SPDX-License-Identifier: Apache-2.0
"""The command ``dlrover-rl``: Ctrl-C is answered in one line also while its modules are imported."""

import sys


def main() -> None:
    try:
        from dlrover.python.rl.cli.commands import main as run  # takes the first half second
    except KeyboardInterrupt:
        sys.stderr.write("interrupted before anything was started\n")
        sys.exit(130)
    run()
