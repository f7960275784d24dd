# SPDX-License-Identifier: Apache-2.0
"""Serving the page on this machine until Ctrl-C."""

from collections.abc import Collection, Mapping
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import echo
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.page.app import create_app
from dlrover.python.rl.page.run_data import RunFolders
from dlrover.python.rl.runtime.http import listen, serve


def serve_page(folders: Mapping[str, Path], host: str, port: int, names: Collection[str] = ()) -> None:
    """Serve the runs in ``folders``. Raises InvalidJob beyond loopback, JobConflict if the port is taken."""
    if not is_loopback(host):
        message = "is beyond loopback, where the page would need tokens: use an SSH tunnel, or the job service's page"
        raise InvalidJob([ConfigError("--host", f"{host} {message}")])
    with listen(host, port) as listener:
        runs = RunFolders(list(folders.values()))
        shown = f"[{host}]" if ":" in host else host
        echo(f"http://{shown}:{listener.getsockname()[1]}/  {len(runs.all())} runs; Ctrl-C ends the page", err=True)
        serve(create_app(runs, names=names), listener)
