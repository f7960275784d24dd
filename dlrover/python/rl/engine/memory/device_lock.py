# SPDX-License-Identifier: Apache-2.0
"""A lock on a device, shared by the processes of one node, which get it in the order of their requests.

::

    folder/
      ORDER                    locked (flock) while the queue changes
      000000012.wait           a process that waits for the device or has it; locked by that process
      000000013.wait           ... the lowest number that is locked has the device
      ....memory               the bytes of each process on the device

A process that dies leaves the queue, because the kernel releases its locks.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, MemoryLedger, format_owner_bytes, read_living

_LOG = get_logger(__name__)

_SUFFIX = ".wait"
_POLL_S = 0.002


class DeviceLock:
    """The right of one role at a time to compute on a device, and if not all engines fit, to hold their bytes there.

    Args:
        folder: shared by all processes that use the device, in the node's memory. Its owner removes it.
        owner: the role's name in messages: ``ROLLOUT[0]``.
        memory: this process's bytes on the device, for the messages of waiting processes.
    """

    def __init__(self, folder: Path, owner: str, memory: DeviceMemory | None = None) -> None:
        self._folder, self.owner = Path(folder), owner
        self._memory = memory
        self._ledger = MemoryLedger(self._folder)
        if memory is not None and memory.ledger is None:
            memory.ledger = self._ledger
        self._entry: tuple[Path, int] | None = None

    @property
    def is_held(self) -> bool:
        return self._entry is not None

    def acquire(self, timeout_s: float = 600.0) -> None:
        """Wait for the device. Raises an ``EngineError`` if this role has it already, or does not get it in time: this
        one names the holder, its bytes and the queue."""
        if self._entry is not None:
            raise EngineError(f"{self.owner} has the device already")
        entry = self._enqueue()
        deadline_s = time.monotonic() + timeout_s
        try:
            while ahead := self._list_ahead(entry[0]):
                if time.monotonic() > deadline_s:
                    raise EngineError(self._format_timeout(ahead, timeout_s))
                time.sleep(_POLL_S)
            self._write(entry[1], "since_s")
        except BaseException:
            self._dequeue(entry)
            raise
        self._entry = entry
        self._publish()

    def release(self) -> None:
        """Give the device to the next role. Bytes that this role still has on it stay in the ledger."""
        if self._entry is None:
            raise EngineError(f"{self.owner} does not have the device")
        self._publish()
        entry, self._entry = self._entry, None
        self._dequeue(entry)

    def is_wanted(self) -> bool:
        """Return True if this role has the device, and another one waits for it."""
        entry = self._entry
        return entry is not None and any(path.name > entry[0].name for path in self._folder.glob(f"*{_SUFFIX}"))

    def close(self) -> None:
        """Release the device if this role has it, and remove this process from the ledger."""
        if self._entry is not None:
            self.release()
        if self._memory is not None and self._memory.ledger is self._ledger:
            self._memory.ledger = None
        self._ledger.close()

    def _publish(self) -> None:
        if self._memory is not None:
            with suppress(OSError):  # only messages need it
                self._ledger.publish(self._memory.by_owner())

    @contextmanager
    def _ordering(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / "ORDER", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits: for a process that lists a few files; death releases it
            yield
        finally:
            os.close(descriptor)

    def _enqueue(self) -> tuple[Path, int]:
        with self._ordering():
            last = max((int(path.stem) for path in self._folder.glob(f"*{_SUFFIX}")), default=0)
            path = self._folder / f"{last + 1:09}{_SUFFIX}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process reads an entry behind its own
                self._write(descriptor, "waiting_s")
            except BaseException:
                os.close(descriptor)  # unlocked: the next process that waits removes the file
                raise
        return path, descriptor

    def _dequeue(self, entry: tuple[Path, int]) -> None:
        try:
            with self._ordering():
                entry[0].unlink(missing_ok=True)
        finally:
            os.close(entry[1])

    def _list_ahead(self, own: Path) -> list[dict[str, Any]]:
        """List the entries of the living processes before this one; a dead process's entry is removed."""
        ahead = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path.name >= own.name:
                continue
            with suppress(FileNotFoundError):  # released just now
                entry = read_living(path)
                if entry is not None:
                    ahead.append(entry)
                    continue
                with self._ordering():
                    path.unlink(missing_ok=True)
        return ahead

    def _format_timeout(self, ahead: list[dict[str, Any]], timeout_s: float) -> str:
        first, owners = ahead[0], [entry.get("owner", "an unknown role") for entry in ahead]
        pid, owner = first.get("pid", 0), owners[0]
        since_s = time.time() - first.get("since_s", first.get("waiting_s", time.time()))
        record = self._ledger.others().get(first.get("ledger", ""))
        usage = "no reported bytes"
        if record:
            total = sum(sum(kinds.values()) for kinds in record[1].values())
            usage = f"{total:,} bytes: {format_owner_bytes(record[1])}"
        waiting = f"; waiting before it: {', '.join(owners[1:])}" if len(owners) > 1 else ""
        return (
            f"{self.owner} did not get the device within {timeout_s:g} s: {owner} (process {pid}) has had it for"
            f" {since_s:.1f} s, with {usage}{waiting}"
        )

    def _write(self, descriptor: int, time_key: str) -> None:
        entry = {"owner": self.owner, "pid": os.getpid(), "ledger": self._ledger.name, time_key: time.time()}
        with suppress(OSError):  # only messages need it
            os.pwrite(descriptor, json.dumps(entry).encode().ljust(512), 0)


@dataclass(eq=False)
class DeviceTurns:
    """The turns of one role on its devices: it has all ``locks``, and afterwards none.

    If the role ``lingers``, it has them until another process waits for one of them, so that several turns in a row
    need not move its bytes. A thread then calls ``leave``, which moves them away before the devices are released."""

    locks: Sequence[DeviceLock]
    leave: Callable[[], None]
    lingers: bool
    _mutex: threading.Lock = field(default_factory=threading.Lock)  # of the turn, or of the thread that ends it
    _thread: threading.Thread | None = None

    @contextmanager
    def turn(self, timeout_s: float) -> Iterator[None]:
        with self._mutex:  # waits: for a role that leaves its devices
            with ExitStack() as undo:
                for lock in [lock for lock in self.locks if not lock.is_held]:
                    lock.acquire(timeout_s)  # waits: for timeout_s at most
                    undo.callback(lock.release)
                undo.pop_all()
            if self.lingers and self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="device turns", daemon=True)
                self._thread.start()
            try:
                yield
            finally:
                self._end_turn(always=not self.lingers)

    def _end_turn(self, always: bool = False) -> None:
        if always or (self.lingers and any(lock.is_wanted() for lock in self.locks)):
            with ExitStack() as stack:
                for lock in self.locks:
                    stack.callback(lock.release)
                self.leave()

    def _watch(self) -> None:
        while self.lingers:
            time.sleep(_POLL_S)
            try:
                with self._mutex:  # waits: for the end of a turn
                    self._end_turn()
            except Exception:  # noqa: BLE001 -- the role's next call finds its engine in that state
                _LOG.exception("%s has not left its device cleanly", self.locks[0].owner)

    def close(self) -> None:
        """Stay on the devices until the locks are closed."""
        if self.lingers:
            with self._mutex:  # waits: for a role that leaves its devices
                self.lingers = False
