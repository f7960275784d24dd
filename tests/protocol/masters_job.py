# SPDX-License-Identifier: Apache-2.0
"""A job under production masters, which are ended, frozen, cut off and started again.

The master, its brain and journal file, hang detector, executor, table of processes and reservations are the production
classes. The workers answer, and the trainer makes calls and commits steps, as real ones do.
"""

import asyncio
import json
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from unittest import mock

from ray.exceptions import RayActorError

from dlrover.python.rl.common.errors import JobFailed, JournalCorrupt, StaleEpoch
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.events import Cause, CauseKind, MasterStarted, Submitted
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import replay
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import EndReason, MemberPhase, Phase
from dlrover.python.rl.master.process import brain, rl_master
from dlrover.python.rl.runtime.checkpoint import journal_store
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore, read_lines
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.ray.cluster import nodes as node_watch
from dlrover.python.rl.runtime.ray.processes import actors
from tests.protocol.loops_world import Process, Violation, World
from tests.protocol.masters_cluster import Actor, Cluster, StaleCallError
from tests.protocol.masters_disk import Disk
from tests.protocol.masters_referee import Referee

STEPS = 25
LEASE_S, BEAT_S, HANG_S = 20.0, 0.5, 12.0
OWNER_S = 5.0  # between two looks at the owner of the run's folder


@dataclass(frozen=True)
class Terms:
    """A job and its cluster, and how its processes behave. The limits are numbers of restarts."""

    sizes: tuple[int, int, int] = (2, 2, 0)  # of actor, rollout and reward
    standbys: tuple[int, int] = (0, 1)
    limit: int = 999
    role_limit: int | None = None
    backoff_s: float = 0.5
    window_s: float = 3600.0
    node_limit: int = 999
    plan_nodes: int = 2
    nodes: int = 4
    rejoins: bool = False
    is_durable: bool = True
    echo: tuple[float, float] = (0.0, 0.0)  # the share of events that are reported once more, and the latest time

    def text(self, folder):
        trainer = f"module: toys, class: Loop, node_number: {self.plan_nodes}, device_per_node: 4, device_type: CPU"
        roles = zip(("actor", "rollout", "reward"), self.sizes, (*self.standbys, 0), strict=True)
        workload = "".join(
            f"  {role}: {{module: toys, class: Toy, num: {num}, per_node: {num if role == 'actor' else 1},"
            f" standby: {standby}, hang_after_s: {HANG_S}}}\n"
            for role, num, standby in roles
            if num
        )
        limits = {role: self.role_limit for role in ("actor", "rollout") if self.role_limit}
        return (
            f"name: sim\njob_dir: {folder}\ntrainer: {{{trainer}, hang_after_s: {HANG_S}}}\nworkload:\n{workload}"
            f"restart: {{job_max_restart: {self.limit}, trainer_max_restart: {self.limit}, window_s: {self.window_s},"
            f" node_max_failures: {self.node_limit}, backoff_s: {self.backoff_s},"
            f" workload_max_restart: {json.dumps(limits)}}}\n"
            f"liveness: {{beat_s: {BEAT_S}, lease_s: {LEASE_S}, start_timeout_s: 30}}\n"
        )


