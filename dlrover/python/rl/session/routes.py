"""How weights get from one engine's processes to another's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from dlrover.python.rl.common.errors import SessionError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.sync.base import SyncSettings, WeightTransport
from dlrover.python.rl.engine.sync.broadcast import BroadcastTransport
from dlrover.python.rl.engine.sync.file import disk, shared_memory
from dlrover.python.rl.engine.sync.link import LinkTransport
from dlrover.python.rl.engine.sync.process import ProcessTransport
from dlrover.python.rl.runtime.node_memory import memory_root
from dlrover.python.rl.session.session import MEMORY, Crew, Session

Way: TypeAlias = Literal["process", "device memory", "shared memory", "object store", "broadcast", "disk"]
WAYS: tuple[Way, ...] = get_args(Way)
"""Those before ``broadcast`` are chosen by themselves, the first that can be gone."""


@dataclass(frozen=True)
class Route:
    """From the ranks of one engine to those of another.

    Attributes:
        way: within one ``process``; ``device memory``: a CUDA buffer that both sides have open; ``shared memory`` of a
            node; ``object store``: Ray's, from node to node; ``broadcast``: by nccl, or by gloo where engines share a
            device or have none; ``disk``: files in a folder that both sides see.
        session: whose folder in the memory of the node they meet in.
        name: of the sender and the receiver.
        sinks: ranks that receive.
        at: of a broadcast the address of the sender's node, of files their folder.
        by_host: whether a broadcast goes from host to host.
    """

    way: Way
    session: str
    name: str
    sinks: int
    at: str = ""
    by_host: bool = False


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
        device = "cpu" if route.by_host else self._device
        settings = SyncSettings(who=self._who, leads=self._leads, sinks=route.sinks, device=device, memory=self._memory)
        if route.way == "process":
            return ProcessTransport(settings)
        if route.way == "broadcast":
            return BroadcastTransport(settings, route.at)
        if route.way == "disk":
            return disk(Path(route.at), route.name, settings)
        made = LinkTransport if route.way == "device memory" else shared_memory
        return made(memory_root(MEMORY, route.session), route.name, settings)

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._open.popitem()[1].close()


def route_between(
    source: Crew, target: Crew, session: Session, wanted: Way | None = None, folder: str | Path | None = None
) -> Route:
    """How weights go from one engine to another.

    Args:
        source: who sends.
        target: who receives.
        session: whose they are.
        wanted: the way; None for the shortest.
        folder: of files, which both sides see.

    Raises:
        SessionError: there is no such way, or not between these; says why.
    """
    closed = _closed(source, target, session, folder)
    on_cuda = session.slots[source.seats[0][0]].kind == "cuda"
    if wanted is not None and wanted not in closed:
        raise SessionError(f"weights have no way '{wanted}'{hint(wanted, WAYS)}")
    open_ways = (way for way in WAYS if not closed[way] and (on_cuda or way != "device memory"))
    way = next(open_ways) if wanted is None else wanted
    if closed[way]:
        raise SessionError(f"weights cannot go from {source.name} to {target.name} by '{way}': {closed[way]}")
    at = {"broadcast": source.processes[0].address, "disk": str(folder)}.get(way, "")
    shared = {slot for seat in source.seats for slot in seat} & {slot for seat in target.seats for slot in seat}
    by_host = way == "broadcast" and (not on_cuda or bool(shared))  # nccl has each device once
    return Route(way, session.id, f"{source.name}-{target.name}", len(target.seats), at, by_host)


def _closed(source: Crew, target: Crew, session: Session, folder: str | Path | None) -> dict[Way, str]:
    """Why each way cannot be gone; "" if it can."""
    (first,) = source.seats[0]
    nodes = {process.node for process in (source.processes[0], *target.processes)}
    apart = f"they are on {len(nodes)} nodes" if len(nodes) > 1 else ""
    alone = "" if session.hosting.separate else "init(local=True) has one process, where nobody can wait for another"
    # A process sees its own devices only, and CUDA opens memory on the device of the same number.
    seen = session.slots[first].kind != "cuda" or all(seat[0] == first for seat in target.seats)
    unseen = "" if seen else f"{source.name}[0] has not the first device of {target.name}"
    return {
        "process": "their ranks are processes of their own" if session.hosting.separate else "",
        "device memory": alone or apart or unseen,
        "shared memory": apart,
        "object store": "",
        "broadcast": alone,
        "disk": "" if folder else "it takes a folder that both see",
    }
