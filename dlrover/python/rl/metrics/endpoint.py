# SPDX-License-Identifier: Apache-2.0
"""``GET /metrics`` over HTTP, for Prometheus: nothing else, and not for browsers.

On loopback it needs no token, since Prometheus has none by default; the check of the ``Host`` header keeps out pages
whose names were rebound to loopback. Beyond loopback it needs a bearer token and TLS.
"""

import hmac
import ssl
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.sockets import is_loopback

_TIMEOUT_S = 10.0
_MAX_CLIENTS = 20
_CLOSING_S = 0.05
"""How soon it sees that it is closed."""


def tls_context(certificate: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """For a server; clients need a certificate of ``client_ca``, where there is one. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class MetricsEndpoint:
    """Serves ``registry`` in a thread until it is closed. Raises CallError beyond loopback without a token or without
    TLS, OSError if the address is taken."""

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        if not is_loopback(host) and (not token or tls is None):
            raise CallError(
                f"metrics at {host}, which is beyond loopback, need a token and TLS: set metrics_token_file,"
                " metrics_tls_cert and metrics_tls_key (serve: --metrics-token-file, --tls-cert, --tls-key), or keep"
                " them on loopback, behind a proxy"
            )
        self._server = _Server((host, port), _handler(registry, token, is_loopback(host)))
        if tls is not None:
            # The handshake is at the first read, in the client's own thread and within its time.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.address = f"{host}:{self._server.server_address[1]}"
        self.url = f"{'https' if tls is not None else 'http'}://{self.address}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSING_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MAX_CLIENTS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(_MAX_CLIENTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _handler(registry: CollectorRegistry, token: str, is_local: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S
        server_version, sys_version = "dlrover-rl", ""

        def do_GET(self) -> None:
            refusal = self._refusal()
            body = b"" if refusal else generate_latest(registry)
            self.send_response(refusal or HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _refusal(self) -> HTTPStatus | None:
            host = (self.headers.get("Host") or "").rpartition(":")[0].strip("[]")
            if self.headers.get("Origin") is not None or (is_local and not is_loopback(host)):
                return HTTPStatus.FORBIDDEN
            if token and not hmac.compare_digest(
                (self.headers.get("Authorization") or "").encode("latin-1"), f"Bearer {token}".encode()
            ):
                return HTTPStatus.UNAUTHORIZED
            return None if self.path == "/metrics" else HTTPStatus.NOT_FOUND

        def _not_allowed(self) -> None:
            self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
            self.send_header("Allow", "GET")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _not_allowed

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are not logged."""

    return Handler
