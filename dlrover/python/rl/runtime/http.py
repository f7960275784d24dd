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
    connection. Connections beyond the open files that this process may have are refused with the status 503."""

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

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self._later(self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        deadline = self.timeout_keep_alive_task  # of the request that begins here or has begun
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._unset_keepalive_if_required()
            at_s = deadline.when() if deadline is not None else self.loop.time() + self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_at(at_s, self._refuse_half)

    def _refuse_half(self) -> None:
        if not self.transport.is_closing():
            fault = {"message": "the request did not arrive whole in time", "type": "invalid_request_error"}
            text = json.dumps({"error": {**fault, "param": None, "code": "timeout"}}).encode()
            head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
            self.transport.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + text)
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
