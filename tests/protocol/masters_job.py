# SPDX-License-Identifier: Apache-2.0
"""A job under production masters, which are ended, frozen, cut off and started again.

The master, its brain and journal file, hang detector, executor, table of processes and reservations are the production
classes. The workers answer, and the trainer makes calls and commits steps, as real ones do.
"""

import asyncio
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

from ray.exceptions import RayActorError

from dlrover.python.rl.common.errors import JobFailed, JournalCorrupt
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import replay
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import MemberPhase, Phase
from dlrover.python.rl.master.process import brain, rl_master
from dlrover.python.rl.runtime.checkpoint import journal_store
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.ray.cluster import nodes as node_watch
from dlrover.python.rl.runtime.ray.processes import actors
from tests.protocol.loops_world import Process, Violation, World
from tests.protocol.masters_cluster import Actor, Cluster, StaleCallError

STEPS = 25
LEASE_S, BEAT_S, HANG_S = 20.0, 0.5, 12.0
OWNER_S = 5.0  # between two looks at the owner of the run's folder

JOB = f"""
name: sim
job_dir: {{folder}}
trainer: {{{{module: toys, class: Loop, node_number: 2, device_per_node: 4, device_type: CPU, hang_after_s: {HANG_S}}}}}
workload:
  actor: {{{{module: toys, class: Policy, num: 2, per_node: 2, hang_after_s: {HANG_S}}}}}
  rollout: {{{{module: toys, class: Sampler, num: 2, per_node: 1, standby: 1, hang_after_s: {HANG_S}}}}}
restart: {{{{job_max_restart: 999, trainer_max_restart: 999, node_max_failures: 999, backoff_s: 0.5,
           workload_max_restart: {{{{actor: 999, rollout: 999}}}}}}}}
liveness: {{{{beat_s: {BEAT_S}, lease_s: {LEASE_S}, start_timeout_s: 30}}}}
"""


class Left(BaseException):
    """This master's process has ended itself."""


class TrainerActor(Actor):
    """Commits a step when all workers have answered."""

    def __init__(self, cluster, request, node, pid):
        super().__init__(cluster, request, node, pid)
        self.process_id, (self.number, _, beats) = TRAINER_ID, request.arguments
        self.loop = self.world.start(self.name)
        self.job, self.start_of = cluster.job, None
        self._runs, self._outcome = [], ()
        self.beat(beats)

    def heartbeat(self):
        age_s = self.world.now_s - self._since_s if self.is_stuck else 0.0
        return Heartbeat(TRAINER_ID, self.number, "fit" if self.is_stuck else "", age_s, step=self.job.committed)

    def on_start(self, reply, start):
        self.start_of = start
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
            self._outcome = (Cause(CauseKind.USER_ERROR, "trainer", str(error)),)
        except StaleCallError:
            self.world.reached["a replaced trainer is refused"] += 1  # and ends with its lease
            return
        except Violation as violation:
            self.world.broken = violation
        else:
            self._outcome = (None,)
        for reply in self._runs:
            reply.value(*self._outcome)

    def die(self):
        super().die()
        self.loop.kill()


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
        await self.ask("opened", self.epoch)
        self.job.claim(self.epoch)
        while self.job.committed < STEPS:
            step = self.job.committed + 1
            for role in ("ROLLOUT", "ACTOR"):
                await asyncio.gather(*(self.call(each) for each in list(self.members) if each.role == role))
            while self.actor.is_stuck:
                await asyncio.sleep(1.0)
            self.job.commit(self.epoch, step)
            self.cluster.ask_master("progressed", (self.epoch, step), lambda answer, error: None)

    async def call(self, member):
        while True:
            incarnation, handle = self.members[member]
            try:
                return await self.world.answer_of(partial(handle.work, self.epoch, incarnation))
            except RayActorError:
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

        self.cluster.ask_master(method, arguments, take)
        return await future


