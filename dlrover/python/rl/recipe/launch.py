"""``python -m dlrover.python.rl.recipe.<recipe> [--config job.yaml] key=value ...``, alone, under ``torchrun`` or under
``accelerate launch``: the recipe without Ray, with a member of each role in every process.

``python -m dlrover.python.rl.recipe.launch --config job.yaml`` runs a trainer of one's own in the same way.

Exit codes: 0 the job finished; 1 it failed; 2 the request was wrong and nothing was started; 130 it was interrupted.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import click
import torch.distributed as dist

from dlrover.python.rl.common.errors import DLRoverRLError, InvalidJob, JobFailed, Problem
from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.load import load_job, search_folders
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.engine.abilities import shares_process
from dlrover.python.rl.recipe.config import EngineConfig
from dlrover.python.rl.runtime.inspection import inspect_job
from dlrover.python.rl.runtime.progress import ProgressView
from dlrover.python.rl.runtime.torchrun.links import MEETING_S, Board, Place, call_in, join, refuse
from dlrover.python.rl.runtime.torchrun.run import Lead, follow
from dlrover.python.rl.trainer.trainer import Reporter

_LOG = get_logger(__name__)

_MEETINGS = itertools.count()

EXIT_FAILED, EXIT_INVALID, EXIT_INTERRUPTED = 1, 2, 130


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "job_file", help="A job file; by default the recipe's own settings.")
@click.argument("overrides", nargs=-1)
@click.pass_obj
def _command(recipe: str, job_file: str | None, overrides: tuple[str, ...]) -> None:
    """Run the recipe. OVERRIDES are key=value: keys of its configuration, or of the job file's layout."""
    try:
        code = launch(recipe, job_file, overrides)
    except DLRoverRLError as error:
        click.echo(str(error), err=True)
        code = EXIT_INVALID if isinstance(error, InvalidJob) else EXIT_FAILED
    except KeyboardInterrupt:
        click.echo("interrupted: the same command goes on from the last commit", err=True)
        code = EXIT_INTERRUPTED
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread may be in a call that does not end


def main(recipe: str = "") -> None:
    """Entry point of a recipe's module."""
    _command(obj=recipe, prog_name=f"python -m dlrover.python.rl.recipe.{recipe or 'launch'}")


def launch(recipe: str, job_file: str | None, overrides: Sequence[str]) -> int:
    """Run a recipe in the processes that a launcher has started, of which this is one. The exit code.

    Raises:
        InvalidJob: at rank 0: with every problem; nothing was started.
        JobConflict: another start of the job is running.
        ClusterUnavailable: the processes did not meet.
    """
    place = Place.from_env(os.environ)
    configure_logging(f"rank {place.rank}" if place.world_size > 1 else "")
    jobs: list[JobSpec] = []

    def describe() -> JobSpec:
        jobs.append(described(recipe, job_file, overrides, place))
        return jobs[0]

    with ProgressView(recipe or "job", live=not place.rank) as view:
        error = run_together(describe, place, view)
    if error is not None:
        return EXIT_INVALID if isinstance(error, InvalidJob) else EXIT_FAILED
    for job in jobs:
        _print_summary(job)
    return 0


def run_together(describe: Callable[[], JobSpec], place: Place, report: Reporter) -> BaseException | None:
    """Run a job in the processes of a launch, of which this is one. May be called again by all of them.

    Args:
        describe: at rank 0, gives the checked job; not called elsewhere.
        place: which process this is.
        report: at rank 0, where step reports go.

    Returns:
        What the job has failed of, None when it is done. Elsewhere than at rank 0 that is an :class:`InvalidJob` where
        rank 0 has started nothing, and else a :class:`JobFailed`.

    Raises:
        InvalidJob: what ``describe`` raises; nothing was started.
        JobConflict: another start of the job is running.
        ClusterUnavailable: the processes did not meet.
    """
    place = replace(place, meeting=next(_MEETINGS))
    board = _store() if place.world_size > 1 else None
    if place.rank:
        assert board is not None, "there are others"
        link = join(place, board)
        if link is None:
            return InvalidJob([Problem("rank 0", "has started nothing; it says why")])
        return None if follow(place, link) else JobFailed(f"rank {place.rank}: the job has failed; rank 0 says why")
    try:
        job = describe()
    except BaseException:
        if board is not None:
            refuse(place, board)
        raise
    return Lead(job, place, call_in(place, board) if board is not None else {}, report).run()


