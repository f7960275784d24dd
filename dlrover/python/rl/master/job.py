# SPDX-License-Identifier: Apache-2.0
"""Checks, runs and submits jobs from Python; the command line is a thin layer over this module."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CallError, ConfigError, InvalidJob, JobConflict, JobFailed, MasterLost
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import master_name
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.load import search_folders
from dlrover.python.rl.config.secrets import seal
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.config.typed import from_plain
from dlrover.python.rl.control.placement import Placement, plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.brain import fresh_journal, run_local
from dlrover.python.rl.master.rl_master import RLMaster
from dlrover.python.rl.master.status import JobStatus, Position, Update
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore
from dlrover.python.rl.runtime.checkpoint.run_files import validate_archive
from dlrover.python.rl.runtime.process.curve import redraw
from dlrover.python.rl.runtime.process.inspection import Inspection, inspect_in_child, inspect_job
from dlrover.python.rl.runtime.process.interrupts import Interrupts
from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster
from dlrover.python.rl.runtime.ray.processes.actors import ask, end, find, launch, sweep, wait_gone
from dlrover.python.rl.runtime.run_folder import IN_PROCESS, ON_RAY, begin, claim, conflict, continued, held
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, StepReport, announce_nothing

_LOG = get_logger(__name__)

INTERRUPTED = "interrupted"
FOLLOW_S = 1.0
_ANSWER_S = 60.0


@dataclass(frozen=True)
class CheckedJob:
    job: JobSpec
    placement: Placement
    inspection: Inspection
    given: Any = None
    """The job's config as it was given, without the defaults that the job has."""


def check_job(job: JobSpec, local: bool = False) -> CheckedJob:
    """Find all errors of ``job`` without starting anything, or raise InvalidJob with them.

    ``local`` jobs run in this process, so their classes are imported here; otherwise a child process imports them.
    """
    job = replace(job, work_dir=job.work_dir or str(Path.cwd()), search_path=job.search_path or search_folders())
    job = continued(job)
    placement, errors = plan(job)
    errors += [*_validate_job_dir(job), *validate_archive(job)]
    inspection = inspect_job(job, here=True) if local else inspect_in_child(job)
    errors += inspection.errors
    if local:
        errors += inspection.single_process_refusals
        inspection = replace(inspection, about=(*_warn_of_device(job, inspection.config), *inspection.about))
    if errors or placement is None:
        raise InvalidJob(errors)
    given = job.config if inspection.given is None else from_plain(inspection.given)
    return CheckedJob(inspection.complete(job), placement, inspection, given)


def _warn_of_device(job: JobSpec, config: Mapping[str, Any] | None) -> list[str]:
    engine = (config or {}).get("engine")
    device = engine.get("device") if isinstance(engine, Mapping) else None
    if job.trainer.device_type != "GPU" or device != "cpu":
        return []
    return ["trainer.device_type is GPU, and this process has none: it computes on the CPU"]


def check_described(describe: Callable[[], JobSpec], local: bool = False) -> CheckedJob:
    """Like :func:`check_job` for a job that ``describe`` reads: the errors of reading it and of the rest together."""
    try:
        job = describe()
    except InvalidJob as error:
        raise InvalidJob([*error.errors, *_validate_further(error, local)]) from None
    return check_job(job, local)


def _validate_further(error: InvalidJob, local: bool) -> list[ConfigError]:
    if error.salvaged is None:
        return []
    try:
        check_job(error.salvaged, local)
    except InvalidJob as more:
        places = {fault.where for fault in error.errors}
        return [fault for fault in more.errors if fault.where not in places]
    return []


