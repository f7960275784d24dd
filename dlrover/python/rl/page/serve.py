# SPDX-License-Identifier: Apache-2.0
"""The server of the page on this machine, until Ctrl-C."""

import socket
from collections.abc import Mapping
from pathlib import Path

import uvicorn

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobConflict
from dlrover.python.rl.common.log import echo
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.page.app import create_app
from dlrover.python.rl.page.run_data import RunFolders


def serve_page(folders: Mapping[str, Path], host: str, port: int) -> None:
    """Serve the runs in ``folders``. Raises InvalidJob beyond loopback, JobConflict if the port is taken."""
    if not is_loopback(host):
        message = "is beyond loopback, where the page would need tokens: use an SSH tunnel, or the job service's page"
        raise InvalidJob([ConfigError("--host", f"{host} {message}")])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listener:
        try:
            listener.bind((host, port))
        except OSError as error:
            raise JobConflict(f"{host}:{port} cannot be used: {error.strerror}; --port 0 takes a free one") from error
        runs = RunFolders(list(folders.values()))
        shown = f"[{host}]" if ":" in host else host
        echo(f"http://{shown}:{listener.getsockname()[1]}/  {len(runs.all())} runs; Ctrl-C ends the page", err=True)
        config = uvicorn.Config(create_app(runs), log_level="warning", timeout_graceful_shutdown=1, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])
