# SPDX-License-Identifier: Apache-2.0
"""Checks of a cluster before a run: every node, and what must be alike on all of them."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace

from dlrover.python.rl.runtime.process.health import Check, MachineReport, examine
from dlrover.python.rl.runtime.ray.cluster.api import RayClusterApi
from dlrover.python.rl.runtime.ray.cluster.cluster import risk_of_open_ray

MOST_APART_S = 2.0


def examine_cluster(folder: str) -> tuple[list[MachineReport], list[Check]]:
    """A report of each node that answers, and checks of all together; on the cluster that this process is connected
    to."""
    cluster = RayClusterApi()
    nodes = [row for row in cluster.list_nodes() if row.alive]
    answers = asyncio.run(_ask(cluster, [row.node_id for row in nodes], folder))
    silent = [row.node_id[:8] for row, answer in zip(nodes, answers, strict=True) if answer is None]
    reports = [answer for answer in answers if answer is not None]
    risk = risk_of_open_ray()
    checks = [
        Check("nodes", not silent, f"{len(reports)} of {len(nodes)} answer", f"these do not: {', '.join(silent)}"),
        Check("Ray's authentication", not risk, risk or "on loopback, or by token", "see docs/security.md"),
        *compare(reports),
    ]
    return reports, checks


async def _ask(cluster: RayClusterApi, nodes: Iterable[str], folder: str) -> list[MachineReport | None]:
    return await asyncio.gather(*(_ask_one(cluster, node, folder) for node in nodes))


async def _ask_one(cluster: RayClusterApi, node: str, folder: str) -> MachineReport | None:
    """With the time there at half of the way, as this clock would have it."""
    began_s = time.time()
    report: MachineReport | None = await cluster.run_on(node, examine, folder)
    half_s = (time.time() - began_s) / 2
    return None if report is None else replace(report, wall_s=report.wall_s - began_s - half_s)


def compare(reports: list[MachineReport]) -> list[Check]:
    """``wall_s`` of the reports is how far each clock is ahead of this one."""
    if not reports:
        return []
    ahead = [report.wall_s for report in reports]
    apart_s = max(ahead) - min(ahead)
    differing = sorted(
        package
        for package in {package for report in reports for package in report.versions}
        if len({report.versions.get(package) for report in reports}) > 1
    )
    return [
        Check("clocks", apart_s <= MOST_APART_S, f"{apart_s:.1f} s apart at most", "run chrony or ntpd on all nodes"),
        Check(
            "versions",
            not differing,
            "alike on all nodes" if not differing else f"{', '.join(differing)} differ",
            "use one image, or one constraints file, on all nodes",
        ),
    ]
