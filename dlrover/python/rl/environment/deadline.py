"""A reward function with a deadline that holds whatever the function does.

A verifier runs on text a model wrote; sooner or later one loops, or blows up a parser, or kills its interpreter. So it
runs in a child process, which can be killed. The child is a fresh interpreter that imports this module and the
verifier's, nothing of the parent: neither its main script (multiprocessing's spawn would run it again) nor its memory.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn

from dlrover.python.rl.common.errors import VerifierCrashed, VerifierError, VerifierTimeout
from dlrover.python.rl.environment.lookup import load_function

_ORPHAN_GRACE_S = 5.0
_EXIT_S = 1.0


class DeadlineVerifier:
    """Calls ``function(completion, answer, extra_info)`` in a child process, for at most ``timeout_s`` a call.

    Calls from several threads take turns; a turn's deadline starts with it. In a coroutine, call it through
    ``asyncio.to_thread``.

    Args:
        function: ``"package.module:function"``, or a function defined at the top of an importable module.
        timeout_s: seconds a call may take; loading the function's module is not part of it.
        start_timeout_s: seconds the child may take to start and load it.

    Raises:
        ValueError: ``function`` has no importable name, or a limit is not positive and finite.
        VerifierError: the child could not load it.
    """

    def __init__(self, function: str | Callable[..., float], timeout_s: float, start_timeout_s: float = 60.0) -> None:
        if not (0 < timeout_s < math.inf and 0 < start_timeout_s < math.inf):
            raise ValueError(f"limits must be positive and finite, not {timeout_s} and {start_timeout_s}")
        self._name = _importable_name(function)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._start()
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def __call__(self, completion: str, answer: str | None, extra_info: dict[str, Any] | None = None) -> float:
        """The reward, a finite number.

        Raises:
            VerifierTimeout: no reward in time.
            VerifierCrashed: the child ended.
            VerifierError: the function raised, or returned something else.
        """
        with self._lock:
            if self._closed:
                raise ValueError(f"the verifier {self._name} is closed")
            if not self._ready:
                self._await_ready()
            try:
                # Pickles before it sends: arguments that cannot be pickled raise here, and the child never knows.
                self._pipe.send((completion, answer, extra_info if extra_info is not None else {}))
            except OSError:  # It died since the last call.
                self._replace_crashed()
            return _reward(self._name, self._receive(self._timeout_s, "gave no reward"))

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
        self._ready = False
        self._pipe, child = Pipe()
        # sys.path goes along, since a function of a script's neighbour module is importable here.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve(*sys.argv[1:])"
        limits = [str(limit_s + _ORPHAN_GRACE_S) for limit_s in (self._start_timeout_s, self._timeout_s)]
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, self._name, str(child.fileno()), *limits],
                stdin=subprocess.DEVNULL,
                pass_fds=[child.fileno()],
                start_new_session=True,  # Its own children go with it when its group is killed.
            )

    def _await_ready(self) -> None:
        trouble = self._receive(self._start_timeout_s, "could not be loaded")
        if trouble is not None:
            self._restart()
            raise VerifierError(f"{self._name} could not be loaded", trouble)
        self._ready = True

    def _receive(self, timeout_s: float, failure: str) -> Any:
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._replace_crashed()
        except BaseException:
            self._restart()  # Interrupted: a late reply must not be taken for the next call's.
            raise
        self._restart()
        raise VerifierTimeout(f"{self._name} {failure} within {timeout_s:g} s; its process was killed")

    def _replace_crashed(self) -> NoReturn:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.returncode
        self._restart()
        raise VerifierCrashed(f"the process of {self._name} ended: {_describe_exit(code)}")

    def _restart(self) -> None:
        self._stop()
        self._start()

    def _stop(self) -> None:
        self._pipe.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def serve(name: str, descriptor: str, load_limit_s: str, call_limit_s: str) -> None:
    """The child's life: load the function, say so, then answer calls until the parent's end of the pipe closes.

    Args:
        name: ``"package.module:function"``.
        descriptor: the inherited end of the pipe.
        load_limit_s: seconds after which loading ends the process.
        call_limit_s: seconds after which a call ends it. The parent kills it earlier; if the parent is gone, this
            does, even while the function holds the interpreter: SIGALRM's default action is the kernel's.
    """
    pipe = Connection(int(descriptor))
    signal.setitimer(signal.ITIMER_REAL, float(load_limit_s))
    try:
        function = load_function(name)
    except Exception:  # noqa: BLE001 - the process boundary: whatever importing raises is the parent's to report
        pipe.send(traceback.format_exc())
        return
    reply: Any = None
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            pipe.send(reply)
            arguments = pipe.recv()
        except (EOFError, OSError):  # The parent is gone.
            return
        signal.setitimer(signal.ITIMER_REAL, float(call_limit_s))
        reply = _call(function, arguments)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, str, str]:
    """The reward, what is wrong with it (or ``""``), and a traceback."""
    try:
        value = function(*arguments)
        reward = float(value)
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever it raises is the parent's to report
        return math.nan, f"raised {type(error).__name__}: {error}", traceback.format_exc()
    return reward, "" if math.isfinite(reward) else f"returned {reward}, which is no reward", ""


def _reward(name: str, reply: tuple[float, str, str]) -> float:
    reward, trouble, remote_traceback = reply
    if trouble:
        raise VerifierError(f"{name} {trouble}", remote_traceback)
    return reward


def _importable_name(function: str | Callable[..., float]) -> str:
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
        return "it closed its pipe"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
