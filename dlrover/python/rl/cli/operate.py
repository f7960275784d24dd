# SPDX-License-Identifier: Apache-2.0
"""The verbs for running jobs: ``list|status|attach|wait|stop|resize|logs|explain``, on a Ray cluster or a service."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import echo, inert
from dlrover.python.rl.common.names import is_job_name, log_name
from dlrover.python.rl.master.client.explain import advice, explain_lines
from dlrover.python.rl.master.client.views import JobOperations, JobView, RunOperations, check_name
from dlrover.python.rl.master.process.status import RunningProcess
from dlrover.python.rl.runtime.run.progress import ProgressView

EXIT_FAILED, EXIT_INVALID, EXIT_STOPPED, EXIT_NO_CLUSTER, EXIT_MASTER_LOST, EXIT_INTERRUPTED = 1, 2, 3, 4, 5, 130
EXIT_QUOTA, EXIT_TIMED_OUT = 6, 124
_MOST_LISTED = 32  # processes; more are counted by role

_ADDRESS = click.option("--address", default="auto", show_default=True, help="A running Ray cluster.")
_SERVER = click.option(
    "--server", envvar="DLROVER_RL_SERVER", show_envvar=True, help="A job service, host:port, instead of a cluster."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def connect(address: str, server: str | None, name: str | None) -> Iterator[JobOperations]:
    """Connect to the cluster or the service of a job. Raises ClusterUnavailable, ServiceUnavailable."""
    if server:
        from dlrover.python.rl.service.client import RemoteJobs, connected  # gRPC takes a moment

        with connected(server) as client:
            yield RemoteJobs(client)
        return
    from dlrover.python.rl.master.client.on_ray import ray_jobs

    with ray_jobs(address, name) as jobs:
        yield jobs


def _operation(function: Callable[..., None]) -> click.Command:
    """Make a verb of a function whose first argument is the jobs of a cluster, a service, or a run's folder."""

    def run(address: str, server: str | None, **arguments: Any) -> None:
        folder = arguments.get("name_or_dir")
        if folder is not None and _is_folder(folder, server):
            if address != "auto":
                message = "is not used for a run's folder: give the job's name to ask a cluster"
                raise InvalidJob([ConfigError("--address", message)])
            from dlrover.python.rl.master.client.jobs import SavedRuns  # the readers of runs take a second

            function(SavedRuns(), **arguments)
            return
        name = arguments.get("name", folder)
        if name is not None:
            check_name(name.partition("@")[0] if server else name)
        with connect(address, server, name) as jobs:
            function(jobs, **arguments)

    run.__doc__ = function.__doc__
    run.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    return click.command(function.__name__.removesuffix("_jobs"))(_ADDRESS(_SERVER(run)))


def _is_folder(name_or_dir: str, server: str | None) -> bool:
    """Return True for the folder of a run, which answers without a cluster and without a service."""
    if server:
        is_default = click.get_current_context().get_parameter_source("server") is ParameterSource.ENVIRONMENT
        return is_default and not is_job_name(name_or_dir)
    from dlrover.python.rl.master.client.jobs import is_run_folder

    return is_run_folder(name_or_dir)


@_operation
@_JSON
def list_jobs(jobs: JobOperations, as_json: bool) -> None:
    """List the jobs of a cluster or a service. 'dlrover-rl runs' lists those in folders."""
    views, left_out = jobs.list_jobs()
    if left_out:
        echo(f"{left_out} older ended jobs are not listed", err=True)
    if as_json:
        echo(json.dumps([view.to_plain() for view in views]))
        return
    if not views:
        echo("no jobs")
        return
    columns = ["job", "run", "owner", "phase", "step", "last step", "reward", "elapsed", "recoveries", "devices"]
    table = Table(*columns, "priority", "now", box=None)
    for view in views:
        texts = [view.name, view.run, view.owner, _phase(view)]
        numbers = [_steps(view), _ago(view.step_age_s), _number(view.reward), _span(view.elapsed_s)]
        counts = [view.restarts + sum(view.recoveries.values()), view.devices, view.priority]
        now = inert(view.activity or view.reason)
        table.add_row(*map(inert, texts), *numbers, *map(str, counts), now)
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


