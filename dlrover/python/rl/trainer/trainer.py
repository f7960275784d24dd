"""``BaseTrainer``: the user's loop over role groups."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import CallError, Problem, UnknownMethod
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.trainer.port import Port
from dlrover.python.rl.trainer.recovery import Checkpoints, Recovery, Renewed, RestartInfo, RoleTraits
from dlrover.python.rl.trainer.role_group import RoleGroup, replicas_of
from dlrover.python.rl.trainer.steps import Attempt, Steps
from dlrover.python.rl.trainer.workload import BaseWorkload, is_stateful, undecorated

__all__ = ["BaseTrainer", "BaseWorkload", "StepReport", "TrainerLink"]


@dataclass(frozen=True)
class StepReport:
    """What a trainer says of a step: the step, of how many (0: unknown), and its figures."""

    step: int
    total_steps: int
    metrics: Mapping[str, float]


Reporter: TypeAlias = Callable[[StepReport], None]
"""Where step reports go; returns at once."""


@dataclass(frozen=True)
class TrainerLink:
    """What ties a trainer to the place it runs in; the runtime binds it after construction.

    Attributes:
        port: how members are called.
        report: where step reports go; returns at once.
        job: the job's name.
        job_dir: the job's output directory.
        resources: what one member of each role was given, ``{"cpu": 1.0}``.
        recovery: how lost members come back; None: a loss ends the trainer.
        checkpoints: where commits are kept; None: nowhere.
    """

    port: Port
    report: Reporter
    job: str
    job_dir: Path
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    recovery: Recovery | None = None
    checkpoints: Checkpoints | None = None


class BaseTrainer(ABC):
    """Base of every trainer: subclass it and write :meth:`init` and :meth:`fit`.

    In ``__init__`` only define fields. Role groups (``RG_ACTOR``, ``RG_ROLLOUT``, ...) are bound once the trainer is
    constructed, for the roles that the job has, the user's own included (``RG_JUDGE``); use them from ``init`` on.

    Args:
        actor_handles: role to its members' handles, in rank order.
        actor_classes: role to its workload class.
        config: the job's ``config``, as an OmegaConf ``DictConfig``.
    """

    def __init__(
        self,
        actor_handles: Mapping[RLRoleType, list[Any]],
        actor_classes: Mapping[RLRoleType, type[Any]],
        config: Any,
    ) -> None:
        self._actor_handles = {RLRoleType(role): list(handles) for role, handles in actor_handles.items()}
        self._actor_classes = {RLRoleType(role): undecorated(cls) for role, cls in actor_classes.items()}
        self._config = config
        self._link: TrainerLink | None = None
        self._steps: Steps | None = None
        self._total_steps = 0

    # -- what the user writes -----------------------------------------------------------------------------------------

    @abstractmethod
    def init(self) -> None:
        """Prepare the training: tokenizer, data loader, the workloads' models."""

    @abstractmethod
    def fit(self) -> None:
        """The training itself."""

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[Problem]:
        """Problems that this trainer sees in the job's ``config`` and role sizes; asked before anything starts."""
        return ()

    # -- what the loop uses -------------------------------------------------------------------------------------------

    def steps(self, total_steps: int) -> Iterator[int]:
        """Yield the steps up to ``total_steps``, beginning after the last committed one. The end of the body is the
        commit: every workload that has state, and :attr:`state`, are saved.

        What is called inside the body survives the death of any process: it is not done twice, and gives the same
        results. What is called after the loop does so too. A second loop goes on where the first has ended.
        """
        self._total_steps = total_steps
        yield from self._durable().run(total_steps)

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's own state, saved at each commit: numbers, texts, arrays, lists and dicts of them, and objects
        with ``state_dict`` and ``load_state_dict`` (a data cursor). Put them there in ``init``: when the trainer goes
        on from a commit, :meth:`steps` loads the objects in place and replaces the plain values.

        Whatever else the trainer keeps from step to step is gone when it restarts.
        """
        return self._durable().state

    @property
    def restart_info(self) -> RestartInfo:
        """Why this trainer runs again: how often it did, the last reason, and from :meth:`steps` on the last committed
        step."""
        return self._durable().restart_info

    def log(self, step: int, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Report the figures of a step to whoever watches the job. Returns at once."""
        values = {name: float(value) for name, value in {**(metrics or {}), **more}.items()}
        self._bound().report(StepReport(step, self._total_steps, values))

    @property
    def job_dir(self) -> Path:
        """The job's output directory; it exists."""
        return self._bound().job_dir

    # -- the guide's properties ---------------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The job's ``config``."""
        return self._config

    @property
    def actor_handles(self) -> dict[RLRoleType, list[Any]]:
        """Role to its members' handles, in rank order."""
        return self._actor_handles

    @property
    def actors(self) -> list[Any]:
        """Handles of the ACTOR members."""
        return self._actor_handles.get(RLRoleType.ACTOR, [])

    @property
    def references(self) -> list[Any]:
        """Handles of the REFERENCE members."""
        return self._actor_handles.get(RLRoleType.REFERENCE, [])

    @property
    def rollouts(self) -> list[Any]:
        """Handles of the ROLLOUT members."""
        return self._actor_handles.get(RLRoleType.ROLLOUT, [])

    @property
    def rewards(self) -> list[Any]:
        """Handles of the REWARD members."""
        return self._actor_handles.get(RLRoleType.REWARD, [])

    @property
    def critics(self) -> list[Any]:
        """Handles of the CRITIC members."""
        return self._actor_handles.get(RLRoleType.CRITIC, [])

    def get_role_groups(self) -> list[str]:
        """Names of the role groups that exist, e.g. ``["RG_ACTOR", "RG_ROLLOUT"]``."""
        return [f"RG_{role}" for role in self._actor_handles]

    def get_workload_resource(self, role: str) -> dict[str, float]:
        """What one member of ``role`` was given, e.g. ``{"cpu": 1.0, "gpu": 0.5}``.

        Raises:
            UnknownMethod: the job has no such role; the nearest one is named.
        """
        name = RLRoleType(role)
        if name not in self._actor_handles:
            raise UnknownMethod(f"the job has no role '{name}'{hint(name, self._actor_handles)}")
        return dict(self._bound().resources.get(name, {}))

    # -- binding ------------------------------------------------------------------------------------------------------

    def bind(self, link: TrainerLink, attempt: Attempt | None = None) -> Steps:
        """Connect the trainer to where it runs and create the role groups; called by the runtime, once.

        Args:
            link: where it runs.
            attempt: which trainer object of its process this is; None: the first.
        """
        self._link = link
        traits = {
            str(role): RoleTraits(len(handles), is_stateful(cls), bool(getattr(cls, "needs_own_process", False)))
            for role, handles in self._actor_handles.items()
            for cls in [self._actor_classes[role]]
        }
        self._steps = steps = Steps(link.port, link.recovery, link.checkpoints, traits, attempt or Attempt())
        steps.port.renewed = self._take_handles
        for role, handles in self._actor_handles.items():
            cls = self._actor_classes[role]
            size = replicas_of(cls, self._config, len(handles))
            setattr(self, f"RG_{role}", RoleGroup(role, cls, len(handles), size, steps.port, steps.counter))
        return steps

    def _take_handles(self, renewed: Renewed) -> None:
        for rank, handle in renewed.handles.items():
            self._actor_handles[RLRoleType(renewed.role)][rank] = handle

    def _durable(self) -> Steps:
        self._bound()
        assert self._steps is not None, "bind sets both"
        return self._steps

    def _bound(self) -> TrainerLink:
        if self._link is None:
            raise CallError("the trainer is not bound yet: use role groups, log and job_dir from init() on")
        return self._link

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that do not exist: explain a missing role group.
        if name.startswith("RG_"):
            if self.__dict__.get("_link") is None:
                raise UnknownMethod(f"{name} is bound after the trainer is constructed: use it from init() on")
            raise UnknownMethod(f"the job has no role group '{name}'{hint(name, self.get_role_groups())}")
        # A property of a subclass that failed inside ends here as well: asked once more, it says so itself.
        return object.__getattribute__(self, name)