def random_terms(seed):
    rng = Random(seed)
    sizes = rng.randint(1, 3), rng.randint(1, 3), int(rng.random() < 0.3)
    standbys = rng.choice((0, 0, 1)), rng.choice((0, 1, 2))
    limit, role_limit = rng.choice(((2, None), (10, None), (10, 3), (999, 999), (999, 999), (999, 999)))
    plan_nodes = max(sizes[1], -(-(sum(sizes) + sum(standbys)) // 4))
    return Terms(
        sizes,
        standbys,
        limit,
        role_limit,
        backoff_s=rng.choice((0.0, 0.2, 0.5, 1.0)),
        window_s=rng.choice((30.0, 3600.0)),
        node_limit=rng.choice((2, 3, 4, 999)),
        plan_nodes=plan_nodes,
        nodes=plan_nodes + rng.randint(1, 2),
        rejoins=seed % 2 == 1,
        is_durable=rng.random() < 0.85,
        echo=(rng.choice((0.0, 0.1, 0.5)), rng.choice((0.1, 2.0, 8.0))),
    )


class Left(BaseException):
    """This master's process has ended itself."""


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


class Job:
    """The run, and what its masters are."""

    def __init__(self, world: World, folder, terms=Terms(), text="") -> None:  # noqa: B008 -- it is frozen
        self.world, self.folder, self.terms = world, folder, terms
        self.committed, self.fence, self.submitted = 0, 0, False
        self.is_quiet = self.is_stopped = self.is_failing = False
        self.disk = Disk(folder, Random(world.seed), self._kill_in_write)
        self.power_too = False
        self.referee = Referee(self._works)
        self.situation, self.entered = "new", lambda situation: None
        self.spec = load_job_text(text or terms.text(folder), "sim")
        self.spec = replace(self.spec, run="run1")
        self.placement = plan(self.spec)[0]
        rejoining = ("ACTOR",) if terms.rejoins else ()
        self.inspection = Inspection(collectives=("ACTOR",), stateful=("ACTOR",), rejoining=rejoining)
        self.cluster = Cluster(world, TrainerActor, {f"n{index}": True for index in range(terms.nodes)})
        self.cluster.job, self.cluster.audit = self, self.audit
        self.masters: list[Process] = []
        self.handle = SimpleNamespace(resume=SimpleNamespace(remote=self._resume_later))
        self._writers: dict[int, int] = {}
        self._newest: dict[ProcessId, int] = {}
        self._born: dict[tuple[ProcessId, int], int] = {}

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
            self.world.after(0.0, self.look)

        process.call_soon(construct)

    def close(self):
        """The files of masters that were killed are closed too."""
        for process in self.masters:
            if hasattr(process, "rl_master"):
                process.rl_master._run.brain.store.close()

    def restart_master_later(self):
        self.world.after(self.world.rng.uniform(0.5, 3.0), self.start_master)
        self.world.after(0.0, self.look)

    def _kill_in_write(self):
        process = asyncio.get_running_loop()
        self.world.trace(process.name, "is killed in a write")
        self.world.reached[f"a master is killed in a write{' and loses power' * self.power_too}"] += 1
        process.kill()
        if process is self.master:
            self.restart_master_later()
        if self.power_too:
            self.power_too = False
            self.world.after(0.0, self.cut_power)

    def cut_power(self):
        """All masters lose their power, and the disk what was not synced."""
        for process in self.masters:
            if not process.is_dead:
                process.kill()
                if process is self.master:
                    self.restart_master_later()
        self.disk.power_fails()

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
        return self.referee.last.phase if self.referee.last.settings is not None else None

    def look(self):
        """Tell when the job is in another situation than before."""
        situation = self._situation()
        if situation != self.situation:
            self.situation = situation
            self.entered(situation)

    def _situation(self):
        if self.master.is_dead or not hasattr(self.master, "rl_master"):
            return "away"
        state = self.referee.last
        if state.phase is not Phase.RUNNING:
            return state.phase.value if state.settings is not None else "new"
        if not state.opened:
            return "opening"
        members = state.members.values()
        is_up = all(each.phase is MemberPhase.UP for each in (state.trainer, *members))
        return "stepping" if is_up else "recovering"

    def is_over(self):
        master = getattr(self.master, "rl_master", None)
        return master is not None and not self.master.is_dead and master._state.phase.terminal

    # -- what must never happen ---------------------------------------------------------------------------------------

    def claim(self, epoch):
        if epoch < self.fence:
            raise StaleCallError
        self.fence = epoch

    def commit(self, trainer, step, members):
        if trainer.number < self.fence:
            self.world.reached["a commit of an earlier trainer is refused"] += 1
            raise StaleCallError
        if step != self.committed + 1:
            raise Violation(f"step {step} is committed after step {self.committed}")
        if self._writers.setdefault(trainer.number, trainer.pid) != trainer.pid:
            raise Violation(f"two processes commit in epoch {trainer.number}")
        for process_id, (incarnation, _) in members.items():
            if incarnation < self._newest.get(process_id, 0):
                raise Violation(f"{process_id} #{incarnation} commits after #{self._newest[process_id]}")
            self._newest[process_id] = incarnation
        group = {incarnation for process_id, (incarnation, _) in members.items() if process_id.role == "ACTOR"}
        if len(group) > 1:
            raise Violation(f"ranks of a group that were not started together work together: {group}")
        self.committed = step

    def identify(self, actor):
        """No two processes have the same name and number."""
        identity = actor.process_id, actor.number
        if self._born.setdefault(identity, actor.pid) != actor.pid:
            raise Violation(f"the processes {self._born[identity]} and {actor.pid} are both {identity}")

    def _works(self, process_id, number):
        return any(
            (actor.process_id, actor.number) == (process_id, number)
            and actor.is_alive
            and not actor.is_stuck
            and not actor.was_cut_off
            for actor in self.cluster.everyone
        )

    def audit(self, actor):
        """A master that was replaced ends no process that the job needs."""
        with suppress(RuntimeError):
            process = asyncio.get_running_loop()
            if process in self.masters and process is not self.master and self._is_needed(actor):
                self.world.broken = Violation(f"{process.name}, which was replaced, ends {actor.name}")

    def _is_needed(self, actor):
        state = self.referee.last
        if state.phase is not Phase.RUNNING or not actor.is_alive:
            return False
        if actor.process_id == TRAINER_ID:
            return state.epoch == actor.number
        member = state.members.get(actor.process_id)
        return member is not None and member.phase is MemberPhase.UP and member.incarnation == actor.number

    def check_end(self):
        state = self.state()
        expected = {EndReason.FINISHED}
        expected |= {EndReason.RESTART_LIMIT} if self.terms.limit < 100 else set()
        expected |= {EndReason.STOPPED} if self.is_stopped else set()
        expected |= {EndReason.NOT_RETRYABLE} if self.is_failing else set()
        if state.ended_by not in expected or not state.phase.terminal:
            raise Violation(f"the job is {state.phase.value}: {state.reason}")
        if state.phase is Phase.FINISHED and self.terms.is_durable and self.committed != STEPS:
            raise Violation(f"the job has finished at step {self.committed}")
        if state.committed > self.committed:
            raise Violation("a committed step was lost")
        if state != self.referee.last:
            raise Violation("the journal does not replay to the state in which the job ended")
        self.world.reached[f"ended: {state.ended_by.value}"] += 1

    def left_over(self):
        groups = [row.name for row in self.cluster.groups.values() if row.state != "REMOVED"]
        replaced = [process.name for process in self.masters[:-1] if not process.is_dead]
        return [
            *self.cluster.actors,
            *(each.name for each in self.cluster.everyone if each.is_alive),
            *groups,
            *replaced,
        ]

    # -- the environment of the production classes ---------------------------------------------------------------------

    def environment(self) -> ExitStack:
        world, stack = self.world, ExitStack()

        def patch(where, **names):
            for name, value in names.items():
                stack.enter_context(mock.patch.object(where, name, value))

        patch(asyncio, to_thread=self._to_thread)
        patch(node_watch, in_daemon_thread=lambda call: asyncio.ensure_future(self._to_thread(call)))
        patch(actors, session_folder=lambda: "/nonexistent")
        for name, value in self.disk.patched().items():
            stack.enter_context(mock.patch.object(journal_store, name, value, create=True))
        patch(brain, Brain=self._watched_brain())
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
            if asyncio.get_running_loop() is not self.master and self.phase is not None:
                self._leave("the folder has another owner")

    def _leave(self, why):
        process = asyncio.get_running_loop()
        self.world.trace(process.name, "leaves")
        self.world.reached["a replaced master leaves"] += 1
        process.kill()
        if process is self.master:  # an earlier one took the journal from it, as it began only then
            self.world.reached["Ray starts a master that has left again"] += 1
            self.restart_master_later()
        raise Left(why)

    def _watched_brain(job):  # noqa: N805 -- the brain's methods have their self
        """A brain on the world's clock, under the eyes of the referee."""

        class Brain(brain.Brain):
            def __init__(self, store):
                super().__init__(store, *[lambda: job.world.now_s] * 2)
                if isinstance(store, FileStateStore):
                    job.judge(lambda: job.referee.replayed(self.state))

            def handle_all(self, events):
                steps = job.referee.expect(self.state, events, self._steady_s() + self._offset_s)
                pending = job.referee.pending
                job.referee.pending = [*pending, steps]
                try:
                    handled = super().handle_all(events)
                except StaleEpoch:
                    job.referee.pending = pending  # nothing is written
                    raise
                job.referee.pending = pending
                job.judge(lambda: job.referee.handled(steps, handled))
                job.world.after(0.0, job.look)
                job.echo(events)
                return handled

        return Brain

    def judge(self, rule):
        """Let a broken rule end the run, not the master."""
        try:
            rule()
        except Violation as violation:
            self.world.broken = violation

    def echo(self, events):
        """Some events are reported once more, later."""
        process = asyncio.get_running_loop()
        for event in events:
            share, late_s = self.terms.echo
            if not isinstance(event, Submitted | MasterStarted) and self.world.rng.random() < share:
                report = partial(process.rl_master._events.put_nowait, event)
                self.world.after(self.world.rng.uniform(0.0, late_s), partial(process.call_soon, report))


async def _end_later(actor, after_s):
    await asyncio.sleep(after_s)
    asyncio.get_running_loop().kill()
