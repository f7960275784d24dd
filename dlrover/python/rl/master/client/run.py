# SPDX-License-Identifier: Apache-2.0
"""Find all errors of a job without starting anything, and run it here or on a cluster of Ray."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobFailed
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.load import search_folders
from dlrover.python.rl.config.plain import from_plain
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.config.typed import lies_in
from dlrover.python.rl.control.placement import Placement, plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.process.brain import fresh_journal, run_local, validate_least
from dlrover.python.rl.master.process.status import JobStatus
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore
from dlrover.python.rl.runtime.checkpoint.runs import Room, room_for, validate_archive, validate_room
from dlrover.python.rl.runtime.member.inspection import NOT_IN_CORE, Inspection, inspect_in_child, inspect_job
from dlrover.python.rl.runtime.member.interpreters import refuse_interpreters
from dlrover.python.rl.runtime.run import folder as run_folder
from dlrover.python.rl.runtime.run.progress import redraw
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, announce_nothing, report_nothing

_LOG = get_logger(__name__)

_JOB = "job"
"""The place of an inspection's own failures."""

_NOT_CHECKED = f"not checked here, since only dlrover-rl-core is installed: {NOT_IN_CORE}"
_LIBRARY_ELSEWHERE = "install dlrover-rl instead, or enqueue the job at a service that has it"

_GPU_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class CheckedJob:
    job: JobSpec
    placement: Placement
    inspection: Inspection
    user_config: Any = None
    """The job's config as the user wrote it, without defaults."""

    room: Room | None = None
    """The space that its commits need, None: unknown."""

    opening: str = ""
    """The first announcement, made once the folder of its run is claimed; empty: none."""


def check_job(job: JobSpec, local: bool = False, partly: bool = False) -> CheckedJob:
    """Check ``job`` without starting anything; raise InvalidJob with all errors. A ``local`` job runs in this process,
    so its classes are imported here; otherwise a child process imports them. Classes of a library that is not installed
    are errors, or if ``partly``, a line of the inspection says what was not checked."""
    job = replace(job, work_dir=job.work_dir or str(Path.cwd()), search_path=job.search_path or search_folders())
    job = run_folder.continued(job)
    placement, errors = plan(job)
    folder = job.run_folders or job.job_dir
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        errors.append(ConfigError("job_dir", f"{existing} is a file, not a folder"))
    elif not os.access(existing, os.W_OK | os.X_OK):
        errors.append(ConfigError("job_dir", f"{existing} cannot be written to"))
    elif why := run_folder.conflict(job):
        errors.append(ConfigError("job_dir", why))
    errors += validate_archive(job)
    before = run_folder.earlier_description(job)
    inspection = inspect_job(job, before, here=True) if local else inspect_in_child(job, before)
    errors += [*inspection.errors, *validate_least(job, inspection)]
    if inspection.missing and partly:
        inspection = replace(inspection, about=(*inspection.about, _NOT_CHECKED))
    elif inspection.missing:
        errors += [replace(error, what=f"{error.what}: {_LIBRARY_ELSEWHERE}") for error in inspection.missing]
    if local:
        errors += [*inspection.single_process_refusals, *refuse_interpreters(job, "in one process")]
        if job.trainer.device_type == "GPU" and _device_of(inspection.config) == "cpu" != _device_of(job.config):
            warning = "trainer.device_type is GPU, but this process has no GPU and computes on the CPU"
            inspection = replace(inspection, about=(warning, *inspection.about))
    room = room_for(job, placement, inspection.state_bytes) if placement is not None else None
    errors += validate_room(job, room) if job.trainer.device_type == "CPU" or _GPU_DRIVER.exists() else []
    if errors or placement is None:
        raise InvalidJob(errors)
    user_config = job.config if inspection.renamed is None else from_plain(inspection.renamed)
    return CheckedJob(inspection.complete(job), placement, inspection, user_config, room)


def _device_of(config: Mapping[str, Any] | None) -> Any:
    engine = (config or {}).get("engine")
    return engine.get("device") if isinstance(engine, Mapping) else None


def with_limits(job: JobSpec, **values: Any) -> JobSpec:
    """Return the job with those ``values`` that are not None, under the names of upstream DLRover's arguments."""
    changes: dict[str, dict[str, Any]] = {"restart": {}, "master": {}, "": {}}
    for name, value in values.items():
        if value is not None:
            section, field = _FIELDS[name]
            changes[section][field] = value
    restart, master = replace(job.restart, **changes["restart"]), replace(job.master, **changes["master"])
    return replace(job, restart=restart, master=master, **changes[""])


_FIELDS = {
    "job_max_restart": ("restart", "job_max_restart"),
    "trainer_max_restart": ("restart", "trainer_max_restart"),
    "workload_max_restart": ("restart", "workload_max_restart"),
    "master_cpu": ("master", "cpu"),
    "master_mem": ("master", "memory"),
    "master_max_restart": ("master", "max_restart"),
    "scheduling_strategy_type": ("", "scheduling_strategy"),
}


