# SPDX-License-Identifier: Apache-2.0
"""Checks of a cluster: folders, connections and clocks of its nodes, and doors that are open to anyone."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import grpc
import pytest

from dlrover.python.rl.common.sockets import machine_addresses
from dlrover.python.rl.runtime.ray.cluster import health
from dlrover.python.rl.runtime.ray.cluster.cluster import _own
from dlrover.python.rl.runtime.ray.cluster.health import check_connections, check_shared, find_risk, gcs_answers
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow
from dlrover.python.rl.runtime.run.machine import MachineReport, accept_one, examine, leave_mark, reach

NODES = [NodeRow(f"node{number}", True, f"127.0.0.{number}", 1) for number in (1, 2, 3)]


class Nodes:
    """Runs functions in threads. ``folders``: what the shared folder is on a node, None where nothing can be written;
    ``deaf`` is a node whose ports a firewall closes."""

    def __init__(self, folders=None, deaf=""):
        self.folders, self.deaf = folders or {}, deaf

    async def run_on(self, node, function, first, *others):
        if function is accept_one and node == self.deaf:
            others = (others[0], 0.2)
        if function is reach:
            first = "127.0.0.99" if first == f"127.0.0.{self.deaf[4:]}" else first
            others = (others[0], 0.2) if first == "127.0.0.99" else others
        return await asyncio.to_thread(function, str(self.folders.get(node, first)), *others)


def shared(folders):
    return asyncio.run(check_shared(Nodes(folders), NODES, "runs"))


def test_a_folder_that_all_nodes_share_is_right_and_left_empty(tmp_path):
    check = shared({node.node_id: tmp_path for node in NODES})
    assert check.ok is True and list(tmp_path.iterdir()) == []


def test_a_folder_that_one_node_has_for_itself_is_found(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    check = shared({"node1": tmp_path, "node2": tmp_path, "node3": own})
    assert check.ok is False and "127.0.0.3" in check.result and "mount" in check.advice
    assert list(tmp_path.iterdir()) == [own] and list(own.iterdir()) == []


def test_a_folder_that_a_node_cannot_write_is_found(tmp_path):
    check = shared({"node1": tmp_path, "node2": tmp_path / "nowhere", "node3": tmp_path})
    assert check.ok is False and "127.0.0.2" in check.result


def test_a_node_that_does_not_answer_is_found(tmp_path):
    nodes = Nodes({node.node_id: tmp_path for node in NODES})
    answering = nodes.run_on

    async def run_on(node, function, *arguments):
        return None if node == "node3" else await answering(node, function, *arguments)

    nodes.run_on = run_on
    assert asyncio.run(check_shared(nodes, NODES, "runs")).ok is False


def test_a_mark_is_not_left_where_nothing_can_be_written(tmp_path):
    assert leave_mark(str(tmp_path), "mark") is True
    assert leave_mark(str(tmp_path / "nowhere"), "mark") is False


def test_nodes_that_reach_each_other_are_right():
    assert asyncio.run(check_connections(Nodes(), NODES)).ok is True


def test_a_node_behind_a_firewall_is_found():
    check = asyncio.run(check_connections(Nodes(deaf="node2"), NODES))
    assert check.ok is False and check.result == "none from 127.0.0.1 to 127.0.0.2"


@pytest.mark.parametrize(("apart_s", "is_right"), [(0.0, True), (-5.0, False)])
def test_clocks_are_compared_without_the_time_that_the_checks_take(monkeypatch, apart_s, is_right):
    now_s = 1e9
    clock = SimpleNamespace(time=lambda: now_s)
    monkeypatch.setattr(health, "time", clock)

    class Slow:
        async def run_on(self, node, function, *arguments):
            nonlocal now_s
            there_s = apart_s if node == "node2" else 0.0
            if function is examine:
                now_s += 20.0 if node == "node2" else 0.0
                return MachineReport(node, now_s + there_s, {}, ())
            now_s += 0.1
            return now_s + there_s

    async def ask():
        return [await health._ask(Slow(), node.node_id, "runs", ()) for node in NODES[:2]]

    assert health.compare(asyncio.run(ask()))[0].ok is is_right


@pytest.mark.parametrize("listens", [True, False])
def test_only_who_listens_is_reached(listens):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        assert reach("127.0.0.1", port, 0.1) is listens
    assert accept_one("127.0.0.1", port, 0.01) is False


needs_address = pytest.mark.skipif(not machine_addresses(), reason="this machine has loopback only")
NO_GCS = "127.0.0.1:9"


@contextmanager
def dashboard(host, status):
    """The port of one that answers as told."""

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
def test_a_dashboard_that_answers_is_a_risk_also_where_the_gcs_is_on_loopback(status, is_risk):
    with dashboard("0.0.0.0", status) as port:
        for host in ("127.0.0.1", "localhost", machine_addresses()[0]):
            risk = find_risk(NO_GCS, f"{host}:{port}")
            assert ("dashboard" in risk and "RAY_AUTH_MODE=token" in risk) == is_risk, host


@needs_address
def test_a_dashboard_on_loopback_is_none():
    with dashboard("127.0.0.1", 200) as port:
        assert find_risk(NO_GCS, f"127.0.0.1:{port}") == ""


@needs_address
def test_what_does_not_answer_is_none():
    assert find_risk(f"{machine_addresses()[0]}:9", f"{machine_addresses()[0]}:9") == ""
    assert find_risk(NO_GCS, "") == ""


@contextmanager
def gcs(code):
    """The address of one that lists its nodes, or refuses with ``code``."""

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
def test_a_gcs_that_answers_is_a_risk(code, is_risk):
    with gcs(code) as port:
        assert gcs_answers(f"127.0.0.1:{port}") == is_risk
        for host in ("127.0.0.1", machine_addresses()[0]):
            assert ("GCS" in find_risk(f"{host}:{port}", "")) == is_risk


def test_a_cluster_has_as_many_cpus_as_are_asked_for_or_two_more_than_a_job_needs():
    assert [repr(_own({"cpu": 64.0}, cpus)["num_cpus"]) for cpus in (4, None)] == ["4", "66"]
