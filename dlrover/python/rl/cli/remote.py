# SPDX-License-Identifier: Apache-2.0
"""``run``, ``submit`` and ``eval`` with ``--server``: the job goes to a service."""

import io
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dlrover.python.rl.cli.operate import exit_as, follow
from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.master.main import EXIT_INTERRUPTED, job_of_options
from dlrover.python.rl.master.saved_run import evaluation_name, evaluation_overrides
from dlrover.python.rl.runtime.run.files import SUMMARY
from dlrover.python.rl.runtime.run.folder import MODEL
from dlrover.python.rl.runtime.run.owner import DESCRIPTION
from dlrover.python.rl.runtime.run.progress import print_summary
from dlrover.python.rl.service.verbs import check_submitted, read_job_file, submit

_SERVER = click.Option(["--server"], help="Submit the job to this job service, host:port.")
_PRIORITY = click.Option(["--priority"], type=click.IntRange(-100, 100), default=0, help="With --server.")
_FOLDER = click.Option(
    ["--folder"], default="", help="With --server: where the job's modules and data are, relative to its root."
)
_DETACH = click.Option(["--detach"], is_flag=True, help="With --server: return once the job is submitted.")
_HERE_ONLY = ("address", "local", "supervise")


def add_server(command: click.Command, describe: Callable[..., dict[str, Any]]) -> None:
    """Give a command that begins a job the option ``--server``; ``describe(client, **arguments)`` is the submission."""
    here: Callable[..., None] = command.callback  # type: ignore[assignment]  # every command has one
    has_detach = any(parameter.name == "detach" for parameter in command.params)
    options = [_PRIORITY, _FOLDER, *([] if has_detach else [_DETACH])]
    there_only = [str(option.name) for option in options]

    def begin(server: str | None, **arguments: Any) -> None:
        if server is None:
            _refuse(there_only, "needs --server")
            here(**{name: value for name, value in arguments.items() if name not in there_only})
            return
        _refuse(_HERE_ONLY, "is not for --server, which chooses where a job runs")
        arguments = {name: value for name, value in arguments.items() if name not in _HERE_ONLY}
        placing = {name: arguments.pop(name) for name in ("priority", "folder")}
        _submit(server, arguments.pop("detach"), lambda client: {**describe(client, **arguments), **placing})

    command.callback = begin
    command.params += [_SERVER, *options]


def _submit(server: str, detach: bool, describe: Callable[[Any], dict[str, Any]]) -> None:
    from dlrover.python.rl.service.remote_jobs import RemoteJobs, connected  # gRPC takes a moment

    with connected(server) as client:
        name = submit(client, server, **describe(client))
        if detach:
            return
        ended = follow(RemoteJobs(client), name)
        if ended is None:
            sys.exit(EXIT_INTERRUPTED)
        if any(file.path == SUMMARY for file in client.artifacts(name)):
            print_summary(name, _read(client, name, SUMMARY))
    exit_as(ended)


def _refuse(names: Iterable[str], what: str) -> None:
    """Raises InvalidJob for those of the options that were given, which would have no effect."""
    context = click.get_current_context()
    given = [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise InvalidJob([ConfigError(f"--{name}", what) for name in given])


def _of_file(_: Any, job_file: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    text, name = read_job_file(Path(job_file))
    is_renamed = any(override.startswith("name=") for override in overrides)
    name = "" if is_renamed else name
    check_submitted(text, name, overrides, Path(job_file).absolute().parent)
    return {"text": text, "name": name, "overrides": overrides}


def _of_options(_: Any, job_name: str, rl_config: str, **options: Any) -> dict[str, Any]:
    return {"text": job_to_yaml(job_of_options(job_name, rl_config, options)), "name": job_name}


def _of_run(client: Any, name_or_dir: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """An evaluation of the newest run of a name, whose files are on the service's machine."""
    run = client.get(name_or_dir)
    has_model = any(file.path.startswith(f"{MODEL}/") for file in client.artifacts(run.name))
    text = _read(client, run.name, DESCRIPTION)
    changes = [*evaluation_overrides(text, Path(run.folder), has_model, overrides), "job_dir=''"]
    return {"text": text, "name": evaluation_name(run.name), "overrides": changes}


def _read(client: Any, name: str, path: str) -> str:
    file = io.BytesIO()
    client.fetch(name, path, file)
    return file.getvalue().decode()


DESCRIBE: Mapping[str, Callable[..., dict[str, Any]]] = {"run": _of_file, "submit": _of_options, "eval": _of_run}
