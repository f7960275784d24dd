"""How weights get from one engine's processes to another's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.sync.base import SyncSettings, WeightTransport
from dlrover.python.rl.engine.sync.file import shared_memory
from dlrover.python.rl.engine.sync.link import LinkTransport
from dlrover.python.rl.runtime.hosting import Device
from dlrover.python.rl.runtime.node_memory import memory_root
from dlrover.python.rl.session.session import MEMORY, Crew

Way: TypeAlias = Literal["shared memory", "device memory", "object store"]


@dataclass(frozen=True)
class Route:
    """From the ranks of one engine to those of another.

    Attributes:
        way: ``shared memory`` of a node; ``device memory``: CUDA buffers that both sides have open; ``object store``:
            Ray's, from node to node.
        session: whose folder in the memory of the node they meet in.
        name: of the sender and the receiver.
        sinks: ranks that receive.
    """

    way: Way
    session: str
    name: str
    sinks: int


class Routes:
    """A process's ends of routes, kept from sync to sync.

    Args:
        who: what messages call the process.
        leads: whether it is the rank that sends.
        device: what its weights are on.
        memory: accounts for that.
    """

    def __init__(self, who: str, leads: bool, device: str, memory: DeviceMemory) -> None:
        self._who, self._leads, self._device, self._memory = who, leads, device, memory
        self._open: dict[Route, WeightTransport] = {}

    def end(self, route: Route) -> WeightTransport:
        """This process's end of ``route``, which is not the object store; that of an earlier one between the same
        engines is closed."""
        if route not in self._open:
            for other in [other for other in self._open if other.name == route.name]:
                self._open.pop(other).close()
            self._open[route] = self._made(route)
        return self._open[route]

    def _made(self, route: Route) -> WeightTransport:
        folder = memory_root(MEMORY, route.session)
        settings = SyncSettings(
            who=self._who, leads=self._leads, sinks=route.sinks, device=self._device, memory=self._memory
        )
        if route.way == "device memory":
            return LinkTransport(folder, route.name, settings)
        return shared_memory(folder, route.name, settings)

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._open.popitem()[1].close()


def route_between(source: Crew, target: Crew, slots: Sequence[Device], session: str, separate: bool) -> Route:
    """The shortest route from one engine to another.

    Args:
        source: who sends.
        target: who receives.
        slots: the session's devices.
        session: its id.
        separate: whether their ranks are processes of their own.
    """
    way: Way = "object store"
    nodes = {process.node for process in (source.processes[0], *target.processes)}
    if separate and len(nodes) == 1:
        (first,) = source.seats[0]
        # A process sees its own devices only: the memory of one can be opened where both see it.
        shared = slots[first].kind == "cuda" and all(first in seat for seat in target.seats)
        way = "device memory" if shared else "shared memory"
    return Route(way, session, f"{source.name}-{target.name}", len(target.seats))
