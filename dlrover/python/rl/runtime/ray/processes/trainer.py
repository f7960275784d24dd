# SPDX-License-Identifier: Apache-2.0
"""The actor that runs the user's trainer, and how lost workers come back to it.

The trainer requests the replacement of a lost worker from the master, and calls it from then on. It repeats the request
while the master is away.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import JobFailed, MasterLost, WorkloadDied, user_traceback
from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.common.spans import SpanFile
from dlrover.python.rl.config.spec import JobSpec, LivenessSpec
from dlrover.python.rl.control.commands import StartTrainer
from dlrover.python.rl.control.events import Cause, Process
from dlrover.python.rl.runtime.checkpoint.commits import checkpoints_of
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_name
from dlrover.python.rl.runtime.checkpoint.runs import results_of, synced_files
from dlrover.python.rl.runtime.member import loading
from dlrover.python.rl.runtime.member.heartbeat import DepartureNotice, Heartbeat, HeartbeatSender
from dlrover.python.rl.runtime.ray.processes.actors import ask, find
from dlrover.python.rl.runtime.ray.processes.member import locate, send_to
from dlrover.python.rl.runtime.ray.processes.port import CallWatch, WatchedPort, is_loss
from dlrover.python.rl.runtime.run.files import LogCopier, copy_output
from dlrover.python.rl.runtime.run.progress import format_step
from dlrover.python.rl.runtime.trainer_spans import RecordedPort
from dlrover.python.rl.trainer.port import Recovery, Renewed, RestartInfo
from dlrover.python.rl.trainer.trainer import BaseTrainer, StepReport, TrainerLink, run_trainer

_LOG = get_logger(__name__)

OWN_CODE = "its own code"  # the method in a trainer's heartbeat while it waits for no worker
_RAY_WORKER = "ray._private.worker"
_RENEWAL_S = 600.0  # for a lost worker's replacement, in addition to the time for placing it
_WAIT_S = 5.0
_ASK_S = 30.0
_ASK_AGAIN_S = 0.5  # a master that is dead refuses at once
_REPORT_EVERY = 20  # steps: without a loss, too, since the master may have missed a report

Replaced: TypeAlias = Mapping[int, tuple[int, str]]  # by rank: incarnation and actor name


@dataclass(frozen=True)
class TrainerStart:
    """The arguments of a trainer's process: incarnation and handle of each worker in rank order, 0 and None while it is
    being replaced; ``resources`` of one worker of each role; ``full_sizes`` of roles that lack workers."""

    job: JobSpec
    run: str
    command: StartTrainer
    members: Mapping[ProcessId, tuple[int, Any]]
    resources: Mapping[str, Mapping[str, float]]
    full_sizes: Mapping[str, int] = field(default_factory=dict)


class RayRecovery(Recovery):
    """Replaces lost workers, at first those without a handle, through the master, each within ``timeout_s``."""

    def __init__(
        self,
        master: Any,
        port: WatchedPort,
        members: Mapping[ProcessId, tuple[int, Any]],
        command: StartTrainer,
        timeout_s: float,
    ) -> None:
        self.epoch, self.fresh = command.epoch, command.fresh
        self.restart_info = RestartInfo(command.restarts, command.reason)
        self.step = 0
        self._master, self._port, self._timeout_s = master, port, timeout_s
        self._lock = threading.RLock()
        self._should_report = True
        for member, (incarnation, handle) in members.items():
            if handle is not None:
                port.replace(member.role, member.rank, handle, incarnation)
        for member, (_, handle) in members.items():
            if handle is None:
                self.renew(member.role, member.rank, 0, "it was being replaced when the trainer started")

    def incarnations(self) -> Mapping[ProcessId, int]:
        return self._port.incarnations()

    def renew(self, role: str, rank: int, incarnation: int, why: str) -> Renewed:
        process_id = ProcessId(role, rank)
        with self._port.watch.waiting(), self._lock:
            handles: dict[int, Any] = {}
            dead = incarnation
            while self.incarnations().get(process_id, 0) <= dead:
                self._should_report = True
                members = self._wait_for_replacement(process_id, dead, why)
                handles.update(self._adopt(role, members))
                if self.incarnations().get(process_id, 0) <= dead and rank in members:
                    dead = max(dead, members[rank][0])  # the replacement is already gone
            numbers = {peer.rank: number for peer, number in self.incarnations().items() if peer.role == role}
            return Renewed(role, numbers, handles)

    def _wait_for_replacement(self, process_id: ProcessId, incarnation: int, why: str) -> Replaced:
        """Wait until the master has replaced a dead incarnation. Raises JobFailed or MasterLost."""
        cause = Cause(loading.death_kind(why), str(process_id), why)
        deadline_s = time.monotonic() + self._timeout_s
        request = (self.epoch, process_id.role, process_id.rank, incarnation, cause, _WAIT_S)
        while True:
            try:
                replaced: Replaced | None = ask(lambda: self._master.renew.remote(*request), _ASK_S)
            except MasterLost as error:
                if time.monotonic() > deadline_s:
                    raise
                _LOG.warning("waiting for the replacement of %s: %s", process_id, error)
                time.sleep(_ASK_AGAIN_S)
                continue
            if replaced is not None:
                return replaced
            if time.monotonic() > deadline_s:
                raise JobFailed(f"{process_id} was not replaced within {self._timeout_s:g} s")

    def _adopt(self, role: str, members: Replaced) -> dict[int, Any]:
        """Call these workers from now on; returns the handles of new living ones."""
        handles = {}
        for rank, (incarnation, name) in members.items():
            is_new = incarnation != self.incarnations().get(ProcessId(role, rank), 0)
            if is_new and (handle := find(name)) is not None:
                self._port.replace(role, rank, handle, incarnation)
                handles[rank] = handle
        return handles

    def opened(self) -> None:
        ask(lambda: self._master.opened.remote(self.epoch), _ASK_S)

    def began(self, step: int) -> None:
        self.step = step

    def progressed(self, step: int) -> None:
        if self._should_report or step % _REPORT_EVERY == 0:
            self._master.progressed.remote(self.epoch, step)
            self._should_report = False


class TrainerActor:
    """Constructs the trainer, binds it to its role groups, and runs it."""

    def __init__(self, epoch: int, master: Any, beats: LivenessSpec) -> None:
        configure_logging(str(TRAINER_ID))
        self._epoch, self._master = epoch, master
        self._start: TrainerStart | None = None
        self._recovery: RayRecovery | None = None
        self._recorded: RecordedPort | None = None
        self._log: LogCopier | None = None
        self._calls = CallWatch()
        self._outcome: Cause | None = None
        self._running = self._ended = False
        self._notice = DepartureNotice(beats.notice_file)
        HeartbeatSender(self._beat, send_to(master), beats).start()

    def start(self, start: TrainerStart) -> Process:
        """Import the job's classes and return where this process runs. Raises WorkloadStartError."""
        job = start.job
        loading.enter_folder(job.work_dir)
        loading.take_secrets(job)
        self._log = copy_output(job.job_dir, TRAINER_ID.log_name, f"trainer attempt {self._epoch}")
        with loading.starting(str(TRAINER_ID)):
            self._trainer_class = loading.load_class(job.trainer.module, job.trainer.class_, job.search_path)
            self._classes = {role: loading.load_workload(job, role) for role in job.workloads}
        self._start = start
        return locate()

    def _beat(self) -> Heartbeat:
        step = self._recovery.step if self._recovery is not None else -1
        if _is_waiting_in_ray(threading.main_thread()):
            self._calls.touch()
        own_s = self._calls.own_s() if self._running else None
        pending = tuple(self._calls.pending().items())
        method, notice = "" if own_s is None else OWN_CODE, self._notice.read()
        return Heartbeat(TRAINER_ID, self._epoch, method, own_s or 0.0, step, notice, pending=pending)

    def dlrover_ping(self) -> bool:
        return True

    def run(self) -> Cause | None:
        """Run ``init`` and ``fit`` and return the cause of a failure. A second call returns the same outcome."""
        if self._ended:
            return self._outcome
        assert self._start is not None, "start() comes first"
        self._calls.touch()
        self._running = True
        try:
            link, make = self._bind(self._start)
            run_trainer(make, link)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: every error travels on
            self._outcome = loading.cause_of(root := _root(error), str(TRAINER_ID), user_traceback(root))
        self._ended, self._running = True, False
        if self._recorded is not None:
            self._recorded.close(has_finished=self._outcome is None)
        if self._log is not None:
            self._log.copy()
        return self._outcome

    def _bind(self, start: TrainerStart) -> tuple[TrainerLink, Callable[[], BaseTrainer]]:
        """Return the link of trainers to this process, and their factory."""
        job, master = start.job, self._master
        port = WatchedPort(self._calls)
        timeout_s = _RENEWAL_S + job.placement_timeout_s
        self._recovery = recovery = RayRecovery(master, port, start.members, start.command, timeout_s)
        job.job_dir.mkdir(parents=True, exist_ok=True)
        checkpoints = checkpoints_of(job, start.run, start.command.epoch, memory_name())
        reported = 0

        def report(step: StepReport) -> None:
            nonlocal reported
            if self._log is not None:
                self._log.note(format_step(step))
            calls, before, reported = self._calls, reported, checkpoints.committed_bytes
            fresh = reported - before
            master.report.remote(replace(step, calls=calls.drain(), pending=calls.pending(), commit_bytes=fresh))

        def announce(activity: str) -> None:
            master.announce.remote(activity)

        def make() -> BaseTrainer:
            with loading.starting(str(TRAINER_ID)):
                trainer: BaseTrainer = self._trainer_class(port.handles(), self._classes, job.config)
                return trainer

        services = start.resources, recovery, checkpoints, is_loss, announce, synced_files(job), results_of(job)
        spans = SpanFile(job.job_dir, TRAINER_ID, self._epoch, job.spans_mb)
        self._recorded = recorded = RecordedPort(port, spans)
        link = TrainerLink(recorded, report, job.name, job.job_dir, *services, full_sizes=start.full_sizes)
        return replace(link, begin_step=recorded.begin_step), make


def _is_waiting_in_ray(thread: threading.Thread) -> bool:
    """Return True if a thread is inside ``ray.get`` or ``ray.wait``, which a trainer may call itself."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") == _RAY_WORKER and frame.f_code.co_name in ("get", "wait"):
            return True
        frame = frame.f_back
    return False


def _root(error: BaseException) -> BaseException:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, WorkloadDied):
            return link
        link = link.__cause__ or link.__context__
    return error
