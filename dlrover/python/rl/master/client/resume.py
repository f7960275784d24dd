# SPDX-License-Identifier: Apache-2.0
"""Saved runs, to resume or to evaluate: the folder has the job's description, the owner's record its start."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec
import yaml

from dlrover.python.rl.common.errors import CheckpointMissing, ConfigError, InvalidJob
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import hint, nearest, resume_command
from dlrover.python.rl.common.private_files import open_file
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.secrets import hidden_in, unseal
from dlrover.python.rl.config.spec import RUNS, JobSpec
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.runtime.checkpoint.code import describe_changes, digest_code
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory, memory_path
from dlrover.python.rl.runtime.checkpoint.object_store import store_errors
from dlrover.python.rl.runtime.checkpoint.runs import CODE, newest_commit
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore, Manifest
from dlrover.python.rl.runtime.run import folder as run_folder
from dlrover.python.rl.runtime.run.names import DESCRIPTION, MODEL

_LOG = get_logger(__name__)

_POLL_S = 0.5
_EVALUATION = "-eval"
_LONGEST = 63 - len(_EVALUATION)


@dataclass(frozen=True)
class SavedRun:
    folder: Path
    owner: run_folder.Owner


def find_saved_run(name_or_dir: str) -> SavedRun:
    """Return the run in a folder, or the last run of a job's name. Raises InvalidJob."""
    for base in (Path(name_or_dir), RUNS / name_or_dir):
        for folder in (base, base / run_folder.LATEST):
            owner = run_folder.newest_owner(folder)
            description = folder / DESCRIPTION
            if owner is not None and description.is_file() and not description.is_symlink():
                return SavedRun(folder.resolve(), owner)
    names = [path.name for path in RUNS.glob("*") if (path / run_folder.LATEST).is_dir()]
    beside = [str(path) for path in Path(name_or_dir).parent.glob("*") if run_folder.newest_owner(path) is not None]
    near = hint(name_or_dir, names if nearest(name_or_dir, beside) is None else beside)
    message = f"neither the folder of a run nor a name under {RUNS.absolute()}{near}"
    raise InvalidJob([ConfigError(name_or_dir, message)])


def saved_job(run: SavedRun, overrides: Sequence[str] = ()) -> JobSpec:
    """Return the job that resumes a run in its folder; secrets come from the environment. Raises InvalidJob."""
    refuse_names(overrides)
    return _read(run, ["checkpoint.resume=latest", *overrides], lambda job: replace(job, job_dir=run.folder))


def evaluation_job(run: SavedRun, overrides: Sequence[str] = ()) -> JobSpec:
    """Return a job that evaluates the saved model of a run, or of an override, in a separate folder. Raises
    InvalidJob."""
    refuse_names(overrides, f"cannot be changed: an evaluation is in a folder under {RUNS}, named after the run's job")
    text = _description(run)
    changes = evaluation_overrides(text, run.folder, (run.folder / MODEL).is_dir(), overrides)
    return _read(run, changes, lambda job: replace(job, name=evaluation_name(job.name), job_dir=RUNS, archive=""))


def _read(run: SavedRun, overrides: Sequence[str], place: Callable[[JobSpec], JobSpec]) -> JobSpec:
    """Return the job of a run, in its working directory, with the folder and name that ``place`` sets."""
    text = _description(run)
    try:
        job = load_job_text(text, run.owner.job, overrides, run.owner.search_path or None)
    except InvalidJob as error:
        salvaged = error.salvaged and replace(place(error.salvaged), work_dir=run.owner.work_dir)
        raise InvalidJob(error.errors, salvaged) from None
    return replace(place(_with_secrets(job)), work_dir=run.owner.work_dir)


def _description(run: SavedRun) -> str:
    with open_file(run.folder / DESCRIPTION) as file:
        return file.read().decode()


def refuse_names(
    overrides: Sequence[str], why: str = "cannot be changed: the run resumes in its folder, under its name"
) -> None:
    names = [match[1] for override in overrides if (match := re.match(r"\+*(name|job_dir)=", override))]
    if names:
        raise InvalidJob([ConfigError(name, why) for name in names])