def described(recipe: str, job_file: str | None, overrides: Sequence[str], place: Place) -> JobSpec:
    """The checked job: as many members of each role as processes, going on where an earlier start has come to.

    Args:
        recipe: whose settings to take without a job file, ``""`` for none; any key may be given then.
        job_file: a path.
        overrides: ``key=value``.
        place: says how many processes there are.

    Raises:
        InvalidJob: with every problem.
    """
    if not job_file and not recipe:
        raise InvalidJob([Problem("--config", "is required: a job file")])
    file = job_file or Path(__file__).with_name(f"{recipe}.yaml")
    given = [item if job_file or item.startswith("+") else f"+{item}" for item in overrides]
    return checked(lambda: load_job(file, ["checkpoint.resume=latest", *given]), place)


def checked(read: Callable[[], JobSpec], place: Place) -> JobSpec:
    """A job with as many members of each role as there are processes, and nothing that speaks against it.

    Args:
        read: gives the job, or raises an :class:`InvalidJob` with what of it could be read.
        place: says how many processes there are.

    Raises:
        InvalidJob: with every problem.
    """
    problems: list[Problem] = []
    job: JobSpec | None
    try:
        job = read()
    except InvalidJob as error:
        job, problems = error.salvaged, list(error.problems)
    if job is not None:
        job = _over_processes(job, place)
        said = {problem.where for problem in problems}
        found = [*inspect_job(job).problems, *_sharing_problems(job, place)]
        problems += [problem for problem in found if problem.where not in said]
    if problems or job is None:
        raise InvalidJob(problems)
    return job


def _over_processes(job: JobSpec, place: Place) -> JobSpec:
    world = place.world_size
    for role, spec in job.workloads.items():
        if spec.num not in (1, world):
            _LOG.info("%s has %d members, one in each process, not %d as in the job file", role, world, spec.num)
    workloads = {role: replace(spec, num=world, per_node=None, standby=0) for role, spec in job.workloads.items()}
    trainer = replace(job.trainer, node_number=place.nodes)
    return replace(
        job, workloads=workloads, trainer=trainer, groups=(), work_dir=str(Path.cwd()), search_path=search_folders()
    )


def _sharing_problems(job: JobSpec, place: Place) -> list[Problem]:
    """Some engines cannot run in a process where another one is, of several ranks."""
    engine = getattr(getattr(job.config, "engine", None), "train", None) or EngineConfig.train
    teachers = [RLRoleType(name) for name in getattr(job.config, "teachers", None) or ()]
    judges = [RLRoleType.REWARD] if getattr(getattr(job.config, "reward", None), "model", None) else []
    models = (RLRoleType.REFERENCE, RLRoleType.CRITIC, *judges, *teachers)
    others = [role.lower() for role in models if role in job.workloads]
    if place.world_size == 1 or not others or shares_process(engine):
        return []
    what = f"{engine} cannot run the models of {', '.join(others)} in the processes of the actor's ranks: use fsdp2"
    return [Problem("config.engine.train", f"{what}, or Ray")]


@cache
def _store() -> Board:
    """The store of whoever has launched this, or one at rank 0; the same one for all meetings of the processes."""
    place = Place.from_env(os.environ)
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=MEETING_S)))
    # Engines meet at stores of their own, at rank 0; torch would look for all of them at the launcher's.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    board: Board = store
    return board


def _print_summary(job: JobSpec) -> None:
    file = job.job_dir / "summary.json"
    if file.is_file():
        for name, value in json.loads(file.read_text(encoding="utf-8")).items():
            click.echo(f"{name}: {value}")
    click.echo(f"{job.name}: finished; files in {job.job_dir}")


if __name__ == "__main__":
    main()
