"""A job's trainer, made where it runs."""

from collections.abc import Callable

from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.loading import load_class
from dlrover.python.rl.runtime.local.port import LocalHandle
from dlrover.python.rl.trainer.trainer import BaseTrainer, TrainerLink


def trainer_maker(job: JobSpec) -> Callable[[TrainerLink], BaseTrainer]:
    """What makes a trainer object, each time a new one, whose raw handles go through the link's port.

    Raises:
        ClassNotFound: a class of the job is not there.
    """
    spec = job.trainer
    trainer_class = load_class(spec.module, spec.class_, job.search_path)
    classes = {
        role: load_class(workload.module, workload.class_, job.search_path) for role, workload in job.workloads.items()
    }

    def make(link: TrainerLink) -> BaseTrainer:
        handles = {
            role: [LocalHandle(link.port, role, rank) for rank in range(workload.num)]
            for role, workload in job.workloads.items()
        }
        trainer: BaseTrainer = trainer_class(handles, classes, job.config)
        return trainer

    return make
