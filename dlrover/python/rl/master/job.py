# SPDX-License-Identifier: Apache-2.0
"""Checks, runs and submits jobs from Python; the command line is a thin layer over this module."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CallError, InvalidJob, JobFailed
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.checked_job import CheckedJob, check_described, check_job
from dlrover.python.rl.master.process.brain import fresh_journal, run_local
from dlrover.python.rl.master.process.status import INTERRUPTED, JobStatus
from dlrover.python.rl.runtime.checkpoint.storage.journal_store import FileStateStore
from dlrover.python.rl.runtime.run.folder import begin, claim, held
from dlrover.python.rl.runtime.run.owner import IN_PROCESS
from dlrover.python.rl.runtime.run.progress import redraw
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, announce_nothing, report_nothing


def run_here(
    checked: CheckedJob, report: Reporter = report_nothing, announce: Announcer = announce_nothing
) -> JobStatus:
    """Run a checked job in this process, without Ray. Raises JobConflict if its folder is in use or has results."""
    job = begin(checked.job)
    with held(claim(job, IN_PROCESS, bound=True)) as claimed:
        if checked.opening:
            announce(checked.opening)
        status = run_local(job, checked.placement, report, FileStateStore(fresh_journal(job)), announce=announce)
        claimed.end(status.phase.value)
    return _drawn(status)


def _drawn(status: JobStatus) -> JobStatus:
    """The trainer draws its last curve only if it finishes."""
    if status.folder and status.phase is not Phase.FINISHED:
        redraw(Path(status.folder))
    return status


def run_on_ray(  # noqa: PLR0913 -- what is told, and where it runs
    checked: CheckedJob,
    report: Reporter = report_nothing,
    address: str | None = None,
    connected: bool = False,
    announce: Announcer = announce_nothing,
    supervise: bool = False,
) -> JobStatus:
    """Run a checked job under a master actor and follow it to its end.

    The first Ctrl-C stops the job in good order. A second one stops waiting for that: a cluster that was started here
    ends at once; on a shared one the master continues to stop the job.

    Args:
        address: of a running cluster; None starts one for this job, and another one if it is lost.
        connected: this process is connected to Ray already; ``address`` is ignored.
        supervise: go on from the last commit when the cluster of ``address``, or the master there, was lost.

    Raises:
        JobConflict: a job of this name is running on the cluster, or the job's folder is in use or has results.
        ClusterUnavailable: no Ray.
        MasterLost: the master died, and its processes were ended; or it does not answer, and nothing was touched; or a
            cluster was lost too often.
    """
    from dlrover.python.rl.master.ray_run import run_on_cluster  # imports Ray, which other commands do without
    from dlrover.python.rl.master.supervisor import run_supervised

    checked = replace(checked, job=begin(checked.job))
    if connected or (address is not None and not supervise):
        return _drawn(run_on_cluster(checked, report, announce, address, connected))
    return _drawn(run_supervised(checked, report, announce, address))


def leave_on_ray(checked: CheckedJob, address: str, announce: Announcer = announce_nothing) -> JobStatus:
    """Begin a checked job on the cluster of ``address``. Raises as :func:`run_on_ray`."""
    from dlrover.python.rl.master.ray_run import begin_on  # as above

    return begin_on(checked, address, announce)


class RLJob:
    """A described job, ready to be submitted."""

    def __init__(self, builder: "RLJobBuilder") -> None:
        self._builder = builder

    def spec(self, job_name: str, local: bool = False) -> JobSpec:
        return self._builder.spec(job_name, in_process=local)

    def submit(  # noqa: PLR0913 -- upstream DLRover's signature, and where to run
        self,
        job_name: str,
        blocking: bool = True,
        master_cpu: float | None = None,
        master_memory: float | None = None,
        job_max_restart: int | None = None,
        address: str | None = None,
        local: bool = False,
    ) -> JobStatus:
        """Run the job and wait for its end.

        Args:
            job_name: a DNS label, unique on the cluster.
            blocking: False returns once the job has begun; it needs ``address``, since a cluster that is started here
                ends with this process.
            master_cpu: logical CPUs reserved for the master; by default those of the job.
            master_memory: memory reserved for the master, in MB; by default that of the job.
            job_max_restart: restarts of the whole job; by default those of the job.
            address: of a running Ray cluster; None starts one for this job.
            local: run in this process, without Ray.

        Raises:
            InvalidJob: with all errors; nothing was started.
            CallError: not blocking, and no ``address``.
            JobFailed: it ended in failure; carries the first cause and its traceback.
        """
        if not blocking and address is None:
            raise CallError("submit(blocking=False) needs address=: a cluster started here would end with this process")
        spec = self.spec(job_name, local)
        amounts = {"cpu": master_cpu, "memory": master_memory}
        master: dict[str, Any] = {name: float(amount) for name, amount in amounts.items() if amount is not None}
        spec = replace(
            spec,
            master=replace(spec.master, **master),
            restart=spec.restart if job_max_restart is None else replace(spec.restart, job_max_restart=job_max_restart),
        )
        checked = check_job(spec, local)
        if address is not None and not blocking:
            return leave_on_ray(checked, address)
        status = run_here(checked) if local else run_on_ray(checked, address=address)
        raise_if_failed(status)
        return status


class RLJobBuilder(JobBuilder):
    """Describe a job in Python, then ``build().submit(name)``.

    Example::

        job = (
            RLJobBuilder()
            .node_num(1).device_per_node(4).device_type("CPU")
            .config({"lr": 1e-3})
            .trainer("my_package.trainer", "MyTrainer")
            .actor("my_package.workloads", "MyActor").total(2)
            .rollout("my_package.workloads", "MyRollout").total(2)
            .with_collocation("actor", "rollout")
            .build()
        )
        job.submit("my-job")
    """

    def build(self) -> RLJob:
        """Raises InvalidJob with all errors that can be found without importing the classes."""
        spec = self.spec("unnamed", in_process=True)
        _, errors = plan(spec)
        if errors:
            raise InvalidJob(errors)
        return RLJob(self)


def raise_if_failed(status: JobStatus) -> None:
    """Raise :class:`JobFailed`, with the first cause, when a job ended in failure."""
    if status.phase is Phase.FAILED:
        detail = f"\n\n{status.cause.detail}" if status.cause and status.cause.detail else ""
        raise JobFailed(f"{status.name} failed: {status.reason}{detail}")


__all__ = [
    "INTERRUPTED",
    "CheckedJob",
    "RLJob",
    "RLJobBuilder",
    "check_described",
    "check_job",
    "leave_on_ray",
    "run_here",
    "run_on_ray",
]
