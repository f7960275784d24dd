"""The actor that runs the user's trainer."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from dlrover.python.rl.common.errors import WorkloadDied
from dlrover.python.rl.common.log import configure_logging
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.commands import StartTrainer
from dlrover.python.rl.control.events import Cause, Process
from dlrover.python.rl.runtime.beats import Beat, Beater, BeatTerms
from dlrover.python.rl.runtime.durability import checkpoints_of
from dlrover.python.rl.runtime.executor import cause_of, starting
from dlrover.python.rl.runtime.loading import enter_folder, load_class
from dlrover.python.rl.runtime.ray.activity import Activity, WatchedPort
from dlrover.python.rl.runtime.ray.member import locate, send_to
from dlrover.python.rl.runtime.ray.recovery import RayRecovery, Seat
from dlrover.python.rl.runtime.ray.units import TRAINER
from dlrover.python.rl.trainer.runner import run_trainer
from dlrover.python.rl.trainer.trainer import BaseTrainer, StepReport, TrainerLink

OWN_CODE = "its own code"
"""What a trainer that waits for nobody says it is in."""

_RENEWAL_S = 600.0
"""How long to wait for a lost member's replacement, besides the time that placing it may take."""


@dataclass(frozen=True)
class TrainerStart:
    """What the trainer's process is told.

    Attributes:
        job: the job.
        run: which run of it.
        command: the brain's command that this process carries out.
        seats: every member, in rank order.
        resources: what one member of each role was given.
    """

    job: JobSpec
    run: str
    command: StartTrainer
    seats: tuple[Seat, ...]
    resources: Mapping[str, Mapping[str, float]]


class TrainerActor:
    """Constructs the trainer, binds it to its role groups, and runs it.

    Args:
        epoch: its number.
        master: the master's handle.
        beats: how it shows that it lives.
    """

    def __init__(self, epoch: int, master: Any, beats: BeatTerms) -> None:
        configure_logging(TRAINER)
        self._epoch, self._master = epoch, master
        self._start: TrainerStart | None = None
        self._recovery: RayRecovery | None = None
        self._activity = Activity()
        self._outcome: Cause | None = None
        self._running = self._ended = False
        Beater(self._beat, send_to(master), beats).start()

    def start(self, start: TrainerStart) -> Process:
        """Import the job's classes. Returns where it is.

        Raises:
            WorkloadStartError: importing them failed.
        """
        job = start.job
        enter_folder(job.work_dir)
        with starting(TRAINER):
            self._trainer_class = load_class(job.trainer.module, job.trainer.class_, job.search_path)
            self._classes = {
                role: load_class(spec.module, spec.class_, job.search_path) for role, spec in job.workloads.items()
            }
        self._start = start
        return locate()

    def _beat(self) -> Beat:
        step = self._recovery.step if self._recovery is not None else -1
        own_s = self._activity.own_s() if self._running else None
        return Beat(TRAINER, self._epoch, "" if own_s is None else OWN_CODE, own_s or 0.0, step)

    def dlrover_ping(self) -> bool:
        """Answer, once nothing else is running: a pending ping is how the master watches a process."""
        return True

    def run(self) -> Cause | None:
        """Run ``init`` and ``fit``. Asked again, it gives the same answer.

        Returns:
            What it failed with, None when it came to its end.
        """
        if not self._ended:
            self._activity.touch()
            self._running = True
            self._outcome, self._ended, self._running = self._run(), True, False
        return self._outcome

    def _run(self) -> Cause | None:
        start = self._start
        assert start is not None, "start() comes first"
        try:
            link, make = self._bound(start)
            run_trainer(make, link)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: whatever it raises travels on
            return cause_of(_root(error), TRAINER, traceback.format_exc())
        return None

    def _bound(self, start: TrainerStart) -> tuple[TrainerLink, Callable[[], BaseTrainer]]:
        """What ties trainers to this place, and what makes them."""
        job, master = start.job, self._master
        port = WatchedPort(self._activity)
        recovery = RayRecovery(
            master, port, start.seats, start.command, _RENEWAL_S + job.placement_timeout_s, self._activity
        )
        self._recovery = recovery
        job.job_dir.mkdir(parents=True, exist_ok=True)
        node = ray.get_runtime_context().get_node_id()
        checkpoints = checkpoints_of(job, start.run, start.command.epoch, node)
        report = _report_to(master)
        link = TrainerLink(port, report, job.name, job.job_dir, start.resources, recovery, checkpoints)

        def make() -> BaseTrainer:
            with starting(TRAINER):
                trainer: BaseTrainer = self._trainer_class(recovery.handles(), self._classes, job.config)
                return trainer

        return link, make


def _root(error: BaseException) -> BaseException:
    """The death of a member that ``error`` was raised because of, or ``error`` itself."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, WorkloadDied):
            return link
        link = link.__cause__ or link.__context__
    return error


def _report_to(master: Any) -> Any:
    def report(report: StepReport) -> None:
        master.report.remote(report)

    return report
