# SPDX-License-Identifier: Apache-2.0
"""The session of a script or notebook: its cluster, slots and engines.

::

    init() --> Session: a slot for each device --build()--> engine: a role group of worker actors, one for each rank
    shutdown(), the end of the process, Ctrl-C --> all processes end, and a cluster that was started here

A *slot* is a numbered device of the session; the slots of a node have consecutive numbers. An engine has *groups* of
slots; the ranks of a group together hold the model once.
"""

import atexit
import itertools
import socket
import threading
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from dlrover.python.rl.common.errors import SessionError, WorkloadDied
from dlrover.python.rl.common.names import RLRoleType, hint, is_role_name
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.local import LocalHosting
from dlrover.python.rl.runtime.member.loading import Device, Hosting
from dlrover.python.rl.trainer.port import Ref, gather
from dlrover.python.rl.trainer.role_group import CallCounter, RoleGroup

Slots = tuple[int, ...]


@dataclass(frozen=True)
class SlotRequest:
    group: int = 1  # slots of one group
    groups: int | None = None  # None: as many as fit
    one_node: bool = False  # the slots of a group have to be on one node
    colocate_with: Slots | None = None  # share exactly these slots; None: use free slots
    apart_from: frozenset[int] = frozenset()  # slots not to share
    nodes: tuple[str, ...] | None = None  # addresses or ids of the nodes to use; None: all

    @classmethod
    def near(cls, colocate_with: Any, not_colocate_with: Any, nodes: Collection[str] | None) -> "SlotRequest":
        """Request single slots by the arguments of ``build``."""
        return cls(
            colocate_with=_slots_of(colocate_with),
            apart_from=frozenset(_slots_of(not_colocate_with) or ()),
            nodes=None if nodes is None else tuple(nodes),
        )


class SlotTable:
    """Assigns a session's devices to engines, by slot."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._slots_of: dict[str, Slots] = {}

    @property
    def free(self) -> Slots:
        occupied = {slot for slots in self._slots_of.values() for slot in slots}
        return tuple(slot for slot in range(len(self.devices)) if slot not in occupied)

    def candidates(self, request: SlotRequest) -> Slots:
        """Return the slots that ``request`` may use. Raises SessionError if the request contradicts itself."""
        names = {name for device in self.devices for name in (device.address, device.node)}
        for name in request.nodes or ():
            if name not in names:
                raise SessionError(f"no node '{name}'{hint(name, {device.address for device in self.devices})}")
        allowed = {
            slot
            for slot, device in enumerate(self.devices)
            if request.nodes is None or {device.address, device.node} & set(request.nodes)
        }
        if request.colocate_with is None:
            return tuple(slot for slot in self.free if slot in allowed and slot not in request.apart_from)
        shared = set(request.colocate_with)
        if both := sorted(shared & request.apart_from):
            raise SessionError(f"slots {both} are in both colocate_with and not_colocate_with")
        if outside := sorted(shared - allowed):
            nodes = ", ".join(request.nodes or ())
            raise SessionError(f"slots {outside} of colocate_with are not on the nodes {nodes}")
        return request.colocate_with

    def take(self, owner: str, request: SlotRequest) -> tuple[Slots, ...]:
        """Assign the groups of a request to ``owner``. Raises SessionError, and assigns none, if too few are free."""
        if owner in self._slots_of:
            raise SessionError(f"{owner} holds the slots {list(self._slots_of[owner])} already")
        if request.group < 1 or (request.groups is not None and request.groups < 1):
            raise SessionError(f"{owner} requests {request.groups} x {request.group} slots: both must be positive")
        candidates = self.candidates(request)
        runs = [candidates]
        if request.one_node:
            runs = [tuple(run) for _, run in groupby(candidates, key=lambda slot: self.devices[slot].node)]
        size = request.group
        groups = [run[at : at + size] for run in runs for at in range(0, len(run) - size + 1, size)]
        count = len(groups) if request.groups is None else request.groups
        has_rest = request.colocate_with is not None and count * size != len(candidates)
        if not count or len(groups) < count or has_rest:
            raise SessionError(self._explain_shortage(owner, request, candidates))
        self._slots_of[owner] = tuple(slot for group in groups[:count] for slot in group)
        return tuple(groups[:count])

    def give_back(self, owner: str) -> None:
        """Release the owner's slots; engines that share them keep them."""
        self._slots_of.pop(owner, None)

    def _explain_shortage(self, owner: str, request: SlotRequest, candidates: Slots) -> str:
        size = f"groups of {request.group}"
        if request.groups is not None:
            size = f"{request.groups} x {request.group} = {request.groups * request.group}"
        where = " with each group on one node" if request.one_node and request.group > 1 else ""
        if request.colocate_with is not None:
            return f"{owner} requests {size} slots{where}, but colocate_with has {len(candidates)}: {list(candidates)}"
        owners = "; ".join(f"{name} has {list(slots)}" for name, slots in self._slots_of.items()) or "no engine has any"
        remedy = "init(slots_per_node=N) takes more of each node"
        if request.nodes or request.apart_from:
            remedy = "only those on the requested nodes and apart from not_colocate_with count"
        free = f"free are {list(candidates)} of {len(self.devices)} ({owners})"
        return f"{owner} requests {size} slots{where}; {free}; {remedy}"


def _slots_of(engines: Any) -> Slots | None:
    if engines is None:
        return None
    listed = engines if isinstance(engines, list | tuple) else [engines]
    return tuple(slot for engine in listed for slot in engine.slots)


