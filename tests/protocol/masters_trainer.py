# SPDX-License-Identifier: Apache-2.0
"""A simulated trainer: it makes calls and commits steps, as a real one does."""

import asyncio
from functools import partial

from ray.exceptions import RayActorError

from dlrover.python.rl.common.errors import JobFailed
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat
from tests.protocol.loops_world import Violation
from tests.protocol.masters_cluster import Actor, StaleCallError

STEPS = 25


class TrainerActor(Actor):
    """Commits a step when all workers have answered."""

    def __init__(self, cluster, request, node, pid):
        super().__init__(cluster, request, node, pid)
        self.process_id, (self.number, _, beats) = TRAINER_ID, request.arguments
        self.loop = self.world.start(self.name)
        self.job, self.start_of, self.is_failing = cluster.job, None, False
        self._runs, self._outcome = [], ()
        self.beat(beats)

    def heartbeat(self):
        age_s = self.world.now_s - self._since_s if self.is_stuck else 0.0
        return Heartbeat(TRAINER_ID, self.number, "fit" if self.is_stuck else "", age_s, step=self.job.committed)

    def on_start(self, reply, start):
        self.start_of, self.is_up = start, True
        self.job.identify(self)
        reply.value(self.process)

    def on_run(self, reply):
        """Asked again, it tells the end of the same run."""
        self._waiting.append(reply)
        self._runs.append(reply)
        if self._outcome:
            reply.value(*self._outcome)
        elif len(self._runs) == 1:
            self.loop.call_soon(lambda: self.loop.create_task(self._run()))

    async def _run(self):
        try:
            await Training(self).run()
        except JobFailed as error:
            self._note_refusal()
            self._outcome = (Cause(CauseKind.USER_ERROR, "trainer", str(error)),)
        except MemberDiedError as error:
            self._outcome = (Cause(CauseKind.PROCESS_DIED, str(error), "a call found it dead"),)
        except StaleCallError:
            self._note_refusal()
            return  # it ends with its lease
        except Violation as violation:
            self.world.broken = violation
        else:
            self._outcome = (None,)
        for reply in self._runs:
            reply.value(*self._outcome)

    def _note_refusal(self):
        if self.number < self.job.referee.last.epoch:
            self.world.reached["a replaced trainer is refused"] += 1

    def die(self):
        super().die()
        self.loop.kill()


class MemberDiedError(Exception):
    """A worker has died under a trainer that does not replace it."""


class Training:
    """The work of a trainer, in its process."""

    def __init__(self, actor):
        self.actor, self.world, self.cluster, self.job = actor, actor.world, actor.cluster, actor.job
        self.epoch = actor.number
        self.members = {}

    async def run(self):
        for member, (incarnation, handle) in self.actor.start_of.members.items():
            if handle is None:
                await self.renew(member, 0)
            else:
                self.members[member] = incarnation, handle
        if not self.job.terms.is_durable:
            while not self.job.is_quiet:
                await self.call_all()
            return
        await self.ask("opened", self.epoch)
        self.job.claim(self.epoch)
        while self.job.committed < STEPS:
            step = self.job.committed + 1
            await self.call_all()
            self.job.commit(self.actor, step, self.members)
            self.cluster.ask_master("progressed", (self.epoch, step), lambda answer, error: None, node=self.actor.node)

    async def call_all(self):
        for role in ("ROLLOUT", "REWARD", "ACTOR"):
            await asyncio.gather(*(self.call(each) for each in list(self.members) if each.role == role))
        while self.actor.is_stuck:
            await asyncio.sleep(1.0)
        if self.actor.is_failing:
            raise JobFailed("the user's code fails")

    async def call(self, member):
        while True:
            incarnation, handle = self.members[member]
            try:
                return await self.world.answer_of(partial(handle.work, self.actor, self.epoch, incarnation))
            except RayActorError:
                if not self.job.terms.is_durable:
                    raise MemberDiedError(member) from None
                await self.renew(member, incarnation)

    async def renew(self, member, dead):
        cause = Cause(CauseKind.PROCESS_DIED, str(member), "a call found it dead")
        while self.members.get(member, (0, None))[0] <= dead:
            replaced = await self.ask("renew", self.epoch, member.role, member.rank, dead, cause, 5.0)
            for rank, (incarnation, name) in (replaced or {}).items():
                peer = ProcessId(member.role, rank)
                handle = self.cluster.find_actor(name)
                if incarnation > self.members.get(peer, (0, None))[0] and handle is not None:
                    self.members[peer] = incarnation, handle
                elif peer == member and handle is None:
                    dead = max(dead, incarnation)

    async def ask(self, method, *arguments):
        future = self.actor.loop.create_future()

        def take(answer, error):
            if not self.actor.loop.is_dead and not future.done():
                settle = partial(future.set_result, answer) if error is None else partial(future.set_exception, error)
                self.actor.loop.call_soon(settle)

        self.cluster.ask_master(method, arguments, take, node=self.actor.node)
        return await future