@_operation
@click.argument("name_or_dir")
@_JSON
def status(jobs: RunOperations, name_or_dir: str, as_json: bool) -> None:
    """Show the status of a job, or of a run in a folder. If no cluster answers, show the job's last run in ./runs."""
    _show(jobs.get(name_or_dir), as_json)


@_operation
@click.argument("name")
def attach(jobs: JobOperations, name: str) -> None:
    """Follow a job as 'run' does. Ctrl-C ends this command, not the job."""
    jobs.get(name)
    ended = follow(jobs, name)
    if ended is not None:
        exit_as(ended)


@_operation
@click.argument("name")
@click.option("--timeout", type=click.FloatRange(min=0), help="In seconds; exit code 124 if the job has not ended.")
@_JSON
def wait(jobs: JobOperations, name: str, timeout: float | None, as_json: bool) -> None:
    """Wait for the end of a job; exit codes are as for 'run'."""
    view = jobs.wait(name, timeout)
    _show(view, as_json)
    if not view.ended:
        sys.exit(EXIT_TIMED_OUT)
    exit_as(view)


@_operation
@click.argument("name")
@click.option("--hard", is_flag=True, help="Kill its processes at once.")
@_JSON
def stop(jobs: JobOperations, name: str, hard: bool, as_json: bool) -> None:
    """Stop a job cleanly, and wait for its end."""
    _show(jobs.stop(name, hard), as_json)


@_operation
@click.argument("name")
@click.argument("role")
@click.argument("num", type=click.IntRange(min=1))
def resize(jobs: JobOperations, name: str, role: str, num: int) -> None:
    """Change the number of workers of a stateless ROLE while the job runs."""
    view = jobs.resize(name, role.upper(), num)
    echo(f"{name}: {role.upper()} gets {num} workers" + (f" after step {view.step}" if view.step else ""))


@_operation
@click.argument("name_or_dir")
@click.argument("process", default="")
@click.option("-f", "--follow", is_flag=True, help="Continue until the job has ended.")
@click.option("--tail", type=click.IntRange(min=0), default=0, help="Print only the last lines of each process.")
def logs(jobs: RunOperations, name_or_dir: str, process: str, follow: bool, tail: int) -> None:
    """Print the output of a job, or of the run in a folder: of PROCESS, such as rollout-1 or trainer, or of all."""
    process = log_name(process)
    writer = ""
    for writer, text in jobs.logs(name_or_dir, process, follow, tail):
        prefix = "" if process else f"[{writer}] "
        echo("".join(f"{prefix}{line}\n" for line in text.splitlines()), nl=False)
    if not writer:
        echo("there is no log; a run in one process writes none", err=True)


@_operation
@click.argument("name_or_dir")
@click.option("--time", "with_time", is_flag=True, help="Show where its hours went instead, and each recovery's cost.")
@_JSON
def explain(jobs: RunOperations, name_or_dir: str, with_time: bool, as_json: bool) -> None:
    """Explain the state of a job, or of the run in a folder: since when, why, and what to try."""
    view = jobs.get(name_or_dir)
    folder = Path(view.folder) if view.folder and not view.owner else None
    if folder is not None and not folder.is_dir():
        folder = None
    if with_time and folder is None:
        raise InvalidJob([ConfigError("--time", "reads the run's folder, which is not on this machine")])
    if folder is not None:  # a service's client has none, and imports no reader of runs
        from dlrover.python.rl.page.findings import last_findings, time_lines
        from dlrover.python.rl.page.run_data import RunView
        from dlrover.python.rl.page.timeline import use_lines
    if as_json:
        history = jobs.history(view)
        failures = [{"at_s": at_s, "message": message} for at_s, message in (history.failures if history else ())]
        past: dict[str, Any] = {"uses": [], "marks": [], "findings": []}
        if folder is not None:
            run = RunView(folder, ".")
            past = {"uses": run.uses(), **run.marks(), "findings": list(map(vars, last_findings(folder)))}
        echo(json.dumps({**view.to_plain(), "failures": failures, "try": list(advice(view)), **past}))
    elif with_time and folder is not None:
        echo("\n".join(use_lines(folder)))
    else:
        lines = explain_lines(view, jobs.history(view))
        echo("\n".join([*lines, *(time_lines(folder) if folder is not None else [])]))