class Job:
    """The run, and what its masters are."""

    def __init__(self, world: World, folder, text=JOB, nodes=4) -> None:
        self.world, self.folder = world, folder
        self.committed, self.fence, self.submitted = 0, 0, False
        self.failing: tuple[str, int] | None = None  # a call of the journal's disk, and the number of its error
        self.spec = load_job_text(text.format(folder=folder), "sim")
        self.spec = replace(self.spec, run="run1")
        self.placement = plan(self.spec)[0]
        self.inspection = Inspection(collectives=("ACTOR",), stateful=("ACTOR",))
        self.cluster = Cluster(world, TrainerActor, {f"n{index}": True for index in range(nodes)})
        self.cluster.job, self.cluster.audit = self, self.audit
        self.masters: list[Process] = []
        self.handle = SimpleNamespace(resume=SimpleNamespace(remote=self._resume_later))

    # -- masters ------------------------------------------------------------------------------------------------------

    def begin(self):
        self.start_master(is_restarted=False)
        self.cluster.ask_master("start", ({},), lambda answer, error: None)

    def start_master(self, is_restarted=True):
        """Ray starts a process of the master; calls go to it from then on."""
        process = self.world.start(f"master-{len(self.masters) + 1}")
        process.is_restarted = is_restarted
        self.masters.append(process)

        def construct() -> None:
            process.rl_master = rl_master.RLMaster(self.spec, self.placement, self.inspection, claims=False)
            self.cluster.serve_as(process)

        process.call_soon(construct)

    def close(self):
        """The files of masters that were killed are closed too."""
        for process in self.masters:
            if hasattr(process, "rl_master"):
                process.rl_master._run.brain.store.close()

    def _resume_later(self):
        """A master's request to itself, which goes to the current one; others may come first."""
        self.world.after(
            self.world.rng.choice((0.0, 1.0)),
            lambda: self.cluster.ask_master("resume", (), lambda answer, error: None),
        )

    @property
    def master(self):
        return self.masters[-1]

    def state(self):
        """Return the journal's state."""
        with suppress(OSError, JournalCorrupt):
            return replay(decode(read_lines(self.folder / brain.JOURNAL)))
        return None

    @property
    def phase(self):
        state = self.state()
        return state.phase if state is not None else None

    def is_over(self):
        master = getattr(self.master, "rl_master", None)
        return master is not None and not self.master.is_dead and master._state.phase.terminal

    # -- what must never happen ---------------------------------------------------------------------------------------

    def claim(self, epoch):
        if epoch < self.fence:
            raise StaleCallError
        self.fence = epoch

    def commit(self, epoch, step):
        if epoch < self.fence:
            raise StaleCallError
        if step != self.committed + 1:
            raise Violation(f"step {step} is committed after step {self.committed}")
        self.committed = step

    def audit(self, actor):
        """A master that was replaced ends no process that the job needs."""
        with suppress(RuntimeError):
            process = asyncio.get_running_loop()
            if process in self.masters and process is not self.master and self._is_needed(actor):
                self.world.broken = Violation(f"{process.name}, which was replaced, ends {actor.name}")

    def _is_needed(self, actor):
        state = self.state()
        if state is None or state.phase is not Phase.RUNNING or not actor.is_alive:
            return False
        if actor.process_id == TRAINER_ID:
            return state.epoch == actor.number
        member = state.members.get(actor.process_id)
        return member is not None and member.phase is MemberPhase.UP and member.incarnation == actor.number

    def check_end(self):
        state = self.state()
        if state.phase is not Phase.FINISHED:
            raise Violation(f"the job is {state.phase.value}: {state.reason}")
        if self.committed != STEPS:
            raise Violation(f"the job has finished at step {self.committed}")

    def left_over(self):
        groups = [row.name for row in self.cluster.groups.values() if row.state != "REMOVED"]
        replaced = [process.name for process in self.masters[:-1] if not process.is_dead]
        return [*self.cluster.actors, *groups, *replaced]

    # -- the environment of the production classes ---------------------------------------------------------------------

    def environment(self) -> ExitStack:
        world, stack = self.world, ExitStack()

        def patch(where, **names):
            for name, value in names.items():
                stack.enter_context(mock.patch.object(where, name, value))

        patch(asyncio, to_thread=self._to_thread)
        patch(node_watch, in_daemon_thread=lambda call: asyncio.ensure_future(self._to_thread(call)))
        patch(actors, session_folder=lambda: "/nonexistent")
        patch(journal_store, os=Disk(self))
        patch(brain, Brain=self._brain_on_clock())
        patch(
            rl_master.MasterRun,
            take=lambda run: None,
            hold=lambda run, is_over: self._hold(is_over),
            leave=lambda run, outcome: None,
        )
        patch(
            rl_master,
            configure_logging=lambda name: None,
            RayClusterApi=lambda: self.cluster,
            current_actor=lambda: self.handle,
            was_restarted=lambda: asyncio.get_running_loop().is_restarted,
            end_unless=self._end_unless,
            end_later=_end_later,
            leave=self._leave,
            HangDetector=partial(rl_master.HangDetector, now_s=lambda: world.now_s),
            time=SimpleNamespace(monotonic=lambda: world.now_s, time=time.time),
        )
        return stack

    async def _to_thread(self, function, *arguments, **named):
        await asyncio.sleep(self.world.latency_s())
        of_cluster = getattr(function, "__self__", None) in (self.cluster, getattr(self._own(), "_cluster", None))
        while self.cluster.is_away and of_cluster:
            await asyncio.sleep(0.1)
        return function(*arguments, **named)

    def _own(self):
        return getattr(asyncio.get_running_loop(), "rl_master", None)

    def _end_unless(self, has_begun, after_s, why):
        process = asyncio.get_running_loop()
        self.world.after(after_s, lambda: None if has_begun() else process.kill())

    async def _hold(self, is_over):
        """The folder of the run, whose new owner a master sees soon."""
        while not is_over():
            await asyncio.sleep(OWNER_S)
            if asyncio.get_running_loop() is not self.master and self.state() is not None:
                self._leave("the folder has another owner")

    def _leave(self, why):
        process = asyncio.get_running_loop()
        self.world.trace(process.name, "leaves")
        self.world.reached["a replaced master leaves"] += 1
        process.kill()
        if process is self.master:  # an earlier one took the journal from it, as it began only then
            self.world.reached["Ray starts a master that has left again"] += 1
            self.world.after(self.world.rng.uniform(0.5, 3.0), self.start_master)
        raise Left(why)

    def _brain_on_clock(self):
        job = self

        class Brain(brain.Brain):
            def __init__(self, store):
                super().__init__(store, *[lambda: job.world.now_s] * 2)

        return Brain


class Disk:
    """The module ``os``, with a call that fails while the job says so."""

    def __init__(self, job):
        self.job = job

    def __getattr__(self, name):
        call, number = self.job.failing or ("", 0)
        return partial(self._fail, number) if name == call else getattr(os, name)

    def _fail(self, number, *arguments):
        raise OSError(number, os.strerror(number))


async def _end_later(actor, after_s):
    await asyncio.sleep(after_s)
    asyncio.get_running_loop().kill()
