"""Handing a device from one role to the next: a queue of processes on one node, in the order in which they came.

::

    folder/
      ORDER                    locked (flock) for the instant in which the queue is changed
      000000012.turn           one that waits or has the device; locked by its process as long as that lives
      000000013.turn           ... the lowest of those that are locked has it
      ....holdings             what each process has on the device

A process that dies has left the queue, since the kernel lets go of its locks.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.holdings import HoldingsBoard, phrase, total
from dlrover.python.rl.engine.memory import DeviceMemory

_TURN = ".turn"
_LOOK_S = 0.002


class DeviceLease:
    """The right to have more than a few bytes on a device, which one role has at a time.

    Args:
        folder: the same for all processes that share the device; in the node's memory. Its owner removes it.
        owner: what messages call this role: ``ROLLOUT[0]``.
        memory: what of the device this process holds; told to those who wait.
    """

    def __init__(self, folder: Path, owner: str, memory: DeviceMemory | None = None) -> None:
        self._folder, self._owner = Path(folder), owner
        self._memory = memory
        self._board = HoldingsBoard(self._folder)
        if memory is not None and memory.board is None:
            memory.board = self._board
        self._turn: tuple[Path, int] | None = None

    @property
    def held(self) -> bool:
        """Whether this role has the device."""
        return self._turn is not None

    def take(self, timeout_s: float = 600.0) -> None:
        """Wait for the device; whoever asked before gets it before.

        Raises:
            EngineError: it has the device already, or did not get it in time: names who has it, since when and with
                how many bytes, and who waits.
        """
        if self._turn is not None:
            raise EngineError(f"{self._owner} has the device already")
        turn = self._queue_up()
        deadline_s = time.monotonic() + timeout_s
        try:
            while before := self._before(turn[0]):
                if time.monotonic() > deadline_s:
                    raise EngineError(self._late(before, timeout_s))
                time.sleep(_LOOK_S)
        except BaseException:
            self._leave(turn)
            raise
        self._write(turn[1], "since_s")
        self._turn = turn
        self._publish()

    def give(self) -> None:
        """Let the next one have it. What this role still holds of the device stays told to the others.

        Raises:
            EngineError: it does not have the device.
        """
        if self._turn is None:
            raise EngineError(f"{self._owner} does not have the device")
        self._publish()
        turn, self._turn = self._turn, None
        self._leave(turn)

    @contextmanager
    def turn(self, timeout_s: float = 600.0) -> Iterator[None]:
        """Have the device inside the block."""
        self.take(timeout_s)
        try:
            yield
        finally:
            self.give()

    def close(self) -> None:
        """Give the device back, if this role has it, and say no more what this process holds."""
        if self._turn is not None:
            self.give()
        if self._memory is not None and self._memory.board is self._board:
            self._memory.board = None
        self._board.close()

    def _publish(self) -> None:
        if self._memory is not None:
            self._board.publish(self._memory.by_owner())

    # -- the queue ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _ordering(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / "ORDER", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits: for who lists a few files; one that dies has let go
            yield
        finally:
            os.close(descriptor)

    def _queue_up(self) -> tuple[Path, int]:
        with self._ordering():
            last = max((int(path.stem) for path in self._turns()), default=0)
            path = self._folder / f"{last + 1:09}{_TURN}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody looks at one behind its own
            self._write(descriptor, "waiting_s")
        return path, descriptor

    def _leave(self, turn: tuple[Path, int]) -> None:
        with self._ordering():
            turn[0].unlink(missing_ok=True)
            os.close(turn[1])

    def _turns(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_TURN}"))

    def _before(self, mine: Path) -> list[dict[str, Any]]:
        """Those who come before, the one that has the device first. Dead ones are taken out."""
        found = []
        for path in self._turns():
            if path.name < mine.name:
                with suppress(FileNotFoundError):  # given back just now
                    found.append(self._living(path))
        return [told for told in found if told is not None]

    def _living(self, path: Path) -> dict[str, Any] | None:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                told: dict[str, Any] = json.loads(file.read() or "{}")
                return told
        with self._ordering():
            path.unlink(missing_ok=True)
        return None

    def _late(self, before: list[dict[str, Any]], timeout_s: float) -> str:
        first, *others = before
        pid, owner = first.get("pid", 0), first.get("owner", "somebody")
        since_s = time.time() - first.get("since_s", first.get("waiting_s", time.time()))
        found = self._board.others().get(first.get("board", ""))
        told = f"{total(found.held):,} bytes: {phrase(found.held)}" if found else "no bytes that it tells of"
        waiting = f"; {', '.join(each.get('owner', 'somebody') for each in others)} came before too" if others else ""
        return (
            f"{self._owner} did not get the device within {timeout_s:g} s: {owner} (process {pid}) has had it for"
            f" {since_s:.1f} s, with {told}{waiting}"
        )

    def _write(self, descriptor: int, what: str) -> None:
        told = json.dumps({"owner": self._owner, "pid": os.getpid(), "board": self._board.name, what: time.time()})
        os.pwrite(descriptor, told.encode().ljust(512), 0)
