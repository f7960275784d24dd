# SPDX-License-Identifier: Apache-2.0
"""The verbs of a machine: ``doctor``, which looks before a run, and the job service's ``serve`` and ``token``."""

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
from dlrover.python.rl.common.errors import (
    CallError,
    ClusterUnavailable,
    ConfigError,
    DLRoverRLError,
    InvalidJob,
    JobConflict,
)
from dlrover.python.rl.common.log import echo, get_logger
from dlrover.python.rl.common.private_files import read_token
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.config.plain import ALLOW_RESOLVERS
from dlrover.python.rl.runtime.checkpoint.node_memory import RunMemory, forget_memory
from dlrover.python.rl.runtime.run.folder import ended_memory
from dlrover.python.rl.runtime.run.machine import Check, examine
from dlrover.python.rl.service.auth import default_state, write_address

_LOG = get_logger(__name__)

PORT = 8470
_LOOK_S = 0.5
_ROLES = ("read", "submit", "admin")


def path(text: str | Path) -> Path:
    """A path from where the command was given: ``serve`` works in another directory, its root. Links stay, since a
    certificate may be one that changes."""
    return Path(text).absolute()


_FILE = FuncParamType(path)
_STATE = click.option("--state", type=_FILE, default=default_state, show_default="~/.dlrover-rl/service")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Beyond loopback needs --tls-cert and --tls-key.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free one.")
@_STATE
@click.option("--root", type=_FILE, default=Path(), help="The folder that jobs may use; by default this one.")
@click.option("--address", help="A running Ray cluster; by default one is started, which ends with the service.")
@click.option("--allow-open-ray", is_flag=True, help="Use a cluster beyond loopback that asks for no token.")
@click.option("--cpus", type=click.IntRange(min=1), help="Logical CPUs of a cluster that is started here.")
@click.option("--dry-run", is_flag=True, help="Queue jobs and pretend to run them: for trying clients.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve Prometheus metrics at this port of --host.")
@click.option("--metrics-token-file", type=_FILE, help="A token that scrapers send; beyond loopback it is needed.")
@click.option("--tls-cert", type=_FILE, help="Of the service, and of its metrics.")
@click.option("--tls-key", type=_FILE)
@click.option("--tls-client-ca", type=_FILE, help="Clients need a certificate that it has signed.")
@click.option("--max-queued", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--max-running", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--max-queued-per-owner", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--max-running-per-owner", type=click.IntRange(min=1), default=100, show_default=True)
def serve(host: str, port: int, state: Path, root: Path, **options: Any) -> None:
    """Run the job service until SIGTERM or Ctrl-C. Jobs on a cluster of their own (--address) go on."""
    tls = _tls_options(host, options)
    if not root.is_dir():
        raise InvalidJob([ConfigError("--root", f"no such folder: {root}")])
    if state.resolve().is_relative_to(root.resolve()):  # jobs could use the tokens and the database
        message = f"{state} is inside {root}, which jobs may use: put one of them elsewhere by --state or --root"
        raise InvalidJob([ConfigError("--state", message)])
    os.chdir(root)  # relative paths of jobs start here
    os.environ.pop(ALLOW_RESOLVERS, None)  # those of the service are not for its clients
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    asyncio.run(_serve(address, state, tls, options))


def _tls_options(host: str, options: dict[str, Any]) -> tuple[Path, Path, Path | None] | None:
    """Raises InvalidJob unless the service may listen at ``host``."""
    certificate, key, client_ca = (options.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca"))
    missing = [path for path in (certificate, key, client_ca) if path is not None and not path.is_file()]
    if missing:
        raise InvalidJob([ConfigError("--tls-cert", f"no such file: {missing[0]}")])
    if (certificate is None) != (key is None) or (client_ca is not None and certificate is None):
        raise InvalidJob([ConfigError("--tls-cert", "--tls-cert and --tls-key go together")])
    if certificate is None and not is_loopback(host):
        what = (
            f"{host} is beyond loopback, where tokens and jobs would travel in the clear: add --tls-cert and --tls-key"
        )
        raise InvalidJob([ConfigError("--host", what)])
    return None if certificate is None else (certificate, key, client_ca)


async def _serve(
    address: str, state: Path, tls: tuple[Path, Path, Path | None] | None, options: dict[str, Any]
) -> None:
    from dlrover.python.rl.master.process.metrics import tls_context
    from dlrover.python.rl.service.auth import TokenFile, prepare
    from dlrover.python.rl.service.jobs.ledger import QueueLimits
    from dlrover.python.rl.service.jobs.store import SqliteJobStore
    from dlrover.python.rl.service.jobs.submissions import SubmissionReader, in_a_process
    from dlrover.python.rl.service.manager import JobManager
    from dlrover.python.rl.service.runner import MemoryRunner
    from dlrover.python.rl.service.server import JobServer, TlsFiles

    ray_address, cpus, is_dry = (options.pop(name) for name in ("address", "cpus", "dry_run"))
    may_be_open = options.pop("allow_open_ray")
    metrics_port, metrics_file = options.pop("metrics_port"), options.pop("metrics_token_file")
    metrics_token = read_token(metrics_file) if metrics_file else ""
    token = prepare(state)
    store = SqliteJobStore(state)
    nothing_lost: tuple[Any, Callable[[], str]] = MemoryRunner(), lambda: ""
    with nullcontext(nothing_lost) if is_dry else _cluster(ray_address, cpus, may_be_open) as (runner, lost_process):
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has taken SIGTERM when it connected
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
                metrics = _metrics(server.metrics.registry, host, metrics_port, metrics_token, https)
                echo(f"metrics at {metrics.url}", err=True)
            own = f"{address.rpartition(':')[0]}:{port}"
            write_address(state, own)
            echo(f"serving at {own}; the administrator's token is in {token}", err=True)
            await _until_the_end(stopping, lost_process)
            stays = "jobs go on, on their cluster" if ray_address else "the cluster ends, too"
            echo(f"ending; {stays}: the next start follows or continues the jobs", err=True)
        finally:
            await server.close()
            await manager.close()


def _metrics(registry: Any, host: str, port: int, token: str, tls: Any) -> Any:
    from dlrover.python.rl.master.process.metrics import MetricsEndpoint

    try:
        return MetricsEndpoint(registry, host, port, token, tls)
    except OSError as error:
        raise JobConflict(f"metrics cannot be served at {host}:{port}: {error.strerror or error}") from error


async def _until_the_end(stopping: asyncio.Event, lost_process: Callable[[], str]) -> None:
    """Raises ClusterUnavailable once a process of the cluster that was started here has died: the next start of the
    service has another one. A GCS may be started again at once, and is lost if it is dead in two looks."""
    seen = ""
    while not stopping.is_set():
        before, seen = seen, lost_process()
        if seen and seen == before:
            _LOG.error("the %s of the service's Ray cluster has died: the service ends", seen)
            raise ClusterUnavailable(
                f"the {seen} of the service's Ray cluster has died: start the service again, "
                "and its jobs go on from their last commits"
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stopping.wait()


@contextmanager
def _cluster(address: str | None, cpus: int | None, may_be_open: bool) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Give what runs jobs on a cluster, and what looks for a process of it that has died."""
    from dlrover.python.rl.runtime.local import set_ray_auto_start
    from dlrover.python.rl.runtime.ray.cluster.cluster import lost_process, ray_cluster
    from dlrover.python.rl.runtime.ray.cluster.health import risk_of_open_ray
    from dlrover.python.rl.service.ray_runner import RayJobRunner

    with ray_cluster(address, {"cpu": float(os.cpu_count() or 1)}, log_to_driver=False, cpus=cpus):
        if (risk := risk_of_open_ray()) and not may_be_open:
            raise InvalidJob([ConfigError("--address", f"{risk}, and say --allow-open-ray")])
        try:
            yield RayJobRunner(), lost_process
        finally:
            set_ray_auto_start(False)  # a thread that is still asking Ray would start another cluster


@click.group()
def token() -> None:
    """The tokens of the job service on this machine."""


@token.command("add")
@click.argument("name")
@click.option("--role", type=click.Choice(_ROLES), default="submit", show_default=True)
@click.option("--file", type=_FILE, help="Where the token is written; by default NAME.token in the state's folder.")
@_STATE
def add(name: str, role: str, file: Path | None, state: Path) -> None:
    """Write a new token for NAME to a file that only you can read. An earlier one stays valid."""
    from dlrover.python.rl.service.auth import AccessRole, add_token, prepare

    prepare(state)
    path = add_token(state, name, AccessRole(role), file or state / f"{Path(name).name}.token")
    echo(str(path))


@token.command("remove")
@click.argument("name")
@_STATE
def remove(name: str, state: Path) -> None:
    """Take away all tokens of NAME, at once."""
    from dlrover.python.rl.service.auth import remove_tokens

    if not remove_tokens(state, name):
        raise CallError(f"'{name}' has no token")
    echo(f"'{name}' has no access any more")


@token.command("list")
@_STATE
def show(state: Path) -> None:
    """Names and roles, a line for each token."""
    from dlrover.python.rl.service.auth import TokenFile

    for name, role in TokenFile(state).entries():
        echo(f"{name}\t{role}")


# -- before a run ------------------------------------------------------------------------------------------------------


_MARKS = {True: "ok  ", False: "BAD ", None: "    "}


@click.command()
@click.option("--address", help="A running Ray cluster, whose nodes are checked; by default this machine only.")
@click.option("--folder", default="runs", show_default=True, help="Where runs write: shared by all nodes of a cluster.")
@click.option("--server", help="A job service, host:port: whether it answers and knows your token.")
@click.option(
    "--port",
    "ports",
    multiple=True,
    type=click.IntRange(1, 65535),
    help="A TCP port that should be free, of metrics for example; may be repeated. On this machine also 8470.",
)
@click.option("--free-memory", is_flag=True, help="Remove the commits of ended runs from this machine's memory.")
def doctor(address: str | None, folder: str, server: str | None, ports: tuple[int, ...], free_memory: bool) -> None:
    """Check a machine or a cluster before a run. Exit code 1 if something would be in the way."""
    if free_memory:
        for memory in ended_memory():  # a last step that is nowhere else is saved first
            size = _mb_of(memory)
            forget_memory(memory.job, memory.run, if_free=True)
            is_there = memory.root.exists()
            echo(f"{memory.root}: {'stays, see above' if is_there else f'{size} freed'}", err=True)
    if address is None:
        report = examine(folder, (PORT, *ports))
        how = "of commits, of a run that has ended; doctor --free-memory removes them"
        left = [Check(f"memory of {each.job}-{each.run}", None, f"{_mb_of(each)} {how}") for each in ended_memory()]
        reports, of_all = [replace(report, checks=(*report.checks, *left))], list[Check]()
    else:
        from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster
        from dlrover.python.rl.runtime.ray.cluster.health import examine_cluster

        with ray_cluster(address, {}):
            reports, of_all = examine_cluster(str(Path(folder).absolute()), ports)
    shown: list[tuple[str, Iterable[Check]]] = []
    for report in reports:
        versions = ", ".join(f"{package} {version}" for package, version in report.versions.items())
        shown.append((f"{report.host}: {versions}", report.checks))
    shown += [("all nodes", of_all)] if of_all else []
    shown += [("job service", [_examine_service(server)])] if server else []
    for title, checks in shown:
        echo(title)
        for check in checks:
            echo(f"  {_MARKS[check.ok]} {check.name}: {check.result}")
            if check.ok is False and check.advice:
                echo(f"       {check.advice}")
    faults = sum(check.ok is False for _, checks in shown for check in checks)
    echo(f"{faults} to mend" if faults else "nothing to mend")
    if faults:
        sys.exit(EXIT_FAILED)


def _mb_of(memory: RunMemory) -> str:
    return f"{sum(state.st_blocks for state in memory.states()) * 512 / 2**20:.0f} MB"


def _examine_service(server: str) -> Check:
    from dlrover.python.rl.service.client import connected  # gRPC takes a moment

    try:
        with connected(server) as client:
            count = len(client.list_jobs())
    except DLRoverRLError as error:
        return Check(server, False, str(error), "see DLROVER_RL_TOKEN_FILE, DLROVER_RL_TLS_CA, and the service's log")
    return Check(server, True, f"answers; {count} of its jobs have not ended")
