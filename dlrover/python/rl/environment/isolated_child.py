"""The process of an isolated environment: an event loop that answers calls until its parent is gone."""

import asyncio
import base64
import json
import pickle
import socket
import traceback
from functools import partial
from typing import Any

from dlrover.python.rl.common.errors import DataError, EnvironmentFailed
from dlrover.python.rl.data.state_tree import dump
from dlrover.python.rl.environment.child import PRINTED_CHARACTERS, Capped, restrain, stand_guard
from dlrover.python.rl.environment.functions import UserEnvironment, load_environment

SIZE_BYTES = 8
_MESSAGE_CHARACTERS, _TRACEBACK_CHARACTERS = 2_000, 20_000


def host(where: str, options: str, requests: str, replies: str, memory_mb: str) -> None:
    """Become the warden; its child loads the environment, says so, and answers.

    Args:
        where: the environment's name.
        options: JSON of the keyword arguments of its class.
        requests: the inherited end that calls come from.
        replies: that where answers go.
        memory_mb: address space in MB, 0 for no limit.
    """
    reading, writing = socket.socket(fileno=int(requests)), socket.socket(fileno=int(replies))
    stand_guard(reading.fileno(), writing.fileno())
    output = restrain(int(memory_mb))
    try:
        environment = load_environment(where, json.loads(options))
    except BaseException as error:  # noqa: BLE001 - the process boundary: importing may even exit
        _write(writing, {"number": 0, "trouble": str(error)[:_MESSAGE_CHARACTERS], "traceback": _trace()})
        return
    _write(writing, {"number": 0, **_tree(environment.episodes)})
    asyncio.run(_Server(environment, writing, output).serve(reading))


class _Server:
    def __init__(self, environment: UserEnvironment, writing: socket.socket, output: Capped) -> None:
        self._environment, self._writing, self._output = environment, writing, output
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reading: socket.socket) -> None:
        """Answer calls side by side until the other end closes."""
        reader, _ = await asyncio.open_connection(sock=reading)
        while True:
            try:
                size = int.from_bytes(await reader.readexactly(SIZE_BYTES), "little")
                request = await reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return
            number, call, arguments = pickle.loads(request)
            if call == "cancel":
                self._cancel(number, *arguments)
                continue
            self._output.left = PRINTED_CHARACTERS
            task = asyncio.create_task(self._answer(number, call, arguments))
            self._calls[number] = task
            task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, _: "asyncio.Task[None]") -> None:
        self._calls.pop(number, None)

    def _cancel(self, number: int, call: int) -> None:
        if call in self._calls:
            self._calls[call].cancel()
        _write(self._writing, {"number": number, **_tree(None)})

    async def _answer(self, number: int, call: str, arguments: tuple[Any, ...]) -> None:
        try:
            returned = await getattr(self._environment, call)(*arguments)
            if call == "reset":
                returned = [returned, arguments[0]]
            elif call == "step":
                returned = dict(vars(returned))
            reply = _tree(returned)
        except Exception as error:  # noqa: BLE001 - the process boundary: whatever it raises is the parent's to report
            reply = {"trouble": _trouble(call, error)[:_MESSAGE_CHARACTERS], "traceback": _trace()}
        _write(self._writing, {"number": number, **reply})


def _trouble(call: str, error: Exception) -> str:
    if isinstance(error, DataError):
        return f"{call} gave data that cannot travel: {error}"
    return str(error) if isinstance(error, EnvironmentFailed) else f"{call} raised {type(error).__name__}: {error}"


def _tree(value: Any) -> dict[str, Any]:
    tree = dump(value)
    buffers = [base64.b64encode(buffer).decode() for buffer in tree.buffers]
    return {"tree": tree.skeleton.decode("utf-8", "surrogatepass"), "buffers": buffers}


def _trace() -> str:
    return traceback.format_exc()[-_TRACEBACK_CHARACTERS:]


def _write(writing: socket.socket, reply: dict[str, Any]) -> None:
    # Blocking: the parent has a thread that does nothing but read.
    body = json.dumps(reply).encode("utf-8", "surrogatepass")
    writing.sendall(len(body).to_bytes(SIZE_BYTES, "little") + body)
