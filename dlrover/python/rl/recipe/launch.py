# SPDX-License-Identifier: Apache-2.0
"""``python -m dlrover.python.rl.recipe.<recipe> [--config job.yaml] key=value ...``, alone, under ``torchrun`` or under
``accelerate launch``, runs a recipe without Ray, with a worker of each role in every process.
``python -m dlrover.python.rl.recipe.launch --config job.yaml`` runs your own trainer in the same way.

Exit codes: 0 the job finished; 1 it failed; 2 the request was wrong and nothing was started; 130 it was interrupted.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from dlrover.python.rl.algorithm.registry import complete_options
from dlrover.python.rl.common.errors import (
    ConfigError,
    DataError,
    DLRoverRLError,
    InvalidJob,
    InvocationError,
    JobConflict,
    JobFailed,
)
from dlrover.python.rl.common.log import configure_logging, echo, get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.command import OverridesCommand
from dlrover.python.rl.config.layout import JOB_KEYS, digest
from dlrover.python.rl.config.load import load_job, search_folders
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.config.typed import list_keys
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_info
from dlrover.python.rl.engine.model.ranks import meet_at_store
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.runtime.interrupts import hangup_terminates
from dlrover.python.rl.runtime.member.inspection import inspect_job
from dlrover.python.rl.runtime.member.interpreters import refuse_interpreters
from dlrover.python.rl.runtime.member.loading import load_class
from dlrover.python.rl.runtime.run.folder import begin, continued, earlier_description, has_commits, repeated
from dlrover.python.rl.runtime.run.names import SUMMARY
from dlrover.python.rl.runtime.run.progress import ProgressView, print_summary
from dlrover.python.rl.runtime.torchrun.links import MEETING_S, LaunchEnv, accept_all, join, refuse_all
from dlrover.python.rl.runtime.torchrun.run import Leader, open_run, run_follower
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, announce_nothing

_LOG = get_logger(__name__)

_MEETINGS = itertools.count()

EXIT_FAILED, EXIT_INVALID, EXIT_INTERRUPTED = 1, 2, 130


class _RecipeCommand(OverridesCommand):
    """A command whose help lists the keys of the recipe's configuration."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        if not context.obj:
            return
        trainer = load_job(recipe_file(context.obj)).trainer
        recipe = load_class(trainer.module, trainer.class_)
        keys = dict(list_keys(recipe.config_class))
        if recipe.algorithm_name:
            del keys["algorithm"]
            for name, value in complete_options({"name": recipe.algorithm_name}).items():
                keys[f"algorithm.{name}"] = "null" if value is None else str(value)
        with formatter.section("Keys of the configuration, with their defaults"):
            formatter.write_dl(sorted(keys.items(), key=lambda item: item[0].split(".")[0]))


@click.command(cls=_RecipeCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "job_file", help="A job file; by default the recipe's own settings.")
@click.argument("overrides", nargs=-1)
@click.pass_obj
def _command(recipe: str, job_file: str | None, overrides: tuple[str, ...]) -> None:
    """Run the recipe. OVERRIDES are key=value: keys of its configuration, or of the job file's layout."""
    try:
        code = launch(recipe, job_file, overrides)
    except DLRoverRLError as error:
        echo(str(error), err=True)
        code = _report_exit(error)
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        code = EXIT_INTERRUPTED
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread may be in a call that does not end


def main(recipe: str = "") -> None:
    hangup_terminates()
    _command(obj=recipe, prog_name=f"python -m dlrover.python.rl.recipe.{recipe or 'launch'}")


