"""The actor that runs the user's trainer."""

import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover.python.rl.common.errors import WorkloadDied, WorkloadStartError
from dlrover.python.rl.common.log import configure_logging
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Cause
from dlrover.python.rl.runtime.executor import cause_of
from dlrover.python.rl.runtime.loading import enter_folder, load_class
from dlrover.python.rl.runtime.ray.member import Location, locate
from dlrover.python.rl.runtime.ray.port import RayPort
from dlrover.python.rl.trainer.trainer import BaseTrainer, StepReport, TrainerLink


class TrainerFailed(Exception):
    """What the trainer raised, as it travels to the master: the cause in words, for the exception itself may be of a
    class that only the trainer's process can import."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class TrainerActor:
    """Constructs the trainer, binds it to its role groups, and runs it."""

    def __init__(self) -> None:
        configure_logging("trainer")
        self._trainer: BaseTrainer | None = None

    def start(
        self,
        job: JobSpec,
        handles: Mapping[RLRoleType, Sequence[Any]],
        resources: Mapping[str, Mapping[str, float]],
        master: Any,
    ) -> Location:
        """Construct and bind the trainer.

        Raises:
            WorkloadStartError: importing, constructing or binding it failed.
        """
        enter_folder(job.work_dir)
        try:
            trainer_class = load_class(job.trainer.module, job.trainer.class_, job.search_path)
            classes = {
                role: load_class(spec.module, spec.class_, job.search_path) for role, spec in job.workloads.items()
            }
            trainer = trainer_class({role: list(members) for role, members in handles.items()}, classes, job.config)
            job.job_dir.mkdir(parents=True, exist_ok=True)
            trainer.bind(TrainerLink(RayPort(handles), _report_to(master), job.name, job.job_dir, resources))
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: whatever it raises travels on
            raise WorkloadStartError("trainer", f"{type(error).__name__}: {error}", traceback.format_exc()) from None
        self._trainer = trainer
        return locate()

    def run(self) -> int:
        """Run ``init`` and ``fit``. Returns the process id.

        Raises:
            TrainerFailed: one of them raised.
        """
        assert self._trainer is not None, "start() comes first"
        try:
            self._trainer.init()
            self._trainer.fit()
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: whatever it raises travels on
            raise TrainerFailed(cause_of(_root(error), "trainer", traceback.format_exc())) from None
        return os.getpid()


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
