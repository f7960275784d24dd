"""What an engine has on its device, where another program holds the tensors and only sizes can be accounted for."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.memory import DeviceMemory, Kind
from dlrover.python.rl.engine.offload import Part, Place

_KINDS: dict[Part, tuple[Kind, ...]] = {
    "all": ("weights", "kv_cache"),
    "weights": ("weights",),
    "kv_cache": ("kv_cache",),
}


class Tenancy:
    """Where the weights and the key-value cache of a rollout engine are, and what is refused meanwhile.

    A meta tensor of the size of each stands in for what the backend holds: it counts, and has no storage.

    Args:
        memory: accounts for the device.
        name: of the engine; the owner's name in ``memory``.

    Attributes:
        place: where the weights are.
        lacks: why nothing can be drawn from them; "" when it can.
    """

    def __init__(self, memory: DeviceMemory, name: str) -> None:
        self.place: Place = "meta"
        self.lacks = ""
        self._memory, self._owner = memory, memory.owner(name)
        self._nbytes: dict[Kind, int] = {}
        self._there: dict[Kind, Any] = {}

    def missing(self, part: Part) -> list[Kind]:
        """The kinds of ``part`` that are not on the device."""
        return [kind for kind in _KINDS[part] if kind not in self._there]

    def bring(self, kind: Kind, nbytes: int | None = None) -> None:
        """Account for ``kind``, before it is brought; of the size that it had before if ``nbytes`` is None.

        Raises:
            OutOfDeviceMemory: it does not fit; names who holds what.
        """
        self._nbytes[kind] = self._nbytes[kind] if nbytes is None else nbytes
        stand_in = torch.empty(self._nbytes[kind], dtype=torch.uint8, device="meta")
        self._memory.hold(self._owner, kind, [stand_in])
        self._there[kind] = stand_in
        if kind == "weights":
            self.place = "cuda"

    def drop(self, kind: Kind, place: Place) -> None:
        """``kind`` could not be brought after all; the weights are in ``place``."""
        self._there.pop(kind, None)
        self.place = place

    def computing(self) -> AbstractContextManager[None]:
        """Where the backend finds no room inside, say who holds what; see :meth:`DeviceMemory.computing`."""
        return self._memory.computing(self._owner)

    def leave(self, place: Place) -> None:
        """Everything has left the device."""
        self._there.clear()
        self.place = place

    def check_ready(self) -> None:
        """Refuse to draw while something is missing.

        Raises:
            EngineError: says which call brings it.
        """
        refuse_unready(self.place, self.lacks, "kv_cache" in self._there)

    def footprint(self) -> dict[str, int]:
        """Bytes on the device by kind."""
        return {kind: self._nbytes[kind] for kind in self._there if self._nbytes[kind]}


def part_of(nbytes: int, ranks: int) -> int:
    """What each of the devices has that ``ranks`` divide so many bytes between."""
    return -(-nbytes // ranks)


def refuse_unready(place: Place, lacks: str, has_cache: bool) -> None:
    """Refuse to draw with weights in ``place``, for which ``lacks`` says why they do not serve if it is not empty.

    Raises:
        EngineError: says which call brings what is missing.
    """
    if place != "cuda":
        where = "on the host" if place == "cpu" else "nowhere"
        raise EngineError(f"the weights are {where}: cuda('weights') brings them to the device")
    if lacks:
        raise EngineError(lacks)
    if not has_cache:
        raise EngineError("there is no key-value cache: cuda('kv_cache') brings it back")


RELEASED = "the weights have been released: receive new ones"
BROKEN_OFF = "taking over weights broke off: receive them again"
