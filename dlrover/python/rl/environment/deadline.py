"""A reward function with a deadline that holds whatever the function does.

A verifier runs on text a model wrote; sooner or later one loops, or blows up a parser, or kills its interpreter. So it
runs in a child process, which can be killed. The child is a fresh interpreter that imports what
:mod:`~dlrover.python.rl.environment.child` and the verifier's module import, nothing of the parent: neither its main
script (multiprocessing's spawn would run it again) nor its memory.
"""

import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from dlrover.python.rl.common.errors import VerifierCrashed, VerifierError, VerifierTimeout
from dlrover.python.rl.environment.child import request_bytes, serve
from dlrover.python.rl.environment.rewards import Reward

_ORPHAN_GRACE_S = 5.0
_EXIT_S = 1.0
_CRASH_S = 10.0
"""How long to wait for the exit code of a process whose connection is closed: what is told of a sample shall not depend
on how busy the machine is."""
_LONGEST_REPLY = 1 << 20


class DeadlineVerifier:
    """Calls ``function(completion, answer, extra_info)`` in a child process, for at most ``timeout_s`` a call.

    Calls from several threads take turns; a turn's deadline starts with it. In a coroutine, call it through
    ``asyncio.to_thread``. What the function prints goes to standard error, its first 10,000 characters a call.

    Args:
        function: ``"package.module:function"``, or a function defined at the top of an importable module; or several
            of these with their weights, whose weighted sum is the reward. They may be async.
        timeout_s: seconds a call may take; loading the function's module is not part of it.
        start_timeout_s: seconds the child may take to start and load it.
        memory_mb: address space of the child in MB, its libraries included; more is a MemoryError there. None: no
            limit. Either way the kernel takes it first when memory runs out.

    Raises:
        ValueError: ``function`` has no importable name, or a limit is not positive and finite.
        VerifierError: the child could not load it.
    """

    def __init__(
        self,
        function: str | Callable[..., Any] | Mapping[Any, float],
        timeout_s: float,
        start_timeout_s: float = 60.0,
        memory_mb: int | None = None,
    ) -> None:
        if not (0 < timeout_s < math.inf and 0 < start_timeout_s < math.inf and (memory_mb is None or memory_mb > 0)):
            limits = f"{timeout_s}, {start_timeout_s} and {memory_mb}"
            raise ValueError(f"limits must be positive and finite, not {limits}")
        weighted = list(function.items()) if isinstance(function, Mapping) else [(function, 1.0)]
        self._weights = {_importable_name(each): float(weight) for each, weight in weighted}
        self._name = " + ".join(self._weights)
        self._timeout_s, self._start_timeout_s, self._memory_mb = timeout_s, start_timeout_s, memory_mb
        self._lock = threading.Lock()
        self._closed = False
        self._start()
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def __call__(self, completion: str, answer: str | None, extra_info: dict[str, Any] | None = None) -> float:
        """The reward, a finite number; raises what :meth:`judge` does."""
        return self.judge(completion, answer, extra_info).total

    def judge(self, completion: str, answer: str | None, extra_info: dict[str, Any] | None = None) -> Reward:
        """The reward and what it is made of.

        Raises:
            VerifierTimeout: no reward in time.
            VerifierCrashed: the child ended.
            VerifierError: the function raised, or returned something else.
        """
        # Arguments that cannot be pickled raise here, and the child never knows.
        number = secrets.token_hex(8)
        request = request_bytes(number, (completion, answer, extra_info if extra_info is not None else {}))
        with self._lock:
            if self._closed:
                raise ValueError(f"the verifier {self._name} is closed")
            if not self._pid:
                self._await_ready()
            reply = self._exchange(request, self._timeout_s, "gave no reward")
            if reply.get("number") != number:  # What the function wrote itself, not the child's answer.
                self._replace_forger()
        if "trouble" in reply:
            raise VerifierError(f"{self._name} {reply['trouble']}", str(reply.get("traceback", "")))
        return Reward(float(reply["reward"]), dict(reply["parts"]))

    def close(self) -> None:
        """Kill the child; nothing is left of it. May be called again; waits for a call in flight."""
        with self._lock:
            self._closed = True
            self._stop()

    def __enter__(self) -> "DeadlineVerifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._pid = 0  # Of the verifier, which the warden started; known once it is ready.
        self._connection, child = socket.socketpair()
        # sys.path goes along, since a function of a script's neighbour module is importable here.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {serve.__module__} import serve; serve(*sys.argv[1:])"
        limits = [str(limit_s + _ORPHAN_GRACE_S) for limit_s in (self._start_timeout_s, self._timeout_s)]
        limits.append(str(self._memory_mb or 0))
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(self._weights), str(child.fileno()), *limits],
                stdin=subprocess.DEVNULL,
                pass_fds=[child.fileno()],
                start_new_session=True,
            )

    def _await_ready(self) -> None:
        reply = self._exchange(b"", self._start_timeout_s, "could not be loaded")
        if "pid" not in reply:
            self._restart()
            raise VerifierError(f"{self._name} could not be loaded", str(reply.get("traceback", "")))
        self._pid = int(reply["pid"])

    def _exchange(self, request: bytes, timeout_s: float, failure: str) -> dict[str, Any]:
        """Send ``request`` and wait for one line, both within the time; the child is replaced where that fails."""
        try:
            line = _converse(self._connection, request, time.monotonic() + timeout_s)
            reply = json.loads(line)
        except TimeoutError:
            self._restart()
            raise VerifierTimeout(f"{self._name} {failure} within {timeout_s:g} s; its process was killed") from None
        except OSError:
            self._replace_crashed()
        except ValueError:
            self._replace_forger()
        except BaseException:
            self._restart()  # Interrupted: a late reply must not be taken for the next call's.
            raise
        return reply if isinstance(reply, dict) else {}

    def _replace_crashed(self) -> NoReturn:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CRASH_S)
        code = self._process.returncode
        self._restart()
        raise VerifierCrashed(f"the process of {self._name} ended: {_describe_exit(code)}")

    def _replace_forger(self) -> NoReturn:
        self._restart()
        raise VerifierCrashed(f"{self._name} answered for its process, which was ended")

    def _restart(self) -> None:
        self._stop()
        self._start()

    def _stop(self) -> None:
        self._connection.close()
        self._process.terminate()  # The warden ends all that is below it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        for group in (self._pid, self._process.pid):  # In case the warden was killed, or cannot.
            with suppress(OSError):
                if group:
                    os.killpg(group, signal.SIGKILL)
        self._process.wait()  # waits: for a process that was killed
        self._pid = 0


def _converse(connection: socket.socket, request: bytes, deadline_s: float) -> bytes:
    """Send all of ``request``, then read one line.

    Raises:
        TimeoutError: the time was up before.
        OSError: the other end closed.
        ValueError: it wrote more than a reply can be.
    """
    connection.settimeout(_left(deadline_s))
    connection.sendall(request)
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(_left(deadline_s))
        part = connection.recv(1 << 16)  # waits: at most the timeout set above
        line += part
        if not part:
            raise ConnectionError("closed")
        if len(line) > _LONGEST_REPLY:
            raise ValueError("no reply is as long")
    return line


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _importable_name(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        module, colon, path = function.partition(":")
        if not (module and colon and path):
            raise ValueError(f"'{function}' is not of the form 'package.module:function'")
        return function
    home, path = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "<nameless>")
    if home == "__main__" or "<" in path:
        raise ValueError(
            f"{function!r} cannot be imported by another process: define it at the top of a module that is not the"
            " main script"
        )
    return f"{home}:{path}"


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it closed its connection"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
