# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: one actor answers every request of a job on one event loop, from one state.
"""``RLMaster``: the actor that runs one job.

Its loop takes events from a queue that the executor's tasks fill, and waits for nothing else. Requests are answered on
the same event loop, within milliseconds.

::

    executor's tasks --Event--> queue -> brain (journal, then state) --Command--> executor
    trainer: opened, progressed, renew      workers and trainer: beat      people: status, follow, stop

The trainer's calls do not pass through here, so the job continues while the master is away. When Ray has restarted it,
it replays its journal, finds the processes by name, and continues all outstanding commands.
"""

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.disk_space import retry_io_async
from dlrover.python.rl.common.log import configure_logging, get_logger, hide_values
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.common.private_files import read_token
from dlrover.python.rl.config.secrets import Secrets, hidden_in, unseal
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control import events
from dlrover.python.rl.control.commands import Release
from dlrover.python.rl.control.events import Cause, CauseKind, Event, MemberLost, RecoveryScope, Resized
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import can_resize, outstanding
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.control.state import JobState, Member, MemberPhase, Phase, ranks_of
from dlrover.python.rl.master.process import brain
from dlrover.python.rl.master.process.hang_detector import HangDetector, has_lost_peer
from dlrover.python.rl.master.process.live import write_live
from dlrover.python.rl.master.process.metrics import ADDRESS, JobMetrics, MetricsEndpoint, tls_context
from dlrover.python.rl.master.process.status import JobStatus, Position, Update, recoveries, status_of
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore, StateStore, read_lines
from dlrover.python.rl.runtime.member.heartbeat import BeatAnswer, Heartbeat, leave
from dlrover.python.rl.runtime.member.inspection import Inspection, inspect_in_child
from dlrover.python.rl.runtime.ray.cluster.api import RayClusterApi, fenced, kill_process, read_stacks
from dlrover.python.rl.runtime.ray.cluster.cluster import current_address
from dlrover.python.rl.runtime.ray.executor import RayExecutor
from dlrover.python.rl.runtime.ray.placement import RunPlan
from dlrover.python.rl.runtime.ray.processes.actors import current_actor, end_later, end_unless, was_restarted
from dlrover.python.rl.runtime.ray.processes.trainer import Replaced
from dlrover.python.rl.runtime.run import folder as run_folder
from dlrover.python.rl.runtime.run.files import LogCopier, copy_all_rests, copy_output
from dlrover.python.rl.trainer.step_report import StepPace
from dlrover.python.rl.trainer.trainer import StepReport

_LOG = get_logger(__name__)

T = TypeVar("T")

_MAX_REPORTS = 1000  # about 15 kB each

_RELEASE_S = 30.0
_NEXT_STEP_S, _PLACES_S, _LOOK_S = 10.0, 20.0, 1.0
_TAKEN_S = 60.0
_SECRETS_S = 30.0
_LINGER_S = 60.0
_BEGIN_S = 300.0
_JOURNAL_S = 5.0
_POLL_S = 0.05
_MOST_EVENTS = 256
_ECHO_S = 1.0  # a failed link is usually the echo of another rank's death, which is about to show


