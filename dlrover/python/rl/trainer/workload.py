"""``BaseWorkload``: what runs in each process of a role."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.trainer.invocation import trainer_invocation
from dlrover.python.rl.trainer.recovery import RestartInfo

__all__ = ["BaseWorkload", "MemberContext", "trainer_invocation"]

_NO_PORT = -1


@dataclass(frozen=True)
class MemberContext:
    """Who a workload is among its peers; the same facts stand in its process environment.

    Attributes:
        name: unique name of this member, ``""`` outside a job.
        role: its role.
        rank: position among the ``world_size`` members of the role.
        local_rank: position among the ``local_world_size`` members of the role on this node.
        master_addr: address of rank 0 for a torch rendezvous of the role.
        master_port: a port that was free there, -1 when unknown.
        collocation: the roles that share this member's devices, ``"ACTOR,REFERENCE"``; ``""`` for none.
        restart: why this process runs in another's place.
        devices: the accelerators that were reserved for this member, by the numbers they have in its process; those
            of members that share devices are the same. None where the job runs on CPUs or nobody reserves any.
    """

    name: str = ""
    role: RLRoleType = RLRoleType.ACTOR
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = _NO_PORT
    collocation: str = ""
    restart: RestartInfo = RestartInfo()
    devices: tuple[int, ...] = ()

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "MemberContext":
        """Read the variables that :meth:`to_env` writes; absent ones keep their defaults."""
        return cls(
            name=env.get("NAME", ""),
            role=RLRoleType(env.get("ROLE", "ACTOR")),
            rank=int(env.get("RANK", 0)),
            world_size=int(env.get("WORLD_SIZE", 1)),
            local_rank=int(env.get("LOCAL_RANK", 0)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=int(env.get("MASTER_PORT", _NO_PORT)),
            collocation=env.get("DEVICE_COLLOCATION_GROUP", ""),
            restart=RestartInfo(
                int(env.get("RESTART_COUNT", 0)), env.get("RESTART_REASON", ""), int(env.get("RESTART_STEP", 0))
            ),
            devices=tuple(int(number) for number in env.get("DEVICES", "").split(",") if number),
        )

    def to_env(self) -> dict[str, str]:
        """The variables that torch and user code read."""
        return {
            "NAME": self.name,
            "ROLE": str(self.role),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "DEVICE_COLLOCATION_GROUP": self.collocation,
            "RESTART_COUNT": str(self.restart.count),
            "RESTART_REASON": self.restart.reason,
            "RESTART_STEP": str(self.restart.step),
            "DEVICES": ",".join(map(str, self.devices)),
        }


_current: ContextVar[MemberContext | None] = ContextVar("dlrover_member", default=None)


@contextmanager
def member_context(context: MemberContext) -> Iterator[None]:
    """Let a workload constructed inside know who it is; used by the runtimes."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


