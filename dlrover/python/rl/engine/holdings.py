"""What each process has on a device, told to the others of its node: for messages, never for decisions."""

import fcntl
import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Held: TypeAlias = Mapping[str, Mapping[str, int]]
"""Bytes by owner and kind."""

_SUFFIX = ".holdings"


@dataclass(frozen=True)
class Told:
    """What a board tells: a process, and what it holds."""

    pid: int
    held: Held


class HoldingsBoard:
    """A file for each holder in one folder. The kernel's lock on it says whether its process still lives.

    Args:
        folder: the same for all processes that share the device; in the node's memory.

    Attributes:
        name: of the file; a process may have several.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self.name = uuid.uuid4().hex
        self._path = self._folder / f"{self.name}{_SUFFIX}"
        self._descriptor: int | None = None
        self._length = 0

    def publish(self, held: Held) -> None:
        """Let the others know what this process holds now."""
        if self._descriptor is None:
            self._descriptor = self._make()
        told = json.dumps({"pid": os.getpid(), "held": held}).encode().ljust(self._length)
        self._length = len(told)  # what is shorter covers what was longer
        os.pwrite(self._descriptor, told, 0)

    def _make(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # others lock no file that is empty
        return descriptor

    def others(self) -> dict[str, Told]:
        """What was published last on the other boards of living processes, by name. Files of dead ones are removed."""
        found: dict[str, Told] = {}
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path == self._path:
                continue
            with suppress(OSError, ValueError, KeyError):  # going away, or being written
                told = _read(path)
                if told is not None and told["held"]:
                    found[path.stem] = Told(told["pid"], told["held"])
        return found

    def close(self) -> None:
        """Take it off."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def _read(path: Path) -> dict[str, Any] | None:
    with path.open("rb") as file:
        content = file.read()
        if not content:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            told: dict[str, Any] = json.loads(content)
            return told
        path.unlink()
    return None


def phrase(held: Held) -> str:
    """As messages tell it: ``actor: 40 of weights + 80 of optimizer``; empty when nothing is held."""
    return ", ".join(
        f"{owner}: " + " + ".join(f"{size:,} of {kind}" for kind, size in kinds.items())
        for owner, kinds in held.items()
    )


def total(held: Held) -> int:
    """All bytes."""
    return sum(sum(kinds.values()) for kinds in held.values())