def launch(recipe: str, job_file: str | None, overrides: Sequence[str]) -> int:
    """Run a recipe in this process of a launch; returns the exit code. Raises as :func:`run_together`."""
    launch = LaunchEnv.from_env(os.environ)
    configure_logging(f"rank {launch.rank}" if launch.world_size > 1 else "")
    jobs: list[JobSpec] = []

    def resumes(job: JobSpec) -> bool:
        return (job.checkpoint.resume == "latest" or not _says_resume(overrides)) and has_commits(job.job_dir)

    def note_failure(error: BaseException) -> None:
        _report_exit(error)
        cause = error.original if isinstance(error, InvocationError) else error
        if any(map(resumes, jobs)) and not isinstance(cause, DataError | InvalidJob):
            echo("to resume from the last commit, run the same command again", err=True)

    try:
        describe = partial(describe_job, recipe, job_file, overrides, launch)
        error = show_together(recipe or "job", describe, launch, jobs, note_failure)
    except KeyboardInterrupt:
        hint = ""
        if any(map(resumes, jobs)):
            hint = ": to resume from the last commit, run the same command again"
        elif jobs and not any(has_commits(job.job_dir) for job in jobs):
            hint = ": no step was committed; the same command starts over"
        echo(f"interrupted{hint}", err=True)
        return EXIT_INTERRUPTED
    if error is not None:
        return _report_exit(error)
    for job in jobs:
        summary = job.job_dir / SUMMARY
        if summary.is_file():
            print_summary(job.name, summary.read_text(encoding="utf-8"))
        echo(f"{job.name}: finished; files in {job.job_dir}")
    return 0


def show_together(
    title: str,
    describe: Callable[[], JobSpec],
    launch: LaunchEnv,
    started: list[JobSpec],
    note_failure: Callable[[BaseException], None] = lambda error: None,
) -> BaseException | None:
    """Run a job as :func:`run_together` and show it on a terminal; ``started`` receives the checked job."""

    def check() -> JobSpec:
        started.append(describe())
        view.title = started[0].name
        return started[0]

    with ProgressView(title, live=not launch.rank) as view:
        return run_together(check, launch, view, view.announce, note_failure)


