# SPDX-License-Identifier: Apache-2.0
"""Checks of a cluster: folders, connections and clocks of its nodes, and doors that are open to anyone."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import grpc
import pytest

from dlrover.python.rl.common.sockets import machine_addresses
from dlrover.python.rl.runtime.ray.cluster import health
from dlrover.python.rl.runtime.ray.cluster.health import check_connections, check_shared, find_risk, gcs_answers
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow
from dlrover.python.rl.runtime.run.machine import MachineReport, accept_one, examine, reach

NODES = [NodeRow(f"node{number}", True, f"127.0.0.{number}", 1) for number in (1, 2, 3)]
NO_GCS = "127.0.0.1:9"
needs_address = pytest.mark.skipif(not machine_addresses(), reason="this machine has loopback only")


class Nodes:
    """Runs functions in threads. ``folders``: the shared folder on a node, which does not answer without one;
    ``deaf`` is a node whose ports a firewall closes."""

    def __init__(self, folders=None, deaf=""):
        self.folders, self.deaf = folders, deaf

    async def run_on(self, node, function, first, *arguments):
        if self.folders is not None:
            if node not in self.folders:
                return None
            first = self.folders[node]
        if function is reach and first == f"127.0.0.{self.deaf[4:]}":
            first = "127.0.0.99"
        if first == "127.0.0.99" or (function is accept_one and node == self.deaf):
            arguments = (arguments[0], 0.2)
        return await asyncio.to_thread(function, str(first), *arguments)


@pytest.mark.parametrize(
    ("third", "is_ok", "result"),
    [("shared", True, ""), ("own", False, "127.0.0.3"), (None, False, "")],
)
async def test_check_shared_finds_a_node_without_the_folder(tmp_path, third, is_ok, result):
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    folders = {"node1": tmp_path / "shared", "node2": tmp_path / "shared"}
    check = await check_shared(Nodes({**folders, "node3": tmp_path / third} if third else folders), NODES, "runs")
    assert check.ok is is_ok and result in check.result
    assert is_ok or "mount" in check.advice
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "own", tmp_path / "shared"], "no marks are left"


@pytest.mark.parametrize(("deaf", "result"), [("", None), ("node2", "none from 127.0.0.1 to 127.0.0.2")])
async def test_check_connections_finds_a_node_behind_a_firewall(deaf, result):
    check = await check_connections(Nodes(deaf=deaf), NODES)
    assert check.ok is not bool(deaf) and result in (None, check.result)


@pytest.mark.parametrize(("apart_s", "is_right"), [(0.0, True), (-5.0, False)])
async def test_clocks_are_compared_without_the_time_of_the_checks(monkeypatch, apart_s, is_right):
    now_s = 1e9
    monkeypatch.setattr(health, "time", SimpleNamespace(time=lambda: now_s))

    class Slow:
        async def run_on(self, node, function, *arguments):
            nonlocal now_s
            there_s = apart_s if node == "node2" else 0.0
            if function is examine:
                now_s += 20.0 if node == "node2" else 0.0
                return MachineReport(node, now_s + there_s, {}, ())
            now_s += 0.1
            return now_s + there_s

    reports = [await health._ask(Slow(), node.node_id, "runs", ()) for node in NODES[:2]]
    assert health.compare(reports)[0].ok is is_right


@contextmanager
def dashboard(host, status):
    """The port of a dashboard that answers with ``status``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/api/jobs/" and "Authorization" not in self.headers
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(10)


@needs_address
@pytest.mark.parametrize(("status", "is_risk"), [(401, False), (403, False), (200, True), (404, True), (500, True)])
def test_find_risk_of_a_dashboard_without_a_token(status, is_risk):
    with dashboard("0.0.0.0", status) as port:
        for host in ("127.0.0.1", "localhost", machine_addresses()[0]):
            risk = find_risk(NO_GCS, f"{host}:{port}")
            assert ("dashboard" in risk and "RAY_AUTH_MODE=token" in risk) == is_risk, host


@needs_address
def test_find_risk_on_loopback_or_without_an_answer_is_none():
    silent = f"{machine_addresses()[0]}:9"
    with dashboard("127.0.0.1", 200) as port:
        risks = [find_risk(NO_GCS, f"127.0.0.1:{port}"), find_risk(silent, silent), find_risk(NO_GCS, "")]
    assert risks == ["", "", ""]


@contextmanager
def gcs(code):
    """The port of a GCS that lists its nodes, or refuses with ``code``."""

    def answer(request, context):
        assert "authorization" not in dict(context.invocation_metadata())
        if code is not None:
            context.abort(code, "no token")
        return b""

    method = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(1))
    service = grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", {"GetAllNodeInfo": method})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait(10)


@needs_address
@pytest.mark.parametrize(("code", "is_risk"), [(None, True), (grpc.StatusCode.UNAUTHENTICATED, False)])
def test_find_risk_of_a_gcs_without_a_token(code, is_risk):
    with gcs(code) as port:
        assert gcs_answers(f"127.0.0.1:{port}") == is_risk
        for host in ("127.0.0.1", machine_addresses()[0]):
            assert ("GCS" in find_risk(f"{host}:{port}", "")) == is_risk
