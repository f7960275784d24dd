# SPDX-License-Identifier: Apache-2.0
"""Child processes that run user code and may be killed: both ends of their connection.

::

    parent: ChildProcess --starts--> shield --forks--> warden --forks--> child: serve(Channel) --forks--> user's code
            '-------------- requests (pickled), replies (lines of JSON) --------------'

The warden imports no user code and never holds the connection. It is the child's parent, so a function that kills
its parent does not hit the job; and it adopts every orphan (PR_SET_CHILD_SUBREAPER), so SIGTERM to the warden, or the
end of the shield, ends all of them in any session or group. The shield is there to be killed: a worker of Ray that ends
kills its children, and they could clean up nothing. A function that finds and kills the job's processes by number is
not stopped.
"""

import ctypes
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from io import TextIOBase
from pathlib import Path
from typing import Any, NoReturn

from dlrover.python.rl.common.errors import user_traceback
from dlrover.python.rl.common.log import cut_middle

READY = "ready"
"""The number of the first reply, which may carry the ``error`` that the child could not start for."""

_PRINTED_CHARACTERS = 10_000
"""Output of a call that is shown; the rest is dropped."""

_MESSAGE_CHARACTERS, _TRACEBACK_CHARACTERS = 2_000, 20_000
_TICK_S = 1.0
_EXIT_S = 5.0
_PF_EXITING = 0x4
_PR_SET_CHILD_SUBREAPER = 36
_SIZE_BYTES = 8


class ChildEnded(Exception):
    """``is_garbled``: the parent ended it, for a reply that was unreadable or to no call."""

    def __init__(self, reason: str, is_garbled: bool = False) -> None:
        super().__init__(reason)
        self.is_garbled = is_garbled


def pack_request(number: str, call: str, arguments: tuple[Any, ...]) -> bytes:
    """Return a call in the child's format; raise the errors of pickling."""
    body = pickle.dumps((number, call, arguments), pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_SIZE_BYTES, "little") + body


