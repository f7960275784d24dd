"""The session of a script or notebook: its cluster, its slots, its engines.

::

    init() --> Session: a slot for each device --build()--> engine: a process for each of its ranks
    shutdown(), the end of the process, Ctrl-C --> all processes end, the cluster that was started here with them
"""

import atexit
import itertools
import socket
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dlrover.python.rl.common.errors import SessionError, WorkloadDied
from dlrover.python.rl.common.roles import is_role_name
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.hosting import Device, Hosting
from dlrover.python.rl.runtime.local.hosting import LocalHosting
from dlrover.python.rl.runtime.node_memory import forget_memory
from dlrover.python.rl.session.slots import Group, SlotTable, Wish
from dlrover.python.rl.trainer.port import Ref, gather

MEMORY = "session"
"""What a node's memory knows the folders of sessions by."""


class Releasable(Protocol):
    """What the session knows of an engine."""

    def release(self) -> None:
        """End its processes and give its slots back."""
        ...


@dataclass(frozen=True)
class Crew:
    """The processes of a built engine.

    Attributes:
        name: of the engine.
        groups: the slots of each group.
        seats: the slots of each rank.
        processes: where each rank runs.
    """

    name: str
    groups: tuple[Group, ...]
    seats: tuple[Group, ...]
    processes: tuple[Process, ...]


class Session:
    """Made by :func:`init`. Leaving its ``with`` block ends it.

    Args:
        hosting: where engines run.

    Attributes:
        id: unlike any other session's.
        table: who holds which slots.
    """

    def __init__(self, hosting: Hosting) -> None:
        self.hosting = hosting
        self.id = uuid.uuid4().hex
        self.table = SlotTable(hosting.devices)
        self._engines: dict[str, Releasable] = {}
        self._groups: dict[str, tuple[Group, ...]] = {}
        self._crews: dict[str, Crew] = {}
        self._lock = threading.Lock()

    @property
    def slots(self) -> tuple[Device, ...]:
        """The devices, by slot number."""
        return self.table.devices

    @property
    def free_slots(self) -> int:
        """How many slots no engine holds."""
        return len(self.table.free)

    def enter(self, engine: Releasable, wished: str | None, kind: str, wish: Wish) -> str:
        """Give an engine a name unlike any other's, and its slots. Thread safe.

        Args:
            engine: whose they are.
            wished: the name, or None for one made from ``kind``.
            kind: of the engine.
            wish: the slots.

        Returns:
            The name, in upper case.

        Raises:
            SessionError: the name is none, or taken; or the slots are not there. Nothing has changed.
        """
        with self._lock:
            name = self._name(wished, kind)
            self._groups[name] = tuple(self.table.take(name, wish))
            self._engines[name] = engine
            return name

    def _name(self, wished: str | None, kind: str) -> str:
        if wished is None:
            return next(name for n in itertools.count(1) if (name := f"{kind}_{n}") not in self._engines)
        if not is_role_name(wished):
            raise SessionError(f"'{wished}' is no engine's name: letters, digits and '_', beginning with a letter")
        if wished.upper() in self._engines:
            raise SessionError(f"there is an engine '{wished.upper()}' already: release it, or choose another name")
        return wished.upper()

    def start(self, name: str, where: str, whole_groups: bool) -> Crew:
        """Start the processes of an engine that has its slots.

        Args:
            name: the engine's.
            where: class of the object in each process.
            whole_groups: one process for each group, rather than for each slot.

        Raises:
            SessionError: there are no processes here for several ranks. The slots are given back.
            WorkloadStartError: a process did not come up; none is left, and the slots are given back.
        """
        groups = self._groups[name]
        seats = groups if whole_groups else tuple((slot,) for group in groups for slot in group)
        try:
            if len(seats) > 1 and not whole_groups and not self.hosting.separate:
                raise SessionError(f"{name} needs {len(seats)} processes: init(local=True) has one")
            crew = Crew(name, groups, seats, tuple(self.hosting.start(name, seats, where)))
        except BaseException:
            self._leave(name)
            raise
        self._crews[name] = crew
        return crew

    def _leave(self, name: str) -> None:
        with self._lock:
            self.table.give_back(name)
            for known in (self._engines, self._groups, self._crews):
                known.pop(name, None)

    def unseat(self, crew: Crew) -> None:
        """End an engine's processes and take its slots back."""
        try:
            self.hosting.end(crew.name)
        finally:
            self._leave(crew.name)

    def gather(self, refs: Sequence[Ref], timeout_s: float | None = None) -> list[Any]:
        """The results of calls that were submitted; without a deadline the ranks waited for are logged.

        Raises:
            InvocationError: one failed; names engine, rank, method, node and cause.
        """
        try:
            return gather(refs, timeout_s)
        except WorkloadDied as died:
            crew = self._crews.get(died.role)
            if crew is None or died.node:
                raise
            raise _at_its_node(died, crew.processes[died.rank]) from died.__cause__

    def close(self) -> None:
        """End everything; see :func:`shutdown`."""
        if self in _OPEN:
            _OPEN.remove(self)
            atexit.unregister(self.close)
        try:
            for engine in list(self._engines.values()):
                engine.release()
        finally:
            try:
                self.hosting.forget(MEMORY, self.id)
            finally:
                self.hosting.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Session({len(self.slots)} slots, {self.free_slots} free; engines: {', '.join(self._engines) or 'none'})"
        )


