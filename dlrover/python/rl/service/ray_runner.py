# SPDX-License-Identifier: Apache-2.0
"""Runs the service's jobs on the Ray cluster that this process is connected to; each job has its own master.

::

    run() --> has the run a master? --yes--> follow it
                    | no
                    v
              its folder: ended --> report the end;   not started --> check, start, follow
                    |
                    v started, but its master is gone with the cluster: resume from the last commit, follow

Masters and workers do not depend on the service: it may end at any time, and its next process finds them by name.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CallError, DLRoverRLError, InvalidJob, JobConflict, MasterLost
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.client.jobs import read_history
from dlrover.python.rl.master.client.on_ray import start_master
from dlrover.python.rl.master.client.run import CheckedJob, check_job
from dlrover.python.rl.master.process.status import JobStatus, Position, Update
from dlrover.python.rl.runtime.ray.cluster.cluster import lost_process
from dlrover.python.rl.runtime.ray.cluster.nodes import in_daemon_thread
from dlrover.python.rl.runtime.ray.processes.actors import MasterCalls, cluster_capacity, find_master, sweep
from dlrover.python.rl.runtime.run.files import RunFolder
from dlrover.python.rl.runtime.run.folder import newest_owner
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord, Observed
from dlrover.python.rl.service.runner import JobRunner

_LOG = get_logger(__name__)

GRACE_S = 3.0  # then a stopping job is killed; its committed steps stay
_FOLLOW_S = 2.0
_ANSWER_S = 120.0
_POLL_S = 0.05
_RETRY_S = 1.0  # after an error of Ray
_IDENTIFY_S = 2.0  # for a master to report its run
_CHECKS = 4  # processes that check jobs at the same time
_REVIVALS = 3
_SHARED_FIELDS = ("restarts", "activity", "roles", "members", "step_s", "recoveries", "last_failure")


@dataclass
class _Driven:
    """A run that this process follows."""

    record: JobRecord  # at its start, or at the request to stop it
    description: JobDescription
    job: JobSpec | None = None
    launched: MasterCalls | None = None  # the master that this process has started; it may not answer yet
    master: MasterCalls | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    hard: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Task[None] | None = None

    def observed(self, phase: JobPhase, **values: Any) -> Observed:
        folder = str(self.job.job_dir) if self.job is not None else ""
        return Observed(self.record.name, self.record.run, phase, results=folder, **values)

    def ended(self, phase: Phase, reason: str, cause: Any, **values: Any) -> Observed:
        kind, detail = (cause.kind.value, cause.detail) if cause else ("", "")
        return self.observed(JobPhase(phase.value), reason=reason, cause=kind, detail=detail, **values)


class RayJobRunner(JobRunner):
    def __init__(self, grace_s: float = GRACE_S) -> None:
        super().__init__()
        self._grace_s = grace_s
        self._driven: dict[str, _Driven] = {}
        self._checks = asyncio.Semaphore(_CHECKS)

    async def capacity(self) -> Mapping[str, float]:
        return await cluster_capacity()

    def run(self, record: JobRecord, description: JobDescription) -> None:
        driven = self._driven[record.run] = _Driven(record, description)
        self._spawn(self._drive(driven))

    def stop(self, record: JobRecord) -> None:
        driven = self._driven.get(record.run)
        if driven is None:
            return
        driven.record = record
        if not driven.stopping.is_set():
            driven.stopping.set()
            driven.stop = self._spawn(self._stop(driven, record.reason))
        if record.hard:
            driven.hard.set()

    async def resize(self, record: JobRecord, role: str, num: int) -> None:
        driven = self._driven.get(record.run)
        if driven is None or driven.master is None:
            raise CallError(f"'{record.name}' is not running yet")
        try:
            await driven.master.call("resize", role, num, timeout_s=_ANSWER_S)
            status: JobStatus = await driven.master.call("status", timeout_s=_ANSWER_S)
        except MasterLost as error:
            raise CallError(f"the master of '{record.name}' does not answer: try again") from error
        self._sink(driven.observed(JobPhase.RUNNING, **{name: getattr(status, name) for name in _SHARED_FIELDS}))

    async def _drive(self, driven: _Driven) -> None:
        record = driven.record
        try:
            ended = await self._run_to_end(driven)
        except DLRoverRLError as error:
            ended = driven.observed(JobPhase.FAILED, reason=_first_line(error), detail=str(error))
        except Exception as error:  # noqa: BLE001 -- the service continues, and the job ends
            _LOG.exception("%s: following the job failed", record.name)
            reason = f"{type(error).__name__}: {error}"
            ended = driven.observed(JobPhase.FAILED, reason=reason, cause=CauseKind.INTERNAL.value)
        while ended.phase is JobPhase.FAILED and lost_process():  # the service ends; its next process resumes the job
            await asyncio.sleep(_RETRY_S)
        self._driven.pop(record.run, None)
        self._sink(ended)
        if driven.stop is not None:
            driven.stop.cancel()

    async def _run_to_end(self, driven: _Driven) -> Observed:
        lost: MasterLost | None = None
        for revival in range(_REVIVALS + 1):
            try:
                driven.master = await self._find_or_start(driven, revival)
                return await self._follow(driven, driven.master) if driven.master else self._outcome(driven)
            except MasterLost as error:
                lost = error
            if driven.stopping.is_set() or revival == _REVIVALS:
                break
            _LOG.warning("%s: %s; resuming from its last commit", driven.record.name, lost)
        await self._kill_all(driven)
        if driven.stopping.is_set():
            return driven.observed(JobPhase.STOPPED, reason=driven.record.reason or "stopped")
        return driven.observed(JobPhase.FAILED, reason=str(lost), cause="master_lost")

    async def _find_or_start(self, driven: _Driven, revival: int) -> MasterCalls | None:
        """Return the master to follow, None for a run that has ended. Raises MasterLost, InvalidJob."""
        record = driven.record
        driven.job = job = _load_job(record, driven.description)
        if (master := await self._find_master(driven, job)) is not None:
            return master
        await in_daemon_thread(_check_folder, record)
        owner = await in_daemon_thread(newest_owner, job.job_dir)
        began = owner is not None and owner.run == record.run
        if owner is not None and began and owner.state != "running":
            return None
        if driven.stopping.is_set():
            if began:
                await self._kill_all(driven)
            return None
        if revival or began:
            if await find_master(record.name) is None:  # otherwise orphans would keep running beside the new master
                await in_daemon_thread(sweep, record.name, record.run)
            job = replace(job, checkpoint=replace(job.checkpoint, resume="latest"))
            self._sink(driven.observed(JobPhase.STARTING, activity="resuming from the last commit"))
        driven.job = job
        return await self._start(driven, job)

    async def _find_master(self, driven: _Driven, job: JobSpec) -> MasterCalls | None:
        """Find the master of this run, which an earlier process of the service has started. Let it begin, since that
        process may have been killed before it did so."""
        if (master := await find_master(job.name)) is None:
            return None
        with suppress(MasterLost):
            status: JobStatus = await master.call("status", timeout_s=_ANSWER_S)
            if _belongs_to(status, job):
                driven.job = replace(job, job_dir=Path(driven.record.folder or status.folder))
                await master.call("start", {}, timeout_s=_ANSWER_S)  # does nothing if it has begun
                return master
        return None

    async def _start(self, driven: _Driven, job: JobSpec) -> MasterCalls | None:
        """Check the job in a child process, which may take a while, and start its master; None if it was stopped."""
        checking = asyncio.get_running_loop().create_task(self._check(job))
        stopped = asyncio.get_running_loop().create_task(driven.stopping.wait())  # waits: beside the check
        try:
            # waits: for the check, which has a time limit, or for a request to stop
            await asyncio.wait((checking, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            checking.cancel()  # no effect on one that has ended
        if driven.stopping.is_set():
            checking.add_done_callback(lambda task: task.cancelled() or task.exception())
            return None
        checked = await checking
        driven.job = job = checked.job

        def launched(handle: Any) -> None:
            driven.launched = MasterCalls(handle)

        try:
            return MasterCalls(await in_daemon_thread(start_master, checked, True, launched))
        except JobConflict:
            if (master := await self._find_master(driven, job)) is None:
                raise
            return master

    async def _check(self, job: JobSpec) -> CheckedJob:
        async with self._checks:
            return await in_daemon_thread(check_job, job)

    async def _follow(self, driven: _Driven, master: MasterCalls) -> Observed:
        """Report until the run has ended. Raises MasterLost."""
        position: Position = ("", 0)
        while True:
            try:
                update: Update = await master.call("follow", position, _FOLLOW_S, timeout_s=_ANSWER_S)
            except MasterLost:
                if _journalled_end(driven) is None:
                    raise
                return self._outcome(driven)
            status, position = update.status, update.position
            common = {name: getattr(status, name) for name in _SHARED_FIELDS}
            for each in update.reports:
                metrics = {name: float(value) for name, value in each.metrics.items()}
                step = {"step": each.step, "total_steps": each.total_steps, "metrics": metrics}
                self._sink(driven.observed(JobPhase.RUNNING, **step, **common))
            if status.phase.terminal:
                master.end()
                return driven.ended(status.phase, status.reason, status.cause, **common)
            is_starting = status.phase in (Phase.CREATED, Phase.PLACED) and status.incarnation <= 1
            self._sink(driven.observed(JobPhase.STARTING if is_starting else JobPhase.RUNNING, **common))

    def _outcome(self, driven: _Driven) -> Observed:
        """Report the end of a run without a master: the one in its journal, or a stop before it began."""
        state = _journalled_end(driven)
        if state is None:
            return driven.observed(JobPhase.STOPPED, reason=driven.record.reason or "stopped before it began")
        return driven.ended(state.phase, state.reason, state.failure, restarts=state.restarts)

    async def _stop(self, driven: _Driven, reason: str) -> None:
        """Ask the master to stop; kill everything after the grace period, or at once for a hard stop."""
        request = asyncio.get_running_loop().create_task(self._ask_to_stop(driven, reason))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await driven.hard.wait()
        finally:
            request.cancel()
        while driven.record.run in self._driven:  # a master that is starting can be killed once Ray knows it
            try:
                await self._kill_all(driven)
            except Exception as error:  # noqa: BLE001 -- Ray may be unreachable: tried again
                _LOG.warning("%s: could not be killed yet: %s", driven.record.name, _first_line(error))
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(_POLL_S)

    async def _kill_all(self, driven: _Driven) -> None:
        """Kill the processes of this run on the cluster, and none of another run of its name."""
        record, unidentified = driven.record, None
        masters = [master for master in (driven.launched, driven.master) if master is not None]
        if not masters and driven.job is not None and (master := await find_master(record.name)) is not None:
            try:
                status: JobStatus = await master.call("status", timeout_s=_IDENTIFY_S)
                masters += [master] if _belongs_to(status, driven.job) else []
            except MasterLost:
                unidentified = master
        for master in masters:
            master.end()
        orphans = await in_daemon_thread(sweep, record.name, record.run)
        if unidentified is not None and orphans:  # the master of another run would have killed them when it began
            unidentified.end()

    async def _ask_to_stop(self, driven: _Driven, reason: str) -> None:
        while driven.master is None:
            await asyncio.sleep(_POLL_S)
        with suppress(MasterLost):
            await driven.master.call("stop", reason, timeout_s=_ANSWER_S)


def _load_job(record: JobRecord, description: JobDescription) -> JobSpec:
    """Return the job of a run with the run's folder, which does not depend on the time zone or the root."""
    search = (description.folder,) if description.folder else None
    job = load_job_text(description.text, record.name, description.overrides, search)
    job = replace(job, run=record.run, work_dir=description.folder or str(Path.cwd()))
    if folder := record.folder or record.results:
        return replace(job, job_dir=Path(folder))
    if job.run_folders is None:
        return job
    began = datetime.fromtimestamp(record.submitted_s).strftime("%Y%m%d-%H%M%S")
    return replace(job, job_dir=job.run_folders / f"{began}-{record.run}")


def _belongs_to(status: JobStatus, job: JobSpec) -> bool:
    return status.run == job.run if status.run else status.folder == str(job.job_dir)


def _check_folder(record: JobRecord) -> None:
    """Raises InvalidJob if the path of the run's folder, which had no link at submission, has one now."""
    if record.folder:
        RunFolder(Path(record.folder)).check()


def _journalled_end(driven: _Driven) -> Any:
    """Return the final state in a run's journal, None if it has none. Raises InvalidJob if the folder is a link."""
    _check_folder(driven.record)
    history = None if driven.job is None else read_history(driven.job.job_dir)
    if driven.job is None or history is None or not history.state.phase.terminal:
        return None
    settings = history.state.settings
    return history.state if settings is not None and settings.run == driven.job.run else None


def _first_line(error: BaseException) -> str:
    if isinstance(error, InvalidJob):
        return "; ".join(map(str, error.errors))
    return str(error).splitlines()[0] if str(error) else type(error).__name__