@dataclass(frozen=True)
class Members:
    """The workers of a built engine."""

    name: str  #: the engine's, and their role
    groups: tuple[Slots, ...]
    slots: tuple[Slots, ...]  #: of each rank
    processes: tuple[Process, ...]  #: of each rank
    role_group: RoleGroup


class Session:
    """The session that :func:`init` returns; the end of its ``with`` block ends it."""

    def __init__(self, hosting: Hosting) -> None:
        self.hosting = hosting
        self.id = uuid.uuid4().hex
        self.table = SlotTable(hosting.devices)
        self._engines: dict[str, Any] = {}  # to release
        self._members: dict[str, Members] = {}
        self._lock = threading.Lock()

    @property
    def slots(self) -> tuple[Device, ...]:
        return self.table.devices

    @property
    def free_slots(self) -> int:
        return len(self.table.free)

    def start(self, engine: Any, request: SlotRequest, workload: type, replicas: int | None = None) -> Members:
        """Start a worker on each slot, with ``replicas`` sets of arguments for consecutive ranks; without ``replicas``
        one worker on each group. Thread safe. Raises SessionError or WorkloadStartError, and leaves no worker."""
        with self._lock:
            free_names = (name for n in itertools.count(1) if (name := f"{engine._kind}_{n}") not in self._engines)
            name = next(free_names) if engine._requested_name is None else engine._requested_name
            if not is_role_name(name):
                raise SessionError(f"'{name}' is no engine's name: use letters, digits and '_', first a letter")
            name = name.upper()
            if name in self._engines:
                raise SessionError(f"there is an engine '{name}' already: release it, or choose another name")
            groups = self.table.take(name, request)
            self._engines[name] = engine
        slots = groups if replicas is None else tuple((slot,) for group in groups for slot in group)
        try:
            if len(slots) > 1 and replicas is not None and not self.hosting.separate:
                raise SessionError(f"{name} needs {len(slots)} processes: init(local=True) has one")
            processes = tuple(self.hosting.start(name, slots, f"{workload.__module__}:{workload.__qualname__}"))
        except BaseException:
            self._forget(name)
            raise
        counts = len(slots), replicas or len(slots)
        group = RoleGroup(RLRoleType(name), workload, *counts, self.hosting.port, CallCounter())
        self._members[name] = Members(name, groups, slots, processes, group)
        return self._members[name]

    def _forget(self, name: str) -> None:
        with self._lock:
            self.table.give_back(name)
            self._engines.pop(name, None)
            self._members.pop(name, None)

    def end(self, members: Members) -> None:
        try:
            self.hosting.end(members.name)
        finally:
            self._forget(members.name)

    def gather(self, refs: Sequence[Ref], timeout_s: float | None = None) -> list[Any]:
        """Return the results of submitted calls; without a deadline late ranks are logged. Raises InvocationError with
        engine, rank, method, node and cause."""
        try:
            return gather(refs, timeout_s)
        except WorkloadDied as died:
            members = self._members.get(died.role)
            if members is None or died.node:
                raise
            process = members.processes[died.rank]
            cause = str(died).removeprefix(f"{died.role}[{died.rank}]{died.method and '.' + died.method}: ")
            text = f"its process {process.pid} is gone: {cause}; release() the engine and build() it again"
            node = process.host or socket.gethostname()
            lost = WorkloadDied(text, role=died.role, rank=died.rank, method=died.method, node=node)
            raise lost from died.__cause__

    def close(self) -> None:
        if self in _OPEN:
            _OPEN.remove(self)
            atexit.unregister(self.close)
        try:
            for engine in list(self._engines.values()):
                engine.release()
        finally:
            self.hosting.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        engines = ", ".join(self._engines) or "none"
        return f"Session({len(self.slots)} slots, {self.free_slots} free; engines: {engines})"


_OPEN: list[Session] = []


def init(
    address: str | None = None,
    *,
    slots_per_node: int | None = None,
    local: bool = False,
    log_to_driver: bool = True,
    timeout_s: float = 300.0,
) -> Session:
    """Begin a session: start Ray on this node, or join a cluster, and find the devices. A slot is a GPU, or without
    GPUs a logical device, by default one for each core.

    Args:
        address: of a running Ray cluster (``"auto"``, ``"host:port"``); None starts one on loopback, which ends with
            the session. A process that is connected to Ray already stays connected.
        slots_per_node: number of devices to take of each node.
        local: run the engines in this process, one rank each, without Ray: for a debugger.
        log_to_driver: print the output of the engines' processes here.
        timeout_s: limit on the cluster's reservation of the devices, and on the start of an engine's processes.

    Raises:
        SessionError: a session is open already.
        ClusterUnavailable: Ray could not be started or reached, or has no free device.
    """
    if _OPEN:
        raise SessionError(f"init() was called before: {_OPEN[0]!r}; shutdown() ends it")
    hosting: Hosting
    if local:
        hosting = LocalHosting("cuda" if torch.cuda.is_available() else "cpu", slots_per_node or 1)
    else:
        from dlrover.python.rl.runtime.ray.hosting import RayHosting  # Ray takes a second to import

        hosting = RayHosting(address, slots_per_node, log_to_driver, timeout_s)
    session = Session(hosting)
    _OPEN.append(session)
    # Called before Ray's handler, which would orphan a cluster that was started here.
    atexit.register(session.close)
    return session


def shutdown() -> None:
    """End the session with its engines, and the cluster if :func:`init` started it. Safe to repeat."""
    for session in list(_OPEN):
        session.close()


def current() -> Session:
    """Return the open session. Raises SessionError if there is none."""
    if not _OPEN:
        raise SessionError("there is no session: call init() first")
    return _OPEN[0]