def _validate_job_dir(job: JobSpec) -> list[ConfigError]:
    folder = job.run_folders or job.job_dir
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        return [ConfigError("job_dir", f"{existing} is a file, not a folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [ConfigError("job_dir", f"{existing} cannot be written to")]
    why = conflict(job)
    return [ConfigError("job_dir", why)] if why else []


def _quiet(report: StepReport) -> None:
    """Drop the report."""


def run_here(checked: CheckedJob, report: Reporter = _quiet, announce: Announcer = announce_nothing) -> JobStatus:
    """Run a checked job in this process, without Ray. Raises JobConflict if its folder is in use or has results."""
    job = begin(checked.job)
    with held(claim(job, IN_PROCESS, bound=True)) as claimed:
        status = run_local(job, checked.placement, report, FileStateStore(fresh_journal(job)), announce=announce)
        claimed.end(status.phase.value)
    return _drawn(status)


def _drawn(status: JobStatus) -> JobStatus:
    """The trainer draws its last curve only if it finishes."""
    if status.folder and status.phase is not Phase.FINISHED:
        redraw(Path(status.folder))
    return status


def run_on_ray(
    checked: CheckedJob,
    report: Reporter = _quiet,
    address: str | None = None,
    connected: bool = False,
    announce: Announcer = announce_nothing,
) -> JobStatus:
    """Run a checked job under an :class:`RLMaster` and follow it to its end.

    The first Ctrl-C stops the job in good order. A second one stops waiting for that: a cluster that was started here
    ends at once; on a shared one the master continues to stop the job.

    Args:
        address: of a running cluster; None starts one for this job.
        connected: this process is connected to Ray already; ``address`` is ignored.

    Raises:
        JobConflict: a job of this name is running on the cluster, or the job's folder is in use or has results.
        ClusterUnavailable: no Ray.
        MasterLost: the master died, and its processes were ended; or it does not answer, and nothing was touched.
    """
    checked = replace(checked, job=begin(checked.job))
    if connected or address is not None:
        return _drawn(_run_on_cluster(checked, report, address, connected, announce))
    with held(claim(checked.job, ON_RAY, bound=True)) as claimed:
        status = _run_on_cluster(checked, report, None, False, announce)
        claimed.end(status.phase.value)
    return _drawn(status)


def _run_on_cluster(
    checked: CheckedJob, report: Reporter, address: str | None, connected: bool, announce: Announcer
) -> JobStatus:
    name, total = checked.job.name, dict(checked.placement.total)
    total["cpu"] = total.get("cpu", 0.0) + checked.job.master.cpu
    if not connected:
        announce("starting Ray" if address is None else f"connecting to Ray at {address}")
    with Interrupts(signal.SIGINT) as interrupts, nullcontext() if connected else ray_cluster(address, total):
        if interrupts.count:
            return JobStatus(name, Phase.STOPPED, 0, 0, INTERRUPTED, None, folder=str(checked.job.job_dir))
        try:
            announce("starting the master")
            master = start_master(checked, claims=connected or address is not None)
            status = follow(master, report, interrupts, announce=announce)
        except MasterLost as error:
            # A master that exists but does not answer still owns its job, which may not be this one.
            if find(master_name(name)) is not None:
                raise
            sweep(name)
            raise MasterLost(f"{error}; to go on: dlrover-rl resume {checked.job.job_dir}") from error
        if status.phase.terminal:
            end(master)
        return status


def start_master(checked: CheckedJob, claims: bool = True) -> Any:
    """Launch and start the master of a checked job on the connected cluster; it ``claims`` the job's folder unless this
    process has done so. Raises JobConflict while a job of this name is running or another run holds the folder, and
    MasterLost."""
    job = begin(checked.job)
    _clear_the_name(job.name)
    needs = {"cpu": job.master.cpu, "memory": job.master.memory}
    sealed, secrets = seal(job)  # Ray stores the arguments of actors
    plain = replace(checked.inspection, config=None, given=None, about=())
    arguments = (sealed, checked.placement, plain, claims)
    master = launch(RLMaster, master_name(job.name), arguments, needs, job.master.max_restart)
    try:
        ask(partial(master.start.remote, secrets), _ANSWER_S)
    except (JobConflict, InvalidJob):
        end(master)
        raise
    return master


def _clear_the_name(name: str) -> None:
    """Remove the remains of an earlier job of this name; a job that has not ended keeps the name."""
    earlier = find(master_name(name))
    if earlier is not None and not ask(earlier.status.remote, _ANSWER_S).phase.terminal:
        raise JobConflict(f"a job named '{name}' is running on this cluster: stop it first or choose another name")
    for actor in sweep(name):
        if actor != master_name(name):
            _LOG.warning("ended %s, which a job of this name had left behind", actor)
    wait_gone(master_name(name), _ANSWER_S)


def stop_master(master: Any, reason: str) -> None:
    ask(lambda: master.stop.remote(reason), _ANSWER_S)


def follow(
    master: Any,
    report: Reporter = _quiet,
    interrupts: Interrupts | None = None,
    deadline_s: float | None = None,
    announce: Announcer = announce_nothing,
) -> JobStatus:
    """Pass step reports to ``report``, and what the job does to ``announce``, until it has ended; return its status.

    The first of ``interrupts`` stops the job, the second ends the waiting, as does ``deadline_s``.
    """
    position, stopping, began_s, activity = Position(), False, time.monotonic(), ""
    while True:
        update: Update = ask(partial(master.follow.remote, position, FOLLOW_S), _ANSWER_S)
        position = update.position
        if update.status.activity not in ("", activity):
            announce(update.status.activity)
        activity = update.status.activity
        for step_report in () if stopping else update.reports:
            report(step_report)
        if update.status.phase.terminal:
            return update.status
        interrupted = interrupts.count if interrupts else 0
        if interrupted and not stopping:
            stop_master(master, INTERRUPTED)
            stopping = True
        elif interrupted > 1 or (deadline_s is not None and time.monotonic() - began_s > deadline_s):
            return replace(update.status, reason=update.status.reason or INTERRUPTED)


class RLJob:
    """A described job, ready to be submitted."""

    def __init__(self, builder: "RLJobBuilder") -> None:
        self._builder = builder

    def spec(self, job_name: str, local: bool = False) -> JobSpec:
        return self._builder.spec(job_name, in_process=local)

    def submit(  # noqa: PLR0913 -- upstream DLRover's signature, and where to run
        self,
        job_name: str,
        blocking: bool = True,
        master_cpu: float | None = None,
        master_memory: float | None = None,
        job_max_restart: int | None = None,
        address: str | None = None,
        local: bool = False,
    ) -> JobStatus:
        """Run the job and wait for its end.

        Args:
            job_name: a DNS label, unique on the cluster.
            blocking: False returns once the job has begun; it needs ``address``, since a cluster that is started here
                ends with this process.
            master_cpu: logical CPUs reserved for the master; by default those of the job.
            master_memory: memory reserved for the master, in MB; by default that of the job.
            job_max_restart: restarts of the whole job; by default those of the job.
            address: of a running Ray cluster; None starts one for this job.
            local: run in this process, without Ray.

        Raises:
            InvalidJob: with all errors; nothing was started.
            CallError: not blocking, and no ``address``.
            JobFailed: it ended in failure; carries the first cause and its traceback.
        """
        if not blocking and address is None:
            raise CallError("submit(blocking=False) needs address=: a cluster started here would end with this process")
        spec = self.spec(job_name, local)
        amounts = {"cpu": master_cpu, "memory": master_memory}
        master: dict[str, Any] = {name: float(amount) for name, amount in amounts.items() if amount is not None}
        spec = replace(
            spec,
            master=replace(spec.master, **master),
            restart=spec.restart if job_max_restart is None else replace(spec.restart, job_max_restart=job_max_restart),
        )
        checked = check_job(spec, local)
        if not blocking:
            with ray_cluster(address, checked.placement.total):
                initial: JobStatus = ask(start_master(checked).status.remote, _ANSWER_S)
                return initial
        status = run_here(checked) if local else run_on_ray(checked, address=address)
        raise_if_failed(status)
        return status


class RLJobBuilder(JobBuilder):
    """Describe a job in Python, then ``build().submit(name)``.

    Example::

        job = (
            RLJobBuilder()
            .node_num(1).device_per_node(4).device_type("CPU")
            .config({"lr": 1e-3})
            .trainer("my_package.trainer", "MyTrainer")
            .actor("my_package.workloads", "MyActor").total(2)
            .rollout("my_package.workloads", "MyRollout").total(2)
            .with_collocation("actor", "rollout")
            .build()
        )
        job.submit("my-job")
    """

    def build(self) -> RLJob:
        """Raises InvalidJob with all errors that can be found without importing the classes."""
        spec = self.spec("unnamed", in_process=True)
        _, errors = plan(spec)
        if errors:
            raise InvalidJob(errors)
        return RLJob(self)


def raise_if_failed(status: JobStatus) -> None:
    """Raise :class:`JobFailed`, with the first cause, when a job ended in failure."""
    if status.phase is Phase.FAILED:
        detail = f"\n\n{status.cause.detail}" if status.cause and status.cause.detail else ""
        raise JobFailed(f"{status.name} failed: {status.reason}{detail}")


__all__ = ["CheckedJob", "RLJob", "RLJobBuilder", "check_job", "run_here", "run_on_ray"]
