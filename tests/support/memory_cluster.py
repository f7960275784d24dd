# SPDX-License-Identifier: Apache-2.0
"""The in-memory twin of a Ray cluster: each node has space for one placement group, and actors answer at once."""

import asyncio
from dataclasses import dataclass, field, replace

from ray.exceptions import ActorDiedError

from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.ray.cluster.api import CREATED, REMOVED, GroupRow
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow

PENDING = "PENDING"


class Method:
    """``remote`` returns an awaitable, as Ray's does."""

    def __init__(self, function):
        self._function = function

    def remote(self, *arguments):
        return self._function(*arguments)


class MemoryActor:
    """A worker that locates itself on ``node``, starts with a ``context`` and closes at once."""

    def __init__(self, request, node, pid):
        self.request, self.node, self.pid = request, node, pid
        self.process_id, self.context = request.arguments[0], None
        self._ended = asyncio.Event()
        self.dlrover_locate = Method(self._locate)
        self.dlrover_start = Method(self._start)
        self.dlrover_prepare = self.dlrover_close = Method(self._answer)

    async def _locate(self, tcp_ports):
        return Process(self.node, self.pid, address=f"address of {self.node}", port=self.pid)

    async def _start(self, job, context, incarnation):
        self.context = context

    async def _answer(self, *arguments):
        return None

    async def until_ended(self):
        await self._ended.wait()
        return ActorDiedError()

    def end(self):
        self._ended.set()


@dataclass
class MemoryCluster:
    """A twin of ``RayClusterApi``."""

    nodes: tuple[str, ...]
    groups: dict[str, GroupRow] = field(default_factory=dict)
    actors: dict[str, MemoryActor] = field(default_factory=dict)
    started: list = field(default_factory=list)  # process and bundle of each actor
    killed: list = field(default_factory=list)  # processes
    calls: list = field(default_factory=list)  # node, function name and arguments of what was run on nodes
    _excluded: dict = field(default_factory=dict)

    def list_actors(self, prefix):
        return [name for name in self.actors if name.startswith(prefix)]

    def find_actor(self, name):
        return self.actors.get(name)

    def start_actor(self, request):
        group = self.groups[request.placement.group]
        actor = MemoryActor(request, next(iter(group.nodes)), 100 + len(self.started))
        self.actors[request.name] = actor
        self.started.append((str(actor.process_id), request.placement.bundle))
        return actor

    def kill_actor(self, handle):
        self.end(handle)
        self.killed.append(str(handle.process_id))

    async def until_ended(self, handle):
        return await handle.until_ended()

    def end(self, actor):
        """End its process from outside."""
        actor.end()
        self.actors.pop(actor.request.name, None)

    def list_groups(self):
        return list(self.groups.values())

    def create_group(self, bundles, name, excluded=(), node=""):
        group = f"group-{len(self.groups)}"
        self.groups[group] = GroupRow(group, name, PENDING, frozenset())
        self._excluded[group] = set(excluded)
        self._schedule()
        return group

    def remove_group(self, group):
        self.groups[group] = replace(self.groups[group], state=REMOVED, nodes=frozenset())
        self._schedule()

    def _schedule(self):
        for row in list(self.groups.values()):
            used = {node for group in self.groups.values() for node in group.nodes}
            free = sorted(set(self.nodes) - used - self._excluded[row.id])
            if row.state == PENDING and free:
                self.groups[row.id] = replace(row, state=CREATED, nodes=frozenset(free[:1]))

    def free_resources(self):
        return {}

    def list_nodes(self):
        return [NodeRow(node, True, "127.0.0.1", 1) for node in self.nodes]

    async def run_on(self, node, function, *arguments, limit_s=None):
        self.calls.append((node, function.__name__, *arguments))

    def reserved(self):
        """The node of each group that has one."""
        return {row.id: next(iter(row.nodes)) for row in self.groups.values() if row.nodes}
