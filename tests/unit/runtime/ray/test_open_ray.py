# SPDX-License-Identifier: Apache-2.0
"""What a Ray cluster that lets everybody in is known by: it answers without a token."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest

from dlrover.python.rl.common.sockets import machine_addresses
from dlrover.python.rl.runtime.ray.cluster.cluster import _own
from dlrover.python.rl.runtime.ray.cluster.health import find_risk, gcs_answers

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
