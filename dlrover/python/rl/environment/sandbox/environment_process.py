# SPDX-License-Identifier: Apache-2.0
"""An environment in a separate process, which is killed and replaced when it hangs or crashes.

::

    Guard --reset, step, close--> IsolatedEnvironment --calls--> ChildProcess (an event loop, the user's code)

Replies are data, never unpickled. An abandoned call is cancelled in the child; a child that does not confirm this is
stuck and is replaced, and its other episodes fail. An episode that begins although its call was cancelled is closed. A
sync call that cannot be interrupted leaves its thread behind: a child with many of them is replaced between episodes.
"""

import asyncio
import base64
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from dlrover.python.rl.common.errors import DataError, EnvironmentFailed, EnvironmentLost
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.state_tree import dump, load
from dlrover.python.rl.environment.core.base import EnvironmentTraits, StepResult, validate_step
from dlrover.python.rl.environment.core.functions import count_abandoned, load_environment, run_in_thread
from dlrover.python.rl.environment.core.messages import Message, State
from dlrover.python.rl.environment.sandbox.child_process import (
    Channel,
    ChildEnded,
    ChildProcess,
    Reply,
    error_reply,
    pack_call,
)

_LOG = get_logger(__name__)

_EXIT_S = 5.0
_MAX_REPLY_BYTES = 64 << 20
_MOST_ABANDONED = 8  # threads of abandoned calls that a child may have when no episode is open


class IsolatedEnvironment:
    """Runs an environment of :func:`~dlrover.python.rl.environment.core.functions.load_environment` in a child process.

    An episode's ``extra_info`` is sent, so it must be plain data (:mod:`~dlrover.python.rl.data.state_tree`).

    Args:
        where: the environment's name; paths are relative to the current folder.
        options: keyword arguments of its class.
        start_timeout_s: seconds to load it.
        grace_s: seconds to confirm a cancelled call.
        memory_mb: address space of the child in MB; None: no limit.

    Raises:
        EnvironmentFailed: the child could not load it."""

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
        self._count_lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._closed = False
        self._open = 0  # episodes
        self._abandoned = 0  # abandoned calls that had not returned at the last count
        self._abandoned_s = -inf  # time of the last abandoned call
        self.traits = EnvironmentTraits()
        self._running()

    def reset(self, extra_info: dict[str, Any]) -> Coroutine[Any, Any, State | None]:
        self._open += 1  # even if the coroutine is cancelled before it begins: its episode is closed as well
        return self._reset(extra_info)

    async def _reset(self, extra_info: dict[str, Any]) -> State | None:
        state, changed = await self._ask("reset", extra_info)
        extra_info.clear()
        extra_info.update(changed)
        return state  # type: ignore[no-any-return]

    async def step(self, state: State, action: str | Message, extra_info: dict[str, Any]) -> StepResult:
        return validate_step(await self._ask("step", state, action, extra_info), extra_info, needs_state=False)

    async def close(self, extra_info: dict[str, Any]) -> None:
        try:
            await self._ask("close", extra_info)
        finally:
            self._open -= 1
            if self._abandoned > _MOST_ABANDONED:
                threading.Thread(target=self._replace_if_idle, daemon=True).start()

    async def shutdown(self) -> None:
        with self._lock:
            child, self._closed = self._child, True
        if child is not None and not child.is_ended:
            await asyncio.to_thread(self._end, child, "it was shut down")

    async def _ask(self, call: str, *arguments: Any) -> Any:
        child = self._child if self._closed else await asyncio.to_thread(self._running)
        if child is None or (self._closed and call != "close"):
            raise EnvironmentFailed("the environment has been shut down")
        try:
            number, body = await asyncio.to_thread(pack_call, call, *arguments)
        except Exception as error:
            raise EnvironmentFailed(f"{call} cannot be sent: {type(error).__name__}: {error}") from error
        answer = child.submit(number, body)
        try:
            return _decode(await asyncio.wrap_future(answer))
        except ChildEnded as error:
            raise EnvironmentLost(f"the environment's process ended: {error}") from None
        except asyncio.CancelledError:
            threading.Thread(target=self._cancel_call, args=(child, number), daemon=True).start()
            if call == "reset":
                threading.Thread(target=_close_abandoned, args=(child, answer), daemon=True).start()
            raise

    def _running(self) -> ChildProcess:
        """Return the child, which is new if the last one has ended."""
        with self._lock:
            if self._child is not None and not self._child.is_ended:
                return self._child
            if self._closed:
                raise EnvironmentFailed("the environment has been shut down")
            self._abandoned = 0
            arguments = [self._where, self._options]
            child = self._child = ChildProcess(self, EnvironmentServer, arguments, self._memory_mb, _MAX_REPLY_BYTES)
            try:
                self.traits = EnvironmentTraits(**_decode(child.ready.result(self._start_timeout_s)))
            except BaseException as error:
                child.end("it could not be started")
                if isinstance(error, TimeoutError):
                    message = f"the environment could not be loaded within {self._start_timeout_s:g} s"
                    raise EnvironmentFailed(message) from None
                if isinstance(error, ChildEnded):
                    raise EnvironmentFailed(f"the environment's process ended: {error}") from None
                raise
            return child

    def _cancel_call(self, child: ChildProcess, cancelled: str) -> None:
        self._abandoned_s = time.monotonic()
        try:
            self._count_abandoned(child, cancelled)
            self._replace_if_idle()
        except (TimeoutError, ChildEnded):
            if not child.is_ended:
                _LOG.warning("%s is stuck in a call: its process is replaced", self._where)
                child.end("it was stuck in another sample's call: blocking code in a coroutine stops all samples")

    def _replace_if_idle(self) -> None:
        """End a child with too many abandoned calls if no episode is open; the next episode starts a new child."""
        if self._open or self._abandoned <= _MOST_ABANDONED:
            return
        time.sleep(max(self._abandoned_s + self._grace_s - time.monotonic(), 0.0))  # most calls end at their next line
        with self._lock:  # an episode that begins now waits for a new child
            child = self._child
            if child is None or child.is_ended or self._closed or self._open:
                return
            with suppress(TimeoutError, ChildEnded):
                self._count_abandoned(child)
            if self._abandoned > _MOST_ABANDONED:
                _LOG.warning("%s has calls that do not return: its process is replaced", self._where)
                self._end(child, "too many of its calls did not return")

    def _count_abandoned(self, child: ChildProcess, cancelled: str = "") -> None:
        with self._count_lock:  # one call at a time: otherwise an older count may be stored last
            self._abandoned = _decode(child.submit(*pack_call("cancel", cancelled)).result(self._grace_s))

    def _end(self, child: ChildProcess, reason: str) -> None:
        """End a child after the user's own ``shutdown``."""
        try:
            _decode(child.submit(*pack_call("shutdown")).result(_EXIT_S))
        except (TimeoutError, ChildEnded, EnvironmentFailed) as error:
            _LOG.warning("%s did not shut down: %s", self._where, str(error) or "no answer in time")
        finally:
            child.end(reason)


