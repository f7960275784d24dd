# SPDX-License-Identifier: Apache-2.0
"""Checks of a cluster before a run: every node, what must be alike on all of them, and whether its ports let everybody
run code on it: they are asked, as a stranger would, without a token."""

import asyncio
import http.client
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import ray
from ray._private import ray_constants
from ray.experimental.internal_kv import _internal_kv_get

from dlrover.python.rl.common.sockets import is_loopback, machine_addresses
from dlrover.python.rl.runtime.ray.cluster.api import RayClusterApi
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow
from dlrover.python.rl.runtime.run import machine
from dlrover.python.rl.runtime.run.machine import Check, MachineReport

MOST_APART_S = 2.0

_SEE = "see docs/security.md"
_CONNECT_S = 10.0
_EPHEMERAL = (32768, 60999)  # where Linux picks ports

_ASK_S = 5.0
_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def examine_cluster(folder: str, ports: Iterable[int] = ()) -> tuple[list[MachineReport], list[Check]]:
    """Return the reports of the connected cluster's nodes that answer, and checks of all nodes together."""
    cluster = RayClusterApi()
    nodes = [row for row in cluster.list_nodes() if row.alive]
    return asyncio.run(_examine(cluster, nodes, folder, tuple(ports)))


async def _examine(
    cluster: RayClusterApi, nodes: Sequence[NodeRow], folder: str, ports: tuple[int, ...]
) -> tuple[list[MachineReport], list[Check]]:
    answers = await asyncio.gather(*(_ask(cluster, node.node_id, folder, ports) for node in nodes))
    silent = [node.node_id[:8] for node, answer in zip(nodes, answers, strict=True) if answer is None]
    reports = [answer for answer in answers if answer is not None]
    answering = [node for node, answer in zip(nodes, answers, strict=True) if answer is not None]
    risk = await asyncio.to_thread(risk_of_open_ray)
    checks = [
        Check("nodes", not silent, f"{len(reports)} of {len(nodes)} answer", f"these do not: {', '.join(silent)}"),
        Check("Ray's authentication", not risk, risk or "nothing beyond loopback answers without a token", _SEE),
        *compare(reports),
    ]
    if len(answering) > 1:
        checks.append(await check_shared(cluster, answering, folder))
        checks.append(await check_connections(cluster, answering))
    return reports, checks


async def _ask(cluster: RayClusterApi, node: str, folder: str, ports: tuple[int, ...]) -> MachineReport | None:
    """Return a node's report. A call that returns at once reads its clock in the middle of the way there and back."""
    report: MachineReport | None = await cluster.run_on(node, machine.examine, folder, ports)
    began_s = time.time()
    wall_s: float | None = await cluster.run_on(node, machine.read_clock)
    if report is None or wall_s is None:
        return None
    return replace(report, ahead_s=wall_s - (began_s + time.time()) / 2)


async def check_shared(cluster: RayClusterApi, nodes: Sequence[NodeRow], folder: str) -> Check:
    """Check that every node can read the files of all others."""
    names = [f".doctor-{uuid4().hex}" for _ in nodes]

    async def on_each(function: Callable[..., Any], arguments: Iterable[Any]) -> list[Any]:
        pairs = zip(nodes, arguments, strict=True)
        return await asyncio.gather(*(cluster.run_on(node.node_id, function, folder, each) for node, each in pairs))

    try:
        await on_each(machine.leave_mark, names)
        visible = await on_each(machine.find_marks, [names] * len(nodes))
    finally:
        await on_each(machine.remove_mark, names)
    lacking = [node.host for node, marks in zip(nodes, visible, strict=True) if set(marks or ()) != set(names)]
    if not lacking:
        return Check(f"shared {folder}", True, "each node reads what the others write")
    advice = "mount one file system there on all nodes, or name a folder of one: --folder"
    return Check(f"shared {folder}", False, f"not the files of all nodes are on {', '.join(lacking)}", advice)


async def check_connections(cluster: RayClusterApi, nodes: Sequence[NodeRow]) -> Check:
    """Check that each node reaches any port of the next one, as ranks and weights must."""

    async def is_open(source: NodeRow, target: NodeRow) -> bool:
        for _ in range(2):  # at another port: the first may be taken
            port = random.randrange(*_EPHEMERAL)
            listening = cluster.run_on(target.node_id, machine.accept_one, target.host, port, _CONNECT_S)
            reaching = cluster.run_on(source.node_id, machine.reach, target.host, port, _CONNECT_S)
            if all(await asyncio.gather(listening, reaching)):
                return True
        return False

    pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    reached = await asyncio.gather(*(is_open(source, target) for source, target in pairs))
    closed = [f"{pair[0].host} to {pair[1].host}" for pair, is_ok in zip(pairs, reached, strict=True) if not is_ok]
    if not closed:
        return Check("connections", True, "a node reaches the next at a port that neither has used")
    return Check("connections", False, f"none from {', '.join(closed)}", "open all ports between the nodes")


def compare(reports: list[MachineReport]) -> list[Check]:
    if not reports:
        return []
    ahead = [report.ahead_s for report in reports]
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


def risk_of_open_ray() -> str:
    """Return the danger of the connected cluster; empty if neither its GCS nor its dashboard answers a request without
    a token from beyond loopback. A firewall against this machine hides the risk."""
    dashboard = _internal_kv_get(ray_constants.DASHBOARD_ADDRESS, namespace=ray_constants.KV_NAMESPACE_DASHBOARD)
    return find_risk(str(ray.get_runtime_context().gcs_address), (dashboard or b"").decode())


def find_risk(gcs: str, dashboard: str) -> str:
    """Return the risk of a GCS and a dashboard, ``host:port`` or ""; a loopback server may listen elsewhere, too."""
    for name, address, answers in (("GCS", gcs, gcs_answers), ("dashboard", dashboard, dashboard_answers)):
        host, _, port = address.rpartition(":")
        for reached in machine_addresses() if is_loopback(host) else [host] if host else []:
            if answers(f"{reached}:{port}"):
                return (
                    f"Ray's {name} at {reached}:{port} answers without a token: anyone who reaches it can run code on"
                    " the cluster. Set RAY_AUTH_MODE=token on all nodes, or keep its ports in a private network"
                )
    return ""


def dashboard_answers(address: str) -> bool:
    """Return True if the job server at ``address`` answers anything but a refusal."""
    with closing(http.client.HTTPConnection(address, timeout=_ASK_S)) as connection:
        try:
            connection.request("GET", "/api/jobs/")
            return connection.getresponse().status not in _REFUSALS
        except (OSError, http.client.HTTPException):
            return False


def gcs_answers(address: str) -> bool:
    """Return True if the GCS at ``address`` lists its nodes."""
    import grpc  # takes a moment

    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_ASK_S)
        except grpc.RpcError:
            return False
    return True
