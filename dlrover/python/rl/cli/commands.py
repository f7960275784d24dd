# SPDX-License-Identifier: Apache-2.0
"""The command line: a group of all verbs, and what their errors are to the shell.

Exit codes: 0 the job finished; 1 it failed; 2 the request was wrong and nothing was started; 3 it was stopped from
elsewhere; 4 Ray or the service could not be reached; 5 the job's master was lost; 124 'wait' ended before the job; 130
it was interrupted here (Ctrl-C).
"""

import sys

import click

from dlrover.python.rl.cli import begin, operate, remote, serve
from dlrover.python.rl.cli.operate import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID, EXIT_MASTER_LOST, EXIT_NO_CLUSTER
from dlrover.python.rl.common.errors import (
    AccessDenied,
    CallError,
    ClusterUnavailable,
    DLRoverRLError,
    InvalidJob,
    JobConflict,
    MasterLost,
    ServiceBusy,
    ServiceUnavailable,
    UnknownJob,
)
from dlrover.python.rl.common.log import configure_logging, echo
from dlrover.python.rl.common.names import package_version


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_version(), prog_name="dlrover-rl")
def cli() -> None:
    """Run RL post-training jobs."""
    configure_logging()


for command in (*begin.VERBS, *operate.VERBS, serve.doctor, serve.serve, serve.token, remote.enqueue, remote.fetch):
    cli.add_command(command)
for name, describe in remote.DESCRIBE.items():
    remote.add_server(cli.commands[name], describe)


def main() -> None:
    """Run the command of this process."""
    try:
        cli(prog_name="dlrover-rl", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        echo("interrupted before anything was started", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:
            raise
        echo(f"{error.filename} cannot be used: {error.strerror}", err=True)
        sys.exit(EXIT_FAILED)
    except DLRoverRLError as error:
        echo(str(error), err=True)
        sys.exit(next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), EXIT_FAILED))


_EXIT_CODES: dict[type[DLRoverRLError], int] = {
    **dict.fromkeys((InvalidJob, JobConflict, UnknownJob, AccessDenied, CallError), EXIT_INVALID),
    **dict.fromkeys((ClusterUnavailable, ServiceBusy, ServiceUnavailable), EXIT_NO_CLUSTER),
    MasterLost: EXIT_MASTER_LOST,
}
