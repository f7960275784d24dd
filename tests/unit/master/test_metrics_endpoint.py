# SPDX-License-Identifier: Apache-2.0
"""The endpoint that Prometheus scrapes: what it answers, and to whom."""

import http.client
import os
import shutil
import socket
import ssl
import subprocess
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry, Gauge

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.master.process.metrics import MetricsEndpoint, tls_context

TOKEN = "a-token-of-some-length"


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Gauge("rl_answer", "For the test.", registry=registry).set(42)
    return registry


@pytest.fixture
def serve(registry):
    opened = []

    def serve(host="127.0.0.1", token="", tls=None):
        opened.append(MetricsEndpoint(registry, host, 0, token, tls))
        return opened[-1].address.replace("0.0.0.0", "127.0.0.1")

    yield serve
    for endpoint in opened:
        endpoint.close()


def ask(address, method="GET", path="/metrics", trusted=None, **headers):
    """``trusted``: the certificates with which it is asked over HTTPS."""
    if trusted is None:
        connection = http.client.HTTPConnection(address, timeout=10)
    else:
        context = ssl.create_default_context(cafile=trusted)
        connection = http.client.HTTPSConnection(address, timeout=10, context=context)
    with closing(connection):
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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for loopback that is its own CA, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    folder = tmp_path_factory.mktemp("tls")
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -keyout own.key -out own.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *request.split(), *subject], cwd=folder, check=True, capture_output=True, timeout=30)
    return folder / "own.pem", folder / "own.key"


def test_beyond_loopback_a_token_and_tls_are_needed(serve, registry, certificate):
    tls = tls_context(*certificate)
    for token, context in (("", None), ("", tls), (TOKEN, None)):
        with pytest.raises(CallError, match=r"beyond loopback.*metrics_tls_cert.*proxy"):
            MetricsEndpoint(registry, "0.0.0.0", 0, token, context)
    address = serve("0.0.0.0", TOKEN, tls)
    assert ask(address, trusted=certificate[0], Host="cluster.example")[0] == 401
    headers = {"Host": "cluster.example", "Authorization": f"Bearer {TOKEN}"}
    assert ask(address, trusted=certificate[0], **headers)[0] == 200


def test_with_tls_a_token_does_not_travel_in_the_clear(serve, certificate):
    address = serve(token=TOKEN, tls=tls_context(*certificate))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(address, Authorization=f"Bearer {TOKEN}")
    assert ask(address, trusted=certificate[0], Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_client_that_does_not_finish_its_handshake_keeps_nobody_waiting(serve, certificate):
    address = serve(tls=tls_context(*certificate))
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10):
        assert ask(address, trusted=certificate[0])[0] == 200


def test_clients_need_a_certificate_where_a_ca_for_them_is_given(serve, certificate):
    address = serve(tls=tls_context(*certificate, certificate[0]))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(address, trusted=certificate[0])


@pytest.mark.slow
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
