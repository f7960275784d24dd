# SPDX-License-Identifier: Apache-2.0
"""``JobSpec``: a whole job, as it is described before it starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0.0), Lt(float("inf"))]
Seconds = Annotated[float, Gt(0.0), Lt(float("inf"))]

RUNS = Path("runs")

SchedulingStrategy = Literal["AUTO", "SIMPLE", "GROUP"]


@dataclass(frozen=True)
class TrainerSpec:
    """The trainer and the nodes of the job."""

    module: str
    """Module of the trainer class."""

    class_: str
    """The trainer class (``class`` in a job file)."""

    node_number: Positive = 1
    """Maximum number of nodes."""

    device_type: Literal["CPU", "GPU"] = "GPU"
    """Type of device that the job uses."""

    device_per_node: Positive = 8
    """Devices on each node."""

    torch_master_port: tuple[Annotated[int, Gt(1000)], ...] = ()
    """Preferred rendezvous ports, one per role in the order of the file; a free port replaces a busy one."""

    type: Literal["USER_DEFINED"] = "USER_DEFINED"
    """The trainer type of upstream DLRover; unused, since the class determines it."""

    hang_after_s: Seconds = 3600.0
    """Seconds without progress in the trainer, waiting for calls excluded, after which it is killed and recovered."""


@dataclass(frozen=True)
class WorkloadSpec:
    """A role: its class, number of workers and resources."""

    module: str
    """Module of the workload class."""

    class_: str
    """The workload class (``class`` in a job file)."""

    num: Positive = 1
    """Number of workers."""

    per_node: Positive | None = None
    """Workers per node, standbys excluded; None: decided by the placement."""

    resource: Mapping[str, Amount] = field(default_factory=dict)
    """Resources of a worker: ``cpu``, ``gpu``, ``memory`` in MB, or a custom resource. The device type of the job
    defaults to 1 (in a group: an equal share of what the others leave): in a GPU job set ``gpu: 0`` for a role without
    a device."""

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the workers; they override those of the job."""

    standby: NonNegative = 0
    """Number of standby processes, which replace lost workers; each reserves the resources of a worker."""

    hang_after_s: Seconds = 600.0
    """Seconds without progress in a worker after which it is killed and recovered."""

    min: NonNegative = 0
    """With how few workers of a stateless role the job goes on while the others cannot be placed; it grows again when
    they can. 0: with all."""


@dataclass(frozen=True)
class RestartSpec:
    """Limits and back-off of restarts."""

    job_max_restart: NonNegative = 10
    """Maximum restarts of the job within the window."""

    trainer_max_restart: NonNegative = 10
    """Maximum restarts of the trainer within the window."""

    workload_max_restart: Mapping[str, NonNegative] = field(default_factory=dict)
    """Maximum recoveries of a role within the window; the default is the limit of the job."""

    backoff_s: Annotated[float, Ge(0.0), Lt(float("inf"))] = 1.0
    """Delay before the second restart of the same process without progress in between; doubled at each further restart,
    up to a minute."""

    window_s: Seconds = 3600.0
    """Restarts older than this are not counted."""

    node_max_failures: Positive = 3
    """Processes of the job that a node may lose within the window before it is excluded; four times as many within 24
    windows, if it stands out."""


@dataclass(frozen=True)
class CheckpointSpec:
    """Commits to keep, and their location."""

    every: Positive = 10
    """Steps between permanent copies in ``job_dir``. The last two commits are always kept, see ``commit_to``."""

    keep: Positive = 2
    """Number of newest copies to keep."""

    resume: Literal["never", "latest"] = "never"
    """``never``: start a new run. ``latest``: continue from the newest valid commit of any earlier run in ``job_dir``;
    without a ``job_dir``, of the last run of this name, unless that has finished."""

    commit_to: Literal["auto", "memory", "job_dir"] = "auto"
    """Location of the commits, until the job ends. ``memory``: the memory of each node and of the next
    one, which is fast; losing one node loses no committed step. If two neighbours are lost, or the only node, the job
    goes back to the last copy in ``job_dir``, or to step 1. ``job_dir``: a folder that all nodes share. ``auto``:
    ``job_dir`` with ``scheduling_strategy: SIMPLE``, which may use one node of several, else ``memory``."""

    keep_runs: NonNegative = 5
    """Of the ended runs of this name with folders of their own, the newest ones that keep their checkpoints; models,
    metrics and logs of the others stay."""

    commit_every: Positive | Literal["auto"] = "auto"
    """Steps from one commit to the next. With more than 1, the loss of a process that has state takes all roles back to
    the last commit, and they repeat the steps after it. ``auto``: 1 unless every workload says that repeated steps give
    the same bits; then the fewest steps whose commits take at most 1 % of the time, at most 8 steps and 10 seconds."""


