"""An SGLang server: started as a process of its own or found at a URL, and spoken to in its HTTP protocol."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import EngineError, MissingExtra

_KEEPER = "dlrover.python.rl.engine.sglang.keeper"

_HEALTH_S = 10.0

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy stands between an engine and its server, whatever the environment says."""


class SglangServer:
    """A server at ``url``; each call opens its own connection, so threads may share it.

    Args:
        url: where it listens.
        process: the server's process if it is ours to end.
        timeout_s: how long a call may take.
    """

    def __init__(self, url: str, process: "subprocess.Popen[bytes] | None" = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._process, self._timeout_s = process, timeout_s

    @classmethod
    def start(cls, arguments: Sequence[str], folder: Path, start_timeout_s: float, timeout_s: float) -> "SglangServer":
        """Start ``python -m sglang.launch_server`` on a free port of this machine and wait until it answers.

        Args:
            arguments: of the server.
            folder: is removed, as the server is ended, when this process is killed.
            start_timeout_s: how long to wait.
            timeout_s: how long each call may take.

        Raises:
            MissingExtra: SGLang is not installed.
            EngineError: it ended, or did not answer in time.
        """
        if importlib.util.find_spec("sglang") is None:
            raise MissingExtra("sglang", "sglang")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port), *arguments]
        keeper = [sys.executable, "-m", _KEEPER, str(folder), *launch]
        process = subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True)
        server = cls(f"http://127.0.0.1:{port}", process, timeout_s)
        try:
            server.wait_until_up(start_timeout_s)
        except BaseException:
            server.close()
            raise
        return server

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the server answers.

        Raises:
            EngineError: its process ended, or ``timeout_s`` passed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.call("GET", "/health", timeout_s=min(self._timeout_s, _HEALTH_S))
                return
            except EngineError as error:
                if self._process is not None and self._process.poll() is not None:
                    raise EngineError(f"the SGLang server ended with status {self._process.returncode}") from error
                if time.monotonic() > deadline:
                    raise EngineError(f"the SGLang server at {self.url} did not come up in {timeout_s} s") from error
                time.sleep(0.5)

    def call(self, verb: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Send ``body`` as JSON and return the answer's JSON, or None where it is empty.

        Args:
            verb: of HTTP.
            path: on the server.
            body: what it is sent, if anything.
            timeout_s: how long to wait; the server's own by default.

        Raises:
            EngineError: no answer, or one that is an error, with the server's own words.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"} if data else {}, method=verb
        )
        try:
            with _DIRECT.open(request, timeout=timeout_s or self._timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:500]
            raise EngineError(f"SGLang refused {path} with status {error.code}: {words}") from error
        except OSError as error:
            raise EngineError(f"the SGLang server at {self.url} does not answer {path}: {error}") from error
        try:
            return json.loads(text)
        except ValueError:
            return None  # such as /health, which says nothing, and the words of /flush_cache

    def close(self) -> None:
        """End the server and every process that it started, if it is ours."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)
