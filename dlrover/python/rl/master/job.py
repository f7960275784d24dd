"""Planning, running and submitting jobs from Python; the command line is a thin layer over this module."""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CallError, InvalidJob, JobConflict, JobFailed, MasterLost, Problem
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import master_name
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.load import search_folders
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.placement import Placement, plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.brain import fresh_journal, new_run
from dlrover.python.rl.master.interrupts import Interrupts
from dlrover.python.rl.master.local import run_local
from dlrover.python.rl.master.rl_master import RLMaster
from dlrover.python.rl.master.status import JobStatus, Position, Update
from dlrover.python.rl.runtime.durability import forget_commits
from dlrover.python.rl.runtime.inspection import Inspection, inspect_in_child, inspect_job
from dlrover.python.rl.runtime.ray.actors import ask, end, find, launch, sweep, wait_gone
from dlrover.python.rl.runtime.ray.cluster import ray_cluster
from dlrover.python.rl.runtime.state_store import FileStateStore
from dlrover.python.rl.trainer.trainer import Reporter, StepReport

_LOG = get_logger(__name__)

INTERRUPTED = "interrupted"
FOLLOW_S = 1.0
_ANSWER_S = 60.0


@dataclass(frozen=True)
class CheckedJob:
    """A job that may start: its plan, and what inspecting its classes found."""

    job: JobSpec
    placement: Placement
    inspection: Inspection


def check_job(job: JobSpec, local: bool = False) -> CheckedJob:
    """Find everything that speaks against starting ``job``. Nothing is started.

    Args:
        job: what to check.
        local: the job shall run in this process, so its classes are imported here; otherwise a child imports them.

    Raises:
        InvalidJob: with every problem.
    """
    job = replace(job, work_dir=job.work_dir or str(Path.cwd()), search_path=job.search_path or search_folders())
    placement, problems = plan(job)
    problems += _job_dir_problems(job.job_dir)
    inspection = inspect_job(job) if local else inspect_in_child(job)
    problems += inspection.problems
    if local:
        problems += inspection.single_process_refusals
    if problems or placement is None:
        raise InvalidJob(problems)
    return CheckedJob(job, placement, inspection)


def check_described(describe: Callable[[], JobSpec], local: bool = False) -> CheckedJob:
    """Like :func:`check_job` for a job that is still to be read: the problems of reading it come together with those of
    what could be read.

    Raises:
        InvalidJob: with every problem.
    """
    try:
        job = describe()
    except InvalidJob as error:
        raise InvalidJob([*error.problems, *_further_problems(error, local)]) from None
    return check_job(job, local)


def _further_problems(error: InvalidJob, local: bool) -> list[Problem]:
    if error.salvaged is None:
        return []
    try:
        check_job(error.salvaged, local)
    except InvalidJob as more:
        said = {problem.where for problem in error.problems}
        return [problem for problem in more.problems if problem.where not in said]
    return []


