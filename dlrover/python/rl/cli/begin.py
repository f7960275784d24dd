# SPDX-License-Identifier: Apache-2.0
"""The verbs that prepare or start a job: ``init|run|resume|eval|check|submit``."""

import ast
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dlrover.python.rl.cli.operate import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED
from dlrover.python.rl.cli.remote import check_submitted, read_file, read_job_file, with_server
from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.hub import looking_up
from dlrover.python.rl.common.log import echo
from dlrover.python.rl.common.names import hint, is_url
from dlrover.python.rl.config.command import OverridesCommand
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job, load_job_text, search_folders
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.client import resume as resumption
from dlrover.python.rl.master.client.run import (
    CheckedJob,
    check_described,
    leave_on_ray,
    run_here,
    run_on_ray,
    with_limits,
)
from dlrover.python.rl.master.client.views import check_name
from dlrover.python.rl.master.process.status import INTERRUPTED
from dlrover.python.rl.runtime.checkpoint.runs import describe_room
from dlrover.python.rl.runtime.run.folder import FINISHED, IN_PROCESS, LAUNCHED, begin, superseded
from dlrover.python.rl.runtime.run.names import DESCRIPTION, MODEL, SUMMARY
from dlrover.python.rl.runtime.run.progress import ProgressView, print_summary

CLUSTERS = ("local", "ray", "kuberay", "slurm")


@click.command()
@click.argument("name")
@click.option("--cluster", type=click.Choice(CLUSTERS), default="local", show_default=True)
def init(name: str, cluster: str) -> None:
    """Create a folder NAME with a job that is ready to run, and the files of a cluster."""
    folder = write_skeleton(name, cluster)
    echo(f"wrote {folder}; next: {folder / 'README.md'}")


def write_skeleton(name: str, cluster: str) -> Path:
    """Write the folder ``name``. Raises InvalidJob if it exists or is not a valid name of a job."""
    folder = Path(check_name(name))
    if folder.exists():
        raise InvalidJob([ConfigError("name", f"{folder} already exists")])
    skeleton = files(__package__) / "skeleton"
    job = folder / "base" / "files" if cluster == "kuberay" else folder
    _copy(skeleton / "common", job, name)
    _copy(skeleton / cluster, folder, name)
    if cluster == "kuberay":  # the files of the job are mounted alone, and its model is on the volume
        file = job / "job.yaml"
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("model: tiny-model ", "model: /work/runs/tiny-model "), encoding="utf-8")
    return folder


def _copy(source: Traversable, target: Path, name: str) -> None:
    if source.is_dir():
        for entry in source.iterdir():
            _copy(entry, target / entry.name.removesuffix(".template"), name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source.read_text(encoding="utf-8").replace("my-job", name), encoding="utf-8")
    if target.suffix in (".sh", ".sbatch"):
        target.chmod(0o755)


_HAS_FINISHED = "the run has finished; to continue it, override a setting such as its number of steps"
_ADDRESS = click.option("--address", help="A running Ray cluster; by default one is started for the job.")
_LOCAL_OR_RAY = click.option("--local/--ray", default=None, help="By default as the run was started.")
_DETACH = click.option("--detach", is_flag=True, help="Return once the job has started; needs --address or --server.")
_SUPERVISE = click.option(
    "--supervise", is_flag=True, help="With --address: resume from the last commit if that cluster is lost."
)


@click.command(cls=OverridesCommand)
@click.argument("job_file")
@click.argument("overrides", nargs=-1)
@click.option("--address", help="A running Ray cluster ('auto', 'host:port'); by default one is started for the job.")
@click.option("--local", is_flag=True, help="Run everything in this process, without Ray.")
@_DETACH
@_SUPERVISE
def run(job_file: str, overrides: tuple[str, ...], local: bool, **where: Any) -> None:
    """Run JOB_FILE and wait for its end. OVERRIDES are key=value (+key=value adds a key)."""
    place = _Place(local, **where)
    # On a terminal the status is erased at the end, so that errors stand alone.
    with nullcontext() if local else Console(stderr=True).status(f"checking {job_file}"):
        checked = check_described(lambda: resumption.wait_for_lost_owner(load_job(job_file, overrides)), local)
    _run(checked, place)