class RLMaster:
    """Runs one run of a job. It ``claims`` the run's folder unless the process that started the job holds it."""

    def __init__(self, job: JobSpec, placement: Placement, inspection: Inspection, claims: bool = True) -> None:
        configure_logging("master")
        self._run, self._inspection = MasterRun(job, claims), inspection
        self._cluster = fenced(RayClusterApi(), self._check_current)
        plan = RunPlan(job, job.run, placement, inspection.methods)
        self._executor = RayExecutor(plan, current_actor(), self._cluster)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._news = asyncio.Condition()
        stacks = partial(read_stacks, self._cluster)
        self._hang_detector = HangDetector(job, self._executor.beats, self._executor.process_of, stacks)
        self._observer = JobObserver(job)
        self._tasks: list[asyncio.Task[None]] = []
        self._beginning, self._resizing = asyncio.Lock(), asyncio.Lock()
        self._restarted = was_restarted()
        if self._restarted:
            current_actor().resume.remote()
        end_unless(lambda: bool(self._tasks), _BEGIN_S, f"{job.name}: no request has started this job")

    @property
    def _state(self) -> JobState:
        return self._run.brain.state

    async def start(self, secrets: Secrets) -> None:
        """Open the journal, begin the job and return at once; a second call does nothing. Raises JobConflict if another
        run holds the job's folder, InvalidJob if the folder cannot be used."""
        await self.reveal(secrets)
        if await self._has_begun():
            return
        async with self._beginning:
            if self._tasks:
                return
            await self._run.begin()
            self._observer.open(time.time())
            self._events.put_nowait(events.MasterStarted(pid=os.getpid()))
            job = self._run.job
            self._events.put_nowait(brain.submission(job, job.run, self._inspection, self._run.brain))
            self._start_tasks()

    async def resume(self) -> bool:
        """Continue an earlier process of this master; return False if it had not begun."""
        async with self._beginning:
            if self._tasks:
                return True
            try:
                if not await self._run.recover():
                    return False
            except (errors.JournalCorrupt, errors.JobConflict, OSError) as error:
                _LOG.error("%s: %s", self._run.job.name, error)
                self._spawn(self._end_broken_job(error))
                return True
            self._observer.open(self._run.brain.began_s, resumed=True)
            self._spawn(self._resume_job())
            return True

    async def _has_begun(self) -> bool:
        """Return True if the job has begun. A restarted master resumes at the first request, in case its call of
        :meth:`resume` was lost."""
        return bool(self._tasks) or (self._restarted and await self.resume())

    async def _resume_job(self) -> None:
        name = self._run.job.name
        await self._run.handle([events.MasterStarted(pid=os.getpid())])
        state = self._state
        _LOG.warning("the master of %s is back: the job is %s", name, state.phase.value)
        if state.phase.terminal:
            self._leave()  # nothing is left to adopt, and lacking places would be reserved again
            return
        alive = await self._executor.adopt(state, self._events.put_nowait)
        _LOG.warning("%s: %d processes found alive", name, alive)
        until_s = time.monotonic() + _SECRETS_S
        while self._run.lacking and self._state.phase.live:  # the job's processes send secrets after a heartbeat
            if time.monotonic() > until_s:
                lost = ", ".join(self._run.lacking)
                raise errors.JobFailed(f"the secrets {lost} are lost: every process that had them has ended")
            await asyncio.sleep(_POLL_S)
        for command in outstanding(self._state):
            self._executor.execute(command, self._events.put_nowait)
        self._start_tasks()

    async def reveal(self, secrets: Secrets) -> None:
        """Receive the job's secrets, which neither Ray nor a disk stores."""
        hide_values(secrets.values())
        self._run.reveal(secrets)
        self._executor.reveal(secrets)

    def _start_tasks(self) -> None:
        self._spawn(self._run.hold(lambda: self._state.phase.terminal))
        self._spawn(self._handle_events())
        self._spawn(self._watch_hangs())
        self._spawn(self._watch_places())
        self._spawn(self._executor.watch_nodes(self._events.put_nowait))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except errors.StaleEpoch as error:
                leave(f"another process of this master has taken over: {error}")  # the other one ends the job
            except Exception as error:  # noqa: BLE001 -- a broken task must not leave a job that looks alive
                _LOG.exception("%s: a task of the master failed", self._run.job.name)
                await self._end_broken_job(error)

        self._tasks.append(asyncio.get_running_loop().create_task(guarded()))

    async def _handle_events(self) -> None:
        while not self._state.phase.terminal:
            events = [await self._events.get()]  # waits: for the next event, as long as the job runs
            while len(events) < _MOST_EVENTS and not self._events.empty():
                events.append(self._events.get_nowait())
            for handled in await self._run.handle(events):
                self._carry_out(handled)
            await self._notify_followers()
            await asyncio.sleep(0)  # requests come in between
        self._run.brain.store.close()

    def _carry_out(self, handled: brain.Handled) -> None:
        event, before, after, commands = handled
        if isinstance(event, Resized | events.Unplaced) and after is not before:
            self._executor.resize(after)
            num = len(ranks_of(after, event.role))
            _LOG.warning("%s: %s has %d workers", self._run.job.name, event.role, num)
            self._observer.resizing = f"resizing {event.role} to {num}"
        if isinstance(event, MemberLost) and after is not before:
            self._executor.last_causes[ProcessId(event.role, event.rank)] = f"{event.cause.kind}: {event.cause.message}"
        for command in commands:
            self._executor.execute(command, self._events.put_nowait)
        self._observer.metrics.take(time.time(), before, after, event)
        if after.phase is not before.phase:
            reason = f": {after.reason}" if after.reason else ""
            _LOG.info("%s is %s%s", self._run.job.name, after.phase.value, reason)
        for line in recoveries(before, after, event):
            _LOG.warning("%s: %s", self._run.job.name, line)
        if after.phase.terminal and not before.phase.terminal:
            self._leave()  # before followers are notified: they may end this process
        condemned = self._hang_detector.condemned.pop(event, None)
        if condemned is not None and after is not before:
            # Not before the event is journalled: a master that has been replaced must not act.
            self._spawn(kill_process(self._cluster, condemned))

    async def _end_broken_job(self, error: Exception) -> None:
        """Release the job and report the failure, because the loop cannot continue."""
        state = self._state
        released = asyncio.Event()
        self._executor.execute(Release(state.incarnation, final=True), lambda event: released.set())
        with suppress(TimeoutError):  # the executor logs what is left
            async with asyncio.timeout(_RELEASE_S):
                await released.wait()
        self._run.brain.fail(error)
        if released.is_set():  # otherwise the journal still shows whether another master has taken over
            self._run.brain.store.close()
        self._leave()
        await self._notify_followers()

    def _check_current(self) -> None:
        try:
            self._run.brain.store.check()
        except errors.StaleEpoch as error:
            leave(f"another process of this master has taken over: {error}")
        except (OSError, errors.JournalCorrupt):
            pass  # unknown: the job's resources are still released

    def _leave(self) -> None:
        self._spawn(end_later(current_actor(), _LINGER_S))  # in case no process follows the job
        self._run.leave(self._state.phase.value)

    async def _watch_hangs(self) -> None:
        job, writing = self._run.job, asyncio.get_running_loop().create_future()
        writing.set_result(None)
        while not self._state.phase.terminal:
            await asyncio.sleep(job.liveness.beat_s)
            for event in await self._hang_detector.hangs(self._state):
                self._events.put_nowait(event)
            if writing.done():  # a disk may not answer for a while
                writing = asyncio.ensure_future(
                    asyncio.to_thread(write_live, job.job_dir, self._hang_detector.activities(), time.time())
                )

    # -- requests of the job's processes -------------------------------------------------------------------------------

    async def beat(self, beat: Heartbeat) -> BeatAnswer:
        """Record a heartbeat."""
        if not await self._has_begun():
            if error := self._run.miss_journal():
                _LOG.error("%s: %s", self._run.job.name, error)
                self._spawn(self._end_broken_job(error))
            return BeatAnswer.CURRENT
        self._executor.take_beat(beat)
        if not self._hang_detector.take(beat, self._state):
            return BeatAnswer.REPLACED
        self._observer.metrics.beat(beat.process_id, dict(beat.pending), beat.age_s if beat.method else None)
        if has_lost_peer(beat, self._state):
            return BeatAnswer.PEER_LOST
        return BeatAnswer.WITHOUT_SECRETS if self._run.lacking else BeatAnswer.CURRENT

    async def opened(self, epoch: int) -> None:
        """Note that the trainer has entered ``steps()``; return once that is journalled: the trainer relies on it."""
        await self._has_begun()
        self._events.put_nowait(events.StepsOpened(epoch))
        async with self._news, asyncio.timeout(_TAKEN_S):
            await self._news.wait_for(lambda: self._state.opened or not self._state.phase.live)

    async def progressed(self, epoch: int, step: int) -> None:
        await self._has_begun()
        self._events.put_nowait(events.Progressed(epoch, step))

    async def renew(
        self, epoch: int, role: str, rank: int, incarnation: int, cause: Cause, wait_s: float
    ) -> Replaced | None:
        """Return the replacement of a worker whose ``incarnation`` the trainer of ``epoch`` found dead; None: ask
        again. Raises JobFailed if there will be none, or the trainer itself has been replaced."""
        await self._has_begun()
        if epoch < self._state.epoch:
            raise errors.JobFailed("this trainer has been replaced by a later one")
        if cause.kind is CauseKind.LINK_FAILED and self._inspection.scope_of(role) is RecoveryScope.GROUP:
            await self._wait_for_news(lambda: find_up(self._state, role, rank, incarnation) is None, _ECHO_S)
        if (member := find_up(self._state, role, rank, incarnation)) is not None:
            node = member.process.node if member.process else ""
            cause = self._executor.nodes.oom_kills.explain(ProcessId(role, rank), member.process, cause)
            self._events.put_nowait(MemberLost(role, rank, incarnation, cause, node))

        def replaced() -> Replaced | None:
            return replacement(self._state, role, rank, incarnation, self._executor.name_of)

        await self._wait_for_news(lambda: replaced() is not None, wait_s)
        return replaced()

    async def _wait_for_news(self, is_news: Callable[[], bool], timeout_s: float) -> None:
        async with self._news:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait_for(is_news)

    async def report(self, report: StepReport) -> None:
        self._observer.report(report)
        await self._notify_followers()

    async def announce(self, activity: str) -> None:
        self._observer.activity = activity
        await self._notify_followers()

    # -- requests of users ---------------------------------------------------------------------------------------------

    async def stop(self, reason: str) -> None:
        """Ask the job to end; return at once."""
        await self._has_begun()
        self._events.put_nowait(events.StopRequested(reason))

    async def resize(self, role: str, num: int) -> None:
        """Give a stateless ``role`` another number of workers, at the beginning of the next step if that is near.
        Raises CallError or InvalidJob, without any change, if that is impossible."""
        await self._has_begun()
        async with self._resizing:
            job = brain.resizable(self._run.job, self._state, self._inspection, role, num)
            if faults := (await asyncio.to_thread(inspect_in_child, job)).errors:
                raise errors.InvalidJob(list(faults))
            try:
                await self._executor.reservations.enlarge(self._state, role, num, _PLACES_S)
            except errors.PlacementTimeout as error:
                raise errors.CallError(f"{role} of '{job.name}' stays as it is: {error}") from error
            await self._resize_at_next_step(Resized(role, num))
        if len(ranks_of(self._state, role)) != num:
            raise errors.CallError(f"'{job.name}' was restarted during the resize: try again")

    async def _watch_places(self) -> None:
        """Give roles that have fewer workers for lack of places more of them, until the job ends."""
        while not self._state.phase.terminal:
            await asyncio.sleep(_LOOK_S)
            for role, wanted in self._state.wanted.items():
                await self._grow_role(role, wanted)

    async def _grow_role(self, role: str, wanted: int) -> None:
        num = await self._executor.reservations.places(RLRoleType(role), wanted)
        async with self._resizing:
            if num > len(ranks_of(self._state, role)) and can_resize(self._state, role):
                await self._resize_at_next_step(Resized(role, num, wanted))

    async def _resize_at_next_step(self, event: Resized) -> None:
        """Wait for the end of the open step, which would be repeated, unless it is long; then resize."""
        began, until_s = self._executor.open_step, time.monotonic() + _NEXT_STEP_S
        while self._executor.open_step == began and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        self._events.put_nowait(event)

        def is_over() -> bool:
            takes_steps = self._state.opened and self._state.phase.live
            return len(ranks_of(self._state, event.role)) == event.num or not takes_steps

        async with self._news, asyncio.timeout(_TAKEN_S):
            await self._news.wait_for(is_over)

    async def status(self) -> JobStatus:
        await self._has_begun()
        return self._observer.status(self._state)

    async def follow(self, position: Position, timeout_s: float) -> Update:
        """Wait up to ``timeout_s`` seconds for news after ``position``."""
        await self._has_begun()
        observer = self._observer
        state, count, activity = self._state, observer.count_at(position), observer.activity

        def is_news() -> bool:
            is_new = self._state is not state or observer.activity is not activity
            return is_new or observer.count > count or self._state.phase.terminal

        await self._wait_for_news(is_news, timeout_s)
        return observer.update(self._state, count)

    async def _notify_followers(self) -> None:
        async with self._news:
            self._news.notify_all()


