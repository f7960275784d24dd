# SPDX-License-Identifier: Apache-2.0
"""The verbs that only a service has: ``enqueue`` and ``fetch``."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.common.terminal import echo
from dlrover.python.rl.config.command_line import OverridesCommand

_SERVER = click.option(
    "--server", envvar="DLROVER_RL_SERVER", show_envvar=True, required=True, help="The job service, host:port."
)


@click.command(cls=OverridesCommand)
@click.argument("job_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--name", default="", help="By default the file's own, or the name of the file.")
@click.option("--priority", type=click.IntRange(-100, 100), default=0, show_default=True)
@click.option("--folder", default="", help="Where the job's modules and data are, relative to the service's root.")
@click.option("--token", "client_token", default="", help="The same one never makes a second job.")
@_SERVER
def enqueue(job_file: Path, overrides: tuple[str, ...], server: str, **options: Any) -> None:
    """Submit JOB_FILE to a job service and return; it runs when the cluster has room."""
    from dlrover.python.rl.service.remote_jobs import connected

    named = [override for override in overrides if override.lstrip("+").startswith("name=")]
    errors = [ConfigError("name", "is given by --name")] if named else []
    text, name = read_job_file(job_file)
    options["name"] = options["name"] or name
    others = [override for override in overrides if override not in named]
    try:
        check_submitted(text, options["name"], others, job_file.absolute().parent)
    except InvalidJob as error:
        errors += error.errors
    if errors:
        raise InvalidJob(errors)
    with connected(server) as client:
        submit(client, server, text, overrides=overrides, **options)


def read_job_file(job_file: Path) -> tuple[str, str]:
    """The text of a job, and its name. Raises InvalidJob."""
    if not job_file.is_file():
        near = hint(job_file.name, [path.name for path in job_file.parent.glob("*.y*ml")])
        raise InvalidJob([ConfigError(str(job_file), f"no such job file{near}")])
    text = job_file.read_text(encoding="utf-8")
    from dlrover.python.rl.config.load import name_of_file

    return text, _own_name(text) or name_of_file(job_file)


def check_submitted(text: str, name: str, overrides: Sequence[str], *folders: Path) -> None:
    """What can be checked of a job here; its trainer may be in ``folders``. Raises InvalidJob."""
    from dlrover.python.rl.config.load import load_job_text, search_folders
    from dlrover.python.rl.master.checked_job import check_types

    check_types(lambda: load_job_text(text, name, overrides, search_folders(*folders)))


def submit(client: Any, server: str, text: str, **options: Any) -> str:
    """Submit a job to the service that ``client`` is connected to, and say so; returns its name."""
    job = client.submit(text, **options)
    echo(f"{job.name}: {job.reason or 'submitted'}; dlrover-rl attach {job.name} --server {server}")
    return str(job.name)


def _own_name(text: str) -> str:
    import yaml

    try:
        top = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return ""
    return str(top.get("name", "")) if isinstance(top, dict) else ""


@click.command()
@click.argument("name")
@click.argument("path", default="")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path(), help="A folder; by default this one.")
@_SERVER
def fetch(name: str, path: str, out: Path, server: str) -> None:
    """Copy a file of a job, or all files below PATH such as model, from the service; without PATH list them."""
    from dlrover.python.rl.service.remote_jobs import connected

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
    """The file to write; a service must not choose one outside of ``out``."""
    try:
        target = (out / relative).resolve()
    except (OSError, ValueError) as error:
        raise InvalidJob([ConfigError("path", f"{relative[:200]!r} is no path")]) from error
    if not target.is_relative_to(out.resolve()) or target == out.resolve():
        raise InvalidJob([ConfigError("path", f"{relative!r} leads out of {out}")])
    return target


def _copy(read: Callable[..., int], target: Path) -> None:
    made = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as file:
            read(file)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
        with suppress(OSError):  # one that is not empty
            for folder in made:
                folder.rmdir()
