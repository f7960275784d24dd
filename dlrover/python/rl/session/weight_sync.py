# SPDX-License-Identifier: Apache-2.0
"""Weight syncs from a train engine to another engine of a script, which sees names and numbers but no bytes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from dlrover.python.rl.common.errors import SessionError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, WeightTransport
from dlrover.python.rl.engine.weight_sync.collective import BroadcastTransport
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.session.session import Members, Session

Way: TypeAlias = Literal["shared memory", "broadcast", "device memory"]
WAYS: tuple[Way, ...] = get_args(Way)
"""The ways in order of preference; ``device memory`` is used only on request."""
_TRANSPORTS: dict[Way, Callable[[SyncSettings], WeightTransport]] = {
    "shared memory": PullTransport,
    "broadcast": BroadcastTransport,
    "device memory": CudaIpcTransport,
}


@dataclass(frozen=True)
class SyncReport:
    stamp: WeightStamp  #: of the weights that the sender and every rank of the receiver have now
    way: Way


@dataclass(frozen=True)
class Route:
    """The route of weights from one engine to another."""

    # "shared memory" of a node; "broadcast": by NCCL, or by gloo if engines share a device or have none; "device
    # memory": a copy that the sender keeps on a device which both have.
    way: Way
    name: str  # of sender and receiver
    sinks: int  # ranks that receive
    at: str = "127.0.0.1"  # address of the sender's node for a broadcast
    by_host: bool = False  # broadcast by gloo, from host to host


class Endpoints:
    """A process's ends of routes, which stay open from sync to sync."""

    def __init__(self, name: str, is_leader: bool, device: str, memory: DeviceMemory) -> None:
        self._settings = SyncSettings(name=name, is_leader=is_leader, device=device, memory=memory)
        self._open: dict[Route, WeightTransport] = {}

    def endpoint(self, route: Route) -> WeightTransport:
        """Return this process's end of ``route``, and close the end of an earlier route between the same engines."""
        if route in self._open:
            return self._open[route]
        for former in [former for former in self._open if former.name == route.name]:
            self._open.pop(former).close()
        settings = replace(
            self._settings,
            receivers=route.sinks,
            address=route.at,
            device="cpu" if route.by_host else self._settings.device,
        )
        endpoint = self._open[route] = _TRANSPORTS[route.way](settings)
        return endpoint

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def choose_route(source: Members, target: Members, session: Session, way: Way | None = None) -> Route:
    """Choose the route from one engine to another: ``way``, else the shortest. Raises SessionError if the way is not
    possible, with the reason."""
    (first,) = source.slots[0]
    on_cuda = session.slots[first].kind == "cuda"
    nodes = {process.node for process in (source.processes[0], *target.processes)}
    apart = f"they are on {len(nodes)} nodes" if len(nodes) > 1 else ""
    alone = "" if session.hosting.separate else "init(local=True) has one process, which would wait for itself"
    # A process sees its own devices only, and CUDA opens memory on the device of the same number.
    same_device = not on_cuda or all(slots[0] == first for slots in target.slots)
    devices = "" if same_device else f"{source.name}[0] and {target.name} have different first devices"
    obstacles: dict[Way, str] = {
        "device memory": apart or devices,
        "shared memory": apart,
        "broadcast": alone,
    }
    if way is None:
        free = [name for name in WAYS if not obstacles[name] and name != "device memory"]
        if not free:
            reasons = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items() if obstacle)
            raise SessionError(f"no way to send weights from {source.name} to {target.name}: {reasons}")
        way = free[0]
    if way not in obstacles:
        raise SessionError(f"unknown way '{way}' to send weights{hint(str(way), WAYS)}")
    if obstacles[way]:
        raise SessionError(f"cannot send weights from {source.name} to {target.name} by '{way}': {obstacles[way]}")
    at = source.processes[0].address if way == "broadcast" else Route.at
    shared = {slot for slots in source.slots for slot in slots} & {slot for slots in target.slots for slot in slots}
    by_host = way == "broadcast" and (not on_cuda or bool(shared))  # NCCL takes each device once
    return Route(way, f"{source.name}-{target.name}", len(target.slots), at, by_host)
