# SPDX-License-Identifier: Apache-2.0
"""Which run a job goes on with, and what that one was begun with."""

from dataclasses import replace

from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.run_files import files_of
from dlrover.python.rl.runtime.checkpoint.runs import resumed_layout
from dlrover.python.rl.runtime.owner import DESCRIPTION, FINISHED, newest_owner
from dlrover.python.rl.runtime.run_folder import LATEST, has_commits


def repeated(job: JobSpec) -> JobSpec:
    """The same command as that of the last run, which has not finished, goes on in its folder; another one is a new
    run."""
    folder = (job.run_folders / LATEST).resolve() if job.run_folders else job.job_dir
    owner = newest_owner(folder)
    if owner is not None and owner.given == job.given and owner.state != FINISHED:
        return replace(job, job_dir=folder)
    return replace(job, checkpoint=replace(job.checkpoint, resume="never"))


def continued(job: JobSpec) -> JobSpec:
    """With ``checkpoint.resume: latest`` a job without ``job_dir`` goes on in the folder of the last run of this name.
    One that has finished is gone on with only by a command (``given``) with other arguments."""
    if job.run_folders is None or job.checkpoint.resume != "latest":
        return job
    last = (job.run_folders / LATEST).resolve()
    owner = newest_owner(last)
    if owner is None or (owner.state == FINISHED and (job.given in ("", owner.given) or not has_commits(last))):
        return job
    return replace(job, job_dir=last)


def earlier_description(job: JobSpec) -> str:
    """The description of the run whose state ``job`` goes on from; empty if there is none."""
    if job.checkpoint.resume != "latest" or not (has_commits(job.job_dir) or resumed_layout(job)):
        return ""
    path, files = job.job_dir / DESCRIPTION, files_of(job)
    there = "" if files is None else files.read(DESCRIPTION)  # a folder here may be another run's
    return there or (path.read_text(encoding="utf-8") if path.is_file() else "")
