# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl doctor``: what would be in the way of a run on this machine, or on a cluster."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click

from dlrover.python.rl.cli.operate import EXIT_FAILED
from dlrover.python.rl.common.errors import DLRoverRLError
from dlrover.python.rl.common.log import echo
from dlrover.python.rl.runtime.checkpoint.node_memory import RunMemory, forget_memory
from dlrover.python.rl.runtime.run.folder import ended_memory
from dlrover.python.rl.runtime.run.machine import Check, MachineReport, examine

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
        reports, checks = [examine(folder, (8470, *ports))], list[Check]()
        how = "of commits, of a run that has ended; doctor --free-memory removes them"
        left = [Check(f"memory of {each.job}-{each.run}", None, f"{_mb_of(each)} {how}") for each in ended_memory()]
        reports = [replace(report, checks=(*report.checks, *left)) for report in reports]
    else:
        reports, checks = _of_cluster(address, str(Path(folder).absolute()), ports)
    for report in reports:
        versions = ", ".join(f"{package} {version}" for package, version in report.versions.items())
        _show(report.host, versions, report.checks)
    if checks:
        _show("all nodes", "", checks)
    services = [_of_service(server)] if server else []
    if services:
        _show("job service", "", services)
    faults = [check for report in reports for check in report.checks if check.ok is False]
    faults += [check for check in (*checks, *services) if check.ok is False]
    echo(f"{len(faults)} to mend" if faults else "nothing to mend")
    if faults:
        sys.exit(EXIT_FAILED)


def _mb_of(memory: RunMemory) -> str:
    return f"{sum(state.st_blocks for state in memory.states()) * 512 / 2**20:.0f} MB"


def _of_cluster(address: str, folder: str, ports: tuple[int, ...]) -> tuple[list[MachineReport], list[Check]]:
    from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster
    from dlrover.python.rl.runtime.ray.cluster.health import examine_cluster

    with ray_cluster(address, {}):
        return examine_cluster(folder, ports)


def _of_service(server: str) -> Check:
    from dlrover.python.rl.service.remote_jobs import connected  # gRPC takes a moment

    try:
        with connected(server) as client:
            count = len(client.list_jobs())
    except DLRoverRLError as error:
        return Check(server, False, str(error), "see DLROVER_RL_TOKEN_FILE, DLROVER_RL_TLS_CA, and the service's log")
    return Check(server, True, f"answers; {count} of its jobs have not ended")


def _show(title: str, about: str, checks: Iterable[Check]) -> None:
    echo(f"{title}: {about}" if about else title)
    for check in checks:
        echo(f"  {_MARKS[check.ok]} {check.name}: {check.found}")
        if check.ok is False and check.advice:
            echo(f"       {check.advice}")
