# SPDX-License-Identifier: Apache-2.0
"""Serving the page: on this machine until Ctrl-C, or in the event loop of the job service."""

import asyncio
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobConflict
from dlrover.python.rl.common.log import echo
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.page.app import create_app
from dlrover.python.rl.page.run_data import RunFolders


def serve_page(folders: Mapping[str, Path], host: str, port: int, names: Collection[str] = ()) -> None:
    """Serve the runs in ``folders``. Raises InvalidJob beyond loopback, JobConflict if the port is taken."""
    if not is_loopback(host):
        message = "is beyond loopback, where the page would need tokens: use an SSH tunnel, or the job service's page"
        raise InvalidJob([ConfigError("--host", f"{host} {message}")])
    with listen(host, port) as listener:
        runs = RunFolders(list(folders.values()))
        shown = f"[{host}]" if ":" in host else host
        echo(f"http://{shown}:{listener.getsockname()[1]}/  {len(runs.all())} runs; Ctrl-C ends the page", err=True)
        uvicorn.Server(_config(create_app(runs, names=names))).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections. Raises JobConflict if it cannot be bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # who opens the address at once, before the server runs, waits for it
    except OSError as error:
        listener.close()
        message = f"the page cannot be served at {host}:{port}: {error.strerror}; port 0 takes a free one"
        raise JobConflict(message) from error
    return listener


class PageServer:
    """Serves an application in the running event loop until it is closed; ``tls`` are certificate and key."""

    def __init__(self, app: Starlette, listener: socket.socket, tls: tuple[Path, Path] | None) -> None:
        files = {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]} if tls else {}
        self._server, self._listener = _Server(_config(app, **files)), listener
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        self._server.should_exit = True
        await self._task
        self._listener.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the service."""
        yield


def _config(app: Starlette, **files: Path) -> uvicorn.Config:
    options: dict[str, Any] = {name: str(path) for name, path in files.items()}
    return uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, server_header=False, **options)
