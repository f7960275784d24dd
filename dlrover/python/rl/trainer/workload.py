# SPDX-License-Identifier: Apache-2.0
"""``BaseWorkload``, which runs in each process of a role, and ``trainer_invocation``, which sets how the trainer calls
its methods."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType, hint
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.trainer.port import RestartInfo

__all__ = ["BaseWorkload", "MemberContext", "trainer_invocation"]

_LOG = get_logger(__name__)

_NO_TCP_PORT = -1
_OPTIONS = "__trainer_invocation__"
_TARGETS = ("ALL", "RANK0")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True)
class InvocationOptions:
    """The options of :func:`trainer_invocation`; raises TypeError or ValueError for invalid values."""

    blocking: bool = True
    is_async: bool = False
    timeout: float = 10
    target: str = "ALL"
    auto_shard: bool = True
    pre_func: Callable[..., Any] | None = None
    post_func: Callable[..., Any] | None = None
    changes_state: bool | None = None

    def __post_init__(self) -> None:
        if self.changes_state is not None:
            _LOG.warning("trainer_invocation(changes_state=...) has no effect any more, and will become an error")
            object.__setattr__(self, "changes_state", None)  # so that a copy does not repeat the warning
        for name in ("blocking", "is_async", "auto_shard"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"trainer_invocation({name}=...) takes True or False, not {getattr(self, name)!r}")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float):
            raise TypeError(f"trainer_invocation(timeout=...) takes seconds, not {self.timeout!r}")
        if not self.timeout > 0:
            raise ValueError(f"trainer_invocation(timeout=...) must be greater than 0 seconds, not {self.timeout!r}")
        if self.target not in _TARGETS:
            raise ValueError(
                f"trainer_invocation(target=...) takes 'ALL' or 'RANK0', not {self.target!r}"
                f"{hint(str(self.target), _TARGETS)}"
            )
        for name in ("pre_func", "post_func"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"trainer_invocation({name}=...) takes a function, not {function!r}")

    def replace(self, **options: Any) -> "InvocationOptions":
        names = [field.name for field in fields(self)]
        for name in options:
            if name not in names:
                raise TypeError(f"trainer_invocation has no option '{name}'{hint(name, names)}")
        return replace(self, **options)


DEFAULT_OPTIONS = InvocationOptions()


def trainer_invocation(**options: Any) -> Callable[[F], F]:
    """Set how the trainer calls this method of a workload; the method itself, async or not, does not change.

    Args:
        blocking: True waits for the results; False returns at once with pending results, which can be awaited,
            resolved with ``.result(timeout)``, or passed to another role group's call.
        is_async: with ``blocking=True``, wait at most ``timeout`` seconds for **every** worker; late ranks are named in
            an :class:`~dlrover.python.rl.common.errors.InvocationTimeout`, which holds the results that arrived.
        timeout: seconds greater than 0, default 10; used when ``blocking`` and ``is_async`` are both True.
        target: ``"ALL"`` workers, or ``"RANK0"`` alone (the result is a list of one).
        auto_shard: divide the arguments over the workers by the rules of
            :mod:`~dlrover.python.rl.trainer.shard`; False copies them.
        pre_func: ``pre_func(*args, **kwargs)`` runs in the trainer before sharding. It returns the new argument, or a
            tuple of the new arguments.
        post_func: ``post_func(results)`` runs in the trainer on the gathered results; what it returns is the call's
            value.
        changes_state: has no effect; accepted for earlier versions.

    Raises:
        TypeError: an unknown option (the nearest name is given) or one of the wrong type.
        ValueError: a value outside the documented ones.
    """
    changed = DEFAULT_OPTIONS.replace(**options)

    def decorate(method: F) -> F:
        setattr(method, _OPTIONS, changed)
        return method

    return decorate


def get_invocation_options(method: Any) -> InvocationOptions:
    options = getattr(method, _OPTIONS, DEFAULT_OPTIONS)
    return options if isinstance(options, InvocationOptions) else DEFAULT_OPTIONS


_ENV = {
    **{name: name.upper() for name in ("name", "role", "rank", "world_size", "local_rank", "local_world_size")},
    **{name: name.upper() for name in ("master_addr", "master_port")},
    "collocation": "DEVICE_COLLOCATION_GROUP",
}
"""The environment variables of simple fields of :class:`MemberContext`."""


@dataclass(frozen=True)
class MemberContext:
    """The position of a workload among its peers; the environment of its process holds the same values.

    ``name`` is unique, ``""`` outside a job; ``local_rank`` counts the role's workers on this node. ``master_addr`` and
    ``master_port`` (-1: unknown) are for a torch rendezvous of the role. ``collocation`` lists the roles that share
    this worker's devices, ``"ACTOR,REFERENCE"``; ``devices`` lists the accelerators that are reserved for it, as its
    process numbers them; it is empty on CPUs, or if none are reserved. ``shares_process`` is True if all workers of the
    job run in this process, one call after the other."""

    name: str = ""
    role: RLRoleType = RLRoleType.ACTOR
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = _NO_TCP_PORT
    collocation: str = ""
    restart: RestartInfo = RestartInfo()
    devices: tuple[int, ...] = ()
    shares_process: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "MemberContext":
        """Read the variables that :meth:`to_env` writes; absent ones keep their defaults."""
        values = {name: type(getattr(cls, name))(env[key]) for name, key in _ENV.items() if key in env}
        restart = RestartInfo(
            int(env.get("RESTART_COUNT", 0)), env.get("RESTART_REASON", ""), int(env.get("RESTART_STEP", 0))
        )
        devices = tuple(int(number) for number in env.get("DEVICES", "").split(",") if number)
        return cls(**values, restart=restart, devices=devices)

    def to_env(self) -> dict[str, str]:
        return {key: str(getattr(self, name)) for name, key in _ENV.items()} | {
            "RESTART_COUNT": str(self.restart.count),
            "RESTART_REASON": self.restart.reason,
            "RESTART_STEP": str(self.restart.step),
            "DEVICES": ",".join(map(str, self.devices)),
        }


_current: ContextVar[MemberContext | None] = ContextVar("dlrover_member", default=None)


def current_member() -> MemberContext:
    """Return the context of the worker that is constructed here; outside a construction, read the environment."""
    return _current.get() or MemberContext.from_env(os.environ)


@contextmanager
def member_context(context: MemberContext) -> Iterator[None]:
    """Give ``context`` to a workload that is constructed inside; used by the runtimes."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True)