class ChildProcess:
    """A process, its pending calls, and the thread that reads its replies; neither outlives :meth:`end`.

    Args:
        serve: a function of an importable module; a fresh interpreter calls it with a :class:`Channel` and
            ``arguments``, which are plain JSON.
        memory_mb: address space in MB, libraries included; None: no limit.
        max_reply_bytes: a longer reply ends the process.
        send_timeout_s: seconds to send a request; 0: no limit.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        arguments: list[Any],
        memory_mb: int | None,
        max_reply_bytes: int,
        send_timeout_s: float = 0.0,
    ) -> None:
        self.pid = 0  # Of the child, not of the warden; sent before any user code runs.
        self.ready: Future[dict[str, Any]] = Future()
        self._pending = {READY: self.ready}
        self._max_reply_bytes = max_reply_bytes
        self._lock, self._sending, self._killing = threading.Lock(), threading.Lock(), threading.Lock()
        self._ended: tuple[str, bool] | None = None  # The arguments of ChildEnded.
        self._is_killed = False
        self._owner: weakref.finalize[..., Any] | None = None
        self._connection, child = socket.socketpair()
        self._send_timeout_s = send_timeout_s or None
        # sys.path goes along, since a function of a script's neighbour module is importable here.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run_child;"
            f" from {serve.__module__} import {serve.__name__}; run_child({serve.__name__}, *sys.argv[1:])"
        )
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(child.fileno()), str(memory_mb or 0), json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[child.fileno()],
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="replies of a child process", daemon=True)
        self._reader.start()

    @property
    def is_ended(self) -> bool:
        return self._ended is not None

    def end_with(self, owner: object) -> None:
        """End the process when ``owner`` is garbage collected too; the reader does it: the collector never waits."""
        self._owner = weakref.finalize(owner, self._hang_up)
        self._owner.atexit = False  # At exit the connection closes by itself.

    def begin(self, number: str) -> "Future[dict[str, Any]]":
        """Return the future of a call's reply, to be followed by :meth:`send`; it fails with :class:`ChildEnded`."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended is not None:
                answer.set_exception(ChildEnded(*self._ended))
            else:
                self._pending[number] = answer
        return answer

    def send(self, request: bytes) -> None:
        """Send a request, or as much of it as the child takes within ``send_timeout_s``: its call is then late."""
        poll, rest = select.poll(), memoryview(request)
        deadline_s = None if self._send_timeout_s is None else time.monotonic() + self._send_timeout_s
        # The reader sees the end as well; it closes the connection, and that is a ValueError here.
        with suppress(OSError, ValueError), self._sending:
            poll.register(self._connection, select.POLLOUT)
            while rest:
                wait_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
                if not poll.poll(None if wait_s is None else wait_s * 1000):
                    return
                rest = rest[self._connection.send(rest, socket.MSG_DONTWAIT) :]

    def end(self, reason: str = "it was closed", is_garbled: bool = False) -> None:
        """Kill the process and its descendants; pending calls fail with ``reason``. May be called again."""
        if self._owner is not None:
            self._owner.detach()
        with self._lock:
            self._ended = self._ended or (reason, is_garbled)
            pending, self._pending = list(self._pending.values()), {}
        for answer in pending:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ChildEnded(*self._ended))
        with self._killing:
            if not self._is_killed:  # Later its process ids may belong to others.
                self._kill()
                self._is_killed = True
        if threading.current_thread() is not self._reader:
            self._reader.join(_EXIT_S)

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _kill(self) -> None:
        self._hang_up()
        self._process.terminate()  # The warden ends its descendants.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        for group in (self.pid, self._process.pid):  # In case the warden was killed, or cannot.
            with suppress(OSError):
                if group:
                    os.killpg(group, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)

    def _read(self) -> None:
        garbled = ""
        try:
            with self._connection.makefile("rb") as replies:
                self.pid = int(replies.readline() or 0)
                while line := replies.readline(self._max_reply_bytes + 1):
                    self._settle(line)
        except OSError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever hostile code replied, its process ends
            garbled = f"its reply could not be read: {error}"
        self.end(garbled or self._exit_reason(), bool(garbled))
        self._connection.close()

    def _settle(self, line: bytes) -> None:
        if len(line) > self._max_reply_bytes:
            raise ValueError(f"it has more than {self._max_reply_bytes} bytes")
        if not line.endswith(b"\n"):  # The connection closed meanwhile.
            return
        reply = json.loads(line)
        with self._lock:
            answer = self._pending.pop(reply["number"])
        if answer.set_running_or_notify_cancel():
            answer.set_result(reply)

    def _exit_reason(self) -> str:
        """Why the connection closed; a child that runs on is not waited for."""
        if self._ended is None and not _is_running(self.pid):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
        code = self._process.poll()
        if code is None:
            return "it closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _is_running(pid: int) -> bool:
    """False from the moment when the kernel begins to end the process, which is before it closes its connections."""
    try:
        status = _read_status(Path(f"/proc/{pid}"))
    except OSError:
        return False
    return status[0] != "Z" and not int(status[6]) & _PF_EXITING


def _read_status(process: Path) -> list[str]:
    """The fields of proc_pid_stat(5) from the third on: state, parent, group, session, terminal, its group, flags."""
    return (process / "stat").read_text().rpartition(")")[2].split()


# -- in the child ------------------------------------------------------------------------------------------------------


def run_child(serve: Callable[..., None], descriptor: str, memory_mb: str, arguments: str) -> None:
    """Become the warden; its child serves until the parent's end of the connection closes."""
    stand_guard(int(descriptor))
    channel = Channel(int(descriptor), restrain(int(memory_mb)))
    serve(channel, *json.loads(arguments))


