# SPDX-License-Identifier: Apache-2.0
"""The verbs of a machine: ``doctor``, which checks it before a run, and ``serve`` and ``token`` of the job service."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.types import FuncParamType

from dlrover.python.rl.cli.operate import EXIT_FAILED
from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import echo, get_logger
from dlrover.python.rl.common.private_files import read_token
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.config.plain import ALLOW_RESOLVERS
from dlrover.python.rl.runtime.checkpoint.node_memory import RunMemory, forget_memory
from dlrover.python.rl.runtime.run.folder import ended_memory
from dlrover.python.rl.runtime.run.machine import Check, examine
from dlrover.python.rl.service import auth
from dlrover.python.rl.service.auth import AccessRole, TokenFile, default_state

_LOG = get_logger(__name__)

PORT = 8470
_LOOK_S = 0.5
_PORT = click.IntRange(1, 65535)


def path(text: str | Path) -> Path:
    """Return an absolute path, since ``serve`` changes to its root; links stay, since a certificate's may change."""
    return Path(text).absolute()


_FILE = FuncParamType(path)
_STATE = click.option(
    "--state", type=_FILE, default=default_state, show_default="~/.dlrover-rl/service", help="The service's own folder."
)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Beyond loopback needs --tls-cert, --tls-key.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free port.")
@_STATE
@click.option("--root", type=_FILE, default=Path(), help="The folder that jobs may use; by default this one.")
@click.option("--address", help="A running Ray cluster; by default one is started, and ends with the service.")
@click.option("--allow-open-ray", is_flag=True, help="Use a cluster beyond loopback that requires no token.")
@click.option("--cpus", type=click.IntRange(min=1), help="Logical CPUs of the cluster that is started.")
@click.option("--dry-run", is_flag=True, help="Queue jobs and only pretend to run them, to try clients.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve Prometheus metrics at this port of --host.")
@click.option("--metrics-token-file", type=_FILE, help="The token that scrapers send; required beyond loopback.")
@click.option("--page-port", type=click.IntRange(0, 65535), help="Serve the page of the jobs at this port of --host.")
@click.option("--tls-cert", type=_FILE, help="The certificate of the service and its metrics.")
@click.option("--tls-key", type=_FILE, help="The certificate's private key.")
@click.option("--tls-client-ca", type=_FILE, help="Require clients to have a certificate of this CA.")
@click.option("--max-queued", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--max-running", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--max-queued-per-owner", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--max-running-per-owner", type=click.IntRange(min=1), default=100, show_default=True)
def serve(host: str, port: int, state: Path, root: Path, **options: Any) -> None:
    """Run the job service until SIGTERM or Ctrl-C. With --address, its jobs continue on that cluster."""
    tls = _tls_options(host, options)
    if not root.is_dir():
        raise InvalidJob([ConfigError("--root", f"no such folder: {root}")])
    if state.resolve().is_relative_to(root.resolve()):  # jobs could use the tokens and the database
        message = f"{state} is inside {root}, which jobs may use: choose another --state or --root"
        raise InvalidJob([ConfigError("--state", message)])
    os.chdir(root)  # relative paths of jobs start here
    os.environ.pop(ALLOW_RESOLVERS, None)  # clients must not use the service's resolvers
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    asyncio.run(_serve(address, state, tls, options))


def _tls_options(host: str, options: dict[str, Any]) -> tuple[Path, Path, Path | None] | None:
    """Return the certificate, key and client CA. Raises InvalidJob unless the service may listen at ``host``."""
    certificate, key, client_ca = (options.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca"))
    missing = [path for path in (certificate, key, client_ca) if path is not None and not path.is_file()]
    if missing:
        raise InvalidJob([ConfigError("--tls-cert", f"no such file: {missing[0]}")])
    if (certificate is None) != (key is None) or (client_ca is not None and certificate is None):
        raise InvalidJob([ConfigError("--tls-cert", "--tls-cert and --tls-key must be used together")])
    if certificate is None and not is_loopback(host):
        message = f"{host} is beyond loopback, where tokens and jobs need TLS: add --tls-cert and --tls-key"
        raise InvalidJob([ConfigError("--host", message)])
    return None if certificate is None else (certificate, key, client_ca)


async def _serve(
    address: str, state: Path, tls: tuple[Path, Path, Path | None] | None, options: dict[str, Any]
) -> None:
    from dlrover.python.rl.master.process.metrics import tls_context
    from dlrover.python.rl.service.jobs.ledger import QueueLimits
    from dlrover.python.rl.service.jobs.store import SqliteJobStore
    from dlrover.python.rl.service.jobs.submissions import SubmissionReader, in_a_process
    from dlrover.python.rl.service.manager import JobManager
    from dlrover.python.rl.service.runner import MemoryRunner
    from dlrover.python.rl.service.server import JobServer, TlsFiles

    ray_address, cpus, is_dry = (options.pop(name) for name in ("address", "cpus", "dry_run"))
    may_be_open = options.pop("allow_open_ray")
    metrics_port, metrics_file = options.pop("metrics_port"), options.pop("metrics_token_file")
    page_port, page = options.pop("page_port"), None
    metrics_token = read_token(metrics_file) if metrics_file else ""
    token = auth.prepare(state)
    store = SqliteJobStore(state)
    nothing_lost: tuple[Any, Callable[[], str]] = MemoryRunner(), lambda: ""
    with nullcontext(nothing_lost) if is_dry else _cluster(ray_address, cpus, may_be_open) as (runner, lost_process):
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which sets its own handler of SIGTERM
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        manager = JobManager(store, runner, QueueLimits(**options))
        await manager.start()
        reader = SubmissionReader(in_a_process)
        server = JobServer(manager, TokenFile(state), Path.cwd(), TlsFiles(*tls) if tls else None, reader=reader)
        host = address.rpartition(":")[0].strip("[]")
        try:
            port = await server.start(address)
            if metrics_port is not None:
                https = tls_context(*tls) if tls else None
                metrics = _metrics(server.metrics.registry, (host, metrics_port), metrics_token, https, manager.targets)
                echo(f"metrics at {metrics.url}", err=True)
            if page_port is not None:
                from dlrover.python.rl.service.page import serve_jobs

                page, url = serve_jobs(manager, TokenFile(state), host, page_port, tls[:2] if tls else None)
                echo(f"the page is at {url}", err=True)
            own = f"{address.rpartition(':')[0]}:{port}"
            auth.write_address(state, own)
            echo(f"serving at {own}; the administrator's token is in {token}", err=True)
            await _wait_for_the_end(stopping, lost_process)
            jobs = "jobs continue on their cluster" if ray_address else "the cluster ends too"
            echo(f"ending; {jobs}; the next start follows or resumes the jobs", err=True)
        finally:
            if page is not None:
                await page.close()
            await server.close()
            await manager.close()


def _metrics(registry: Any, address: tuple[str, int], token: str, tls: Any, targets: Any) -> Any:
    from dlrover.python.rl.master.process.metrics import MetricsEndpoint

    try:
        return MetricsEndpoint(registry, address, token, tls, targets)
    except OSError as error:
        where = "{}:{}".format(*address)
        raise errors.JobConflict(f"cannot serve metrics at {where}: {error.strerror or error}") from error


async def _wait_for_the_end(stopping: asyncio.Event, lost_process: Callable[[], str]) -> None:
    """Wait until ``stopping`` is set. Raises ClusterUnavailable if a process of the service's own cluster dies. A GCS
    may be restarted at once, so a process is lost if it is dead in two checks."""
    dead = ""
    while not stopping.is_set():
        before, dead = dead, lost_process()
        if dead and dead == before:
            _LOG.error("the %s of the service's Ray cluster has died: the service ends", dead)
            advice = "start the service again, and its jobs resume from their last commits"
            raise errors.ClusterUnavailable(f"the {dead} of the service's Ray cluster has died: {advice}")
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stopping.wait()


@contextmanager
def _cluster(address: str | None, cpus: int | None, may_be_open: bool) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Give the runner of a cluster's jobs, and a function that returns a process of the cluster that has died."""
    from dlrover.python.rl.runtime.local import set_ray_auto_start
    from dlrover.python.rl.runtime.ray.cluster.cluster import lost_process, ray_cluster
    from dlrover.python.rl.runtime.ray.cluster.health import risk_of_open_ray
    from dlrover.python.rl.service.ray_runner import RayJobRunner

    with ray_cluster(address, {"cpu": float(os.cpu_count() or 1)}, log_to_driver=False, cpus=cpus):
        if (risk := risk_of_open_ray()) and not may_be_open:
            raise InvalidJob([ConfigError("--address", f"{risk}, and pass --allow-open-ray")])
        try:
            yield RayJobRunner(), lost_process
        finally:
            set_ray_auto_start(False)  # a thread that still calls Ray would start another cluster


@click.group()
def token() -> None:
    """Manage the tokens of the job service on this machine."""


@token.command("add")
@click.argument("name")
@click.option("--role", type=click.Choice([role.value for role in AccessRole]), default="submit", show_default=True)
@click.option("--file", type=_FILE, help="The file to write; by default NAME.token in the folder of --state.")
@_STATE
def add(name: str, role: str, file: Path | None, state: Path) -> None:
    """Write a new token for NAME to a file that only you can read. Earlier tokens stay valid."""
    auth.prepare(state)
    path = auth.add_token(state, name, AccessRole(role), file or state / f"{Path(name).name}.token")
    echo(str(path))


@token.command("remove")
@click.argument("name")
@_STATE
def remove(name: str, state: Path) -> None:
    """Remove all tokens of NAME, effective at once."""
    if not auth.remove_tokens(state, name):
        raise errors.CallError(f"'{name}' has no token")
    echo(f"'{name}' no longer has access")


@token.command("list")
@_STATE
def show(state: Path) -> None:
    """List names and roles, one line for each token."""
    for name, role in TokenFile(state).entries():
        echo(f"{name}\t{role}")


_MARKS = {True: "ok  ", False: "BAD ", None: "    "}


@click.command()
@click.option("--address", help="A running Ray cluster whose nodes are checked; by default only this machine.")
@click.option("--folder", default="runs", show_default=True, help="The folder of runs, shared by all nodes.")
@click.option(
    "--server",
    envvar="DLROVER_RL_SERVER",
    show_envvar=True,
    help="A job service, host:port, which must answer and accept your token.",
)
@click.option(
    "--port",
    "ports",
    multiple=True,
    type=_PORT,
    help="A port to be free; repeatable. Without --address also 8470.",
)
@click.option("--free-memory", is_flag=True, help="First remove the commits of ended runs from this machine's memory.")
def doctor(address: str | None, folder: str, server: str | None, ports: tuple[int, ...], free_memory: bool) -> None:
    """Check a machine or a cluster before a run. Exit code 1 if a problem is found."""
    if free_memory:
        for memory in ended_memory():  # a last step that is nowhere else is saved first
            size = _mb_of(memory)
            forget_memory(memory.job, memory.run, if_free=True)
            result = "stays, see above" if memory.root.exists() else f"{size} freed"
            echo(f"{memory.root}: {result}", err=True)
    faults = 0
    for title, checks in _examine(address, folder, server, ports):
        echo(title)
        for check in checks:
            echo(f"  {_MARKS[check.ok]} {check.name}: {check.result}")
            faults += check.ok is False
            if check.ok is False and check.advice:
                echo(f"       {check.advice}")
    echo(f"{faults} to fix" if faults else "nothing to fix")
    if faults:
        sys.exit(EXIT_FAILED)


def _examine(
    address: str | None, folder: str, server: str | None, ports: tuple[int, ...]
) -> Iterator[tuple[str, Iterable[Check]]]:
    """Yield titles and their checks. The service, which may take long to answer, is asked last."""
    if address is None:
        about = "of commits, of a run that has ended; doctor --free-memory removes them"
        left = [Check(f"memory of {each.job}-{each.run}", None, f"{_mb_of(each)} {about}") for each in ended_memory()]
        report = examine(folder, (PORT, *ports))
        reports, of_all = [replace(report, checks=(*report.checks, *left))], list[Check]()
    else:
        from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster
        from dlrover.python.rl.runtime.ray.cluster.health import examine_cluster

        with ray_cluster(address, {}):
            reports, of_all = examine_cluster(str(Path(folder).absolute()), ports)
    for report in reports:
        versions = ", ".join(f"{package} {version}" for package, version in report.versions.items())
        yield f"{report.host}: {versions}", report.checks
    if of_all:
        yield "all nodes", of_all
    if server:
        yield "job service", map(_examine_service, [server])


def _mb_of(memory: RunMemory) -> str:
    return f"{sum(state.st_blocks for state in memory.states()) * 512 / 2**20:.0f} MB"


def _examine_service(server: str) -> Check:
    from dlrover.python.rl.service.client import connected  # gRPC takes a moment

    try:
        with connected(server) as client:
            return Check(server, True, f"answers; {len(client.list_jobs())} of its jobs have not ended")
    except errors.DLRoverRLError as error:
        return Check(server, False, str(error), "see DLROVER_RL_TOKEN_FILE, DLROVER_RL_TLS_CA, and the service's log")


VERBS = (serve, token, doctor)