def evaluation_overrides(text: str, folder: Path, has_model: bool, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that turn the job described by ``text``, whose run is in ``folder``, into an evaluation; a
    reference stays the run's initial model. Raises InvalidJob if there is no model."""
    if not has_model and not any(re.match(r"\+?(config\.)?model=", override) for override in overrides):
        raise InvalidJob([ConfigError(str(folder), "has no model yet: pass config.model=FOLDER for another one")])
    config = yaml.safe_load(text).get("config") or {}
    reference = [f"config.reference_model={config['model']}"] if config.get("reference_model", "") is None else []
    changes = ["checkpoint.resume=never", "config.eval_only=true", f"config.model={folder / MODEL}"]
    return [*changes, *reference, *overrides]


def evaluation_name(name: str) -> str:
    return f"{name[:_LONGEST].rstrip('-')}{_EVALUATION}"


def _with_secrets(job: JobSpec) -> JobSpec:
    hidden = {}
    for where in hidden_in(job):  # the environment variable of config.judge.api_key is JUDGE_API_KEY
        if where.startswith("config."):
            hidden[where] = re.sub(r"\W", "_", where.removeprefix("config.")).upper()
        else:
            hidden[where] = where.rpartition(".env.")[2] if ".env." in where else where.removeprefix("env.")
    unknown = [
        ConfigError(where, f"is a secret, which is not saved: set {name} in the environment")
        for where, name in hidden.items()
        if name not in os.environ
    ]
    if unknown:
        raise InvalidJob(unknown)
    return unseal(job, {where: os.environ[name] for where, name in hidden.items()})


def archived_job(url: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Return the job that resumes a run in an object store, on any machine. Raises InvalidJob."""
    try:
        with store_errors(), fsspec.open(f"{url.rstrip('/')}/{DESCRIPTION}") as file:
            text = file.read().decode()
    except (OSError, ImportError, ValueError, CheckpointMissing) as error:
        raise InvalidJob([ConfigError(url, f"is not a readable run: {error}")]) from error
    return _with_secrets(load_job_text(text, "", ["checkpoint.resume=latest", *overrides]))


def last_commit(job: JobSpec, folder: Path, archive: str = "") -> Manifest | None:
    """Return the last commit in a run's folder, None for none. First save any commit that is only in this node's
    memory."""
    forget_memory(job.name)
    newest = newest_commit(folder, archive)
    return None if newest is None else newest[1]


def how_to_go_on(job: JobSpec, folder: Path, step: int = 0, cause: Cause | None = None) -> str:
    """Return the line that tells how to resume a run, empty if only a change of the job or its data helps. ``step`` is
    the last known one."""
    again = resume_command(job.archive or folder)
    needs_change = cause is not None and cause.kind in (CauseKind.USER_ERROR, CauseKind.START_FAILED)
    try:
        if last_commit(job, folder, job.archive) is not None:
            fixed = "once its cause is fixed, resume" if needs_change else "resume"
            return f"{fixed} after its last committed step: {again}"
        if needs_change:
            return ""
        if run_folder.has_commits(folder):
            place = f"its commits are only in the memory of this machine, and could not be saved to {folder}"
            return f"{place}: free space there, and resume before the machine restarts: {again}"
        if step or run_folder.newest_owner(folder) is None:
            return f"to resume, on a machine that has its files: {again}"
        return f"no step was committed; to begin again: {again}"
    except OSError as error:
        root = memory_path(job.name, job.run)
        last = max((manifest.step for manifest in CheckpointStore(root, job.run, durable=False).manifests()), default=0)
        in_memory = f"step {last} is in {root}, until this machine restarts; " if last else ""
        return f"{error.filename or folder} cannot be read ({error.strerror}): {in_memory}once it can, resume: {again}"


def describe_start(run: SavedRun, job: JobSpec, name: str) -> str:
    """Say, for people, from which step ``job`` resumes a run. Raises InvalidJob for ``name`` if no commit is left."""
    commit = last_commit(job, run.folder)
    if commit is None and run.owner.state == run_folder.FINISHED:
        message = "has finished, and its commits were removed (checkpoint.keep_runs): there is nothing to resume"
        raise InvalidJob([ConfigError(name, message)])
    if commit is None or not commit.step:
        return f"{run.owner.job}: resuming in {run.folder}, from the beginning: no step was committed"
    changes = describe_changes(commit.extra.get(CODE, {}), digest_code(job))
    with_changes = f"; changed since: {changes}" if changes else ""
    return f"{run.owner.job}: resuming in {run.folder}, after step {commit.step}{with_changes}"


def wait_for_lost_owner(job: JobSpec) -> JobSpec:
    """Return ``job``, which resumes in its folder, once an earlier start there is lost. If its process is not on this
    machine, wait for its lease to end: cluster managers start a job again earlier."""
    owner = run_folder.newest_owner(job.job_dir)
    if job.run_folders is not None or job.checkpoint.resume != "latest" or owner is None:
        return job
    if not (owner.pid and owner.is_here) and run_folder.in_use(job.job_dir):
        limit_s = owner.lease_s + run_folder.BEAT_S
        _LOG.info("%s is in use by %s: waiting up to %g s for a sign of life", job.job_dir, owner, limit_s)
        deadline_s = time.monotonic() + limit_s
        while run_folder.in_use(job.job_dir) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
    return job