def _job_dir_problems(folder: Path) -> list[Problem]:
    """The job's directory has to be one that can be made and written to."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        return [Problem("job_dir", f"{existing} is a file, not a folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Problem("job_dir", f"{existing} cannot be written to")]
    return []


def _quiet(report: StepReport) -> None:
    """Show nothing."""


def run_here(checked: CheckedJob, report: Reporter = _quiet) -> JobStatus:
    """Run a checked job in this process, without Ray."""
    store = FileStateStore(fresh_journal(checked.job))
    return run_local(checked.job, checked.placement, report, store)


def run_on_ray(
    checked: CheckedJob, report: Reporter = _quiet, address: str | None = None, connected: bool = False
) -> JobStatus:
    """Run a checked job under an :class:`RLMaster` and follow it to its end.

    The first Ctrl-C stops the job in good order, at whatever point it is. A second one stops waiting for that: a
    cluster that was started here ends at once, on a shared one the master goes on stopping.

    Args:
        checked: what to run.
        report: where step reports go.
        address: of a running cluster; None starts one for the job alone.
        connected: this process is connected to Ray already; ``address`` is not used.

    Raises:
        JobConflict: a job of this name is running on the cluster.
        ClusterUnavailable: no Ray.
        MasterLost: the master died, and what it left behind was ended; or it does not answer, and nothing was touched.
    """
    name, total = checked.job.name, dict(checked.placement.total)
    total["cpu"] = total.get("cpu", 0.0) + checked.job.master.cpu
    with Interrupts() as interrupts, nullcontext() if connected else ray_cluster(address, total):
        if interrupts.count:
            return JobStatus(name, Phase.STOPPED, 0, 0, INTERRUPTED, None)
        try:
            master = start_master(checked)
            status = follow(master, report, interrupts)
        except MasterLost:
            # One that is there but does not answer still owns its job, which may be somebody else's.
            if find(master_name(name)) is None:
                sweep(name)
            raise
        if status.phase.terminal:
            end(master)
        return status


def start_master(checked: CheckedJob) -> Any:
    """Launch the master of a checked job on the connected cluster, start it, and return its handle.

    Raises:
        JobConflict: a job of this name is running.
        MasterLost: it did not come up.
    """
    job = checked.job
    _clear_the_name(job.name)
    forget_commits(job.job_dir)
    needs = {"cpu": job.master.cpu, "memory": job.master.memory}
    arguments = (job, new_run(), checked.placement, checked.inspection)
    master = launch(RLMaster, master_name(job.name), arguments, needs, job.master.max_restart)
    ask(master.start.remote, _ANSWER_S)
    return master


def _clear_the_name(name: str) -> None:
    """Remove what an earlier job of this name has left; one that has not ended keeps the name."""
    earlier = find(master_name(name))
    if earlier is not None and not ask(earlier.status.remote, _ANSWER_S).phase.terminal:
        raise JobConflict(f"a job named '{name}' is running on this cluster: stop it first or choose another name")
    for left in sweep(name):
        if left != master_name(name):
            _LOG.warning("ended %s, which a job of this name had left behind", left)
    wait_gone(master_name(name), _ANSWER_S)


def stop_master(master: Any, reason: str) -> None:
    """Ask a job to end."""
    ask(lambda: master.stop.remote(reason), _ANSWER_S)


def follow(
    master: Any, report: Reporter = _quiet, interrupts: Interrupts | None = None, deadline_s: float | None = None
) -> JobStatus:
    """Pass reports on until the job has ended, and return how.

    Args:
        master: the master's handle.
        report: where step reports go.
        interrupts: the first stops the job, the second ends the waiting.
        deadline_s: seconds to wait at most; None waits as long as the job runs.
    """
    position, stopping, began_s = Position(), False, time.monotonic()
    while True:
        update = _news(master, position)
        position = update.position
        for step_report in () if stopping else update.reports:
            report(step_report)
        if update.status.phase.terminal:
            return update.status
        interrupted = interrupts.count if interrupts else 0
        if interrupted and not stopping:
            stop_master(master, INTERRUPTED)
            stopping = True
        elif interrupted > 1 or (deadline_s is not None and time.monotonic() - began_s > deadline_s):
            return replace(update.status, reason=update.status.reason or INTERRUPTED)


def _news(master: Any, position: Position) -> Update:
    update: Update = ask(lambda: master.follow.remote(position, FOLLOW_S), _ANSWER_S)
    return update


class RLJob:
    """A described job, ready to be submitted."""

    def __init__(self, builder: "RLJobBuilder") -> None:
        self._builder = builder

    def spec(self, job_name: str) -> JobSpec:
        """The job under a name."""
        return self._builder.spec(job_name)

    def submit(  # noqa: PLR0913 -- the original signature, and where to run
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
            blocking: wait for its end. False returns once it has begun; this needs ``address``, since a cluster that
                is started here ends with this process.
            master_cpu: logical CPUs reserved for the master.
            master_memory: memory reserved for the master, in MB.
            job_max_restart: restarts of the whole job. This and the two above default to what the job says.
            address: of a running Ray cluster; None starts one for the job alone.
            local: run in this process, without Ray.

        Raises:
            InvalidJob: the job has problems; all are listed, nothing was started.
            CallError: not blocking, and no ``address``.
            JobFailed: it ended in failure; carries the first cause and its traceback.
        """
        if not blocking and address is None:
            raise CallError("submit(blocking=False) needs address=: a cluster started here would end with this process")
        spec = self._builder.spec(job_name)
        asked = {"cpu": master_cpu, "memory": master_memory}
        master: dict[str, Any] = {name: float(amount) for name, amount in asked.items() if amount is not None}
        spec = replace(
            spec,
            master=replace(spec.master, **master),
            restart=spec.restart if job_max_restart is None else replace(spec.restart, job_max_restart=job_max_restart),
        )
        checked = check_job(spec, local)
        if not blocking:
            with ray_cluster(address, checked.placement.total):
                begun: JobStatus = ask(start_master(checked).status.remote, _ANSWER_S)
                return begun
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
        """Check the description.

        Raises:
            InvalidJob: with every problem that can be seen without importing the classes.
        """
        spec = self.spec("unnamed")
        _, problems = plan(spec)
        if problems:
            raise InvalidJob(problems)
        return RLJob(self)


def raise_if_failed(status: JobStatus) -> None:
    """Raise :class:`JobFailed`, with the first cause, when a job ended in failure."""
    if status.phase is Phase.FAILED:
        detail = f"\n\n{status.cause.detail}" if status.cause and status.cause.detail else ""
        raise JobFailed(f"{status.name} failed: {status.reason}{detail}")


__all__ = ["CheckedJob", "RLJob", "RLJobBuilder", "check_job", "run_here", "run_on_ray"]