class BaseWorkload:
    """Base of every workload: subclass it, add methods, call them from the trainer through ``RG_<ROLE>``.

    A class decorated with ``@ray.remote`` and a plain class are both accepted. Methods may be ``async def``.

    Args:
        master_handle: handle of the job's master, or None in one process.
        config: the job's ``config``, as an OmegaConf ``DictConfig``.
    """

    needs_own_process: ClassVar[bool] = False
    """True for workloads whose ranks meet in collectives: more than one of them cannot share a process."""

    def __init__(self, master_handle: Any, config: Any) -> None:
        self._master_handle = master_handle
        self._config = config
        self._member = _current.get() or MemberContext.from_env(os.environ)

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        """How many model replicas the role's ``world_size`` members form: all of them unless a subclass says so.

        With tensor, pipeline or context parallelism return ``world_size`` divided by their product: consecutive ranks
        then form one replica, get the same shard of each argument, and give one result.
        """
        return world_size

    @classmethod
    def check_config(cls, config: Any) -> Iterable[Problem]:
        """Problems that this workload sees in the job's ``config``; asked before anything starts."""
        return ()

    @classmethod
    def warm_up(cls) -> None:
        """Import what takes long to import. Called in a process that waits to take over from a member that dies."""

    def state_dict(self) -> Any:
        """What this workload must have to go on in another process: override it together with :meth:`load_state_dict`
        where calls change what later calls give. None: nothing.

        A tree of dict, list, tuple, str, int, float, bool, None, bytes, numpy arrays and torch tensors. Asked for at
        each commit; it is written before anything else is called.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Go on from what :meth:`state_dict` gave: in a new process after the trainer's ``init`` has been repeated
        there, or in this one to take back steps."""
        raise NotImplementedError(f"{type(self).__name__} has state_dict() without load_state_dict()")

    @property
    def restart_info(self) -> RestartInfo:
        """Why this process runs in another's place: restarts before it, the last reason, and the last committed step
        where it is known."""
        return self._member.restart

    def close(self) -> None:
        """Give back what this workload holds (child processes, files). Called once before the member is ended, however
        the job fares; a process that is killed, or busy for longer than a moment, does not get here."""

    @property
    def master_handle(self) -> Any:
        """Handle of the job's master (None in one process)."""
        return self._master_handle

    @property
    def config(self) -> Any:
        """The job's ``config``."""
        return self._config

    @property
    def name(self) -> str:
        """The unique name of this workload."""
        return self._member.name

    @property
    def role(self) -> RLRoleType:
        """The role of this workload."""
        return self._member.role

    @property
    def rank(self) -> int:
        """Position among the members of the role, from 0."""
        return self._member.rank

    @property
    def world_size(self) -> int:
        """Number of members of the role."""
        return self._member.world_size

    @property
    def word_size(self) -> int:
        """``world_size`` under the integration guide's spelling."""
        return self._member.world_size

    @property
    def local_rank(self) -> int:
        """Position among the members of the role on this node, from 0."""
        return self._member.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of members of the role on this node."""
        return self._member.local_world_size

    @property
    def devices(self) -> tuple[int, ...]:
        """Accelerators reserved for this member, by the numbers they have in this process: ``cuda:<number>``."""
        return self._member.devices

    @property
    def torch_master_addr(self) -> str:
        """Address for the role's torch rendezvous, ``""`` when unknown."""
        return self._member.master_addr

    @property
    def torch_master_port(self) -> int:
        """Port for the role's torch rendezvous, -1 when unknown."""
        return self._member.master_port

    def is_actor_role(self) -> bool:
        """Whether this is an ACTOR."""
        return self.role == RLRoleType.ACTOR

    def is_reference_role(self) -> bool:
        """Whether this is a REFERENCE."""
        return self.role == RLRoleType.REFERENCE

    def is_rollout_role(self) -> bool:
        """Whether this is a ROLLOUT."""
        return self.role == RLRoleType.ROLLOUT

    def is_reward_role(self) -> bool:
        """Whether this is a REWARD."""
        return self.role == RLRoleType.REWARD

    def is_critic_role(self) -> bool:
        """Whether this is a CRITIC."""
        return self.role == RLRoleType.CRITIC

    def get_device_collocation(self) -> str | None:
        """The roles that share this member's devices, e.g. ``"ACTOR,ROLLOUT"``, or None when it shares none."""
        return self._member.collocation or None


def undecorated(workload_class: Any) -> Any:
    """The class the user wrote, with ``@ray.remote`` taken off."""
    metadata = getattr(workload_class, "__ray_metadata__", None)
    modified = getattr(metadata, "modified_class", None)
    return getattr(modified, "__ray_actor_class__", modified) if modified is not None else workload_class


def is_stateful(workload_class: type[Any]) -> bool:
    """Whether a workload has state of its own to save at each commit."""
    own = getattr(workload_class, "state_dict", None)
    return own is not None and own is not BaseWorkload.state_dict