def _close_abandoned(child: ChildProcess, answer: "Future[Reply]") -> None:
    """Close the episode of an abandoned call if it begins nevertheless."""
    with suppress(ChildEnded, EnvironmentFailed):
        _, extra_info = _decode(answer.result())  # waits: for the user's code, or the end of its process
        closed = child.submit(*pack_call("close", extra_info)).result()  # waits: likewise
        if "error" in closed:
            _LOG.warning("an abandoned episode did not close: %s", closed["error"])


def _encode(value: Any) -> dict[str, Any]:
    tree = dump(value)
    buffers = [base64.b64encode(buffer).decode() for buffer in tree.buffers]
    return {"tree": tree.skeleton.decode("utf-8", "surrogatepass"), "buffers": buffers}


def _decode(reply: dict[str, Any]) -> Any:
    if "error" in reply:
        raise EnvironmentFailed(str(reply["error"]), str(reply.get("traceback", "")))
    try:
        buffers = [memoryview(bytearray(base64.b64decode(part))) for part in reply["buffers"]]
        return load(str(reply["tree"]).encode("utf-8", "surrogatepass"), buffers)
    except (DataError, LookupError, TypeError, ValueError) as error:
        raise EnvironmentFailed(f"no reply: {error}") from error


# -- in the child ------------------------------------------------------------------------------------------------------


class EnvironmentServer:
    """Answers calls, many at a time, in the child."""

    def __init__(self, where: str, options: dict[str, Any]) -> None:
        self._environment = load_environment(where, options)
        self.ready = _encode(dict(vars(self._environment.traits)))
        self._calls: dict[str, asyncio.Task[Reply]] = {}

    def serve(self, channel: Channel) -> None:
        asyncio.run(self._serve(channel))

    async def _serve(self, channel: Channel) -> None:
        while (request := await run_in_thread(channel.receive)) is not None:
            number, call, arguments = request
            if call == "cancel":
                if task := self._calls.get(arguments[0]):
                    task.cancel()
                await asyncio.sleep(0)  # the task abandons its thread
                channel.send(number, _encode(count_abandoned()))
                continue
            self._calls[number] = asyncio.create_task(self._answer(call, arguments))
            self._calls[number].add_done_callback(partial(self._reply, channel, number))

    def _reply(self, channel: Channel, number: str, task: "asyncio.Task[Reply]") -> None:
        del self._calls[number]
        if task.cancelled():
            channel.send(number, error_reply(EnvironmentFailed("it was cancelled")))
        elif task.exception() is None:  # otherwise this process ends
            channel.send(number, task.result())  # waits: no more, it is done

    async def _answer(self, call: str, arguments: tuple[Any, ...]) -> Reply:
        try:
            returned = await getattr(self._environment, call)(*arguments)
            if call == "reset":
                returned = [returned, arguments[0]]
            elif call == "step":
                returned = {
                    name: value for name, value in vars(returned).items() if name != "next_state" or value is not None
                }
            try:
                return _encode(returned)
            except DataError as error:
                raise EnvironmentFailed(f"{call} returned data that cannot be sent: {error}") from None
        except Exception as error:  # noqa: BLE001 - the process boundary: the parent reports any error
            return error_reply(error, call)
