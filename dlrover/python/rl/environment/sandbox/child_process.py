# SPDX-License-Identifier: Apache-2.0
"""A server for user code in a child process that may be killed: both ends of its connection.

::

    parent: ChildProcess --starts--> shield --forks--> warden --forks--> child: server.serve(Channel) --> user's code
            '-------------- requests (pickled), replies (lines of JSON) --------------'

The warden imports no user code and never has the connection. It is the child's parent, so a function that kills its
parent does not hit the job; and it adopts every orphan (PR_SET_CHILD_SUBREAPER), so SIGTERM to the warden, or the end
of the shield, ends all of them in any session or group. The shield exists to be killed: a Ray worker that ends kills
its children, which then cannot clean up. A function that finds and kills the job's processes by number is not stopped.
"""

import ctypes
import json
import os
import pickle
import queue
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from io import TextIOBase
from pathlib import Path
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import EnvironmentFailed, VerifierError, user_traceback
from dlrover.python.rl.common.log import cut_middle
from dlrover.python.rl.environment.sandbox.confinement import ProgramLimits, become_confined

READY = "ready"  # the number of the first reply, which may carry the ``error`` that the child could not start for
_PRINTED_CHARACTERS = 10_000  # shown of a call's output
_MESSAGE_CHARACTERS, _TRACEBACK_CHARACTERS = 2_000, 20_000
_TICK_S = 1.0
_EXIT_S, _ENDING_S = 10.0, 2.0
_PR_SET_CHILD_SUBREAPER = 36

Reply: TypeAlias = dict[str, Any]


class ChildEnded(Exception):
    """The child has ended, for the reason in the text, and answers no more calls."""


def pack_call(call: str, *arguments: Any) -> tuple[str, bytes]:
    """Return the number of a call, and the call in the child's format; raises the errors of pickling."""
    number = secrets.token_hex(8)  # user code cannot guess it, and answer for its process
    return number, pickle.dumps((number, call, arguments), pickle.HIGHEST_PROTOCOL)


class ChildProcess:
    """A process, its pending calls, and the threads of its connection; none outlives :meth:`end`.

    Args:
        owner: the process also ends when this object is garbage collected.
        load: a function or class of an importable module; a fresh interpreter calls it with ``arguments``, plain JSON,
            for its server: ``ready`` is the first reply, and ``serve(channel)`` answers until the parent is gone.
        memory_mb: address space in MB, including libraries; None: no limit.
        max_reply_bytes: a longer reply ends the process."""

    def __init__(
        self, owner: object, load: Callable[..., Any], arguments: list[Any], memory_mb: int | None, max_reply_bytes: int
    ) -> None:
        self.pid = 0  # the child's, not the warden's; sent before any user code runs
        self.ready: Future[Reply] = Future()
        self._pending = {READY: self.ready}
        self._max_reply_bytes = max_reply_bytes
        self._lock, self._end_reason = threading.Lock(), ""
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._connection, child = socket.socketpair()
        with child:
            descriptor = child.fileno()
            settings = (load.__module__, load.__name__, str(descriptor), str(memory_mb or 0), json.dumps(arguments))
            self._process = subprocess.Popen(
                interpreter_command(run_child, *settings),
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        self._owner = weakref.finalize(owner, self._hang_up)  # the reader then kills: the collector never waits
        self._owner.atexit = False  # at exit the connection closes by itself
        self._reader = threading.Thread(target=self._read, name="replies of a child process", daemon=True)
        self._reader.start()
        threading.Thread(target=self._send, name="requests to a child process", daemon=True).start()

    @property
    def is_ended(self) -> bool:
        return bool(self._end_reason)

    def submit(self, number: str, body: bytes) -> "Future[Reply]":
        """Send a call of :func:`pack_call`, without waiting. The reply raises :class:`ChildEnded` if the child ends."""
        answer: Future[Reply] = Future()
        answer.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        with self._lock:
            if self._end_reason:
                answer.set_exception(ChildEnded(self._end_reason))
            else:
                self._pending[number] = answer
                self._outgoing.put(body)
        return answer

    def end(self, reason: str = "it was closed") -> None:
        """Kill the process and its descendants; pending calls fail with ``reason``. May be called again."""
        self._fail_calls(reason)
        self._hang_up()
        if threading.current_thread() is not self._reader:
            self._reader.join(2 * _EXIT_S)

    def _fail_calls(self, reason: str) -> None:
        with self._lock:
            self._end_reason = self._end_reason or reason
            pending, self._pending = list(self._pending.values()), {}
        self._outgoing.put(b"")
        for answer in pending:
            answer.set_exception(ChildEnded(self._end_reason))

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        with suppress(OSError):  # The reader sees the end as well.
            while body := self._outgoing.get():  # waits: for requests, or the end
                self._connection.sendall(body)

    def _read(self) -> None:
        reason = ""
        try:
            with self._connection.makefile("rb") as replies:
                self.pid = int(replies.readline() or 0)
                while line := replies.readline(self._max_reply_bytes + 1):
                    self._settle(line)
        except OSError:
            pass
        except Exception as error:  # noqa: BLE001 - any invalid reply of hostile code ends its process
            reason = f"user code forged a reply of its process, which was therefore ended ({error})"
        if not reason:
            with suppress(subprocess.TimeoutExpired):  # do not wait for a child that lives
                self._process.wait(0.0 if self._end_reason else _ENDING_S)
            names = {number.value: number.name for number in signal.Signals}  # a real-time signal has none
            code = self._process.poll()
            reason = "it closed its connection" if code is None else f"exit code {code}"
            if code is not None and code < 0:
                reason = f"killed by {names.get(-code, f'signal {-code}')}"
        self._fail_calls(reason)
        self._hang_up()
        with suppress(subprocess.TimeoutExpired):
            end_guarded(self._process)
        with suppress(OSError):
            if self.pid:  # in case the warden was killed
                os.killpg(self.pid, signal.SIGKILL)
        self._owner.detach()
        self._connection.close()

    def _settle(self, line: bytes) -> None:
        if len(line) > self._max_reply_bytes:
            raise ValueError(f"its reply has more than {self._max_reply_bytes} bytes")
        if line.endswith(b"\n"):  # otherwise the connection has closed in the middle of it
            reply = json.loads(line)
            with self._lock:
                answer = self._pending.pop(reply["number"])
            answer.set_result(reply)


# -- in the child ------------------------------------------------------------------------------------------------------


def interpreter_command(function: Callable[..., None], *arguments: str) -> list[str]:
    """Return the command line of a fresh interpreter, with this ``sys.path``, that calls an importable function."""
    name, module = function.__name__, function.__module__
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {name}; {name}(*sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]


def become_program(folder: str, level: str, limits: str, *tested: str) -> None:
    """Become the warden of ``program.py``, or of a script that tests it by its standard input and output."""
    stand_guard(*((0, 1) if tested else ()))
    command = [sys.executable, "-I", *(tested or ["program.py"])]
    shown = [Path(folder, "program.py"), *map(Path, tested[:1])]
    become_confined(command, Path(folder), shown, ProgramLimits(*json.loads(limits)), level)


def run_child(module: str, name: str, descriptor: str, memory_mb: str, arguments: str) -> None:
    """Become shield and warden; their child loads a server, which serves until the parent's end closes."""
    stand_guard(int(descriptor))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if int(memory_mb):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_mb) << 20, int(memory_mb) << 20))
    with suppress(OSError):  # without memory, the kernel should kill this process, not one of the job
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.stdout = sys.stderr = output = Capped(os.dup(2))  # not inherited: processes that it starts print to nowhere
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    channel = Channel(int(descriptor), output)
    try:
        server = getattr(import_module(module), name)(*json.loads(arguments))
    except Exception as error:  # noqa: BLE001 - the process boundary: the parent reports any error
        channel.send(READY, error_reply(error))
        return
    channel.send(READY, server.ready)
    server.serve(channel)


