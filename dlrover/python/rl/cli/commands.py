# SPDX-License-Identifier: Apache-2.0
"""All verbs of the command line: those of jobs, and those of the service that is built on them."""

from dlrover.python.rl.master.main import cli, main
from dlrover.python.rl.service.command import serve, token

for command in (serve, token):
    cli.add_command(command)

__all__ = ["main"]