class Channel:
    """Sends the child's process id, then replies in JSON: data from hostile code is never unpickled.

    The kernel closes the connection, not the interpreter on its way out: by then the exit code is certain.
    """

    def __init__(self, descriptor: int, output: "Capped") -> None:
        self._descriptor, self._output = descriptor, output
        self._incoming = os.fdopen(descriptor, "rb", closefd=False)
        self._write(b"%d\n" % os.getpid())

    def receive(self) -> tuple[str, str, tuple[Any, ...]] | None:
        """Wait for a call: its number, name and arguments; None: the parent is gone."""
        try:
            size = int.from_bytes(self._incoming.read(_SIZE_BYTES), "little")
            request = self._incoming.read(size)
        except OSError:
            return None
        if not size or len(request) < size:
            return None
        self._output.left = _PRINTED_CHARACTERS
        return pickle.loads(request)  # type: ignore[no-any-return]

    def send(self, number: str, reply: dict[str, Any]) -> None:
        self._write(json.dumps({"number": number, **reply}).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # The parent is gone, as the next receive reports.
            while line:
                line = line[os.write(self._descriptor, line) :]


def error_reply(message: str) -> dict[str, Any]:
    """With the frames of the user's code if an exception is being handled."""
    error = sys.exception()
    text = user_traceback(error) if error is not None else ""
    return {"error": message[:_MESSAGE_CHARACTERS], "traceback": cut_middle(text, _TRACEBACK_CHARACTERS, "\n[...]\n")}


class Capped(TextIOBase):
    """Standard output and error of the function: its first characters reach the parent's standard error."""

    def __init__(self, descriptor: int) -> None:
        self.left, self._descriptor = _PRINTED_CHARACTERS, descriptor

    def write(self, text: str) -> int:
        shown = text[: max(self.left, 0)]
        self.left -= len(text)
        if shown:
            os.write(self._descriptor, shown.encode(errors="replace"))
        return len(text)


def restrain(memory_mb: int) -> Capped:
    """Limit what user code can use up; returns where it prints to."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    with suppress(OSError):  # Where memory runs out, the kernel shall choose this process, not one of the job.
        Path("/proc/self/oom_score_adj").write_text("1000")
    output = Capped(os.dup(2))  # Not inherited: what it starts prints to nowhere.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout = sys.stderr = output
    return output


def stand_guard(*descriptors: int) -> None:
    """Fork: the child returns from here; shield and warden, which keep none of the ``descriptors``, stay
    until the child has ended."""
    _raise_shield(descriptors)
    with suppress(OSError, AttributeError):  # Elsewhere than on Linux orphans are not adopted.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watched = {signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)  # Waited for below, so that none is lost.
    parent, child = os.getppid(), os.fork()
    if child == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    status = None
    while status is None:
        woken = signal.sigwait(watched)
        if woken == signal.SIGTERM or os.getppid() != parent:
            break
        status = _reap(child)
    _end(child, status)


def _raise_shield(descriptors: tuple[int, ...]) -> None:
    """Fork: the child returns from here; this process stays, passes SIGTERM on, and ends as the child does."""
    watched = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    parent, warden = os.getppid(), os.fork()
    if warden == 0:
        os.setpgid(0, 0)  # What kills the shield's group leaves the one that cleans up.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    while (status := _reap(warden)) is None:
        woken = signal.sigtimedwait(watched, _TICK_S)
        if (woken is not None and woken.si_signo == signal.SIGTERM) or os.getppid() != parent:
            os.kill(warden, signal.SIGTERM)
    _end_like(status)


def _reap(child: int) -> int | None:
    """Take in everything that has ended; the status of ``child`` if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _end(child: int, status: int | None) -> NoReturn:
    """Kill all below, generation by generation, then end as the child did."""
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            _kill_children()
            ended, result = os.waitpid(-1, 0)
            status = result if ended == child else _reap(child) or status
    _end_like(status or 0)


def _end_like(status: int) -> NoReturn:
    """End with the exit code, or by the signal, of a process that has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _kill_children() -> None:
    """Kill every process whose parent is this one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if int(_read_status(entry)[1]) == os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
