# SPDX-License-Identifier: Apache-2.0
"""Weights from a train engine to another engine of the script: the script sees names and numbers, never the bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from dlrover.python.rl.common.errors import SessionError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, WeightTransport
from dlrover.python.rl.engine.weight_sync.collective import BroadcastTransport
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.disk import DiskTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.session.session import Members, Session

Way: TypeAlias = Literal["shared memory", "broadcast", "disk", "device memory"]
WAYS: tuple[Way, ...] = get_args(Way)
"""In the order of preference; ``disk`` where a folder is given, ``device memory`` only if asked for."""
_TRANSPORTS: dict[Way, Callable[[SyncSettings], WeightTransport]] = {
    "shared memory": PullTransport,
    "broadcast": BroadcastTransport,
    "disk": DiskTransport,
    "device memory": CudaIpcTransport,
}


@dataclass(frozen=True)
class SyncReport:
    stamp: WeightStamp  #: of the weights that every rank of the receiver has now, equal to the sender's
    way: Way


@dataclass(frozen=True)
class Route:
    """From the ranks of one engine to those of another."""

    # "shared memory" of a node; "broadcast": by NCCL, or by gloo where engines share a device or have none; "disk":
    # files in a folder that both sides see; "device memory": a copy that the sender keeps on a device which both have.
    way: Way
    session: str  # its id
    name: str  # of the sender and the receiver
    sinks: int  # ranks that receive
    at: str = ""  # of a broadcast the address of the sender's node, of files their folder
    by_host: bool = False  # a broadcast goes from host to host


class Endpoints:
    """A process's ends of routes, kept from sync to sync."""

    def __init__(self, who: str, leads: bool, device: str, memory: DeviceMemory) -> None:
        self._who, self._leads, self._device, self._memory = who, leads, device, memory
        self._open: dict[Route, WeightTransport] = {}

    def endpoint(self, route: Route) -> WeightTransport:
        """This process's end of ``route``; the end of an earlier route between the same engines is closed."""
        if route in self._open:
            return self._open[route]
        for former in [former for former in self._open if former.name == route.name]:
            self._open.pop(former).close()
        settings = SyncSettings(
            name=self._who,
            is_leader=self._leads,
            receivers=route.sinks,
            address=route.at if route.way == "broadcast" else "127.0.0.1",
            folder=Path(route.at) if route.way == "disk" else None,
            channel=f"{route.name}-{route.session}",
            device="cpu" if route.by_host else self._device,
            memory=self._memory,
        )
        endpoint = self._open[route] = _TRANSPORTS[route.way](settings)
        return endpoint

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def choose_route(
    source: Members, target: Members, session: Session, way: Way | None = None, folder: str | Path | None = None
) -> Route:
    """How weights go from one engine to another; ``way`` None takes the folder if there is one, else the shortest.
    Raises SessionError with the reason why a way is closed."""
    if folder is not None and way is None:
        way = "disk"
    (first,) = source.slots[0]
    on_cuda = session.slots[first].kind == "cuda"
    nodes = {process.node for process in (source.processes[0], *target.processes)}
    apart = f"they are on {len(nodes)} nodes" if len(nodes) > 1 else ""
    alone = "" if session.hosting.separate else "init(local=True) has one process, which cannot wait for itself"
    # A process sees its own devices only, and CUDA opens memory on the device of the same number.
    sees_first = not on_cuda or all(slots[0] == first for slots in target.slots)
    obstacles: dict[Way, str] = {
        "device memory": apart or ("" if sees_first else f"{source.name}[0] has not the first device of {target.name}"),
        "shared memory": apart,
        "broadcast": alone,
        "disk": "" if folder else "it takes a folder that both see",
    }
    if way is None:
        free = [name for name in WAYS if not obstacles[name] and name != "device memory"]
        if not free:
            raise SessionError(f"weights have no way from {source.name} to {target.name}: {obstacles}")
        way = free[0]
    if way not in obstacles:
        raise SessionError(f"weights have no way '{way}'{hint(str(way), WAYS)}")
    if folder is not None and way != "disk":
        raise SessionError(f"folder={str(folder)!r} is of no use to '{way}': it is for 'disk'")
    if obstacles[way]:
        raise SessionError(f"weights cannot go from {source.name} to {target.name} by '{way}': {obstacles[way]}")
    at = {"broadcast": source.processes[0].address, "disk": str(Path(folder or "").absolute())}.get(way, "")
    shared = {slot for slots in source.slots for slot in slots} & {slot for slots in target.slots for slot in slots}
    by_host = way == "broadcast" and (not on_cuda or bool(shared))  # NCCL takes each device once
    return Route(way, session.id, f"{source.name}-{target.name}", len(target.slots), at, by_host)
