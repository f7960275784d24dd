# SPDX-License-Identifier: Apache-2.0
"""The command line: the group of all verbs, and the exit codes of their errors.

Exit codes: 0 the job finished; 1 it failed; 2 the request was invalid and nothing was started; 3 it was stopped by
another command; 4 Ray or the service could not be reached; 5 the job's master was lost; 6 the service's queue
is full, or the caller's share of it; 124 'wait' timed out; 130 Ctrl-C interrupted it.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from dlrover.python.rl.cli.operate import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    EXIT_MASTER_LOST,
    EXIT_NO_CLUSTER,
    EXIT_QUOTA,
)
from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import ConfigError, DLRoverRLError, InvalidJob
from dlrover.python.rl.common.log import configure_logging, echo
from dlrover.python.rl.common.names import is_job_name, package_version

_HOMES = {  # the modules of the verbs
    "begin": ("init", "run", "resume", "eval", "check", "submit"),
    "operate": ("list", "status", "attach", "wait", "stop", "resize", "logs", "explain"),
    "look": ("view", "trace", "samples", "lineage", "events", "stacks", "runs"),
    "serve": ("serve", "token", "doctor"),
    "remote": ("enqueue", "fetch"),
}


class _Verbs(click.Group):
    """Imports the module of a verb when the verb is used: together they take seconds."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(verb for verbs in _HOMES.values() for verb in verbs)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        home = next((home for home, verbs in _HOMES.items() if name in verbs), None)
        if home is None:
            return None
        command: click.Command = next(
            each for each in import_module(f"{__package__}.{home}").VERBS if each.name == name
        )
        for parameter in command.params:
            if home == "look" and parameter.name in ("name_or_dir", "names_or_dirs"):
                parameter.callback = _refuse_name_of_service
        return command


def _refuse_name_of_service(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
    """Refuse the name of a job that may be on a service, of which these verbs see no files. Raises InvalidJob."""
    for name in [value] if isinstance(value, str) else value:
        if os.environ.get("DLROVER_RL_SERVER") and is_job_name(name.partition("@")[0]) and not Path(name).is_dir():
            why = f"'{ctx.info_name}' reads folders of this machine, and DLROVER_RL_SERVER names a service"
            raise InvalidJob([ConfigError(name, f"{why}: give the folder of a run, or unset it")])
    return value


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_version(), prog_name="dlrover-rl")
def cli() -> None:
    """Run RL post-training jobs."""
    configure_logging()


def main() -> None:
    """Run the command line, and exit with the code of its error."""
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
    errors.QuotaReached: EXIT_QUOTA,
    **dict.fromkeys((errors.InvalidJob, errors.JobConflict, errors.UnknownJob), EXIT_INVALID),
    **dict.fromkeys((errors.AccessDenied, errors.CallError), EXIT_INVALID),
    **dict.fromkeys((errors.ClusterUnavailable, errors.ServiceBusy, errors.ServiceUnavailable), EXIT_NO_CLUSTER),
    errors.MasterLost: EXIT_MASTER_LOST,
}
