# SPDX-License-Identifier: Apache-2.0
"""The verbs of a job service: ``enqueue``, ``fetch``, and ``run``, ``submit`` and ``eval`` with ``--server``."""

import io
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click
import yaml
from click.core import ParameterSource

from dlrover.python.rl.cli.operate import EXIT_INTERRUPTED, exit_as, follow
from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import echo
from dlrover.python.rl.common.names import hint, is_job_name, name_of_file
from dlrover.python.rl.config.command import OverridesCommand
from dlrover.python.rl.runtime.run.names import SUMMARY
from dlrover.python.rl.runtime.run.progress import print_summary

_REQUIRED_SERVER = click.option(
    "--server", envvar="DLROVER_RL_SERVER", show_envvar=True, required=True, help="The job service, host:port."
)
_SERVER = click.Option(
    ["--server"], envvar="DLROVER_RL_SERVER", show_envvar=True, help="Submit the job to this job service, host:port."
)
_PRIORITY = click.Option(
    ["--priority"], type=click.IntRange(-100, 100), default=0, help="With --server: higher ones start first."
)
_FOLDER = click.Option(
    ["--folder"], default="", help="With --server: where the job's modules and data are, relative to its root."
)
_WORKING_DIR = click.Option(
    ["--working-dir"], type=click.Path(path_type=Path), help="With --server: send this folder, with modules and data."
)
_DETACH = click.Option(["--detach"], is_flag=True, help="With --server: return once the job is submitted.")
_HERE_ONLY = ("address", "local", "supervise")


def with_server(command: click.Command, describe: Callable[..., dict[str, Any]]) -> click.Command:
    """Add ``--server`` to a command that starts a job; ``describe(client, **arguments)`` returns the submission."""
    here: Callable[..., None] = command.callback  # type: ignore[assignment]  # every command has one
    has_detach = any(parameter.name == "detach" for parameter in command.params)
    options = [_PRIORITY, _FOLDER, _WORKING_DIR, *([] if has_detach else [_DETACH])]
    server_only = [str(option.name) for option in options]

    def begin(server: str | None, **arguments: Any) -> None:
        if _is_default(server) and _used(_HERE_ONLY):
            server = None
        if server is None:
            _refuse(server_only, "needs --server")
            here(**{name: value for name, value in arguments.items() if name not in server_only})
            return
        _refuse(_HERE_ONLY, "cannot be used with --server, which chooses where a job runs")
        arguments = {name: value for name, value in arguments.items() if name not in _HERE_ONLY}
        if not is_job_name(str(arguments.get("name_or_dir", "job")).partition("@")[0]):
            why = "is no job's name, as --server and DLROVER_RL_SERVER need; --local, --ray or --address run it here"
            raise InvalidJob([ConfigError(arguments["name_or_dir"], why)])
        placing = {name: arguments.pop(name) for name in ("priority", "folder", "working_dir")}
        placing = {name: placing[name] for name in _used(placing)}
        detach = arguments.pop("detach")
        from dlrover.python.rl.service.client import RemoteJobs, connected  # gRPC takes a moment

        with connected(server) as client:
            described = describe(client, **arguments)
            if placing.keys() & {"folder", "working_dir"}:
                described.pop("folder", None)
            elif described.get("folder") == "":
                why = "was submitted to an earlier version, which did not keep where its modules are: pass --folder"
                raise InvalidJob([ConfigError(arguments["name_or_dir"], why)])
            name = submit(client, server, **{**described, **placing})
            if detach:
                return
            ended = follow(RemoteJobs(client), name)
            if ended is None:
                sys.exit(EXIT_INTERRUPTED)
            if any(file.path == SUMMARY for file in client.artifacts(name)):
                print_summary(name, read_file(client, name, SUMMARY))
        exit_as(ended)

    command.callback = begin
    command.params += [_SERVER, *options]
    return command


def _refuse(names: Iterable[str], fault: str) -> None:
    """Raises InvalidJob if an option of ``names``, which would have no effect, is on the command line."""
    if used := _used(names):
        raise InvalidJob([ConfigError(f"--{name}", fault) for name in used])