def _at_its_node(died: WorkloadDied, process: Process) -> WorkloadDied:
    """Only the session knows where a process was that can tell no more."""
    said = str(died).removeprefix(f"{died.role}[{died.rank}].{died.method}: ")
    text = f"its process {process.pid} is gone: {said}; release() the engine and build() it again"
    node = process.host or socket.gethostname()
    return WorkloadDied(text, role=died.role, rank=died.rank, method=died.method, node=node)


_OPEN: list[Session] = []


def init(
    address: str | None = None,
    *,
    slots_per_node: int | None = None,
    local: bool = False,
    log_to_driver: bool = True,
    timeout_s: float = 300.0,
) -> Session:
    """Begin a session: start Ray on this machine, or join it, and find the devices.

    A slot is a GPU, or on a cluster without any a logical device: as many as there are cores, unless told otherwise.

    Args:
        address: of a running Ray cluster (``"auto"``, ``"host:port"``); None starts one on loopback, which ends with
            the session. A process that is connected to Ray already stays connected as it is.
        slots_per_node: take so many devices of each node.
        local: run the engines in this process, one rank each, without Ray: for a debugger.
        log_to_driver: print here what the engines' processes print.
        timeout_s: how long the cluster may take to give the devices, and an engine's processes to come up.

    Returns:
        The session, which a ``with`` block ends.

    Raises:
        SessionError: there is a session already.
        ClusterUnavailable: Ray could not be started or reached, or has no free device.
    """
    if _OPEN:
        raise SessionError(f"init() was called before: {_OPEN[0]!r}; shutdown() ends it")
    forget_memory(MEMORY)  # what sessions that were killed have left
    session = Session(_hosting(address, slots_per_node, local, log_to_driver, timeout_s))
    _OPEN.append(session)
    # Called before Ray's own, which would leave a cluster that was started here without its owner.
    atexit.register(session.close)
    return session


def _hosting(address: str | None, per_node: int | None, local: bool, log_to_driver: bool, timeout_s: float) -> Hosting:
    if local:
        return LocalHosting("cuda" if torch.cuda.is_available() else "cpu", per_node or 1)
    from dlrover.python.rl.runtime.ray.hosting import RayHosting  # Ray takes a second to import

    return RayHosting(address, per_node, log_to_driver, timeout_s)


def shutdown() -> None:
    """End the session: its engines, their processes, and the cluster if :func:`init` started it. Safe to repeat."""
    for session in list(_OPEN):
        session.close()


def current() -> Session:
    """The session.

    Raises:
        SessionError: there is none.
    """
    if not _OPEN:
        raise SessionError("there is no session: call init() first")
    return _OPEN[0]


def slots_of(engines: Any) -> tuple[int, ...]:
    """The slots of one engine or several, as ``build`` takes them.

    Raises:
        SessionError: one is not built.
    """
    many: Sequence[Any] = engines if isinstance(engines, list | tuple) else [engines]
    return tuple(slot for engine in many for slot in engine.slots)
