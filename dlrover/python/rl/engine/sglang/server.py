# SPDX-License-Identifier: Apache-2.0
"""An SGLang server, started as a child process or found at a URL, and its HTTP interface.

``python -m dlrover.python.rl.engine.sglang.server FOLDER COMMAND...`` runs a command while its owner lives. When its
standard input closes, as it does when the owner is killed, it removes the owner's FOLDER and kills its process group.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from dlrover.python.rl.common.errors import EngineDied, EngineError
from dlrover.python.rl.common.progress import note_progress

_KEEPER = "dlrover.python.rl.engine.sglang.server"
_HEALTH_TIMEOUT_S = 10.0
_END_S = 1.0
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection per call: a server may close an idle connection just when a call begins."""


class RequestRefused(EngineError):
    """The server answered with an error status."""


class SglangServer:
    """A server at ``url``; thread safe. :meth:`close` ends ``process``."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes] | None" = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._process, self._timeout_s = process, timeout_s
        # trust_env: calls never go through a proxy that the environment names.
        self._client = httpx.Client(base_url=self.url, limits=_LIMITS, trust_env=False)

    @classmethod
    def start(cls, arguments: Sequence[str], folder: Path, timeout_s: float, env: Mapping[str, str]) -> "SglangServer":
        """Start a server on a free TCP port of this node. Once this process ends, however it does, the server ends and
        ``folder`` is removed. Raises EngineError if SGLang is not installed."""
        if importlib.util.find_spec("sglang") is None:
            raise EngineError("sglang is not installed here: give the option 'url', the URL of its server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            tcp_port = free.getsockname()[1]
        listen = ["--host", "127.0.0.1", "--port", str(tcp_port)]
        launch = [sys.executable, "-m", "sglang.launch_server", *listen, *arguments]
        keeper = [sys.executable, "-m", _KEEPER, str(folder), *launch]
        process = subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True, env=dict(env))
        return cls(f"http://127.0.0.1:{tcp_port}", process, timeout_s)

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the server answers. Raises EngineError if it ends, or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            note_progress()
            try:
                self.call("GET", "/health", timeout_s=min(self._timeout_s, _HEALTH_TIMEOUT_S))
                return
            except EngineError as error:
                if self._process is not None and self._process.poll() is not None:
                    raise EngineError(f"the SGLang server ended with status {self._process.returncode}") from error
                if time.monotonic() > deadline:
                    raise EngineError(f"the SGLang server at {self.url} did not come up in {timeout_s} s") from error
                time.sleep(0.5)

    def call(self, verb: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Send ``body`` as JSON; returns the answer's JSON, or None if it is none. Raises RequestRefused for an error
        status, EngineDied if a server that was started here has ended, else EngineError without an answer in time."""
        content = {} if body is None else {"json": body}
        try:
            answer = self._client.request(verb, path, timeout=timeout_s or self._timeout_s, **content)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client is closed
            refusal = f"the SGLang server at {self.url} does not answer {path}"
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):  # connections break a little before a process ends
                    status = self._process.wait(_END_S)
                    raise EngineDied(f"{refusal}: it has ended with status {status}") from error
            raise EngineError(f"{refusal}: {error}") from error
        if answer.is_error:
            raise RequestRefused(f"SGLang refused {path} with status {answer.status_code}: {answer.text[:500]}")
        try:
            return answer.json()
        except ValueError:
            return None

    def close(self) -> None:
        """End a server that was started here, with all its child processes."""
        self._client.close()
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)


def main(folder: str, command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_owner, args=(folder,), daemon=True).start()
    return child.wait()  # waits: as long as the server serves; its owner ends both


def _end_with_owner(folder: str) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