def _used(names: Iterable[str]) -> list[str]:
    """Return the options of ``names`` that are on the command line."""
    context = click.get_current_context()
    return [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def _is_default(server: str | None) -> bool:
    return bool(server) and click.get_current_context().get_parameter_source("server") is ParameterSource.ENVIRONMENT


def read_file(client: Any, name: str, path: str) -> str:
    file = io.BytesIO()
    client.fetch(name, path, file)
    return file.getvalue().decode()


@click.command(cls=OverridesCommand)
@click.argument("job_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--name", default="", help="By default the name in the file, or of the file.")
@click.option("--priority", type=click.IntRange(-100, 100), default=0, show_default=True)
@click.option("--folder", default="", help="Where the job's modules and data are, relative to the service's root.")
@click.option("--working-dir", type=click.Path(path_type=Path), help="Send this folder, with modules and data.")
@click.option("--token", "client_token", default="", help="Submitting again with the same token makes no second job.")
@_REQUIRED_SERVER
def enqueue(job_file: Path, overrides: tuple[str, ...], server: str, **options: Any) -> None:
    """Submit JOB_FILE to a job service and return; the job starts when the cluster has room."""
    from dlrover.python.rl.service.client import connected

    valid = [override for override in overrides if not override.lstrip("+").startswith("name=")]
    errors = [ConfigError("name", "use the option --name")] if len(valid) < len(overrides) else []
    text, name = read_job_file(job_file)
    options["name"] = options["name"] or name
    try:
        check_submitted(text, options["name"], valid, job_file.absolute().parent)
    except InvalidJob as error:
        errors += error.errors
    if errors:
        raise InvalidJob(errors)
    with connected(server) as client:
        submit(client, server, text, overrides=overrides, **options)


def read_job_file(job_file: Path) -> tuple[str, str]:
    """Return the text of a job file, and the job's name. Raises InvalidJob."""
    if not job_file.is_file():
        near = hint(job_file.name, [path.name for path in job_file.parent.glob("*.y*ml")])
        raise InvalidJob([ConfigError(str(job_file), f"no such job file{near}")])
    text = job_file.read_text(encoding="utf-8")
    name = ""
    with suppress(yaml.YAMLError, RecursionError):
        job = yaml.safe_load(text)
        name = str(job.get("name", "")) if isinstance(job, dict) else ""
    return text, name or name_of_file(job_file)


def check_submitted(text: str, name: str, overrides: Sequence[str], *folders: Path) -> None:
    """Check the types of a job's fields; its trainer may be in ``folders``. Raises InvalidJob."""

    from dlrover.python.rl.config.load import load_job_text, search_folders  # with the child's, this takes seconds
    from dlrover.python.rl.master.client.run import check_types

    check_types(lambda: load_job_text(text, name, overrides, search_folders(*folders)))


def submit(client: Any, server: str, text: str, working_dir: Path | None = None, **options: Any) -> str:
    """Submit a job to the service that ``client`` is connected to, and print how to follow it; return its name."""
    if working_dir is not None:
        from dlrover.python.rl.service.jobs.working_dirs import pack

        with TemporaryFile() as archive:
            options["working_dir"] = pack(working_dir, archive)
            client.upload(archive, options["working_dir"])
    job = client.submit(text, **options)
    echo(f"{job.name}: {job.reason or 'submitted'}; dlrover-rl attach {job.name} --server {server}")
    return str(job.name)


@click.command()
@click.argument("name")
@click.argument("path", default="")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path(), help="A folder; by default this one.")
@_REQUIRED_SERVER
def fetch(name: str, path: str, out: Path, server: str) -> None:
    """Copy a file of a job from the service, or all files below PATH, such as model; without PATH list the files."""
    from dlrover.python.rl.service.client import connected

    with connected(server) as client:
        files = client.artifacts(name)
        if not path:
            for file in files:
                echo(f"{file.bytes:>12} {file.path}")
            return
        wanted = [file.path for file in files if file.path == path or file.path.startswith(f"{path.rstrip('/')}/")]
        for relative in wanted or [path]:
            _copy(lambda to, relative=relative: client.fetch(name, relative, to), _target(out, relative))
            echo(str(out / relative))


def _target(out: Path, relative: str) -> Path:
    """Return the file to write; a service must not choose one outside ``out``."""
    try:
        target = (out / relative).resolve()
    except (OSError, ValueError) as error:
        raise InvalidJob([ConfigError("path", f"{relative[:200]!r} is not a path")]) from error
    if not target.is_relative_to(out.resolve()) or target == out.resolve():
        raise InvalidJob([ConfigError("path", f"{relative!r} is outside {out}")])
    return target


def _copy(read: Callable[..., int], target: Path) -> None:
    new_folders = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as file:
            read(file)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
        with suppress(OSError):  # a folder with files stays
            for folder in new_folders:
                folder.rmdir()


VERBS = (enqueue, fetch)
