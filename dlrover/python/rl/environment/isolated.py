"""An environment in a process of its own: what hangs, or takes the interpreter with it, is killed and begun anew.

::

    Guard --reset, step, close--> IsolatedEnvironment --requests--> warden --forks--> child: event loop, user's code
                                          '------------ a thread that reads <--replies-----------'

Replies are data, never unpickled. A call that is given up on is cancelled in the child; a child that does not confirm
that is stuck, and is replaced. The other calls it was in fail too, for their episodes lived there.
"""

import asyncio
import base64
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, BinaryIO

from dlrover.python.rl.common.errors import DataError, EnvironmentFailed
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.state_tree import load
from dlrover.python.rl.environment.base import StepResult, step_result
from dlrover.python.rl.environment.isolated_child import SIZE_BYTES, host

_LOG = get_logger(__name__)

_EXIT_S = 5.0
LONGEST_REPLY = 64 << 20
"""Bytes of a reply; a longer one is a fault of the environment."""


class IsolatedEnvironment:
    """Runs what :func:`~dlrover.python.rl.environment.functions.load_environment` loads in a child process.

    An episode's ``extra_info`` travels, so it holds plain data: what a state of a run may hold, see
    :mod:`~dlrover.python.rl.data.state_tree`. Other things stay in the environment, by a number in ``extra_info``.

    Args:
        where: the environment's name; a path is taken from the current folder.
        options: keyword arguments of its class.
        start_timeout_s: seconds the child may take to load it.
        grace_s: seconds in which the child must confirm that it has given up a call.
        memory_mb: address space of the child in MB; None: no limit.

    Attributes:
        episodes: how many it serves at a time, as the environment says; None: any number.

    Raises:
        EnvironmentFailed: the child could not load it.
    """

    def __init__(
        self,
        where: str,
        options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 120.0,
        grace_s: float = 2.0,
        memory_mb: int | None = None,
    ) -> None:
        self._where, self._options = where, dict(options or {})
        self._start_timeout_s, self._grace_s, self._memory_mb = start_timeout_s, grace_s, memory_mb
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self.episodes: int | None = None
        self._running()

    async def reset(self, extra_info: dict[str, Any]) -> str | None:
        """The first state, or None."""
        state, changed = await self._ask("reset", extra_info)
        extra_info.clear()
        extra_info.update(changed)
        return state  # type: ignore[no-any-return]

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        """The answer to an action."""
        return step_result(await self._ask("step", state, action, extra_info), extra_info)

    async def close(self, extra_info: dict[str, Any]) -> None:
        """End an episode."""
        await self._ask("close", extra_info)

    async def shutdown(self) -> None:
        """End the environment, and its process."""
        with self._lock:
            child, self._closed = self._child, True
        if child is None or child.is_gone:
            return
        try:
            await asyncio.wait_for(self._ask("shutdown"), _EXIT_S)
        except (TimeoutError, EnvironmentFailed) as error:
            _LOG.warning("%s did not shut down: %s", self._where, error or "no answer in time")
        finally:
            await asyncio.to_thread(child.end, "it was shut down")

    async def _ask(self, call: str, *arguments: Any) -> Any:
        child = self._child if self._closed else await asyncio.to_thread(self._running)
        if child is None or (self._closed and call not in ("close", "shutdown")):
            raise EnvironmentFailed("the environment has been shut down")
        number, answer = child.begin(call, arguments)
        try:
            await asyncio.to_thread(child.send, number, call, arguments)
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            threading.Thread(target=self._give_up, args=(child, number), daemon=True).start()
            raise

    def _running(self) -> "_Child":
        """The child, a new one where the last has ended."""
        with self._lock:
            if self._child is None or self._child.is_gone:
                if self._closed:
                    raise EnvironmentFailed("the environment has been shut down")
                self._child = _Child(self._where, self._options, self._memory_mb)
                try:
                    self.episodes = self._child.ready(self._start_timeout_s)
                except BaseException:
                    self._child.end("it could not be started")
                    raise
            return self._child

    def _give_up(self, child: "_Child", number: int) -> None:
        confirmed = child.cancel(number)
        try:
            confirmed.result(timeout=self._grace_s)
        except (TimeoutError, EnvironmentFailed):
            if not child.is_gone:
                _LOG.warning("%s is stuck in a call: its process is replaced", self._where)
                child.end("it was stuck in another sample's call")