@click.command(cls=OverridesCommand)
@click.argument("name_or_dir")
@click.argument("overrides", nargs=-1)
@_ADDRESS
@_LOCAL_OR_RAY
@_DETACH
@_SUPERVISE
def resume(name_or_dir: str, overrides: tuple[str, ...], local: bool | None, **where: Any) -> None:
    """Resume a run from its last commit. NAME_OR_DIR is a run's folder or URL, or a job's name for its last run."""
    place = _Place(bool(local), **where)
    if is_url(name_or_dir):
        _run(check_described(lambda: resumption.archived_job(name_or_dir, overrides), place.local), place)
        return
    saved = resumption.find_saved_run(name_or_dir)
    folder, owner = saved.folder, saved.owner
    if owner.runtime == LAUNCHED:
        message = "was run by several processes of a launcher: run the same command again to resume it"
        raise InvalidJob([ConfigError(name_or_dir, message)])
    if owner.state == FINISHED and not overrides:
        echo(f"{folder}: {_HAS_FINISHED}")
        return
    local = owner.runtime == IN_PROCESS and not (place.address or place.supervise) if local is None else local
    if local and owner.work_dir:
        os.chdir(owner.work_dir)
    checked = check_described(lambda: resumption.saved_job(saved, overrides), local)
    checked = replace(checked, opening=resumption.describe_start(saved, checked.job, name_or_dir))
    _run(checked, replace(place, local=local))


@click.command("eval", cls=OverridesCommand)
@click.argument("name_or_dir")
@click.argument("overrides", nargs=-1)
@_ADDRESS
@_LOCAL_OR_RAY
def evaluate(name_or_dir: str, overrides: tuple[str, ...], address: str | None, local: bool | None) -> None:
    """Evaluate the saved model of a run on the run's held-out data. NAME_OR_DIR is as for 'resume'. OVERRIDES such as
    config.model=FOLDER or config.data.eval=FILE select another model or other data."""
    saved = resumption.find_saved_run(name_or_dir)
    local = saved.owner.runtime == IN_PROCESS and address is None if local is None else local
    if local and saved.owner.work_dir:
        os.chdir(saved.owner.work_dir)
    try:
        checked = check_described(lambda: resumption.evaluation_job(saved, overrides), local)
    except InvalidJob as error:
        if any(fault.where == "config.eval_only" for fault in error.errors):
            message = "its trainer cannot evaluate without training; the recipes' trainers can"
            raise InvalidJob([ConfigError(name_or_dir, message)]) from None
        raise
    _run(checked, _Place(local, address))


@click.command(cls=OverridesCommand)
@click.argument("job_file")
@click.argument("overrides", nargs=-1)
@click.option("--local", is_flag=True, help="Check the job for a run in one process.")
@click.option("--full", is_flag=True, help="Print the defaults of config too.")
@click.option("--hub", is_flag=True, help="Look up models and data sets on the Hugging Face hub, and read the data.")
def check(job_file: str, overrides: tuple[str, ...], local: bool, full: bool, hub: bool) -> None:
    """Print the resolved plan of JOB_FILE, or all its errors."""
    with looking_up("all" if hub else "none"):
        checked = check_described(lambda: load_job(job_file, overrides), local, partly=True)
    job = checked.job if full else replace(checked.job, config=checked.user_config)
    echo(f"{job_to_yaml(job, hide_secrets=True)}\n{describe(checked)}")


