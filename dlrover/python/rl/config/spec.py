# SPDX-License-Identifier: Apache-2.0
"""``JobSpec``: a whole job, as it is described before it starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from dlrover.python.rl.common.names import RLRoleType

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0.0), Lt(float("inf"))]
Seconds = Annotated[float, Gt(0.0), Lt(float("inf"))]

SchedulingStrategy = Literal["AUTO", "SIMPLE", "GROUP"]


@dataclass(frozen=True)
class TrainerSpec:
    """The trainer, and the machines the job may use."""

    module: str
    """Module of the trainer class."""

    class_: str
    """The trainer class (``class`` in a job file)."""

    node_number: Positive = 1
    """Nodes the job may use."""

    device_type: Literal["CPU", "GPU"] = "GPU"
    """What counts as a device."""

    device_per_node: Positive = 8
    """Devices on each node."""

    torch_master_port: tuple[Annotated[int, Gt(1000)], ...] = ()
    """Rendezvous ports to try first, one per role in the file's order; a busy one is replaced by a free one."""

    type: Literal["USER_DEFINED"] = "USER_DEFINED"
    """The trainer type of upstream DLRover; here the class decides."""

    hang_after_s: Seconds = 3600.0
    """Seconds without progress of the trainer's own code, waiting apart, before it is killed and recovered."""


@dataclass(frozen=True)
class WorkloadSpec:
    """One role: its class, how many members, and what each of them needs."""

    module: str
    """Module of the workload class."""

    class_: str
    """The workload class (``class`` in a job file)."""

    num: Positive = 1
    """Members of the role."""

    per_node: Positive | None = None
    """Members on each node, standbys apart; None leaves it to the placement."""

    resource: Mapping[str, Amount] = field(default_factory=dict)
    """What one member needs: ``cpu``, ``gpu``, ``memory`` in MB, or a custom resource. A job's device that is not named
    counts as one (in a group: an equal share of what the others leave): in a GPU job write ``gpu: 0`` for a role
    without."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the members; wins over the job's."""

    standby: NonNegative = 0
    """Processes kept ready to take a member's place; each reserves what a member needs."""

    hang_after_s: Seconds = 600.0
    """Seconds without progress of a member before it is killed and recovered."""


@dataclass(frozen=True)
class RestartSpec:
    """Limits of restarts, and the back-off before them."""

    job_max_restart: NonNegative = 10
    """Restarts of the whole job within the window."""

    trainer_max_restart: NonNegative = 10
    """Restarts of the trainer within the window."""

    workload_max_restart: Mapping[str, NonNegative] = field(default_factory=dict)
    """Recoveries of a role within the window; a role not named has the job's limit."""

    backoff_s: Annotated[float, Ge(0.0), Lt(float("inf"))] = 1.0
    """Wait before the second restart of the same thing without progress in between, doubled at each further one up to a
    minute."""

    window_s: Seconds = 3600.0
    """Restarts older than this no longer count."""

    node_max_failures: Positive = 3
    """Processes of the job that a node may lose within the window before it is no longer used."""


@dataclass(frozen=True)
class CheckpointSpec:
    """Which committed steps are kept, and where."""

    every: Positive = 10
    """Steps between copies to the job's directory, for good; the last two steps are always kept, see ``commit_to``."""

    keep: Positive = 2
    """Copies to keep, the newest ones."""

    resume: Literal["never", "latest"] = "never"
    """``never``: a new run starts fresh. ``latest``: it goes on from the newest valid copy that any earlier run left in
    ``job_dir``."""

    commit_to: Literal["auto", "memory", "job_dir"] = "auto"
    """Where the state after each step is kept until the job ends. ``memory``: in the memory of each node, which is
    quick; a lost node's part is gone, and the job then goes back to the last copy in ``job_dir``, or to step 1.
    ``job_dir``: there, where all nodes see it; no node's loss costs a committed step. ``auto``: ``memory`` for a job
    that reserves a single node, ``job_dir`` for any other."""


@dataclass(frozen=True)
class LivenessSpec:
    """When a silent process is treated as lost."""

    beat_s: Seconds = 0.5
    """Time between two heartbeats; shorter than every limit that they are compared with."""

    lease_s: Seconds = 60.0
    """A process that has not reached its master for this time ends itself."""

    start_timeout_s: Seconds = 300.0
    """A process whose start takes longer is abandoned."""


@dataclass(frozen=True)
class MasterSpec:
    """Resources and restarts of the job's master."""

    cpu: Amount = 0.0
    """Logical CPUs reserved for the master."""

    memory: Amount = 0.0
    """Memory reserved for the master, in MB."""

    max_restart: Annotated[int, Ge(-1)] = -1
    """Restarts of the master's process, -1 for any number; the job's members go on meanwhile."""


@dataclass(frozen=True)
class JobSpec:
    """A job whose fields have their types and ranges and whose groups name existing roles.

    The plan checks that it fits the machines, the inspection that its classes can be imported.
    """

    name: str
    """The job's name: a DNS label."""

    trainer: TrainerSpec
    workloads: Mapping[RLRoleType, WorkloadSpec]
    """Role to its workload, in the order of the file."""

    groups: tuple[Mapping[RLRoleType, int], ...] = ()
    """Collocated roles: each group maps its roles to their members in one instance of the group."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the trainer and all members."""

    config: Any = None
    """The user's own configuration, a ``DictConfig``, passed through untouched."""

    job_dir: Path = Path("runs")
    """Where the job writes."""

    work_dir: str = ""
    """The folder of relative paths in ``config``; every process works there, on nodes that have it."""

    search_path: tuple[str, ...] = ()
    """Folders that the job's classes may be imported from, besides the installed packages."""

    restart: RestartSpec = RestartSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    liveness: LivenessSpec = LivenessSpec()
    master: MasterSpec = MasterSpec()
    placement_timeout_s: Seconds = 120.0
    """How long to wait for the cluster to have the resources."""

    scheduling_strategy: SchedulingStrategy = "AUTO"
    """AUTO and GROUP reserve all resources together before anything starts; SIMPLE reserves nothing and starts every
    member as its own resources come free."""

    def members(self) -> Iterator[tuple[RLRoleType, int]]:
        """Every member as role and rank, in the order of the file."""
        return ((role, rank) for role, spec in self.workloads.items() for rank in range(spec.num))

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