class _Child:
    """A process, the calls it is in, and the thread that reads its replies."""

    def __init__(self, where: str, options: Mapping[str, Any], memory_mb: int | None) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._why_gone = ""
        self._requests, requests = socket.socketpair()
        self._replies, replies = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {host.__module__} import host; host(*sys.argv[1:])"
        given = [where, json.dumps(options), str(requests.fileno()), str(replies.fileno()), str(memory_mb or 0)]
        with requests, replies:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *given],
                stdin=subprocess.DEVNULL,
                pass_fds=[requests.fileno(), replies.fileno()],
                start_new_session=True,
            )
        threading.Thread(target=self._read, name=f"replies of {where}", daemon=True).start()

    @property
    def is_gone(self) -> bool:
        """It answers no more."""
        return bool(self._why_gone)

    def ready(self, timeout_s: float) -> int | None:
        """How many episodes the environment serves, once it is loaded."""
        try:
            episodes: int | None = self._waiting[0].result(timeout=timeout_s)
        except TimeoutError:
            raise EnvironmentFailed(f"the environment could not be loaded within {timeout_s:g} s") from None
        return episodes

    def begin(self, call: str, arguments: tuple[Any, ...]) -> tuple[int, "Future[Any]"]:
        """A number for a call, and where its answer will be."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._why_gone:
                answer.set_exception(EnvironmentFailed(f"{call}: the environment's process ended: {self._why_gone}"))
            else:
                self._waiting[number] = answer
        return number, answer

    def send(self, number: int, call: str, arguments: tuple[Any, ...]) -> None:
        """Ask; what cannot be sent is the call's own failure."""
        try:
            body = pickle.dumps((number, call, arguments), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - pickling raises what the objects' own code raises
            self._settle(number, error=EnvironmentFailed(f"{call} cannot be sent: {type(error).__name__}: {error}"))
            return
        with suppress(OSError), self._sending:  # The thread that reads sees the end as well.
            self._requests.sendall(len(body).to_bytes(SIZE_BYTES, "little") + body)

    def cancel(self, number: int) -> "Future[Any]":
        """Give up a call; the future is done when the child has confirmed it."""
        confirming, confirmed = self.begin("cancel", ())
        threading.Thread(target=self.send, args=(confirming, "cancel", (number,)), daemon=True).start()
        return confirmed

    def end(self, why: str) -> None:
        """Kill the process and all below it; the calls it is in fail with ``why``. May be called again."""
        with self._lock:
            self._why_gone = self._why_gone or why
            waiting, self._waiting = dict(self._waiting), {}
        for answer in waiting.values():
            _fail(answer, f"the environment's process ended: {self._why_gone}")
        for end in (self._requests, self._replies):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._process.terminate()  # The warden ends all that is below it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
            return
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_EXIT_S)

    def _read(self) -> None:
        why = "it closed its connection"
        try:
            with self._replies.makefile("rb") as replies:
                while head := replies.read(SIZE_BYTES):
                    reply = _parsed(replies, int.from_bytes(head, "little"))
                    self._settle(int(reply["number"]), reply)
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = f"its reply could not be read: {error}"
        self.end(why)
        for end in (self._requests, self._replies):
            end.close()

    def _settle(
        self, number: int, reply: Mapping[str, Any] | None = None, error: EnvironmentFailed | None = None
    ) -> None:
        with self._lock:
            answer = self._waiting.pop(number, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        try:
            if error is not None:
                raise error
            assert reply is not None
            if "trouble" in reply:
                raise EnvironmentFailed(str(reply["trouble"]), str(reply.get("traceback", "")))
            buffers = [memoryview(bytearray(base64.b64decode(part))) for part in reply["buffers"]]
            answer.set_result(load(str(reply["tree"]).encode("utf-8", "surrogatepass"), buffers))
        except (EnvironmentFailed, DataError, LookupError, TypeError, ValueError) as failed:
            known = failed if isinstance(failed, EnvironmentFailed) else EnvironmentFailed(f"no reply: {failed}")
            answer.set_exception(known)


def _parsed(replies: BinaryIO, size: int) -> Any:
    if size > LONGEST_REPLY:
        raise ValueError(f"it has {size} bytes, {LONGEST_REPLY} at most")
    return json.loads(replies.read(size))


def _fail(answer: "Future[Any]", why: str) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(EnvironmentFailed(why))
