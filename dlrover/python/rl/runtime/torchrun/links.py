# SPDX-License-Identifier: Apache-2.0
"""Authenticated connections between rank 0 and the other ranks of a launch.

A sender never waits for the receiver, so two processes that send each other large messages cannot deadlock::

    send -> queue -> thread -> socket ... socket -> thread -> on_message, at the end on_end
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
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import cloudpickle

from dlrover.python.rl.common.errors import ClusterUnavailable, ConfigError, InvalidJob
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.sockets import listening_socket

_LOG = get_logger(__name__)

MEETING_S = 300.0  # how long the processes wait for each other at the start
_HELLO_S = 10.0
_SECRET_BYTES = 32
_HELLO_BYTES = _SECRET_BYTES + 16
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # notices a lost machine after a minute


@dataclass(frozen=True)
class LaunchEnv:
    """This process's rank in a launch, as torchrun's environment variables give it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"  # of rank 0's machine
    nodes: int = 1  # number of machines
    attempt: int = 0  # how often the launcher has restarted all processes
    meeting: int = 0  # jobs that the same processes have run before

    @property
    def store_key(self) -> str:
        """Key of rank 0's address in the store; unique per restart, because the store outlives the processes."""
        return f"dlrover-rl/rank-0/{self.attempt}.{self.meeting}"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "LaunchEnv":
        """Read the variables of a launcher; without one the world size is 1. Raises InvalidJob if some are missing."""
        world = int(env.get("WORLD_SIZE", 1))
        if world > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
            message = "but RANK, MASTER_ADDR and MASTER_PORT are not all set: start with torchrun"
            raise InvalidJob([ConfigError("environment", f"WORLD_SIZE is {world}, {message}")])
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
        self._lock, self._open_threads = threading.Lock(), 2
        self.ended = threading.Event()

    def start(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Start the two threads; ``on_message`` and ``on_end`` run in the reading one."""
        for target, arguments in ((self._write_all, ()), (self._read_all, (on_message, on_end))):
            threading.Thread(target=target, args=arguments, name="dlrover-link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue ``message``, whose large buffers must not change. Raises an error if it cannot be pickled."""
        buffers: list[pickle.PickleBuffer] = []
        data = cloudpickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        self._outbox.put([len(buffers).to_bytes(4, "big") + data, *(buffer.raw() for buffer in buffers)])

    def receive_hello(self, timeout_s: float) -> bytes:
        """Return the other side's first bytes, ``b""`` if incomplete after the timeout; before :meth:`start`."""
        deadline_s, data = time.monotonic() + timeout_s, b""
        with suppress(OSError):
            while self._connection.poll(max(deadline_s - time.monotonic(), 0.0)):
                part = os.read(self._connection.fileno(), _HELLO_BYTES - len(data))
                data += part
                if len(data) == _HELLO_BYTES:
                    return data.rstrip()
                if not part:
                    break
        return b""

    def close(self) -> None:
        """Close at once; before :meth:`start`."""
        self._connection.close()

    def end(self) -> None:
        """Close once all queued messages are sent; after :meth:`start`. The other side then closes too."""
        self._outbox.put(None)

    def _write_all(self) -> None:
        try:
            while (parts := self._outbox.get()) is not None:  # waits: for a message to send; a daemon thread
                for part in parts:
                    self._connection.send_bytes(part)
            with socket.socket(fileno=os.dup(self._connection.fileno())) as handle:
                handle.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the reading thread reports that the other process is gone
        finally:
            self._leave()

    def _read_all(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        try:
            while True:
                first = self._connection.recv_bytes()  # waits: for a message of the other process, or its end
                count = int.from_bytes(first[:4], "big")
                buffers = [self._connection.recv_bytes() for _ in range(count)]  # waits: likewise
                message = pickle.loads(memoryview(first)[4:], buffers=buffers)  # noqa: TID251 -- of a rank of the run
                on_message(message)
        except (EOFError, OSError):
            pass
        except Exception:  # noqa: BLE001 -- the boundary of a thread
            _LOG.exception("a message of another process cannot be read")
        finally:
            self.ended.set()
            self.end()
            self._leave()
            on_end()

    def _leave(self) -> None:
        with self._lock:
            self._open_threads -= 1
            if not self._open_threads:
                self._connection.close()


def accept_all(launch: LaunchEnv, store: Any) -> dict[int, Link]:
    """Wait at rank 0 for the other ranks, by a torch ``Store``, and return their links. Raises ClusterUnavailable."""
    links: dict[int, Link] = {}
    secret = secrets.token_bytes(_SECRET_BYTES)
    deadline_s = time.monotonic() + MEETING_S
    with listening_socket(launch.address, backlog=128) as server:
        store.set(launch.store_key, secret + str(server.getsockname()[1]).encode())
        while len(links) < launch.world_size - 1:
            server.settimeout(max(deadline_s - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()  # waits: until the deadline set above
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, launch.world_size) if rank not in links)
                raise ClusterUnavailable(f"rank {missing} did not connect within {MEETING_S:g} s") from None
            link = Link(connection)
            hello = link.receive_hello(_HELLO_S)
            if hmac.compare_digest(hello[:_SECRET_BYTES], secret):
                links[int(hello[_SECRET_BYTES:])] = link
            else:
                link.close()
    return links


def refuse_all(launch: LaunchEnv, store: Any) -> None:
    """Report from rank 0 that no job will start, and wait until all ranks know: the store may end with this process."""
    store.set(launch.store_key, b"")
    with suppress(RuntimeError):  # a rank that is gone, or late, needs no refusal
        store.wait([_refused_key(launch, rank) for rank in range(1, launch.world_size)], timedelta(seconds=_HELLO_S))


def _refused_key(launch: LaunchEnv, rank: int) -> str:
    return f"{launch.store_key}/refused/{rank}"


def join(launch: LaunchEnv, store: Any) -> Link | None:
    """Connect another rank with rank 0; returns None if that starts no job. Raises ClusterUnavailable."""
    try:
        entry = bytes(store.get(launch.store_key))  # waits: until the store's own timeout
        if not entry:
            store.set(_refused_key(launch, launch.rank), b"1")
            return None
        secret, tcp_port = entry[:_SECRET_BYTES], int(entry[_SECRET_BYTES:])
        connection = socket.create_connection((launch.address, tcp_port), timeout=MEETING_S)
        connection.sendall((secret + str(launch.rank).encode()).ljust(_HELLO_BYTES))
    except (OSError, RuntimeError) as error:  # torch's store raises RuntimeErrors
        raise ClusterUnavailable(f"rank {launch.rank} cannot reach rank 0 at {launch.address}: {error}") from error
    return Link(connection)