class MasterRun:
    """The run of a master: the job, the claim on its folder, and the log and the journal there. Without ``claims`` the
    process that started the job holds the folder."""

    def __init__(self, job: JobSpec, claims: bool) -> None:
        self.job, self.lacking = job, hidden_in(job)  # secrets that have not arrived yet
        self.brain = brain.Brain(StateStore())
        self._claims = claims
        self._claim: run_folder.Claim | None = None
        self._log: LogCopier | None = None
        self._missed_s = 0.0

    def reveal(self, secrets: Secrets) -> None:
        self.job = unseal(self.job, secrets)
        self.lacking = hidden_in(self.job)

    async def begin(self) -> None:
        """Claim the folder, and open a new journal. Raises JobConflict, or InvalidJob if a file there cannot be
        written, and then releases the folder."""
        try:
            self.take()
            journal = await self._patiently(partial(brain.fresh_journal, self.job))
            self.brain = brain.Brain(await self._patiently(partial(FileStateStore, journal)))
        except OSError as error:
            self.leave(run_folder.FAILED)
            raise errors.InvalidJob([errors.ConfigError("job_dir", f"the master cannot use it: {error}")]) from error

    async def recover(self) -> bool:
        """Take over the folder and the journal of an earlier process of this master; return False if it had not begun.
        Raises JournalCorrupt, JobConflict, OSError."""
        earlier = await self._patiently(partial(brain.earlier_journal, self.job, self.job.run))
        if earlier is not None:
            self.take()
            self.brain = earlier
        return earlier is not None

    def take(self) -> None:
        """Claim the folder, but not in a thread, since no other request may resume before. Raises JobConflict."""
        if self._claims:
            self._claim = run_folder.claim(self.job, run_folder.ON_RAY, bound=False)
            with suppress(OSError):
                run_folder.write_shared(self.job.job_dir / run_folder.CLUSTER, current_address().encode())
        if self._log is None:
            self._log = copy_output(self.job.job_dir, "master", "master")

    async def handle(self, events: Sequence[Event]) -> list[brain.Handled]:
        """Journal ``events`` and return their commands, once the journal can be written: a disk may be full."""
        return await self._patiently(partial(self.brain.handle_all, events))

    async def _patiently(self, use_journal: Callable[[], T]) -> T:
        """Retry like a commit. Raises OSError."""
        return await retry_io_async(use_journal, self.job.job_dir / brain.JOURNAL, now_s=time.monotonic)

    def miss_journal(self) -> errors.JournalCorrupt | None:
        """Return an error once the journal has been missing for some time, although a process of this run is alive: an
        earlier process of this master had begun the run, and without its journal there is no state to resume."""
        self._missed_s = self._missed_s or time.monotonic()
        if time.monotonic() - self._missed_s > _JOURNAL_S:
            return errors.JournalCorrupt(f"the journal of this run is no longer in {self.job.job_dir}")
        return None

    async def hold(self, is_over: Callable[[], bool]) -> None:
        """Renew the claim until the job ``is_over``. Raises JobConflict if another run has the folder."""
        while self._claim is not None and not is_over():
            await asyncio.sleep(run_folder.BEAT_S)
            try:
                await asyncio.to_thread(self._claim.beat)
            except errors.JobConflict as error:
                owner = run_folder.newest_owner(self.job.job_dir)
                if owner is not None and owner.run == self.job.run:
                    leave(f"another process of this master has taken over: {error}")
                raise

    def leave(self, outcome: str) -> None:
        """Finish the log and release the folder; log an OSError, since the master ends anyway."""
        try:
            try:
                if self._log is not None:
                    self._log.copy()
                copy_all_rests(self.job.job_dir)
            finally:
                if self._claim is not None:
                    self._claim.end(outcome)
        except OSError as error:
            _LOG.error("the end of %s could not be recorded in its folder: %s", self.job.name, error)


