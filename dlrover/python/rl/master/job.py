"""Planning, running and submitting jobs from Python; the command line is a thin layer over this module."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CallError, InvalidJob, JobConflict, JobFailed, Problem
from dlrover.python.rl.common.names import master_name
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.placement import Placement, plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.local import run_local
from dlrover.python.rl.master.rl_master import RLMaster
from dlrover.python.rl.master.status import JobStatus, Update
from dlrover.python.rl.runtime.inspection import Inspection, inspect_in_child, inspect_job
from dlrover.python.rl.runtime.ray.actors import ask, end, find, launch, wait_gone
from dlrover.python.rl.runtime.ray.cluster import ray_cluster
from dlrover.python.rl.runtime.state_store import FileStateStore
from dlrover.python.rl.trainer.trainer import Reporter, StepReport

FOLLOW_S = 1.0
_ANSWER_S = 60.0
_STOP_DEADLINE_S = 30.0


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
    store = FileStateStore(_fresh_journal(checked.job))
    return run_local(checked.job, checked.placement, report, store)


def run_on_ray(
    checked: CheckedJob,
    report: Reporter = _quiet,
    address: str | None = None,
    connected: bool = False,
    on_start: Callable[[Any], None] = lambda master: None,
) -> JobStatus:
    """Run a checked job under an :class:`RLMaster` and follow it to its end. Ctrl-C stops it in good order.

    Args:
        checked: what to run.
        report: where step reports go.
        address: of a running cluster; None starts one for the job alone.
        connected: this process is connected to Ray already; ``address`` is not used.
        on_start: called with the master's handle.

    Raises:
        JobConflict: a job of this name is running on the cluster.
        ClusterUnavailable: no Ray.
    """
    total = dict(checked.placement.total)
    total["cpu"] = total.get("cpu", 0.0) + checked.job.master.cpu
    with nullcontext() if connected else ray_cluster(address, total):
        master = start_master(checked)
        on_start(master)
        try:
            return _follow(master, report)
        except KeyboardInterrupt:
            stop_master(master, "interrupted")
            return _follow(master, report, _STOP_DEADLINE_S)
        finally:
            end(master)


def start_master(checked: CheckedJob) -> Any:
    """Launch the master of a checked job on the connected cluster, and start it."""
    job = checked.job
    _clear_the_name(job.name)
    args = (job, checked.placement, checked.inspection.methods, _fresh_journal(job))
    needs = {"cpu": job.master.cpu, "memory": job.master.memory}
    master = launch(RLMaster, master_name(job.name), args, needs)
    ask(master.start.remote(), _ANSWER_S)
    return master


def _clear_the_name(name: str) -> None:
    """Remove the master of a job of this name that has ended; one that has not keeps the name."""
    earlier = find(master_name(name))
    if earlier is None:
        return
    if not ask(earlier.status.remote(), _ANSWER_S).phase.terminal:
        raise JobConflict(f"a job named '{name}' is running on this cluster: stop it first or choose another name")
    end(earlier)
    wait_gone(master_name(name), _ANSWER_S)


def stop_master(master: Any, reason: str) -> None:
    """Ask a job to end."""
    ask(master.stop.remote(reason), _ANSWER_S)


def _follow(master: Any, report: Reporter, deadline_s: float = float("inf")) -> JobStatus:
    """Pass reports on until the job has ended, or for ``deadline_s`` seconds."""
    position, waited_s = 0, 0.0
    while True:
        update: Update = ask(master.follow.remote(position, FOLLOW_S), _ANSWER_S)
        for step_report in update.reports if deadline_s == float("inf") else ():
            report(step_report)
        position = update.position
        if update.status.phase.terminal or waited_s > deadline_s:
            return update.status
        waited_s += FOLLOW_S


def _fresh_journal(job: JobSpec) -> Path:
    """Where this run's journal goes. An earlier run's is kept beside it, under its number."""
    job.job_dir.mkdir(parents=True, exist_ok=True)
    (job.job_dir / "job.yaml").write_text(job_to_yaml(job), encoding="utf-8")
    journal = job.job_dir / "journal.jsonl"
    if journal.exists():
        numbers = [int(file.suffixes[0][1:]) for file in job.job_dir.glob("journal.[0-9]*.jsonl")]
        number = 1 + max(numbers, default=0)
        journal.rename(job.job_dir / f"journal.{number}.jsonl")
    return journal


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
        master = {name: float(amount) for name, amount in asked.items() if amount is not None}
        spec = replace(
            spec,
            master=replace(spec.master, **master),
            restart=spec.restart if job_max_restart is None else replace(spec.restart, job_max_restart=job_max_restart),
        )
        checked = check_job(spec, local)
        if not blocking:
            with ray_cluster(address, checked.placement.total):
                begun: JobStatus = ask(start_master(checked).status.remote(), _ANSWER_S)
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
