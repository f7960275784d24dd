"""The processes of a verifier: the one that calls it, and the warden that answers for whatever that one does.

::

    parent (deadline.py) --starts--> warden --forks--> verifier --forks--> whatever the function starts
           '------------------ requests, replies ---------'

The warden imports nothing of the user's and never holds the connection. It is the parent that the verifier sees, so a
function that kills its parent does not hit the job; and it adopts every orphan below it (PR_SET_CHILD_SUBREAPER), so
that SIGTERM to the warden ends all of them, whatever sessions and groups they moved to. A process without privileges
can do no more: a function that looks for the job's processes and kills them by number is not stopped from it.
"""

import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress
from io import TextIOBase
from pathlib import Path
from typing import Any, NoReturn

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.rewards import WeightedRewards

PRINTED_CHARACTERS = 10_000
"""What a call may print; the rest is dropped."""

_MESSAGE_CHARACTERS, _TRACEBACK_CHARACTERS = 2_000, 20_000
_TICK_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_SIZE_BYTES = 8


def serve(weights: str, descriptor: str, load_limit_s: str, call_limit_s: str, memory_mb: str) -> None:
    """Become the warden; its child loads the function, says so, and answers calls until the parent's end closes.

    Args:
        weights: JSON of weights by ``"package.module:function"``.
        descriptor: the inherited end of the connection.
        load_limit_s: seconds after which loading ends the process.
        call_limit_s: seconds after which a call ends it. The parent does so earlier; if both parent and warden are
            gone, this does, even while the function holds the interpreter: SIGALRM's default action is the kernel's.
        memory_mb: address space of the function in MB, 0 for no limit.
    """
    stand_guard(int(descriptor))
    output = restrain(int(memory_mb))
    connection = socket.socket(fileno=int(descriptor))
    incoming = connection.makefile("rb")
    signal.setitimer(signal.ITIMER_REAL, float(load_limit_s))
    try:
        rewards = WeightedRewards.load(json.loads(weights))
    except Exception:  # noqa: BLE001 - the process boundary: whatever importing raises is the parent's to report
        _send(connection, {"trouble": "could not be loaded", "traceback": traceback.format_exc()})
        return
    reply: dict[str, Any] = {"pid": os.getpid()}
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            _send(connection, reply)
            size = int.from_bytes(incoming.read(_SIZE_BYTES), "little")
            request = incoming.read(size)
        except OSError:
            return
        if not size or len(request) < size:  # The parent is gone.
            return
        signal.setitimer(signal.ITIMER_REAL, float(call_limit_s))
        number, arguments = pickle.loads(request)
        output.left = PRINTED_CHARACTERS
        reply = {"number": number, **_call(rewards, arguments)}


def request_bytes(number: str, arguments: tuple[Any, ...]) -> bytes:
    """A call as the child reads it; raises what pickling its arguments raises."""
    body = pickle.dumps((number, arguments), pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_SIZE_BYTES, "little") + body


def _send(connection: socket.socket, reply: dict[str, Any]) -> None:
    """Replies are JSON: what comes back from a function that runs hostile text is never unpickled."""
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _call(rewards: WeightedRewards, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """``reward`` and its ``parts``, or ``trouble`` and its ``traceback``."""
    try:
        reward = rewards.now(*arguments)
    except VerifierError as error:
        return {"trouble": str(error)}
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever it raises is the parent's to report
        trouble = f"raised {type(error).__name__}: {error}"
        return {"trouble": trouble[:_MESSAGE_CHARACTERS], "traceback": traceback.format_exc()[-_TRACEBACK_CHARACTERS:]}
    return {"reward": reward.total, "parts": reward.parts}


class Capped(TextIOBase):
    """Standard output and error of the function: its first characters reach the parent's standard error."""

    def __init__(self, descriptor: int) -> None:
        self.left, self._descriptor = PRINTED_CHARACTERS, descriptor

    def write(self, text: str) -> int:
        kept = text[: max(self.left, 0)]
        self.left -= len(text)
        if kept:
            os.write(self._descriptor, kept.encode(errors="replace"))
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
    """Fork: the child returns from here as the verifier; the warden, which keeps none of the ``descriptors``, stays
    until the child has ended."""
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
            ended, found = os.waitpid(-1, 0)
            status = found if ended == child else _reap(child) or status
    code = os.waitstatus_to_exitcode(status or 0)
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
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
