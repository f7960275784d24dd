# SPDX-License-Identifier: Apache-2.0
"""``python -m dlrover.python.rl.cli``: the command line without its console script."""

from dlrover.python.rl.cli.entry import main

if __name__ == "__main__":
    main()
