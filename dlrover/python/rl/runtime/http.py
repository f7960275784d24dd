# SPDX-License-Identifier: Apache-2.0
"""HTTP servers on uvicorn: in the main thread until Ctrl-C, in a running event loop, or in a thread."""

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dlrover.python.rl.common.errors import JobConflict

_JOIN_S = 5.0
_MOST_CONNECTIONS, _OTHER_FILES = 8192, 512


def listen(host: str, port: int, purpose: str = "the page") -> socket.socket:
    """Return a socket that accepts connections. Raises JobConflict if it cannot be bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # who opens the address at once, before the server runs, waits for it
    except OSError as error:
        listener.close()
        message = f"{purpose} cannot be served at {host}:{port}: {error.strerror}; port 0 takes a free one"
        raise JobConflict(message) from error
    return listener


def serve(app: Any, listener: socket.socket) -> None:
    """Serve an application in this thread until Ctrl-C."""
    uvicorn.Server(_config(app)).run(sockets=[listener])


class TaskServer:
    """Serves an application in the running event loop until it is closed; ``tls`` are certificate and key."""

    def __init__(self, app: Any, listener: socket.socket, tls: tuple[Path, Path] | None) -> None:
        files = {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])} if tls else {}
        self._server, self._listener = _Server(_config(app, **files)), listener
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        self._server.should_exit = True
        await self._task
        self._listener.close()


class ThreadServer:
    """Serves an application in a thread until it is closed, also to untrusted clients.

    A request whose headers are not there within ``patience_s``, and a client that reads nothing for so long, lose their
    connection. Connections beyond the open files that this process may have get the status 503, earlier ones continue.
    All errors have OpenAI's shape."""

    def __init__(self, app: Any, listener: socket.socket, patience_s: float) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = _MOST_CONNECTIONS + _OTHER_FILES
        files = files if hard == resource.RLIM_INFINITY else min(files, hard)
        if soft != resource.RLIM_INFINITY and soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        limits = {"limit_concurrency": max(files - _OTHER_FILES, 64), "timeout_keep_alive": patience_s}
        self._server = _Server(_config(app, http=_ImpatientProtocol, lifespan="off", ws="none", **limits))
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(_JOIN_S)
        self._listener.close()


class _ImpatientProtocol(H11Protocol):
    """Waits for whole headers, and for a client that reads, as long as between two requests."""

    _reading: asyncio.TimerHandle | None = None
    _is_extra = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self._later(self.timeout_keep_alive_handler)
        self._is_extra = len(self.connections) > (self.config.limit_concurrency or 0)
        self.limit_concurrency = None  # uvicorn would also refuse the requests of earlier connections

    def data_received(self, data: bytes) -> None:
        if self._is_extra:
            self._refuse("503 Service Unavailable", "the endpoint has too many connections", "overloaded")
            return
        deadline = self.timeout_keep_alive_task  # of the request that begins here or has begun
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._unset_keepalive_if_required()
            at_s = deadline.when() if deadline is not None else self.loop.time() + self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_at(at_s, self._refuse_half)

    def _refuse_half(self) -> None:
        self._refuse("408 Request Timeout", "the request did not arrive whole in time", "timeout")

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg, "invalid_request")

    def _refuse(self, status: str, message: str, code: str) -> None:
        """Answer with an error in OpenAI's shape, unless an answer is on its way, and close the connection."""
        retry, is_free = status[0] == "5", self.cycle is None or not self.cycle.response_started
        if not self.transport.is_closing() and (is_free or self.cycle.response_complete):
            kind = "server_error" if retry else "invalid_request_error"
            error = {"error": {"message": message, "type": kind, "param": None, "code": code}}
            text, headers = json.dumps(error), f"connection: close\r\nx-should-retry: {str(retry).lower()}"
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n{headers}"
            self.transport.write(f"{head}\r\n\r\n{text}".encode())
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self._later(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._reading is not None:
            self._reading.cancel()

    def _later(self, function: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(self.timeout_keep_alive, function)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the process."""
        yield


def _config(app: Any, **options: Any) -> uvicorn.Config:
    return uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, server_header=False, **options)
