# SPDX-License-Identifier: Apache-2.0
"""``JobSpec``: the description of a whole job."""

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
    """Preferred rendezvous ports, one per role in the order of the file; a busy port is replaced by a free one."""

    type: Literal["USER_DEFINED"] = "USER_DEFINED"
    """The trainer type of upstream DLRover; unused, since the class determines it."""

    hang_after_s: Seconds = 3600.0
    """Seconds without progress in the trainer, not counting waits for calls, after which it is killed and recovered."""


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
    """Workers per node, not counting standbys; None: the placement decides."""

    resource: Mapping[str, Amount] = field(default_factory=dict)
    """Resources of a worker: ``cpu``, ``gpu``, ``memory`` in MB, or a custom resource. A worker gets one device of the
    job by default, and in a group an equal share of what the other roles leave; in a GPU job, set ``gpu: 0`` for a role
    without a device."""

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the workers; they override the job's."""

    standby: NonNegative = 0
    """Number of standby processes, which replace lost workers; each reserves the resources of a worker."""

    hang_after_s: Seconds = 600.0
    """Seconds without progress in a worker after which it is killed and recovered."""

    python: str = ""
    """Path of another environment's Python, in which the workers run; it has the same minor version and the same Ray as
    the job's."""

    min: NonNegative = 0
    """Fewest workers of a stateless role with which the job continues while the other workers cannot be placed; they
    join again once they can. 0: all workers are needed."""


@dataclass(frozen=True)
class RestartSpec:
    """Limits and delays of restarts."""

    job_max_restart: NonNegative = 10
    """Maximum restarts of the job within the window."""

    trainer_max_restart: NonNegative = 10
    """Maximum restarts of the trainer within the window."""

    workload_max_restart: Mapping[str, NonNegative] = field(default_factory=dict)
    """Maximum recoveries of each role within the window; the default is the limit of the job."""

    backoff_s: Annotated[float, Ge(0.0), Lt(float("inf"))] = 1.0
    """Delay before the second restart of a process without progress in between; it doubles with each further restart,
    up to a minute."""

    window_s: Seconds = 3600.0
    """Restarts older than this are not counted."""

    node_max_failures: Positive = 3
    """Processes of the job that a node may lose within the window before it is excluded. A node that stands out is also
    excluded after four times as many within 24 windows."""


@dataclass(frozen=True)
class CheckpointSpec:
    """Commits and checkpoints: how often, how many and where."""

    every: Positive = 10
    """Steps between checkpoints in ``job_dir``. The last two commits are always kept, see ``commit_to``."""

    keep: Positive = 2
    """Number of newest checkpoints to keep."""

    resume: Literal["never", "latest"] = "never"
    """``never``: start a new run. ``latest``: continue from the newest valid commit of any earlier run in ``job_dir``;
    without a ``job_dir``, of the last run of this name unless it has finished."""

    commit_to: Literal["auto", "memory", "job_dir"] = "auto"
    """Location of the commits until the job ends. ``memory``: the memory of each node and of the next one, which is
    fast; the loss of one node loses no committed step. If two neighbours are lost, or the only node, the job returns to
    the last checkpoint in ``job_dir``, or to step 1. ``job_dir``: a folder that all nodes share. ``auto``: ``job_dir``
    with ``scheduling_strategy: SIMPLE``, which may use only one of several nodes, else ``memory``."""

    keep_runs: NonNegative = 5
    """Number of the newest ended runs of this name that keep their checkpoints, without a ``job_dir``; models, metrics
    and logs of older runs stay."""

    commit_every: Positive | Literal["auto"] = "auto"
    """Steps from one commit to the next. With more than 1, the loss of a process that has state returns all roles to
    the last commit, and they repeat the steps after it. ``auto``: 1 unless every workload declares that repeated steps
    give the same bits; then the fewest steps whose commits take at most 1 % of the time, at most 8 steps and 10
    seconds."""


