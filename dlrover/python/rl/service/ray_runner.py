# SPDX-License-Identifier: Apache-2.0
"""Runs the service's jobs on the Ray cluster that this process is connected to, each under a master of its own.

::

    run() --> a master of this run? --yes--> follow it
                    | no
                    v
              its folder: ended --> report how;   never begun --> check, start, follow
                    |
                    v begun, and its master is gone (the cluster was): go on from the last commit, follow

Masters and workers do not depend on the service: it can end at any time, and its next process finds them by name.
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

GRACE_S = 3.0
"""A job has this long to stop; then everything of it is ended. Committed steps stay."""

_FOLLOW_S = 2.0
_ANSWER_S = 120.0
_POLL_S = 0.05
_AGAIN_S = 1.0  # after an error of Ray
_WHOSE_S = 2.0  # for a master to say whose it is
_CHECKS = 4  # processes that check jobs at the same time
_REVIVALS = 3
_PHASES = {Phase.FINISHED: JobPhase.FINISHED, Phase.FAILED: JobPhase.FAILED, Phase.STOPPED: JobPhase.STOPPED}


_REPORTED = ("restarts", "activity", "roles", "members", "step_s", "recoveries", "last_failure")
"""Fields that a job's status and a report of the runner have in common."""


@dataclass
class _Driven:
    """A run that this process looks after."""

    record: JobRecord  # as it was when the run was taken up, or when its stop was asked for
    description: JobDescription
    job: JobSpec | None = None
    launched: MasterCalls | None = None  # what this process has started for it, which may not answer yet
    master: MasterCalls | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    hard: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Task[None] | None = None

    def observed(self, phase: JobPhase, **values: Any) -> Observed:
        folder = str(self.job.job_dir) if self.job is not None else ""
        return Observed(self.record.name, self.record.run, phase, results=folder, **values)

    def stopped(self, reason: str) -> Observed:
        return self.observed(JobPhase.STOPPED, reason=self.record.reason or reason)

    def ended(self, phase: Phase, reason: str, cause: Any, **values: Any) -> Observed:
        kind, detail = (cause.kind.value, cause.detail) if cause else ("", "")
        return self.observed(_PHASES[phase], reason=reason, cause=kind, detail=detail, **values)


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
            raise CallError(f"'{record.name}' does not run yet")
        try:
            await driven.master.call("resize", role, num, timeout_s=_ANSWER_S)
            status: JobStatus = await driven.master.call("status", timeout_s=_ANSWER_S)
        except MasterLost as error:
            raise CallError(f"the master of '{record.name}' does not answer: try again") from error
        self._sink(driven.observed(JobPhase.RUNNING, **{name: getattr(status, name) for name in _REPORTED}))

    # -- one run ------------------------------------------------------------------------------------------------------

    async def _drive(self, driven: _Driven) -> None:
        record = driven.record
        try:
            ended = await self._to_its_end(driven)
        except DLRoverRLError as error:
            ended = driven.observed(JobPhase.FAILED, reason=_first_line(error), detail=str(error))
        except Exception as error:  # noqa: BLE001 -- the service stays, and the job has an end
            _LOG.exception("%s: following it failed", record.name)
            reason = f"{type(error).__name__}: {error}"
            ended = driven.observed(JobPhase.FAILED, reason=reason, cause=CauseKind.INTERNAL.value)
        while ended.phase is JobPhase.FAILED and lost_process():  # the service ends, and its next process continues it
            await asyncio.sleep(_AGAIN_S)
        self._driven.pop(record.run, None)
        self._sink(ended)
        if driven.stop is not None:
            driven.stop.cancel()

    async def _to_its_end(self, driven: _Driven) -> Observed:
        lost: MasterLost | None = None
        for revival in range(_REVIVALS + 1):
            try:
                driven.master = await self._find_or_start(driven, revival)
                return await self._follow(driven, driven.master) if driven.master else self._outcome(driven)
            except MasterLost as error:
                lost = error
            if driven.stopping.is_set() or revival == _REVIVALS:
                break
            _LOG.warning("%s: %s; going on from its last commit", driven.record.name, lost)
        await self._end_all(driven)
        if driven.stopping.is_set():
            return driven.stopped("stopped")
        return driven.observed(JobPhase.FAILED, reason=str(lost), cause="master_lost")

    async def _find_or_start(self, driven: _Driven, revival: int) -> MasterCalls | None:
        """The master to follow; without one the run has an outcome. Raises MasterLost, InvalidJob."""
        record = driven.record
        driven.job = job = _described(record, driven.description)
        master = await self._begun(driven, job)
        if master is not None:
            return master
        await in_daemon_thread(_check_folder, record)
        owner = await in_daemon_thread(newest_owner, job.job_dir)
        began = owner is not None and owner.run == record.run
        if owner is not None and began and owner.state != "running":
            return None
        if driven.stopping.is_set():
            if began:
                await self._end_all(driven)
            return None
        if revival or began:
            if await find_master(record.name) is None:  # what has lost its master would go on beside the next one
                await in_daemon_thread(sweep, record.name, record.run)
            job = replace(job, checkpoint=replace(job.checkpoint, resume="latest"))
            self._sink(driven.observed(JobPhase.STARTING, activity="going on from the last commit"))
        driven.job = job
        return await self._start(driven, job)

    async def _begun(self, driven: _Driven, job: JobSpec) -> MasterCalls | None:
        """The master of this very run. An earlier process of the service has started it, and may have been killed
        before it let it begin."""
        master = await find_master(job.name)
        if master is None:
            return None
        with suppress(MasterLost):
            status: JobStatus = await master.call("status", timeout_s=_ANSWER_S)
            if _is_of(status, job):
                driven.job = replace(job, job_dir=Path(driven.record.folder or status.folder))
                await master.call("start", {}, timeout_s=_ANSWER_S)  # does nothing if it has begun
                return master
        return None

    async def _start(self, driven: _Driven, job: JobSpec) -> MasterCalls | None:
        """The master, or None if the job is to be stopped. It is checked in a child process, which may take a while."""
        checking = asyncio.get_running_loop().create_task(self._check(job))
        stopped = asyncio.get_running_loop().create_task(driven.stopping.wait())  # waits: beside the check
        try:
            # waits: for the end of a check, which has a limit, or of the job
            await asyncio.wait((checking, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            checking.cancel()  # does nothing to one that has ended
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
            master = await self._begun(driven, job)
            if master is None:
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
            status, reports, position = update
            common = {name: getattr(status, name) for name in _REPORTED}
            for step in reports:
                metrics = {name: float(value) for name, value in step.metrics.items()}
                values = {"step": step.step, "total_steps": step.total_steps, "metrics": metrics, **common}
                self._sink(driven.observed(JobPhase.RUNNING, **values))
            if status.phase.terminal:
                master.end()
                return driven.ended(status.phase, status.reason, status.cause, **common)
            is_starting = status.phase in (Phase.CREATED, Phase.PLACED) and status.incarnation <= 1
            self._sink(driven.observed(JobPhase.STARTING if is_starting else JobPhase.RUNNING, **common))

    def _outcome(self, driven: _Driven) -> Observed:
        """How a run without a master has ended: as its journal says, or it was stopped before it began."""
        state = _journalled_end(driven)
        if state is None:
            return driven.stopped("stopped before it began")
        return driven.ended(state.phase, state.reason, state.failure, restarts=state.restarts)

    async def _stop(self, driven: _Driven, reason: str) -> None:
        """Ask the master, and end everything when it takes too long, or at once if that is wanted."""
        asked = asyncio.get_running_loop().create_task(self._ask_to_stop(driven, reason))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await driven.hard.wait()
        finally:
            asked.cancel()
        while driven.record.run in self._driven:  # a master that is being launched can be ended once Ray knows it
            try:
                await self._end_all(driven)
            except Exception as error:  # noqa: BLE001 -- Ray may be away for a moment: tried again
                _LOG.warning("%s: it could not be ended yet: %s", driven.record.name, _first_line(error))
                await asyncio.sleep(_AGAIN_S)
            await asyncio.sleep(_POLL_S)

    async def _end_all(self, driven: _Driven) -> None:
        """End what this run has on the cluster, and nothing of another run of its name."""
        record, found = driven.record, None
        whose: bool | None = None  # it does not say
        masters = [master for master in (driven.launched, driven.master) if master is not None]
        if not masters and driven.job is not None and (found := await find_master(record.name)) is not None:
            with suppress(MasterLost):
                whose = _is_of(await found.call("status", timeout_s=_WHOSE_S), driven.job)
        for master in [found] if found is not None and whose else masters:
            master.end()
        left = await in_daemon_thread(sweep, record.name, record.run)
        if found is not None and whose is None and left:  # a master of another run has ended them when it began
            found.end()

    async def _ask_to_stop(self, driven: _Driven, reason: str) -> None:
        while driven.master is None:
            await asyncio.sleep(_POLL_S)
        with suppress(MasterLost):
            await driven.master.call("stop", reason, timeout_s=_ANSWER_S)


def _described(record: JobRecord, description: JobDescription) -> JobSpec:
    """The job of a run, with the run's own folder: the same each time, also in another time zone or root."""
    search = (description.folder,) if description.folder else None
    job = load_job_text(description.text, record.name, description.overrides, search)
    job = replace(job, run=record.run, work_dir=description.folder or str(Path.cwd()))
    if folder := record.folder or record.results:
        return replace(job, job_dir=Path(folder))
    if job.run_folders is None:
        return job
    begun = datetime.fromtimestamp(record.submitted_s).strftime("%Y%m%d-%H%M%S")
    return replace(job, job_dir=job.run_folders / f"{begun}-{record.run}")


def _is_of(status: JobStatus, job: JobSpec) -> bool:
    return status.run == job.run if status.run else status.folder == str(job.job_dir)


def _check_folder(record: JobRecord) -> None:
    """Raises InvalidJob if the run's folder, which had no link in its path when it was submitted, has one now."""
    if record.folder:
        RunFolder(Path(record.folder)).check()


def _journalled_end(driven: _Driven) -> Any:
    """The final state in the journal of a run, None if it has none. Its master may be alive, and keeps the journal.
    Raises InvalidJob if the folder is a link."""
    _check_folder(driven.record)
    job = driven.job
    history = None if job is None else read_history(job.job_dir)
    if job is None or history is None or history.state.settings is None or history.state.settings.run != job.run:
        return None
    return history.state if history.state.phase.terminal else None


def _first_line(error: BaseException) -> str:
    if isinstance(error, InvalidJob):
        return "; ".join(map(str, error.errors))
    return str(error).splitlines()[0] if str(error) else type(error).__name__


__all__ = ["RayJobRunner"]