class JobObserver:
    """Records all events and reports, for the status and the metrics of a job. If metrics cannot be served, the job
    continues without them."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._reports: deque[StepReport] = deque(maxlen=_MAX_REPORTS)
        self.count = 0  # of the reports that this process has received
        self._boot = os.urandom(4).hex()
        self._pace, self._began_s = StepPace(), 0.0
        self.activity = ""  # of the trainer
        self.resizing = ""  # until the next step
        self.metrics = JobMetrics(job.name, job.run, time.time)
        self._endpoint: MetricsEndpoint | None = None

    def open(self, began_s: float, resumed: bool = False) -> None:
        """Begin to serve metrics; a ``resumed`` master continues them from its journal."""
        self._began_s = began_s
        master, folder = self._job.master, self._job.job_dir
        if resumed:
            self.metrics.replay(decode(read_lines(folder / brain.JOURNAL)))
        if master.metrics_port < 0 or self._endpoint is not None:
            return
        try:
            token = read_token(Path(master.metrics_token_file)) if master.metrics_token_file else ""
            pair = Path(master.metrics_tls_cert), Path(master.metrics_tls_key)
            tls = tls_context(*pair) if master.metrics_tls_cert or master.metrics_tls_key else None
            self._endpoint = MetricsEndpoint(
                self.metrics.registry, (master.metrics_host, master.metrics_port), token, tls
            )
            (folder / ADDRESS).write_text(json.dumps({"address": self._endpoint.address}))
        except (OSError, errors.CallError) as error:
            _LOG.error("%s: metrics cannot be served: %s", self._job.name, error)

    def report(self, report: StepReport) -> None:
        self.metrics.report(report)
        self._pace.note(report.step, time.monotonic())
        self.activity = self.resizing = ""
        self._reports.append(replace(report, at_s=time.time()))
        self.count += 1

    def status(self, state: JobState) -> JobStatus:
        status = status_of(self._job, state, self._reports[-1] if self._reports else None, self.activity)
        activity = ": ".join(filter(None, (self.resizing, status.activity)))
        return replace(status, step_s=self._pace.step_s, started_s=self._began_s, activity=activity)

    def count_at(self, position: Position) -> int:
        """Return the number of this process's reports that were read at ``position``."""
        boot, count = position
        return count if boot == self._boot else 0

    def update(self, state: JobState, count: int) -> Update:
        dropped = self.count - len(self._reports)
        fresh = islice(self._reports, max(count - dropped, 0), None)
        return Update(self.status(state), tuple(fresh), (self._boot, self.count))


