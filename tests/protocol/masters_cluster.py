# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster under simulation: nodes with room for one placement group each, actors that answer, beat and die, and
calls of actors by name that wait while an actor is started again."""

import asyncio
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import count

from ray.exceptions import ActorDiedError

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.control.liveness import Work
from dlrover.python.rl.runtime.member.heartbeat import BeatAnswer, Heartbeat
from dlrover.python.rl.runtime.ray.cluster.api import CREATED, REMOVED
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeRow
from tests.protocol.loops_world import Process as ProcessLoop
from tests.protocol.loops_world import Reply, World
from tests.support.memory_cluster import MemoryCluster, Method

_ANSWER_S = 5.0  # of the master to a beat


class Actor:
    """A process of the job. Its methods answer after a time; a worker beats, and lives no longer than its lease.

    It ``is_gone`` once Ray takes it for dead, which it may not be, if its node was cut off."""

    def __init__(self, cluster, request, node, pid):
        self.cluster, self.world, self.request = cluster, cluster.world, request
        self.node, self.pid, self.name = node, pid, request.name
        self.process_id, self.number = None, 0
        self.is_up, self.is_alive, self.is_gone = False, True, False
        self.is_stuck = self.is_stopped = False
        self.was_cut_off = node in cluster.cut_off
        self.epoch, self.seen_s, self._since_s = 0, self.world.now_s, self.world.now_s
        self._waiting: list[Reply] = []
        self.born_s = self.world.now_s + self.world.rng.uniform(0.2, 2.0)

    def __getattr__(self, name):
        if not name.startswith("dlrover_") and name not in ("start", "run"):
            raise AttributeError(name)
        return Method(lambda *arguments: self.world.answer_of(lambda reply: self._serve(name, arguments, reply)))

    def _serve(self, name, arguments, reply):
        if self.is_gone:
            reply.error(ActorDiedError())
            return
        self._waiting.append(reply)
        if self.node in self.cluster.cut_off:
            self.cluster.delayed.append(lambda: self._serve(name, arguments, reply))
            return
        if name == "dlrover_ping":
            return  # answered by the end of the process
        delay_s = max(self.born_s - self.world.now_s, 0.0) + self.world.rng.uniform(0.001, 0.05)
        self.world.after(delay_s, lambda: self._answer(name, arguments, reply))

    def _answer(self, name, arguments, reply):
        if self.is_alive and not self.is_stuck:
            getattr(self, f"on_{name.removeprefix('dlrover_')}")(reply, *arguments)

    def on_locate(self, reply, ports):
        reply.value(self.process)

    def on_close(self, reply, *arguments):
        reply.value(None)

    on_prepare = on_close

    def on_leave(self, reply):
        self.is_up = False
        reply.value(None)

    @property
    def process(self):
        return Process(self.node, self.pid, self.node, "127.0.0.1", port=20_000 + self.pid)

    def beat(self, beats):
        """Now and from then on."""

        def send() -> None:
            if not self.is_alive:
                return
            if self.world.now_s - self.seen_s > beats.lease_s and not self.is_stopped:
                self.world.trace(self.name, "ends: its lease is over")
                self.die()
                return
            if not self.is_stopped and self.node not in self.cluster.cut_off:
                self.cluster.ask_master("beat", (self.heartbeat(),), self._take_answer, _ANSWER_S)
            self.world.after(beats.beat_s, send)

        self.world.after(self.born_s - self.world.now_s + beats.beat_s, send)

    def heartbeat(self):
        method = "work" if self.is_stuck else ""
        age_s = self.world.now_s - self._since_s if self.is_stuck else 0.0
        return Heartbeat(self.process_id, self.number, method, age_s, work=Work())

    def _take_answer(self, answer, error):
        if error is None:
            self.seen_s = self.world.now_s
            if answer is BeatAnswer.REPLACED:
                self.die()

    def stick(self):
        """It makes no progress any more."""
        self.is_stuck, self._since_s = True, self.world.now_s

    def stop(self):
        """It does nothing any more, and does not beat either."""
        self.stick()
        self.is_stopped = True

    def die(self):
        self.is_alive = self.is_up = False
        if self.node not in self.cluster.cut_off:
            self.forget()

    def end(self):
        """Ray ends it, as far as it can be reached."""
        if self.node in self.cluster.cut_off:
            self.forget()
        else:
            self.die()

    def forget(self):
        """Ray takes it for dead."""
        if self.is_gone:
            return
        self.is_gone = True
        if self.cluster.actors.get(self.name) is self:
            del self.cluster.actors[self.name]
        for reply in self._waiting:
            reply.error(ActorDiedError())


class MemberActor(Actor):
    """A worker, or a standby, until it is started as one."""

    def __init__(self, cluster, request, node, pid):
        super().__init__(cluster, request, node, pid)
        self.process_id, self.number, _, beats = request.arguments
        self.beat(beats)

    def on_start(self, reply, job, context, incarnation):
        self.process_id, self.number, self.is_up = ProcessId(str(context.role), context.rank), incarnation, True
        self.cluster.job.identify(self)
        reply.value(None)

    def work(self, trainer, epoch, incarnation, reply):
        """A call of a trainer."""
        if self.is_gone:
            reply.error(ActorDiedError())
        elif self.node != trainer.node and {self.node, trainer.node} & self.cluster.cut_off.keys():
            self._waiting.append(reply)
            self.cluster.delayed.append(lambda: self.work(trainer, epoch, incarnation, reply))
        elif epoch < self.epoch:
            reply.error(StaleCallError())
        elif incarnation != self.number or not self.is_up:
            reply.error(ActorDiedError())
        else:
            self.epoch = epoch
            self._waiting.append(reply)
            if not self.is_stuck:
                self.world.after(self.world.rng.uniform(0.02, 0.4), lambda: reply.value(None))


class StaleCallError(Exception):
    """A call came from a trainer that has been replaced."""


@dataclass
class Cluster(MemoryCluster):
    """A twin of ``RayClusterApi``, whose ``nodes`` are their names to whether they are alive."""

    _: KW_ONLY
    world: World
    trainer: type
    everyone: list[Actor] = field(default_factory=list)
    master: ProcessLoop | None = None
    is_away: bool = False  # Ray's head
    cut_off: dict[str, int] = field(default_factory=dict)  # nodes that cannot be reached, each with the number of a cut
    delayed: list = field(default_factory=list)  # calls that have not arrived because of them
    audit: object = None
    _scaled: set = field(default_factory=set)
    _cuts: count = field(default_factory=count)
    _calls: list = field(default_factory=list)

    # -- RayClusterApi: in threads ------------------------------------------------------------------------------------

    def start_actor(self, request):
        if request.name in self.actors:
            raise ValueError(f"the name {request.name} is taken")
        group = self.groups.get(request.placement.group)
        node = next(iter(group.nodes), None) if group is not None else None
        kind = self.trainer if "/trainer/" in request.name else MemberActor
        actor = kind(self, request, node or "nowhere", 100 + len(self.everyone))
        self.everyone.append(actor)
        if node is None or not self.nodes.get(node):
            actor.die()  # its group was removed in between
        else:
            self.actors[request.name] = actor
        self.world.trace(self._who(), "starts", request.name, "on", node)
        return actor

    def kill_actor(self, handle):
        self.world.trace(self._who(), "kills", handle.name)
        self.audit(handle)
        self.world.after(self.world.latency_s(), handle.end)

    async def until_ended(self, handle):
        try:
            await handle.dlrover_ping.remote()
        except ActorDiedError as error:
            return error

    def remove_group(self, group):
        for actor in list(self.actors.values()):
            if actor.request.placement.group == group:
                self.audit(actor)
                actor.end()
        super().remove_group(group)

    def _schedule(self):
        waiting = [row for row in self.groups.values() if row.state not in (CREATED, REMOVED)]
        used = {node for group in self.groups.values() for node in group.nodes} if waiting else set()
        for row in waiting:
            excluded = self._excluded[row.id]
            free = (node for node in sorted(self.nodes) if self.nodes[node] and node not in used | excluded)
            node = next(free, None)
            if node is not None:
                used.add(node)
                self.groups[row.id] = replace(row, state=CREATED, nodes=frozenset({node}))
            elif row.id not in self._scaled:  # the provider has another one
                self._scaled.add(row.id)
                self.world.after(self.world.rng.uniform(3.0, 15.0), partial(self._scale_up, row.id))

    def _scale_up(self, group):
        self._scaled.discard(group)
        if self.groups[group].state not in (CREATED, REMOVED):
            self.nodes[f"n{len(self.nodes)}"] = True
            self._schedule()

    def list_nodes(self):
        return [NodeRow(node, is_alive, "127.0.0.1", 0) for node, is_alive in self.nodes.items()]

    async def run_on(self, node, function, *arguments, limit_s=None):
        process = self._who()

        def victims():
            if function.__name__ not in ("kill_and_wait", "_end_and_list"):
                return []
            on_node = [actor for actor in self.everyone if actor.node == node and actor.is_alive]
            return [actor for actor in on_node if actor.pid in arguments[0]]

        def arrive(reply):
            for actor in victims() if self.nodes.get(node) and node not in self.cut_off else ():
                self.world.trace(process, "kills the process of", actor.name)
                actor.die()
            reply.value("")

        for actor in victims():
            self.audit(actor)
        return await self.world.answer_of(arrive)

    def _who(self):
        try:
            return asyncio.get_running_loop().name
        except RuntimeError:
            return "-"

    # -- faults -------------------------------------------------------------------------------------------------------

    def lose_node(self, node):
        for actor in self.everyone:
            if actor.node == node and actor.is_alive:
                actor.die()
        self._give_up(node)

    def cut_node_off(self, node, heal_s):
        """Let nothing reach the node until ``heal_s``, while its processes continue. Ray declares it lost later."""
        cut = self.cut_off[node] = next(self._cuts)
        for actor in self.on_node(node):
            actor.was_cut_off = True

        def give_up() -> None:
            if self.cut_off.get(node) == cut:
                self._give_up(node)

        self.world.after(self.world.rng.uniform(3.0, 6.0), give_up)
        self.world.after(heal_s, lambda: self.reach(node, cut))

    def reach(self, node, cut):
        """Let the node be reached again; processes that Ray has declared dead end some time later."""
        if self.cut_off.get(node) != cut:
            return
        del self.cut_off[node]
        for actor in [actor for actor in self.everyone if actor.node == node]:
            if actor.is_alive and actor.is_gone:
                self.world.after(self.world.rng.uniform(0.5, 20.0), actor.die)
            elif not actor.is_alive:
                actor.forget()
        self._deliver_all()

    def on_node(self, node):
        return [actor for actor in self.actors.values() if actor.node == node]

    def _give_up(self, node):
        self.nodes[node] = False
        for actor in self.on_node(node):
            actor.forget()
        for group, row in self.groups.items():
            if node in row.nodes:
                self.groups[group] = replace(row, state="RESCHEDULING", nodes=frozenset())
        self._schedule()

    # -- calls of the master ------------------------------------------------------------------------------------------

    def ask_master(self, method, arguments, take, timeout_s=None, node=""):
        """``take(answer, error)`` comes later. A call waits while the master is started again, and is repeated."""
        call = [method, arguments, take, False, node]
        self._calls.append(call)
        self.world.after(self.world.latency_s(), lambda: self._deliver(call))
        if timeout_s is not None:
            self.world.after(timeout_s, lambda: self._settle(call, None, TimeoutError()))

    def serve_as(self, master):
        """Make this process the master; what was not answered is sent to it."""
        self.master = master
        self._deliver_all()

    def _deliver_all(self):
        delayed, self.delayed = self.delayed, []
        for serve in delayed:
            serve()
        for call in list(self._calls):
            self._deliver(call)

    def _deliver(self, call):
        method, arguments, _, is_over, node = call
        process = self.master
        if is_over or process is None or process.is_dead or node in self.cut_off:
            return

        async def serve() -> None:
            try:
                answer, error = await getattr(process.rl_master, method)(*arguments), None
            except Exception as raised:  # noqa: BLE001 -- it travels
                answer, error = None, raised
            self.world.after(self.world.latency_s(), lambda: self._settle(call, answer, error))

        process.call_soon(lambda: process.create_task(serve()))

    def _settle(self, call, answer, error):
        if not call[3]:
            call[3] = True
            self._calls.remove(call)
            call[2](answer, error)
