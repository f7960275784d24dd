# SPDX-License-Identifier: Apache-2.0
"""Simulated nodes and processes. The cluster knows the truth; the master knows what it is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sim_world import Violation, World

from dlrover.python.rl.common.names import ProcessId


@dataclass
class Node:
    """A machine. ``cut``: nobody else reaches it. ``lost``: the cluster has given it up, for good."""

    name: str
    alive: bool = True
    cut: bool = False
    lost: bool = False
    cut_count: int = 0
    cut_s: float | None = None

    @property
    def usable(self) -> bool:
        return self.alive and not self.cut and not self.lost


@dataclass
class Proc:
    """A process of the job.

    Attributes:
        name: its name on the cluster: ``("member", "ROLLOUT[1]", 3)``, ``("standby", "ROLLOUT", 0)``,
            ``("trainer", "trainer", 2)``.
        identity: who it is, and which one of those.
        stopped_s: since when it does nothing at all.
        stuck_s: since when it sits in one call; it still beats.
        batch: the start of a group that it belongs to.
        result: what its main function returned: a cause, or ``""`` for a good end.
        highest_epoch: of the trainers that have called it.
    """

    pid: int
    name: tuple[str, str, int]
    node: Node
    identity: tuple[ProcessId, int] | None
    batch: int = 0
    alive: bool = True
    up: bool = False
    stopped_s: float | None = None
    stuck_s: float | None = None
    result: Any = None
    died_s: float | None = None
    highest_epoch: int = 0
    watchers: list[Callable[["Proc"], None]] = field(default_factory=list)

    @property
    def heard_s(self) -> float | None:
        """When the last beat left it, None while it beats."""
        ends = [at_s for at_s in (self.stopped_s, self.died_s, self.node.cut_s) if at_s is not None]
        return min(ends, default=None)

    @property
    def works(self) -> bool:
        return self.alive and self.stopped_s is None and self.stuck_s is None


class Cluster:
    """Nodes, processes, names, reservations and shared memory of one run of a job."""

    def __init__(self, world: World, nodes: int) -> None:
        self.world = world
        self.nodes: list[Node] = []
        self.procs: list[Proc] = []
        self.names: dict[tuple[str, str, int], Proc] = {}
        self.reserved: dict[int, bool] = {}
        self.memory = False
        self.spared: dict[int, Proc] = {}
        self.packed = world.rng.random() < 0.4
        self.born: dict[tuple[ProcessId, int], int] = {}
        self.node_watchers: list[Callable[[Node], None]] = []
        self.wanted_nodes = nodes
        for _ in range(nodes):
            self.add_node()

    # -- nodes --------------------------------------------------------------------------------------------------------

    def add_node(self) -> None:
        """One more machine."""
        self.nodes.append(Node(f"n{len(self.nodes)}"))

    def usable(self, excluded: tuple[str, ...] = ()) -> list[Node]:
        """Where a process may be started."""
        return [node for node in self.nodes if node.usable and node.name not in excluded]

    def kill_node(self, node: Node) -> None:
        """The machine is gone at once; the cluster notices later."""
        node.alive = False
        for proc in self.procs:
            if proc.node is node:
                self.kill(proc)
        self.world.after(self.world.within(0.5, 4.0), self._give_up, node, node.cut_count)

    def cut_node(self, node: Node) -> None:
        """Nobody reaches the machine; what runs there goes on."""
        node.cut, node.cut_s = True, self.world.now_s
        node.cut_count += 1
        self.world.after(self.world.within(3.0, 6.0), self._give_up, node, node.cut_count)

    def heal_node(self, node: Node) -> None:
        """The machine can be reached again. What runs on one that was given up ends a while after."""
        if not node.cut:
            return
        node.cut, node.cut_s = False, None
        for proc in self.procs:
            if proc.node is node and proc.alive and node.lost:
                self.world.after(self.world.within(0.5, 20.0), self.kill, proc)
            elif proc.node is node and not proc.alive and self.names.get(proc.name) is proc:
                del self.names[proc.name]
                self._tell(proc)

    def _give_up(self, node: Node, cut_count: int) -> None:
        if node.lost or (node.alive and not (node.cut and node.cut_count == cut_count)):
            return
        node.lost = True
        self.world.trace("node lost", node.name)
        for name, proc in list(self.names.items()):
            if proc.node is node:
                del self.names[name]
                self._tell(proc)
        for watch in list(self.node_watchers):
            watch(node)
        self.world.after(self.world.within(2.0, 15.0), self.refill)

    def refill(self) -> None:
        """The machines that a provider gives in place of the lost ones."""
        while len([node for node in self.nodes if node.alive and not node.lost]) < self.wanted_nodes:
            self.add_node()

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self, name: tuple[str, str, int], node: Node, identity: tuple[ProcessId, int] | None, batch: int) -> Proc:
        """Begin a process; one of the same name that can be reached is ended first."""
        earlier = self.names.get(name)
        if earlier is not None:
            self.kill(earlier)
        proc = Proc(len(self.procs) + 1, name, node, None, batch)
        self.procs.append(proc)
        self.names[name] = proc
        if identity is not None:
            self.become(proc, identity, batch)
        return proc

    def become(self, proc: Proc, identity: tuple[ProcessId, int], batch: int) -> None:
        """From here on the process carries a number that no other process ever carries."""
        other = self.born.setdefault(identity, proc.pid)
        if other != proc.pid:
            raise Violation(f"the processes {other} and {proc.pid} are both {identity[0]} number {identity[1]}")
        proc.identity, proc.batch = identity, batch

    def kill(self, proc: Proc) -> None:
        """The process is gone."""
        if not proc.alive:
            return
        proc.alive, proc.died_s = False, self.world.now_s
        self.world.trace("gone", proc.pid, *proc.name)
        if not proc.node.cut:
            self._tell(proc)
            if self.names.get(proc.name) is proc:
                del self.names[proc.name]

    def _tell(self, proc: Proc) -> None:
        for watch in proc.watchers:
            watch(proc)
        proc.watchers = []

    def reach(self, one: Node, other: Node) -> bool:
        """Whether processes on these nodes can talk."""
        return one is other or not (one.cut or other.cut or one.lost or other.lost)

    def end(self, proc: Proc) -> None:
        """Kill a process from outside its node."""
        if proc.node.usable:
            self.kill(proc)

    def alive(self) -> list[Proc]:
        """All processes that there really are."""
        return [proc for proc in self.procs if proc.alive]