class Setting:
    """A setting of which only ``kind`` matters to a saved state; ``value`` is for messages. If ``kind`` is None, this
    process cannot know it, so a changed setting is reported but accepted."""

    value: Any = field(compare=False)
    kind: Any

    def __str__(self) -> str:
        return f"[{', '.join(self.value)}]" if isinstance(self.value, list) else str(self.value)


def is_unknown(was: Any, now: Any) -> bool:
    """Return True if two settings cannot be compared."""
    return isinstance(was, Setting) and isinstance(now, Setting) and None in (was.kind, now.kind)


def _member_property(name: str, kind: type[T]) -> T:
    """Return a property of type ``kind`` with the field ``name`` of a workload's :class:`MemberContext`."""
    return property(lambda workload: getattr(workload._member, name))  # type: ignore[return-value]


class BaseWorkload:
    """Base of every workload: subclass it, add methods, call them from the trainer through ``RG_<ROLE>``.

    A class decorated with ``@ray.remote`` and a plain class are both accepted. Methods may be ``async def``. Optional
    class methods are called before anything starts: ``check_config(config)`` yields ConfigErrors,
    ``settings_of_state(config)`` returns the settings that a saved state depends on (as in a ``TrainerPlan``), and
    ``state_bytes(config, world_size)`` the approximate size of a worker's state in a commit.

    Args:
        master_handle: handle of the job's master, or None in one process.
        config: the job's ``config``, as an OmegaConf ``DictConfig``.
    """

    needs_own_process: ClassVar[bool] = False
    """True for workloads whose ranks meet in collectives: no two of these ranks can share a process."""

    @classmethod
    def keeps_process(cls, config: Any) -> bool:
        """Return True if ranks with ``needs_own_process`` keep their processes when another rank is lost, which is
        several times as fast. The rank's object is closed, torch's process groups are destroyed, and a new object is
        made in the same process.

        The process must not retain anything that results depend on, and no call may block for long once its peers have
        left: a process that does not answer soon is replaced, too."""
        return False

    @classmethod
    def takes_other_members(cls, config: Any) -> bool:
        """Return True if a job may be resumed with another number of workers, or with other settings for them. The new
        workers then get the saved states by :meth:`load_states`."""
        return False

    def __init__(self, master_handle: Any, config: Any) -> None:
        self._master_handle = master_handle
        self._config = config
        self._member = current_member()

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        """Return the number of model replicas that the role's ``world_size`` workers form; by default each is one.

        With tensor, pipeline or context parallelism return ``world_size`` divided by their product: consecutive ranks
        then form one replica, get the same shard of each argument, and give one result."""
        return world_size

    @classmethod
    def warm_up(cls) -> None:
        """Import slow modules. Called in a standby process."""

    def state_dict(self) -> Any:
        """Return the state from which another process can continue; None for a stateless workload. Override it together
        with :meth:`load_state_dict` if calls change the results of later calls.

        The state is a tree of dict, list, tuple, str, int, float, bool, None, bytes, numpy arrays and torch tensors. It
        is requested at each commit, and another thread writes it. The worker's next call waits until it is written,
        unless its method does so itself: see :attr:`guards_state`."""
        return None

    guards_state: ClassVar[bool] = False
    """True: methods that this class itself defines may run while a state is written, since they call
    :meth:`wait_until_written` before they change or free the state that :meth:`state_dict` has returned."""

    def wait_until_written(self) -> None:
        """Wait until the state of the last commit is written."""

    def is_deterministic(self) -> bool:
        """Return True if a step that is repeated from a commit gives the same results again, bit for bit. If all
        workloads return True, commits may be several steps apart; see ``checkpoint.commit_every``."""
        return False

    def load_state_dict(self, state: Any) -> None:
        """Continue from a :meth:`state_dict`: in a new process after the trainer's ``init`` was repeated there, or in
        this one to go back some steps."""
        raise NotImplementedError(f"{type(self).__name__} has state_dict() without load_state_dict()")

    def load_states(self, states: Iterable[Any]) -> None:
        """Continue from the :meth:`state_dict` of all workers of an earlier run, in rank order. Called if the number of
        workers has changed, or if :meth:`load_state_dict` has raised :class:`OtherLayout`. Each state is read when you
        request it, and is valid until you request the next one. Override it together with
        :meth:`takes_other_members`."""
        raise NotImplementedError(f"{type(self).__name__} has takes_other_members() without load_states()")

    @property
    def restart_info(self) -> RestartInfo:
        """The number of restarts before this process, the last reason, and the last committed step if it is known."""
        return self._member.restart

    def report_progress(self) -> None:
        """Report progress in a long call: ``hang_after_s`` counts from here. The engines report it by themselves."""
        note_progress()

    def close(self) -> None:
        """Release child processes, files and the like. Called once before the worker ends, but not in a process that is
        killed or stays busy."""

    @property
    def master_handle(self) -> Any:
        return self._master_handle

    @property
    def config(self) -> Any:
        return self._config

    name = _member_property("name", str)
    role = _member_property("role", RLRoleType)
    rank = _member_property("rank", int)
    world_size = _member_property("world_size", int)
    word_size = _member_property("world_size", int)  # the integration guide's spelling
    local_rank = _member_property("local_rank", int)
    local_world_size = _member_property("local_world_size", int)
    devices = _member_property("devices", tuple[int, ...])
    torch_master_addr = _member_property("master_addr", str)
    torch_master_port = _member_property("master_port", int)

    def is_actor_role(self) -> bool:
        return self.role == RLRoleType.ACTOR

    def is_reference_role(self) -> bool:
        return self.role == RLRoleType.REFERENCE

    def is_rollout_role(self) -> bool:
        return self.role == RLRoleType.ROLLOUT

    def is_reward_role(self) -> bool:
        return self.role == RLRoleType.REWARD

    def is_critic_role(self) -> bool:
        return self.role == RLRoleType.CRITIC

    def get_device_collocation(self) -> str | None:
        """Return the roles that share this worker's devices, e.g. ``"ACTOR,ROLLOUT"``, or None if it shares none."""
        return self._member.collocation or None


def undecorated(workload_class: Any) -> Any:
    """Return the class that the user wrote, without ``@ray.remote``."""
    metadata = getattr(workload_class, "__ray_metadata__", None)
    modified = getattr(metadata, "modified_class", None)
    return getattr(modified, "__ray_actor_class__", modified) if modified is not None else workload_class


def guards_state(workload_class: type[Any], method: str) -> bool:
    """Return True if the class that defines the method guards its state."""
    definition = next((base for base in workload_class.__mro__ if method in vars(base)), BaseWorkload)
    return bool(vars(definition).get("guards_state", False))


def is_stateful(workload_class: type[Any]) -> bool:
    own = getattr(workload_class, "state_dict", None)
    return own is not None and own is not BaseWorkload.state_dict