def follow(jobs: JobOperations, name: str) -> JobView | None:
    """Show a job until its end; Ctrl-C leaves it running, and returns None."""
    try:
        with ProgressView(name) as view:
            ended = jobs.attach(name, view, view.announce)
    except KeyboardInterrupt:
        echo(f"{name} is still running; to follow it again: dlrover-rl attach {name}", err=True)
        return None
    echo("\n".join(status_lines(ended)))
    return ended


def _show(view: JobView, as_json: bool) -> None:
    echo(json.dumps(view.to_plain()) if as_json else "\n".join(status_lines(view)))


VERBS = (list_jobs, status, attach, wait, stop, resize, logs, explain)


def status_lines(view: JobView) -> list[str]:
    facts = [_phase(view), f"step {_steps(view)}"]
    facts += [f"reward {_number(view.reward)}"] if isfinite(view.reward) else []
    facts += [f"{view.step_s:.3g} s a step"] if view.step_s else []
    facts += [f"last step {_ago(view.step_age_s)}"] if view.step_age_s else []
    facts += [f"{_span(view.elapsed_s)} elapsed"] if view.elapsed_s else []
    facts += [f"about {_span(view.eta_s)} left"] if view.eta_s else []
    facts += [f"restarts {view.restarts}"]
    lines = [f"{view.name}: {', '.join(facts)}"]
    lines += [f"  run {view.run} of {view.owner}, priority {view.priority}"] if view.owner else []
    lines += [f"  {view.activity}"] if view.activity else []
    lines += [f"  {subject} recovered {times} time{'s' * (times != 1)}" for subject, times in view.recoveries.items()]
    if view.members:
        devices = f", {view.devices} device{'s' * (view.devices != 1)}" if view.devices else ""
        lines.append(f"  {len(view.members)} processes on {view.nodes} node{'s' * (view.nodes != 1)}{devices}")
    elif view.roles and not view.ended:
        lines.append(f"  {', '.join(f'{role} x{num}' for role, num in view.roles.items())}")
    lines += list(_process_lines(view))
    lines += [f"  {view.reason}"] if view.reason else []
    lines += [f"  files in {view.folder}"] if view.folder else []
    return lines


def _process_lines(view: JobView) -> Iterator[str]:
    """Yield a line for each process, or for each role if there are many."""
    if len(view.members) <= _MOST_LISTED:
        for each in view.members:
            devices = f" devices {each.devices}" if each.devices else ""
            yield f"  {each.process:<16} {each.node} pid {each.pid}{devices}"
        return
    roles = defaultdict[str, list[RunningProcess]](list)
    for each in view.members:
        roles[each.process.partition("[")[0]].append(each)
    for role, members in roles.items():
        wanted = f" of {view.roles[role]}" if role in view.roles else ""
        nodes = len({each.node for each in members})
        yield f"  {role:<16} {len(members)}{wanted} on {nodes} node{'s' * (nodes != 1)}"
    yield "  --json lists each process"


def _phase(view: JobView) -> str:
    """Return the phase, and that nothing moves where a step is overdue."""
    return f"{view.phase}, no progress" if view.is_late else view.phase


def _ago(seconds: float) -> str:
    return f"{_span(seconds) or '0:00:00'} ago" if seconds else ""


def exit_as(view: JobView) -> None:
    codes = {"failed": EXIT_FAILED, "stopped": EXIT_STOPPED, "lost": EXIT_MASTER_LOST}
    if view.phase in codes:
        sys.exit(codes[view.phase])


def _steps(view: JobView) -> str:
    return f"{view.step}/{view.total_steps}" if view.total_steps else str(view.step)


def _number(value: float) -> str:
    return f"{value:.4g}" if isfinite(value) else ""


def _span(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds))) if seconds else ""
