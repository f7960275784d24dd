# SPDX-License-Identifier: Apache-2.0
"""All verbs of the command line: to begin jobs, to operate them, and those of the service."""

from dlrover.python.rl.cli.doctor import doctor
from dlrover.python.rl.cli.operate import VERBS
from dlrover.python.rl.cli.remote import DESCRIBE, add_server
from dlrover.python.rl.master.main import cli, main
from dlrover.python.rl.service.command import serve, token
from dlrover.python.rl.service.verbs import enqueue, fetch

for command in (*VERBS, doctor, serve, token, enqueue, fetch):
    cli.add_command(command)
for name, describe in DESCRIBE.items():
    add_server(cli.commands[name], describe)

__all__ = ["cli", "main"]