def check_described(describe: Callable[[], JobSpec], local: bool = False, partly: bool = False) -> CheckedJob:
    """Check a job that ``describe`` reads; report the errors of reading it and of :func:`check_job` together."""
    job, errors = _read(describe)
    try:
        checked = check_job(job, local, partly) if job is not None else None
    except InvalidJob as error:
        places = {fault.where for fault in errors}
        errors += [fault for fault in error.errors if fault.where not in places]
    if errors or checked is None:
        raise InvalidJob(errors)
    return checked


def check_types(describe: Callable[[], JobSpec]) -> None:
    """Find the errors that a job which ``describe`` reads has on any machine: in its layout, and in its ``config`` by
    the trainer's schema if that can be imported here. Raises InvalidJob with all of them."""
    job, errors = _read(describe)
    places = [_JOB, *(fault.where for fault in errors)]
    inspection = inspect_in_child(job, types_only=True) if job is not None else Inspection()
    if inspection.missing:
        _LOG.warning(_NOT_CHECKED)
    errors += [fault for fault in inspection.errors if not lies_in(fault.where, places)]
    if errors:
        raise InvalidJob(errors)


def _read(describe: Callable[[], JobSpec]) -> tuple[JobSpec | None, list[ConfigError]]:
    """Return the job, or as much of it as can be checked further, and the errors of reading it."""
    try:
        return describe(), []
    except InvalidJob as error:
        return error.salvaged, list(error.errors)


def run_here(
    checked: CheckedJob, report: Reporter = report_nothing, announce: Announcer = announce_nothing
) -> JobStatus:
    """Run a checked job in this process, without Ray. Raises JobConflict if its folder is in use or has results."""
    job = run_folder.begin(checked.job)
    with run_folder.held(run_folder.claim(job, run_folder.IN_PROCESS, bound=True)) as claimed:
        if checked.opening:
            announce(checked.opening)
        status = run_local(job, checked.placement, report, FileStateStore(fresh_journal(job)), announce=announce)
        claimed.end(status.phase.value)
    _redraw(status)
    return status


def _redraw(status: JobStatus) -> None:
    """Draw the curve of a run that has not finished, since its trainer draws only at the end."""
    if status.folder and status.phase is not Phase.FINISHED:
        redraw(Path(status.folder))


def run_on_ray(
    checked: CheckedJob,
    report: Reporter = report_nothing,
    address: str | None = None,
    connected: bool = False,
    announce: Announcer = announce_nothing,
    supervise: bool = False,
) -> JobStatus:
    """Run a checked job under a master actor and follow it to its end.

    The first Ctrl-C stops the job cleanly. A second one stops waiting for that: a cluster that was started here ends at
    once; on a shared one the master continues to stop the job.

    Args:
        address: of a running cluster; None starts one for this job, and another one if it is lost.
        connected: this process is connected to Ray already; ``address`` is ignored.
        supervise: resume from the last commit if the cluster of ``address``, or the master there, is lost.

    Raises:
        JobConflict: a job of this name is running on the cluster, or the job's folder is in use or has results.
        ClusterUnavailable: no Ray.
        MasterLost: the master died, and its processes were ended; or it does not answer, and nothing was touched; or a
            cluster was lost too often.
    """
    from dlrover.python.rl.master.client.on_ray import run_on_cluster  # imports Ray, which other commands do without
    from dlrover.python.rl.master.client.supervisor import run_supervised

    checked = replace(checked, job=run_folder.begin(checked.job))
    if connected or (address is not None and not supervise):
        status = run_on_cluster(checked, report, announce, address, connected)
    else:
        status = run_supervised(checked, report, announce, address)
    _redraw(status)
    return status


def leave_on_ray(checked: CheckedJob, address: str, announce: Announcer = announce_nothing) -> JobStatus:
    """Start a checked job on the cluster of ``address``. Raises the same errors as :func:`run_on_ray`."""
    from dlrover.python.rl.master.client.on_ray import ANSWER_S, start_master  # imports Ray
    from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster
    from dlrover.python.rl.runtime.ray.processes.actors import ask

    with ray_cluster(address, checked.placement.total):
        master = start_master(checked)
        if checked.opening:
            announce(checked.opening)
        status: JobStatus = ask(master.status.remote, ANSWER_S)
        return status


def raise_if_failed(status: JobStatus) -> None:
    """Raise :class:`JobFailed`, with the first cause, when a job ended in failure."""
    if status.phase is Phase.FAILED:
        detail = f"\n\n{status.cause.detail}" if status.cause and status.cause.detail else ""
        raise JobFailed(f"{status.name} failed: {status.reason}{detail}")
