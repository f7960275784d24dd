"""Connections between rank 0 and the others: whole messages, both ways, and news of the other's end.

Nobody who sends waits for the other side, so two that send each other much at once do not wait for each other::

    send -> queue -> thread -> socket ... socket -> thread -> on_message, in the end on_end
"""

import hmac
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

import cloudpickle

from dlrover.python.rl.common.errors import ClusterUnavailable, InvalidJob, Problem
from dlrover.python.rl.common.listening import listening_socket
from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

MEETING_S = 300.0
"""How long the processes wait for each other at the start."""

_HELLO_S = 10.0
_SECRET_BYTES = 32
_HELLO_BYTES = _SECRET_BYTES + 16
# A machine that vanishes without a word is noticed after a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


@dataclass(frozen=True)
class Place:
    """Which of the launched processes this is.

    Attributes:
        address: of rank 0's machine.
        nodes: machines in all.
        attempt: of the launcher, which may start all processes again.
        meeting: how often the same processes have met before.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    nodes: int = 1
    attempt: int = 0
    meeting: int = 0

    @property
    def board_key(self) -> str:
        """Where the others find rank 0: a launcher's board lasts longer than its processes."""
        return f"dlrover-rl/rank-0/{self.attempt}.{self.meeting}"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Place":
        """Read what launchers write; without a launcher it is a world of one.

        Raises:
            InvalidJob: the variables say that there are others, and not where.
        """
        world = int(env.get("WORLD_SIZE", 1))
        if world > 1 and ("RANK" not in env or "MASTER_ADDR" not in env or "MASTER_PORT" not in env):
            what = (
                f"WORLD_SIZE is {world}, but RANK, MASTER_ADDR and MASTER_PORT are not all there: start with torchrun"
            )
            raise InvalidJob([Problem("environment", what)])
        local_world = int(env.get("LOCAL_WORLD_SIZE", world))
        return cls(
            int(env.get("RANK", 0)),
            world,
            int(env.get("LOCAL_RANK", 0)),
            local_world,
            env.get("MASTER_ADDR", "127.0.0.1") if world > 1 else "127.0.0.1",
            int(env.get("GROUP_WORLD_SIZE", -(-world // local_world))),
            int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )


class Board(Protocol):
    """Where the processes find each other: a torch ``Store``."""

    def set(self, key: str, value: bytes) -> None:
        """Let all see ``value``."""
        ...

    def get(self, key: str) -> bytes:
        """The value; waits until it is there, for as long as the store is patient."""
        ...


class Link:
    """A connection with another process of the job. Thread safe."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection: Connection[Any, Any] = Connection(connection.detach())
        self._outbox: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._lock, self._at_work = threading.Lock(), 2
        self.ended = threading.Event()

    def begin(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Pass on what comes, from now on and in a thread of its own; and that nothing comes any more."""
        for target, arguments in ((self._write_all, ()), (self._read_all, (on_message, on_end))):
            threading.Thread(target=target, args=arguments, name="dlrover-link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send ``message``, as it is now; large buffers in it must not change. Returns at once.

        Raises:
            Exception: it cannot be pickled.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = cloudpickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        self._outbox.put([len(buffers).to_bytes(4, "big") + data, *(buffer.raw() for buffer in buffers)])

    def hear(self, timeout_s: float) -> bytes:
        """What the other one says first, ``b""`` if it is not whole in time; before :meth:`begin`."""
        deadline_s, heard = time.monotonic() + timeout_s, b""
        with suppress(OSError):
            while self._connection.poll(max(deadline_s - time.monotonic(), 0.0)):
                part = os.read(self._connection.fileno(), _HELLO_BYTES - len(heard))
                heard += part
                if len(heard) == _HELLO_BYTES:
                    return heard.rstrip()
                if not part:
                    break
        return b""

    def say(self, words: bytes) -> None:
        """What :meth:`hear` gives on the other side."""
        os.write(self._connection.fileno(), words.ljust(_HELLO_BYTES))

    def close(self) -> None:
        """Hear and say nothing more; before :meth:`begin`."""
        self._connection.close()

    def end(self) -> None:
        """Hang up once all is sent; after :meth:`begin`. The other one is told the end, and hangs up too."""
        self._outbox.put(None)

    def _write_all(self) -> None:
        try:
            while (parts := self._outbox.get()) is not None:  # waits: for somebody to send something; a daemon thread
                for part in parts:
                    self._connection.send_bytes(part)
            with socket.socket(fileno=os.dup(self._connection.fileno())) as handle:
                handle.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other one is gone, which whoever reads here is told
        finally:
            self._leave()

    def _read_all(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        try:
            while True:
                on_message(self._read())
        except (EOFError, OSError):
            pass
        except Exception:  # noqa: BLE001 -- the boundary of a thread
            _LOG.exception("a message of another process cannot be taken")
        finally:
            self.ended.set()
            self.end()
            self._leave()
            on_end()

    def _leave(self) -> None:
        with self._lock:
            self._at_work -= 1
            if not self._at_work:
                self._connection.close()

    def _read(self) -> Any:
        first = self._connection.recv_bytes()  # waits: for messages, until the other process ends; a daemon thread
        count = int.from_bytes(first[:4], "big")
        buffers = [self._connection.recv_bytes() for _ in range(count)]  # waits: likewise
        return pickle.loads(memoryview(first)[4:], buffers=buffers)


def call_in(place: Place, board: Board) -> dict[int, Link]:
    """At rank 0: wait for the others. Their links, by rank.

    Raises:
        ClusterUnavailable: some did not come in time; names them.
    """
    links: dict[int, Link] = {}
    secret = secrets.token_bytes(_SECRET_BYTES)
    deadline_s = time.monotonic() + MEETING_S
    with listening_socket(place.address, backlog=128) as server:
        board.set(place.board_key, secret + str(server.getsockname()[1]).encode())
        while len(links) < place.world_size - 1:
            server.settimeout(max(deadline_s - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()  # waits: until the deadline set above
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, place.world_size) if rank not in links)
                raise ClusterUnavailable(f"rank {missing} did not come within {MEETING_S:g} s") from None
            link = Link(connection)
            words = link.hear(_HELLO_S)
            if hmac.compare_digest(words[:_SECRET_BYTES], secret):
                links[int(words[_SECRET_BYTES:])] = link
            else:
                link.close()
    return links


def refuse(place: Place, board: Board) -> None:
    """At rank 0: tell the others that nothing will be started."""
    board.set(place.board_key, b"")


def join(place: Place, board: Board) -> Link | None:
    """At another rank: the link with rank 0; None when it starts nothing.

    Raises:
        ClusterUnavailable: it cannot be reached.
    """
    try:
        found = bytes(board.get(place.board_key))  # waits: as long as the store is patient
        if not found:
            return None
        secret, port = found[:_SECRET_BYTES], int(found[_SECRET_BYTES:])
        link = Link(socket.create_connection((place.address, port), timeout=MEETING_S))
    except (OSError, RuntimeError) as error:  # torch's store raises RuntimeErrors
        raise ClusterUnavailable(f"rank {place.rank} cannot reach rank 0 at {place.address}: {error}") from error
    link.say(secret + str(place.rank).encode())
    return link