def _literal(_: click.Context, option: click.Parameter, text: str) -> Any:
    """Parse a Python literal, as upstream DLRover's options do."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise click.BadParameter(f"{text!r} is not a Python literal such as {{'rollout': 3}}") from error
    limits = list(value.values()) if isinstance(value, dict) else [None]
    if not all(isinstance(limit, int) and limit >= 0 for limit in limits):
        raise click.BadParameter(f"{text!r} is not a dict of roles and limits such as {{'rollout': 3}}")
    return value


def _note_ignored(_: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None:
        echo(f"--{option.name} has no effect: the master keeps its journal in the job's directory", err=True)


_IGNORED: dict[str, Any] = {"callback": _note_ignored, "expose_value": False, "help": "Ignored."}


@click.command()
@click.option("--job_name", required=True, help="A DNS label, unique on the cluster.")
@click.option("--rl_config", required=True, help="The job in the rl_config layout: a file, or YAML or JSON text.")
@click.option("--master_cpu", type=click.FloatRange(min=0))
@click.option("--master_mem", "--master_memory", type=click.FloatRange(min=0), help="In MB.")
@click.option("--job_max_restart", "--max_restart", type=click.IntRange(min=0))
@click.option("--trainer_max_restart", type=click.IntRange(min=0))
@click.option("--workload_max_restart", default="{}", callback=_literal, help="Limits by role: {'rollout': 3}.")
@click.option("--scheduling_strategy_type", type=click.Choice(["AUTO", "SIMPLE", "GROUP"], case_sensitive=False))
@click.option("--master_max_restart", type=click.IntRange(min=-1), help="-1: unlimited.")
@click.option("--master_state_backend_type", "--state_backend_type", **_IGNORED)
@click.option("--master_state_backend_config", "--state_backend_config", **_IGNORED)
@_ADDRESS
@click.option("--local", is_flag=True, help="Run everything in this process, without Ray.")
@_DETACH
def submit(job_name: str, rl_config: str, address: str | None, local: bool, detach: bool, **options: Any) -> None:
    """Run a job that upstream DLRover's options describe, and wait for its end. Options override the job's fields."""
    place = _Place(local, address, detach)
    _run(check_described(lambda: job_of_options(job_name, rl_config, options), local), place)


def job_of_options(job_name: str, rl_config: str, options: dict[str, Any]) -> JobSpec:
    """Return the job that the options of ``submit`` describe. Raises InvalidJob."""
    is_file = not any(mark in rl_config for mark in "\n{") and Path(rl_config).is_file()
    text = Path(rl_config).read_text(encoding="utf-8") if is_file else rl_config
    if not is_file and not any(mark in text for mark in "\n{:"):
        siblings = [path.name for path in Path(text).parent.glob("*") if path.is_file()]
        raise InvalidJob([ConfigError("--rl_config", f"no such file: {text}{hint(Path(text).name, siblings)}")])
    search_path = search_folders(Path(rl_config).absolute().parent) if is_file else None
    job = load_job_text(text, job_name, search_path=search_path)
    limits = {str(role).upper(): limit for role, limit in options["workload_max_restart"].items()}
    if unknown := [role for role in limits if role not in job.workloads]:
        faults = (f"the job has no role '{role}'{hint(role, job.workloads)}" for role in unknown)
        raise InvalidJob([ConfigError("--workload_max_restart", fault) for fault in faults])
    file_limits = {role.upper(): limit for role, limit in job.restart.workload_max_restart.items()}
    return with_limits(job, **{**options, "workload_max_restart": {**file_limits, **limits}})


def describe(checked: CheckedJob) -> str:
    """Return the plan, one line for each role."""
    lines = [f"plan: {len(checked.placement.bundles)} bundles, {checked.placement.total} in all"]
    for role, slots in checked.placement.slots.items():
        spec, shared = checked.job.workloads[role], checked.job.collocation_of(role)
        bundles = ", ".join(str(slot.bundle) for slot in slots)
        sharing = f", sharing devices: {'+'.join(shared)}" if shared else ""
        workers = f"x{spec.num}  {spec.module}.{spec.class_}  each {dict(slots[0].resources)}"
        lines.append(f"  {role:<10} {workers}  in bundle {bundles}{sharing}")
        if standbys := checked.placement.standbys.get(role, ()):
            bundles = ", ".join(str(slot.bundle) for slot in standbys)
            lines.append(f"  {'':<10} and {len(standbys)} standby in bundle {bundles}")
    lines += [*checked.inspection.about, *describe_room(checked.room)]
    if checked.job.run_folders:
        lines.append(f"files: each run in its own folder, {checked.job.run_folders}/<time>-<id>")
    return "\n".join([*lines, *_removals(checked.job)])


def _removals(job: JobSpec) -> list[str]:
    folders = superseded(job) if job.run_folders else []
    return [f"  the run will remove {folder} (checkpoint.keep_runs)" for folder in folders]


@dataclass(frozen=True)
class _Place:
    """The place of a run: this process, or the cluster at ``address``, by default a new one."""

    local: bool = False
    address: str | None = None
    detach: bool = False
    supervise: bool = False

    def __post_init__(self) -> None:
        has_address, other = self.address is not None, "detach" if self.detach else "local"
        checks = [
            (self.local and has_address, "--address", "names a cluster, but --local runs without Ray"),
            (self.detach and not has_address, "--detach", "needs --address: a new cluster ends with this command"),
            (self.supervise and (self.detach or self.local), "--supervise", f"cannot be used with --{other}"),
        ]
        if errors := [ConfigError(option, fault) for is_wrong, option, fault in checks if is_wrong]:
            raise InvalidJob(errors)


def _run(checked: CheckedJob, place: _Place) -> None:
    for line in [*checked.inspection.about, *_removals(checked.job)]:
        echo(line, err=True)
    job = begin(checked.job)
    checked = replace(checked, job=job)
    if place.detach and place.address is not None:
        leave_on_ray(checked, place.address, partial(echo, err=True))
        echo(f"{job.name} has started; files in {job.job_dir}")
        echo(f"dlrover-rl attach|status|logs|stop {job.name} --address {place.address}", err=True)
        return
    try:
        # A live bar would erase the prompt of a debugger in this process.
        with ProgressView(job.name, live=not place.local, opening=checked.opening) as view:
            if place.local:
                ended = run_here(checked, view, view.announce)
            else:
                ended = run_on_ray(checked, view, place.address, announce=view.announce, supervise=place.supervise)
    except (SystemExit, OSError):  # SIGTERM, or an error of the disk
        echo(resumption.how_to_go_on(job, job.job_dir), err=True)
        raise
    is_finished, summary = ended.phase is Phase.FINISHED, Path(ended.folder) / SUMMARY
    if is_finished and summary.is_file():  # it may be on the trainer's node only
        print_summary(ended.name, summary.read_text(encoding="utf-8"))
    echo(f"{ended.name}: {ended.phase.value}, {ended.reason}; files in {ended.folder}", err=True)
    if ended.cause is not None and ended.cause.detail:
        echo(f"\n{ended.cause.detail}", err=True)
    if is_finished:
        return
    if ended.folder:
        line = resumption.how_to_go_on(job, Path(ended.folder), ended.step, ended.cause)
        echo(line, err=True, nl=bool(line))
    stopped = EXIT_INTERRUPTED if ended.reason == INTERRUPTED else EXIT_STOPPED
    sys.exit(EXIT_FAILED if ended.phase is Phase.FAILED else stopped)


def _describe_file(_: Any, job_file: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    text, name = read_job_file(Path(job_file))
    name = "" if any(override.startswith("name=") for override in overrides) else name
    check_submitted(text, name, overrides, Path(job_file).absolute().parent)
    return {"text": text, "name": name, "overrides": overrides}


def _describe_options(_: Any, job_name: str, rl_config: str, **options: Any) -> dict[str, Any]:
    return {"text": job_to_yaml(job_of_options(job_name, rl_config, options)), "name": job_name}


def _describe_evaluation(client: Any, name_or_dir: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Describe an evaluation of a run, by default the newest one of the name, whose files the service has."""
    run = client.get(name_or_dir)
    has_model = any(file.path.startswith(f"{MODEL}/") for file in client.artifacts(name_or_dir))
    text = read_file(client, name_or_dir, DESCRIPTION)
    changes = [*resumption.evaluation_overrides(text, Path(run.folder), has_model, overrides), "job_dir=''"]
    name = resumption.evaluation_name(run.name)
    return {"text": text, "name": name, "overrides": changes, "folder": run.work_dir, "priority": run.priority}


def _describe_resume(client: Any, name_or_dir: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Describe the job that continues a run, by default the newest one of the name, in its folder on the service's
    machine. Raises InvalidJob for a run that has not ended, or has nothing to continue."""
    from dlrover.python.rl.service.client import JobPhase, phase_of  # gRPC takes a moment

    resumption.refuse_names(overrides)
    run = client.get(name_or_dir)
    phase = phase_of(run)
    if not phase.ended or not run.folder:
        raise InvalidJob([ConfigError(name_or_dir, f"is {phase}, and has nothing to continue")])
    if phase is JobPhase.FINISHED and not overrides:
        echo(f"{name_or_dir}: {_HAS_FINISHED}")
        raise click.exceptions.Exit(0)
    text = read_file(client, name_or_dir, DESCRIPTION)
    changes = [f"job_dir={run.folder}", "checkpoint.resume=latest", *overrides]
    return {"text": text, "name": run.name, "overrides": changes, "folder": run.work_dir, "priority": run.priority}


VERBS = (
    init,
    with_server(run, _describe_file),
    with_server(resume, _describe_resume),
    with_server(evaluate, _describe_evaluation),
    check,
    with_server(submit, _describe_options),
)