class Channel:
    """Sends the child's process id, then replies in JSON: data from hostile code is never unpickled.

    The kernel closes the connection, not the exiting interpreter: by then the exit code is certain."""

    def __init__(self, descriptor: int, output: "Capped") -> None:
        self._descriptor, self._output = descriptor, output
        self._incoming = os.fdopen(descriptor, "rb", closefd=False)
        self._write(b"%d\n" % os.getpid())

    def receive(self) -> tuple[str, str, tuple[Any, ...]] | None:
        """Wait for a call: its number, name and arguments; None: the parent is gone."""
        try:
            request = pickle.load(self._incoming)  # noqa: TID251 -- in the child: requests of its parent
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        self._output.left = _PRINTED_CHARACTERS
        return request  # type: ignore[no-any-return]

    def send(self, number: str, reply: Reply) -> None:
        self._write(json.dumps({"number": number, **reply}).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # the parent is gone, as the next receive reports
            while line:
                line = line[os.write(self._descriptor, line) :]


def error_reply(error: Exception, call: str = "") -> Reply:
    """Describe an error of user code in a ``call``, with the user's frames."""
    is_own = isinstance(error, VerifierError | EnvironmentFailed)
    message = str(error) if is_own else f"{call} raised {type(error).__name__}: {error}".lstrip()
    trace = cut_middle(user_traceback(error), _TRACEBACK_CHARACTERS, "\n[...]\n")
    return {"error": message[:_MESSAGE_CHARACTERS], "traceback": trace}


class Capped(TextIOBase):
    """Standard output and error of user code, of which the first characters reach the parent's standard error."""

    def __init__(self, descriptor: int) -> None:
        self.left, self._descriptor = _PRINTED_CHARACTERS, descriptor

    def write(self, text: str) -> int:
        shown = text[: max(self.left, 0)]
        self.left -= len(text)
        if shown:
            os.write(self._descriptor, shown.encode(errors="replace"))
        return len(text)


# -- shield and warden -------------------------------------------------------------------------------------------------


def stand_guard(*descriptors: int, folder: str = "") -> None:
    """Fork: the child returns; shield and warden close ``descriptors``, wait for its end, and end in the same way. The
    warden removes ``folder`` after the last process has ended."""
    _watch_child(descriptors, lambda warden: os.kill(warden, signal.SIGTERM))
    with suppress(OSError, AttributeError):  # only Linux adopts orphans
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _watch_child(descriptors, lambda child: os.killpg(child, signal.SIGKILL), folder)


def end_guarded(process: "subprocess.Popen[bytes]") -> int:
    """End the shield and its descendants; return its exit code. Raises TimeoutExpired if it cannot be ended."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_EXIT_S)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(_EXIT_S)


def _watch_child(descriptors: tuple[int, ...], end: Callable[[int], None], folder: str = "") -> None:
    """Fork: the child returns. On SIGTERM or its parent's end this process ends its descendants and itself."""
    watched = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)  # waited for below, so that none is lost
    parent, child = os.getppid(), os.fork()
    if child == 0:
        os.setsid()  # a signal to the shield's group must not reach the warden
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    while (status := _reap(child)) is None:
        event = signal.sigtimedwait(watched, _TICK_S)
        if (event is not None and event.si_signo == signal.SIGTERM) or os.getppid() != parent:
            with suppress(OSError):
                end(child)
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            _kill_children()
            os.waitpid(-1, 0)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # end by the same signal
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _reap(child: int) -> int | None:
    """Reap all processes that have ended; return the status of ``child`` if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _kill_children() -> None:
    """Kill every process whose parent is this one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
