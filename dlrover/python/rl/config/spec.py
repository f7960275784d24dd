"""``JobSpec``: everything there is to know about a job before it starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from dlrover.python.rl.common.roles import RLRoleType

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0.0), Lt(float("inf"))]

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
    """The original's trainer type; the class decides."""


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
    """Members on each node; None leaves it to the placement."""

    resource: Mapping[str, Amount] = field(default_factory=dict)
    """What one member needs: ``cpu``, ``gpu``, ``memory`` in MB, or a custom resource. A job's device that is not named
    counts as one (a collocated role takes its share of it): in a GPU job write ``gpu: 0`` for a role without."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the members; wins over the job's."""


@dataclass(frozen=True)
class RestartSpec:
    """How often what may restart, and how long to wait before."""

    job_max_restart: NonNegative = 10
    """Restarts of the whole job."""

    trainer_max_restart: NonNegative = 10
    """Restarts caused by the trainer's process."""

    workload_max_restart: Mapping[str, NonNegative] = field(default_factory=dict)
    """Restarts caused by members of a role; a role not named has the job's limit."""

    backoff_s: Annotated[float, Ge(0.0)] = 1.0
    """Wait before the first restart, doubled at each further one up to a minute."""


@dataclass(frozen=True)
class MasterSpec:
    """What the job's master needs."""

    cpu: Amount = 0.0
    """Logical CPUs reserved for the master."""

    memory: Amount = 0.0
    """Memory reserved for the master, in MB."""


@dataclass(frozen=True)
class JobSpec:
    """A job, checked in itself: every field has its type and range, groups name existing roles.

    Whether the classes import and the job fits the machines is for the plan and the inspection to say.
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
    """The folder that relative paths in ``config`` are meant from: every process of the job works there, on nodes that
    have it."""

    search_path: tuple[str, ...] = ()
    """Folders that the job's classes may be imported from, besides the installed packages."""

    restart: RestartSpec = RestartSpec()
    master: MasterSpec = MasterSpec()
    placement_timeout_s: Annotated[float, Gt(0.0)] = 120.0
    """How long to wait for the cluster to have the resources."""

    scheduling_strategy: SchedulingStrategy = "AUTO"
    """AUTO and GROUP reserve all resources together before anything starts; SIMPLE starts every
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
