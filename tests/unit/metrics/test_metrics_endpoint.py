# SPDX-License-Identifier: Apache-2.0
"""The endpoint that Prometheus scrapes: what it answers, and to whom."""

import http.client
import os
import socket
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry, Gauge

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.metrics.endpoint import MetricsEndpoint

TOKEN = "a-token-of-some-length"


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Gauge("rl_answer", "For the test.", registry=registry).set(42)
    return registry


@pytest.fixture
def serve(registry):
    opened = []

    def serve(host="127.0.0.1", token=""):
        opened.append(MetricsEndpoint(registry, host, 0, token))
        return opened[-1].address.replace("0.0.0.0", "127.0.0.1")

    yield serve
    for endpoint in opened:
        endpoint.close()


def ask(address, method="GET", path="/metrics", **headers):
    with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_metrics_are_served(serve):
    status, body = ask(serve())
    assert status == 200 and "rl_answer 42.0" in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_other_methods_are_refused(serve, method):
    assert ask(serve(), method)[0] == 405


@pytest.mark.parametrize("path", ["/", "/metrics/../secret", "/debug", "/metrics?x=1"])
def test_there_is_nothing_else(serve, path):
    assert ask(serve(), path=path)[0] == 404


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example:80"}, {"Host": ""}, {"Origin": "http://evil.example"}], ids=str
)
def test_pages_of_a_browser_are_refused(serve, headers):
    status, body = ask(serve(), **headers)
    assert status == 403 and "rl_answer" not in body


def test_a_token_is_needed_where_there_is_one(serve):
    address = serve(token=TOKEN)
    assert ask(address)[0] == ask(address, Authorization="Bearer wrong")[0] == 401
    assert ask(address, Authorization=TOKEN)[0] == ask(address, Authorization="Bearer \xff")[0] == 401
    assert ask(address, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_beyond_loopback_a_token_is_needed(serve, registry):
    with pytest.raises(CallError, match="beyond loopback"):
        MetricsEndpoint(registry, "0.0.0.0", 0)
    address = serve("0.0.0.0", TOKEN)
    assert ask(address, Host="cluster.example")[0] == 401
    assert ask(address, Host="cluster.example", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_clients_that_say_nothing_do_not_fill_it(serve):
    """Twenty at once are answered; more are cut off, and none of them takes memory or threads."""
    address = serve()
    host, port = address.split(":")
    silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(60)]
    try:
        assert len(os.listdir("/proc/self/task")) < 60
    finally:
        for connection in silent:
            connection.close()
    for _ in range(100):
        try:
            assert ask(address)[0] == 200
            return
        except (ConnectionError, http.client.HTTPException):
            continue
    raise AssertionError("it does not recover")
