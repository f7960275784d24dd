# SPDX-License-Identifier: Apache-2.0
"""``python -m dlrover.python.rl.master.main``: the command line under the name that guides use."""

from dlrover.python.rl.cli.entry import main

if __name__ == "__main__":
    main()
