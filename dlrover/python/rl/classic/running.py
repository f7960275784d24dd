"""A recipe's job in the processes that run a script."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.load import search_folders
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.recipe.launch import checked, run_together
from dlrover.python.rl.recipe.trackers import LogConfig, Trackers, WandbConfig
from dlrover.python.rl.runtime.torchrun.links import Place
from dlrover.python.rl.trainer.trainer import StepReport
from dlrover.python.rl.trainer.workload import BaseWorkload

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Told:
    """What is told of a run on the way.

    Attributes:
        level: of Python's ``logging``.
        every: steps between two lines of figures.
        characters: of each completion that is shown beside them; None: none is shown.
        wandb: the run there; None: none.
    """

    level: int = logging.INFO
    every: int = 1
    characters: int | None = None
    wandb: WandbConfig | None = None


@dataclass(frozen=True)
class Recipe:
    """What to run.

    Attributes:
        trainer: the recipe's class.
        roles: the workload of each role.
        config: the recipe's configuration.
        output_dir: where the job writes.
        resume: go on from the last step that an earlier run has committed there.
    """

    trainer: type
    roles: Mapping[str, type[BaseWorkload]]
    config: Mapping[str, Any]
    output_dir: Path
    resume: bool

    def described(self) -> JobSpec:
        """The job.

        Raises:
            InvalidJob: with every problem that can be seen without looking at the classes.
        """
        builder = JobBuilder().device_type("CPU").trainer(self.trainer.__module__, self.trainer.__qualname__)
        for role, workload in self.roles.items():
            builder = builder.role(role, workload.__module__, workload.__qualname__)
        builder = builder.config(self.config).checkpoint(resume="latest" if self.resume else "never")
        job = builder.spec(self.trainer.__name__.lower(), search_folders())
        return replace(job, job_dir=self.output_dir.absolute())


def place_of(use_accelerate: bool) -> Place:
    """Which of the processes this is that a launcher has started.

    Raises:
        ValueError: there are several, which is not wanted.
        InvalidJob: the launcher's variables do not say where the others are.
    """
    place = Place.from_env(os.environ)
    if place.world_size > 1 and not use_accelerate:
        what = f"{place.world_size} processes were launched, and each would train alone into the same folder"
        raise ValueError(f"{what}: pass use_accelerate=True")
    return place


def run(make: Callable[[], Recipe], place: Place, told: Told) -> None:
    """Run a recipe's job to its end, with a member of each role in every process of the launch.

    Args:
        make: gives what to run; called at rank 0 alone.
        place: which process this is.
        told: what is told of it at rank 0.

    Raises:
        InvalidJob: at rank 0: with every problem; nothing was started.
        DLRoverRLError: what the job has failed of.
        Exception: what ``make`` raises; nothing was started.
    """
    configure_logging(f"rank {place.rank}" if place.world_size > 1 else "", told.level)
    begun: list[tuple[Path, Trackers]] = []

    def describe() -> JobSpec:
        recipe = make()
        job = checked(recipe.described, place)
        begun.append((recipe.output_dir, Trackers(LogConfig(told.wandb), recipe.output_dir, recipe.config)))
        return job

    def report(report: StepReport) -> None:
        ((folder, trackers),) = begun
        trackers.step(_name_of_run(folder), report.step, report.metrics)
        if report.step % told.every == 0:
            _tell(report, folder, told)

    error = run_together(describe, place, report)
    for folder, trackers in begun:
        trackers.close()
        if error is None:
            name_final(folder)
    if error is not None:
        raise error


def _name_of_run(folder: Path) -> str:
    """The same when a run goes on."""
    return str(json.loads((folder / "torchrun.json").read_bytes())["run"])


def name_final(folder: Path) -> None:
    """Let ``final`` be another name of ``model``, where the recipe has written the trained model."""
    link = folder / "final"
    link.unlink(missing_ok=True)
    link.symlink_to("model", target_is_directory=True)


def _tell(report: StepReport, folder: Path, told: Told) -> None:
    figures = "  ".join(f"{name} {value:.4g}" for name, value in report.metrics.items())
    _LOG.info("step %d%s  %s", report.step, f"/{report.total_steps}" if report.total_steps else "", figures)
    for row in _completions(folder, report.step) if told.characters is not None else ():
        _LOG.info("reward %s  %r", row.get("reward"), row["completion"][: told.characters])


def _completions(folder: Path, step: int) -> Iterator[dict[str, Any]]:
    with open(folder / "samples.jsonl", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(f'{{"step": {step},'):
                yield json.loads(line)