def _report_exit(error: BaseException) -> int:
    """Return the exit code, and write the reason for torchrun, which prints the earliest one as the cause."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not Path(file).exists():
        is_consequence = os.environ.get("RANK", "0") != "0"
        extra = {"py_callstack": str(error), "timestamp": str(int(time.time()) + is_consequence)}
        Path(file).write_text(json.dumps({"message": {"message": str(error), "extraInfo": extra}}), encoding="utf-8")
    return EXIT_INVALID if isinstance(error, InvalidJob | JobConflict) else EXIT_FAILED


def run_together(
    describe: Callable[[], JobSpec],
    launch: LaunchEnv,
    report: Reporter,
    announce: Announcer = announce_nothing,
    note_failure: Callable[[BaseException], None] = lambda error: None,
) -> BaseException | None:
    """Run a job in the processes of a launch, of which this is one. All of them may call it again.

    At rank 0, ``describe`` returns the checked job, ``report`` receives step reports, ``announce`` the phases in
    between, and ``note_failure`` the job's failure before the other processes end. Returns the failure, or None; at
    other ranks it is an :class:`InvalidJob` if rank 0 has started nothing, else a :class:`JobFailed`. Raises InvalidJob
    from ``describe``, JobConflict if the job is running already, ClusterUnavailable if the processes did not meet."""
    launch = replace(launch, meeting=next(_MEETINGS))
    store = _store() if launch.world_size > 1 else None
    if launch.rank:
        assert store is not None, "set where world_size > 1"
        link = join(launch, store)
        if link is None:
            return InvalidJob([ConfigError("rank 0", "did not start the job; its output says why")])
        if run_follower(launch, link):
            return None
        return JobFailed(f"rank {launch.rank}: the job has failed; rank 0 says why")
    with ExitStack() as stack:
        try:
            announce("checking the job")
            job, start = stack.enter_context(open_run(describe(), alone=launch.world_size == 1))
        except BaseException:
            if store is not None:
                refuse_all(launch, store)
            raise
        links = accept_all(launch, store) if store is not None else {}
        return Leader(job, start, launch, links, report, announce, note_failure).run()


def recipe_file(recipe: str) -> Path:
    return Path(__file__).with_name(f"{recipe}.yaml")


def describe_job(recipe: str, job_file: str | None, overrides: Sequence[str], launch: LaunchEnv) -> JobSpec:
    """Return the checked job; a repeated command resumes from the latest commit. Without ``job_file`` the settings of
    ``recipe`` are used, and any key may be overridden. Raises InvalidJob with every config error."""
    if not job_file and not recipe:
        raise InvalidJob([ConfigError("--config", "is required: a job file")])
    file = job_file or recipe_file(recipe)
    adds = [not job_file and item.split(".")[0] in JOB_KEYS for item in overrides]  # the recipe's keys need no +
    items = [f"+{item}" if may_add else item for item, may_add in zip(overrides, adds, strict=True)]
    read = partial(load_job, file, ["checkpoint.resume=latest", *items])
    return check_job(read, launch, partial(echo, err=True), may_repeat=not _says_resume(items))


def _says_resume(overrides: Sequence[str]) -> bool:
    return any(item.lstrip("+").startswith("checkpoint.resume=") for item in overrides)


def check_job(
    read: Callable[[], JobSpec],
    launch: LaunchEnv,
    show: Callable[[str], None] = lambda line: None,
    may_repeat: bool = False,
) -> JobSpec:
    """Read a job, put one worker of each role in each process, and check it; raises InvalidJob with every config error.
    ``show`` receives lines about it. ``may_repeat``: resume the last run of its name if it had the same settings."""
    errors: list[ConfigError] = []
    job: JobSpec | None
    try:
        job = read()
    except InvalidJob as error:
        job, errors = error.salvaged, list(error.errors)
    if job is not None:
        world = launch.world_size
        for role, spec in job.workloads.items():
            if spec.num not in (1, world):
                _LOG.info("%s has %d workers, one in each process, not %d as in the job file", role, world, spec.num)
        workloads = {role: replace(spec, num=world, per_node=None, standby=0) for role, spec in job.workloads.items()}
        trainer = replace(job.trainer, node_number=launch.nodes)
        job = replace(job, workloads=workloads, trainer=trainer, groups=())
        job = replace(job, work_dir=str(Path.cwd()), search_path=search_folders())
        job = replace(job, description_digest=digest(job))
        job = repeated(job) if may_repeat else continued(job)
        places = {error.where for error in errors}
        inspection = inspect_job(job, earlier_description(job), here=True)
        separate = refuse_interpreters(job, "under torchrun")
        further = [*inspection.errors, *separate, *_validate_sharing(job, launch)]
        errors += [error for error in further if error.where not in places]
    if errors or job is None:
        raise InvalidJob(errors)
    for line in inspection.about:
        show(line)
    if has_commits(job.job_dir) and job.checkpoint.resume == "latest":
        show(f"resuming after the last committed step in {job.job_dir}")
    return begin(inspection.complete(job))


def _validate_sharing(job: JobSpec, launch: LaunchEnv) -> list[ConfigError]:
    """Report an engine that cannot share the processes of several ranks with another one."""
    engine = getattr(getattr(job.config, "engine", None), "train", None) or EngineConfig.train
    teachers = [RLRoleType(name) for name in getattr(job.config, "teachers", None) or ()]
    reward_models = [RLRoleType.REWARD] if getattr(getattr(job.config, "reward", None), "model", None) else []
    models = (RLRoleType.REFERENCE, RLRoleType.CRITIC, *reward_models, *teachers)
    roles = ", ".join(role.lower() for role in models if role in job.workloads)
    if launch.world_size == 1 or not roles or engine_info(TRAIN_ENGINES, engine).shares_process:
        return []
    message = f"{engine} cannot run the models of {roles} in the processes of the actor's ranks: use fsdp2, or Ray"
    return [ConfigError("config.engine.train", message)]


@cache
def _store() -> Any:
    """Return the launcher's store, or one at rank 0, for all jobs of these processes."""
    launch = LaunchEnv.from_env(os.environ)
    rank, world_size = launch.rank, launch.world_size
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return meet_at_store(launch.address, int(os.environ["MASTER_PORT"]), rank, world_size, MEETING_S)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=MEETING_S)))
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # else torch looks for the engines' stores there, not at rank 0
    return store


if __name__ == "__main__":
    main()
