# SPDX-License-Identifier: Apache-2.0
"""An environment in a separate process, which is killed and replaced when it hangs or crashes.

::

    Guard --reset, step, close--> IsolatedEnvironment --calls--> ChildProcess (an event loop, the user's code)

Replies are data, never unpickled. An abandoned call is cancelled in the child; a child that does not confirm that is
stuck and is replaced. Its other calls fail too, because their episodes lived there. A sync call that cannot be
interrupted leaves its thread behind: a child with many of them is replaced between episodes.
"""

import asyncio
import base64
import secrets
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from dlrover.python.rl.common.errors import DataError, EnvironmentFailed
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.state_tree import dump, load
from dlrover.python.rl.environment.core.base import EnvironmentTraits, StepResult, validate_step
from dlrover.python.rl.environment.core.functions import (
    UserEnvironment,
    count_abandoned,
    load_environment,
    run_in_thread,
)
from dlrover.python.rl.environment.core.messages import Message, State
from dlrover.python.rl.environment.sandbox.child_process import (
    READY,
    Channel,
    ChildEnded,
    ChildProcess,
    error_reply,
    pack_request,
)

_LOG = get_logger(__name__)

_EXIT_S = 5.0
_MAX_REPLY_BYTES = 64 << 20
_REMEMBERED = 64
"""Episodes whose first answer may still be refused."""

_MOST_ABANDONED = 8
"""Threads of abandoned calls that a child may have when no episode is open."""


class IsolatedEnvironment:
    """Runs an environment of :func:`~dlrover.python.rl.environment.core.functions.load_environment` in a child process.

    An episode's ``extra_info`` is sent, so it holds plain data (:mod:`~dlrover.python.rl.data.state_tree`).

    Args:
        where: the environment's name; paths are relative to the current folder.
        options: keyword arguments of its class.
        start_timeout_s: seconds to load it.
        grace_s: seconds to confirm a cancelled call.
        memory_mb: address space of the child in MB; None: no limit.

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
        self._child: ChildProcess | None = None
        self._closed = False
        self._open = 0  # episodes
        self._abandoned = 0  # calls that had not returned when they were last counted
        self._abandoned_s = -inf  # when the last one was
        self.traits = EnvironmentTraits()
        self._running()

    def reset(self, extra_info: dict[str, Any]) -> Coroutine[Any, Any, State | None]:
        self._open += 1  # also if the coroutine is cancelled before it begins: its episode is closed as well
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
        number = secrets.token_hex(8)
        try:
            request = await asyncio.to_thread(pack_request, number, call, arguments)
        except Exception as error:
            raise EnvironmentFailed(f"{call} cannot be sent: {type(error).__name__}: {error}") from error
        answer = child.begin(number)
        try:
            await asyncio.to_thread(child.send, request)
            return _decode(await asyncio.wrap_future(answer))
        except ChildEnded as error:
            raise _ended(error) from None
        except asyncio.CancelledError:
            threading.Thread(target=self._cancel_call, args=(child, number), daemon=True).start()
            raise

    def _running(self) -> ChildProcess:
        """Return the child, a new one if the last has ended."""
        with self._lock:
            if self._child is None or self._child.is_ended:
                if self._closed:
                    raise EnvironmentFailed("the environment has been shut down")
                self._abandoned = 0
                arguments = [self._where, self._options]
                self._child = ChildProcess(serve_environment, arguments, self._memory_mb, _MAX_REPLY_BYTES)
                self._child.end_with(self)
                try:
                    self.traits = self._await_ready(self._child)
                except BaseException:
                    self._child.end("it could not be started")
                    raise
            return self._child

    def _await_ready(self, child: ChildProcess) -> EnvironmentTraits:
        try:
            return EnvironmentTraits(**_decode(child.ready.result(timeout=self._start_timeout_s)))
        except TimeoutError:
            message = f"the environment could not be loaded within {self._start_timeout_s:g} s"
            raise EnvironmentFailed(message) from None
        except ChildEnded as error:
            raise _ended(error) from None

    def _cancel_call(self, child: ChildProcess, cancelled: str) -> None:
        self._abandoned_s = time.monotonic()
        try:
            self._count_abandoned(child, cancelled)
            self._replace_if_idle()
        except (TimeoutError, ChildEnded):
            if not child.is_ended:
                _LOG.warning("%s is stuck in a call: its process is replaced", self._where)
                child.end("it was stuck in another sample's call: what blocks in a coroutine holds up all samples")

    def _replace_if_idle(self) -> None:
        """End a child with too many abandoned calls if no episode is open; the next episode starts another one."""
        child = self._child
        if child is None or not self._is_replaceable(child):
            return
        time.sleep(max(self._abandoned_s + self._grace_s - time.monotonic(), 0.0))  # most end at their next line
        with suppress(TimeoutError, ChildEnded):
            self._count_abandoned(child)
        with self._lock:
            if not self._is_replaceable(child):
                return
            self._child = None
        _LOG.warning("%s has calls that do not return: its process is replaced", self._where)
        self._end(child, "too many of its calls did not return")

    def _is_replaceable(self, child: ChildProcess) -> bool:
        return child is self._child and not (self._closed or self._open) and self._abandoned > _MOST_ABANDONED

    def _count_abandoned(self, child: ChildProcess, cancelled: str = "") -> None:
        count = _decode(_request(child, "cancel", (cancelled,), self._grace_s))
        if child is self._child:
            self._abandoned = count

    def _end(self, child: ChildProcess, reason: str) -> None:
        """End a child after the user's own ``shutdown``."""
        try:
            _decode(_request(child, "shutdown", (), _EXIT_S))
        except (TimeoutError, ChildEnded, EnvironmentFailed) as error:
            _LOG.warning("%s did not shut down: %s", self._where, str(error) or "no answer in time")
        finally:
            child.end(reason)