@dataclass(frozen=True)
class LivenessSpec:
    """Heartbeats, hangs and slow workers."""

    beat_s: Seconds = 0.5
    """Interval of heartbeats; every limit must be longer."""

    lease_s: Seconds = 60.0
    """Seconds after which a process that cannot reach its master ends itself."""

    start_timeout_s: Seconds = 300.0
    """Seconds for the start of a process."""

    slow_factor: Annotated[float, Gt(1.0)] = 2.0
    """A worker is reported after it has been slower than the median of its peers by this factor for a while."""

    replace_slow: bool = False
    """Replace workers that are reported as slow, and count them as failures of their nodes."""

    notice_file: str = ""
    """A file whose appearance announces the end of its node, like SIGTERM to a process: the job moves to another node
    if there is one."""


@dataclass(frozen=True)
class MasterSpec:
    """Resources and restarts of the master."""

    cpu: Amount = 0.0
    """Logical CPUs reserved for the master."""

    memory: Amount = 0.0
    """Memory reserved for the master, in MB."""

    max_restart: Annotated[int, Ge(-1)] = -1
    """Maximum restarts of the master, during which workers continue; -1: unlimited."""

    metrics_port: Annotated[int, Ge(-1), Lt(65536)] = -1
    """Port on which the master serves Prometheus metrics; 0: any free port, -1: no metrics. The address is in the run's
    ``metrics.json``."""

    metrics_host: str = "127.0.0.1"
    """Address on which the metrics are served. Beyond loopback it needs the three settings below."""

    metrics_token_file: str = ""
    """File with the token that scrapers send as ``Authorization: Bearer``; only its owner may be able to read it."""

    metrics_tls_cert: str = ""
    """File with the certificate for HTTPS."""

    metrics_tls_key: str = ""
    """File with the key of the certificate."""


@dataclass(frozen=True)
class JobSpec:
    """A job that fits its types, ranges and roles; later the plan checks the nodes, and the inspection the classes."""

    name: str  #: name of the job, a DNS label
    trainer: TrainerSpec
    workloads: Mapping[RLRoleType, WorkloadSpec]  #: workload of each role, in the order of the file
    #: collocated roles: each group maps roles to their workers in one instance of the group
    groups: tuple[Mapping[RLRoleType, int], ...] = ()
    #: environment variables of the trainer and all workers
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: configuration of the user, a ``DictConfig``, passed through unchanged
    config: Any = field(default=None, repr=False)
    #: overrides of keys that ``config`` lacked: errors, unless the trainer's schema has them
    unlisted: tuple[ConfigError, ...] = ()
    #: output folder of the job, an absolute path; ``RUNS``: each run has a separate folder in ``run_folders``
    job_dir: Path = RUNS
    #: URL of the job's directory in an object store, for checkpoints and results; ``job_dir`` is then local to a node
    archive: str = ""
    run: str = ""  #: id of the run; empty before it begins
    #: digest of the description without defaults, which identifies a repeated command; empty: unknown
    description_digest: str = ""
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
    spans_mb: NonNegative = 64  #: MB of spans (calls and waits, for the page and ``trace``) of each process; 0: none

    def __repr__(self) -> str:
        return f"JobSpec({self.name!r})"

    @property
    def run_folders(self) -> Path | None:
        """The parent of the runs' folders; None with a ``job_dir``."""
        return (RUNS / self.name).absolute() if self.job_dir == RUNS else None

    def members(self) -> Iterator[tuple[RLRoleType, int]]:
        """Iterate over all workers as role and rank, in the order of the file."""
        return ((role, rank) for role, spec in self.workloads.items() for rank in range(spec.num))

    def with_sizes(self, sizes: Mapping[str, int]) -> "JobSpec":
        """Return the job with other numbers of workers for some roles."""
        workloads = {role: replace(spec, num=sizes.get(role, spec.num)) for role, spec in self.workloads.items()}
        return replace(self, workloads=workloads)

    def preferred_ports(self, role: RLRoleType) -> tuple[int, ...]:
        """Return the port of ``torch_master_port`` for ``role``, if there is one."""
        index = list(self.workloads).index(role)
        return self.trainer.torch_master_port[index : index + 1]

    def collocation_of(self, role: RLRoleType) -> tuple[RLRoleType, ...]:
        """Return the roles that share devices with ``role``, itself included; empty if it shares none."""
        return next((tuple(group) for group in self.groups if role in group and len(group) > 1), ())
