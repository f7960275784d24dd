# SPDX-License-Identifier: Apache-2.0
"""Jobs from Python: describe a job with :class:`RLJobBuilder`, or check and run one that is described elsewhere."""

from dlrover.python.rl.common.errors import CallError, InvalidJob
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.master.client.run import (
    CheckedJob,
    check_described,
    check_job,
    leave_on_ray,
    raise_if_failed,
    run_here,
    run_on_ray,
    with_limits,
)
from dlrover.python.rl.master.process.status import INTERRUPTED, JobStatus


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
            master_cpu: logical CPUs reserved for the master; by default the job's value.
            master_memory: memory reserved for the master, in MB; by default the job's value.
            job_max_restart: restarts of the whole job; by default the job's value.
            address: of a running Ray cluster; None starts one for this job.
            local: run in this process, without Ray.

        Raises:
            InvalidJob: with all errors; nothing was started.
            CallError: not blocking, and no ``address``.
            JobFailed: it failed; carries the first cause and its traceback.
        """
        if not blocking and address is None:
            raise CallError("submit(blocking=False) needs address=: a cluster started here would end with this process")
        cpu, memory = (None if amount is None else float(amount) for amount in (master_cpu, master_memory))
        spec = with_limits(
            self.spec(job_name, local), master_cpu=cpu, master_mem=memory, job_max_restart=job_max_restart
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
        """Build the job. Raises InvalidJob with all errors that can be found without importing the classes."""
        spec = self.spec("unnamed", in_process=True)
        _, errors = plan(spec)
        if errors:
            raise InvalidJob(errors)
        return RLJob(self)


__all__ = [
    "INTERRUPTED",
    "CheckedJob",
    "RLJob",
    "RLJobBuilder",
    "check_described",
    "check_job",
    "leave_on_ray",
    "raise_if_failed",
    "run_here",
    "run_on_ray",
]