def find_up(state: JobState, role: str, rank: int, incarnation: int) -> Member | None:
    member = state.members.get(ProcessId(role, rank))
    is_up = member is not None and member.incarnation == incarnation and member.phase is MemberPhase.UP
    return member if is_up else None


def replacement(
    state: JobState, role: str, rank: int, incarnation: int, name_of: Callable[[str, int, int, int], str]
) -> Replaced | None:
    """Return the process after ``incarnation`` of a worker, with its group if that is replaced as a whole; None before
    it is up. Raises JobFailed if there will be none."""
    if state.phase is not Phase.RUNNING or state.settings is None:
        lost = ProcessId(role, rank)
        raise errors.JobFailed(f"{lost} is not replaced: the job is {state.phase.value}. {state.reason}".strip())
    group = {at: state.members.get(ProcessId(role, at)) for at in ranks_of(state, role)}
    member = group.get(rank)
    if member is None or member.incarnation <= incarnation or member.phase is not MemberPhase.UP:
        return None
    up = {at: peer for at, peer in group.items() if peer is not None and peer.phase is MemberPhase.UP}
    if state.settings.roles[role].scope is RecoveryScope.GROUP and len(up) < len(group):
        return None
    return {at: (peer.incarnation, name_of(role, at, peer.first, peer.standby)) for at, peer in up.items()}
