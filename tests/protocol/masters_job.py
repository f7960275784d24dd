# SPDX-License-Identifier: Apache-2.0
"""A job under production masters, which are ended, frozen, cut off and started again.

The master, its brain and journal file, hang detector, executor, table of processes and reservations are the production
classes. The workers answer, and the trainer makes calls and commits steps, as real ones do.
"""

import asyncio
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from unittest import mock

from dlrover.python.rl.common.errors import JournalCorrupt, StaleEpoch
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.events import MasterStarted, Submitted
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import replay
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import EndReason, MemberPhase, Phase
from dlrover.python.rl.master.process import brain, rl_master
from dlrover.python.rl.runtime.checkpoint import journal_store
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore, read_lines
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.ray.cluster import nodes as node_watch
from dlrover.python.rl.runtime.ray.processes import actors
from tests.protocol.loops_world import Process, Violation, World
from tests.protocol.masters_cluster import Cluster, StaleCallError
from tests.protocol.masters_disk import Disk
from tests.protocol.masters_referee import Referee
from tests.protocol.masters_terms import Terms
from tests.protocol.masters_trainer import STEPS, TrainerActor

OWNER_S = 5.0  # between two looks at the owner of the run's folder


class Left(BaseException):
    """This master's process has ended itself."""


class Job:
    """The run, and what its masters are."""

    def __init__(self, world: World, folder, terms=Terms(), text="") -> None:  # noqa: B008 -- it is frozen
        self.world, self.folder, self.terms = world, folder, terms
        self.committed = self.fence = 0
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
        nodes = {f"n{index}": True for index in range(terms.nodes)}
        self.cluster = Cluster(nodes, world=world, trainer=TrainerActor)
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
            self.world.rng.choice((0.0, 1.0)), lambda: self.cluster.ask_master("resume", (), lambda answer, error: None)
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
        before, self.situation = self.situation, self._situation()
        if self.situation != before:
            self.entered(self.situation)

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
        state = self.referee.last
        member = state.members.get(actor.process_id)
        is_needed = member is not None and member.phase is MemberPhase.UP and member.incarnation == actor.number
        if actor.process_id == TRAINER_ID:
            is_needed = state.epoch == actor.number
        with suppress(RuntimeError):
            process, is_running = asyncio.get_running_loop(), state.phase is Phase.RUNNING and actor.is_alive
            if process in self.masters and process is not self.master and is_running and is_needed:
                self.world.broken = Violation(f"{process.name}, which was replaced, ends {actor.name}")

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
        alive = (each.name for each in self.cluster.everyone if each.is_alive)
        return [*self.cluster.actors, *alive, *groups, *replaced]

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
        own = getattr(asyncio.get_running_loop(), "rl_master", None)
        of_cluster = getattr(function, "__self__", None) in (self.cluster, getattr(own, "_cluster", None))
        while self.cluster.is_away and of_cluster:
            await asyncio.sleep(0.1)
        return function(*arguments, **named)

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

    def _watched_brain(job):
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