@dataclass(frozen=True)
class LivenessSpec:
    """Heartbeats and their limits."""

    beat_s: Seconds = 0.5
    """Interval of heartbeats; must be below every limit."""

    lease_s: Seconds = 60.0
    """A process that cannot reach its master for this time ends itself."""

    start_timeout_s: Seconds = 300.0
    """Timeout of the start of a process."""

    slow_factor: Annotated[float, Gt(1.0)] = 2.0
    """A worker is reported once it has been slower than the median of its peers by this factor for a while."""

    replace_slow: bool = False
    """Replace a worker that is reported as slow; its node is blamed."""

    notice_file: str = ""
    """A file whose appearance on a node says that the node will go, as SIGTERM to a process of the job does: the job
    leaves the node if there is another one."""


@dataclass(frozen=True)
class MasterSpec:
    """Resources and restarts of the master."""

    cpu: Amount = 0.0
    """Logical CPUs reserved for the master."""

    memory: Amount = 0.0
    """Memory reserved for the master, in MB."""

    max_restart: Annotated[int, Ge(-1)] = -1
    """Maximum restarts of the master, -1: unlimited; workers continue meanwhile."""

    metrics_port: Annotated[int, Ge(-1), Lt(65536)] = -1
    """Port on which the master serves Prometheus metrics, 0: any free one, -1: none. The address is in the run's
    ``metrics.json``."""

    metrics_host: str = "127.0.0.1"
    """Address that they are served at. Beyond loopback it needs the three settings below."""

    metrics_token_file: str = ""
    """File with a token, readable by its owner only, that scrapers send as ``Authorization: Bearer``."""

    metrics_tls_cert: str = ""
    """File with the certificate with which they are served over HTTPS."""

    metrics_tls_key: str = ""
    """File with its key."""


@dataclass(frozen=True)
class JobSpec:
    """A job whose fields have their types and ranges and whose groups name existing roles.

    The plan checks that it fits the machines, the inspection that its classes can be imported.
    """

    name: str  #: name of the job, a DNS label
    trainer: TrainerSpec
    workloads: Mapping[RLRoleType, WorkloadSpec]  #: workload of each role, in the order of the file
    #: collocated roles: each group maps roles to their workers in one instance of the group
    groups: tuple[Mapping[RLRoleType, int], ...] = ()
    #: environment variables of the trainer and all workers
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: configuration of the user, a ``DictConfig``, passed through unchanged
    config: Any = field(default=None, repr=False)
    #: overrides of keys that ``config`` had not: errors, unless the trainer's schema has them
    unlisted: tuple[ConfigError, ...] = ()
    #: output folder of the job, an absolute path; ``RUNS``: each run gets a folder of its own, in ``run_folders``
    job_dir: Path = RUNS
    #: URL of the job's directory in an object store, which gets the copies of commits and the results; ``job_dir`` is a
    #: folder of each node then
    archive: str = ""
    run: str = ""  #: id of the run; empty before it begins
    #: digest of the description without defaults, by which a repeated command is told from another; empty: unknown
    given: str = ""
    #: the command that began the run, its working directory, and the commit there
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False)
    overwrite: bool = False  #: replace the results of an earlier run in ``job_dir``
    #: folder of relative paths in ``config``, and working directory of every process on nodes that have it
    work_dir: str = ""
    search_path: tuple[str, ...] = ()  #: folders to import the classes of the job from, besides installed packages
    restart: RestartSpec = RestartSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    liveness: LivenessSpec = LivenessSpec()
    master: MasterSpec = MasterSpec()
    placement_timeout_s: Seconds = 120.0  #: timeout of the reservation of resources
    #: AUTO and GROUP reserve all resources before anything starts; SIMPLE reserves nothing and starts each worker when
    #: its resources are free
    scheduling_strategy: SchedulingStrategy = "AUTO"

    def __repr__(self) -> str:
        return f"JobSpec({self.name!r})"

    @property
    def run_folders(self) -> Path | None:
        """The parent of the folders that runs get, None with a ``job_dir``."""
        return (RUNS / self.name).absolute() if self.job_dir == RUNS else None

    def members(self) -> Iterator[tuple[RLRoleType, int]]:
        """Every worker as role and rank, in the order of the file."""
        return ((role, rank) for role, spec in self.workloads.items() for rank in range(spec.num))

    def with_sizes(self, sizes: Mapping[str, int]) -> "JobSpec":
        """The job with other numbers of workers for some roles."""
        workloads = {role: replace(spec, num=sizes.get(role, spec.num)) for role, spec in self.workloads.items()}
        return replace(self, workloads=workloads)

    def preferred_ports(self, role: RLRoleType) -> tuple[int, ...]:
        """The rendezvous port to try first for ``role``, if ``torch_master_port`` has one for it."""
        index = list(self.workloads).index(role)
        return self.trainer.torch_master_port[index : index + 1]

    def collocation_of(self, role: RLRoleType) -> tuple[RLRoleType, ...]:
        """The roles that share devices with ``role``, itself included; empty when it shares none."""
        for group in self.groups:
            if role in group and len(group) > 1:
                return tuple(group)
        return ()