def _request(child: ChildProcess, call: str, arguments: tuple[Any, ...], timeout_s: float) -> dict[str, Any]:
    """The reply to a call. Raises TimeoutError and ChildEnded."""
    number = secrets.token_hex(8)
    answer = child.begin(number)
    request = pack_request(number, call, arguments)
    threading.Thread(target=child.send, args=(request,), daemon=True).start()
    return answer.result(timeout=timeout_s)


def _ended(error: ChildEnded) -> EnvironmentFailed:
    return EnvironmentFailed(f"the environment's process ended: {error}")


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


def serve_environment(channel: Channel, where: str, options: dict[str, Any]) -> None:
    """Load the environment ``where`` and answer calls, many at a time."""
    try:
        environment = load_environment(where, options)
        traits = _encode(dict(vars(environment.traits)))
    except BaseException as error:  # noqa: BLE001 - the process boundary: importing may even exit
        channel.send(READY, error_reply(str(error)))
        return
    channel.send(READY, traits)
    asyncio.run(_Server(environment, channel).serve())


class _Server:
    def __init__(self, environment: UserEnvironment, channel: Channel) -> None:
        self._environment, self._channel = environment, channel
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, Any] = {}  # extra_info of the last episodes, by their first call
        self._closing: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while (request := await run_in_thread(self._channel.receive)) is not None:
            number, call, arguments = request
            if call == "cancel":
                task = self._calls.get(arguments[0])
                if (task is None or not task.cancel()) and arguments[0] in self._begun:
                    self._close(self._begun.pop(arguments[0]))  # the answer was on its way, and is not taken
                await asyncio.sleep(0)  # the task abandons its thread
                self._channel.send(number, _encode(count_abandoned()))
                continue
            task = asyncio.create_task(self._answer(number, call, arguments))
            self._calls[number] = task
            task.add_done_callback(partial(self._forget, number))

    def _forget(self, number: str, task: "asyncio.Task[None]") -> None:
        del self._calls[number]
        if task.cancelled():
            self._channel.send(number, error_reply("it was cancelled"))

    def _begin(self, number: str, extra_info: Any) -> None:
        """An episode has begun; it ends at once if its first call was cancelled, and answers all the same."""
        if self._calls[number].cancelling():
            self._close(extra_info)
            raise EnvironmentFailed("it was cancelled")
        self._begun[number] = extra_info
        while len(self._begun) > _REMEMBERED:
            del self._begun[next(iter(self._begun))]

    def _close(self, extra_info: Any) -> None:
        """End an episode that the other side does not know of."""

        async def close() -> None:
            try:
                await self._environment.close(extra_info)
            except Exception as error:  # noqa: BLE001 - the user's code; no caller waits for it
                _LOG.warning("an episode that was given up did not close: %s: %s", type(error).__name__, error)

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _answer(self, number: str, call: str, arguments: tuple[Any, ...]) -> None:
        try:
            returned = await getattr(self._environment, call)(*arguments)
            if call == "reset":
                self._begin(number, arguments[0])
                returned = [returned, arguments[0]]
            elif call == "step":
                returned = {
                    name: value for name, value in vars(returned).items() if name != "next_state" or value is not None
                }
            reply = _encode(returned)
        except EnvironmentFailed as error:
            reply = error_reply(str(error))
        except DataError as error:
            reply = error_reply(f"{call} returned data that cannot be sent: {error}")
        except Exception as error:  # noqa: BLE001 - the process boundary: whatever it raises the parent reports it
            reply = error_reply(f"{call} raised {type(error).__name__}: {error}")
        self._channel.send(number, reply)
