# SPDX-License-Identifier: Apache-2.0
"""Finding all errors of a job without starting anything."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.config.load import search_folders
from dlrover.python.rl.config.plain import from_plain
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.config.typed import lies_in
from dlrover.python.rl.control.placement import Placement, plan
from dlrover.python.rl.master.process.resize import validate_least
from dlrover.python.rl.runtime.checkpoint.room import Room, room_for, validate_room
from dlrover.python.rl.runtime.checkpoint.runs import validate_archive
from dlrover.python.rl.runtime.member.inspection import Inspection, inspect_in_child, inspect_job
from dlrover.python.rl.runtime.run.folder import conflict, continued, earlier_description

_JOB = "job"
"""The place of an inspection's own failures."""

_GPU_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class CheckedJob:
    job: JobSpec
    placement: Placement
    inspection: Inspection
    given: Any = None
    """The job's config as it was given, without the defaults that the job has."""

    room: Room | None = None
    """What its commits need, None: unknown."""

    opening: str = ""
    """Announced once the folder of its run is held; empty: nothing."""


def check_job(job: JobSpec, local: bool = False) -> CheckedJob:
    """Find all errors of ``job`` without starting anything, or raise InvalidJob with them.

    ``local`` jobs run in this process, so their classes are imported here; otherwise a child process imports them.
    """
    job = replace(job, work_dir=job.work_dir or str(Path.cwd()), search_path=job.search_path or search_folders())
    job = continued(job)
    placement, errors = plan(job)
    errors += [*_validate_job_dir(job), *validate_archive(job)]
    before = earlier_description(job)
    inspection = inspect_job(job, before, here=True) if local else inspect_in_child(job, before)
    errors += [*inspection.errors, *validate_least(job, inspection)]
    if local:
        errors += inspection.single_process_refusals
        inspection = replace(inspection, about=(*_warn_of_device(job, inspection.config), *inspection.about))
    room = room_for(job, placement, inspection.state_bytes) if placement is not None else None
    errors += validate_room(job, room) if job.trainer.device_type == "CPU" or _GPU_DRIVER.exists() else []
    if errors or placement is None:
        raise InvalidJob(errors)
    given = job.config if inspection.given is None else from_plain(inspection.given)
    return CheckedJob(inspection.complete(job), placement, inspection, given, room)


def _warn_of_device(job: JobSpec, config: Mapping[str, Any] | None) -> list[str]:
    if job.trainer.device_type != "GPU" or _device_of(config) != "cpu" or _device_of(job.config) == "cpu":
        return []
    return ["trainer.device_type is GPU, and this process has none: it computes on the CPU"]


def _device_of(config: Mapping[str, Any] | None) -> Any:
    engine = (config or {}).get("engine")
    return engine.get("device") if isinstance(engine, Mapping) else None


def check_described(describe: Callable[[], JobSpec], local: bool = False) -> CheckedJob:
    """Like :func:`check_job` for a job that ``describe`` reads: the errors of reading it and of the rest together."""
    try:
        job = describe()
    except InvalidJob as error:
        raise InvalidJob([*error.errors, *_validate_further(error, local)]) from None
    return check_job(job, local)


def check_types(describe: Callable[[], JobSpec]) -> None:
    """Find the errors that a job which ``describe`` reads has on any machine: of its layout, and of its ``config`` by
    the trainer's schema, where that can be imported here. Raises InvalidJob with all of them."""
    job, errors = None, list[ConfigError]()
    try:
        job = describe()
    except InvalidJob as error:
        job, errors = error.salvaged, list(error.errors)
    places = [_JOB, *(fault.where for fault in errors)]
    found = inspect_in_child(job, types_only=True).errors if job is not None else ()
    errors += [fault for fault in found if not lies_in(fault.where, places)]
    if errors:
        raise InvalidJob(errors)


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
