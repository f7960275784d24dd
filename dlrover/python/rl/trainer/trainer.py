# SPDX-License-Identifier: Apache-2.0
"""``BaseTrainer``, the user's loop over role groups, and ``run_trainer``, which runs it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.log import cut_middle, get_logger
from dlrover.python.rl.common.names import RLRoleType, hint
from dlrover.python.rl.trainer.plan import TrainerPlan
from dlrover.python.rl.trainer.port import Checkpoints, Port, Recovery, Renewed, RestartInfo, RoleTraits
from dlrover.python.rl.trainer.role_group import RoleGroup, replicas_of
from dlrover.python.rl.trainer.step_report import Announcer, Reporter, StepReport, announce_nothing, report_nothing
from dlrover.python.rl.trainer.steps import Attempt, Steps
from dlrover.python.rl.trainer.workload import BaseWorkload, is_stateful, trainer_invocation, undecorated

__all__ = [
    "Announcer",
    "BaseTrainer",
    "BaseWorkload",
    "Reporter",
    "StepReport",
    "TrainerLink",
    "announce_nothing",
    "report_nothing",
    "trainer_invocation",
]

_LOG = get_logger(__name__)
_MAX_ATTEMPTS = 3


RunEnd: TypeAlias = Literal["finished", "failed", "stopped"]


def note_nothing(step: int) -> None:
    pass


@dataclass(frozen=True)
class TrainerLink:
    """The connection of a trainer to its runtime. The runtime constructs the trainer, then binds it to this link.
    Without ``recovery`` a lost worker ends the trainer; without ``checkpoints`` there are no commits."""

    port: Port
    report: Reporter
    job: str
    job_dir: Path
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    recovery: Recovery | None = None
    checkpoints: Checkpoints | None = None
    is_loss: Callable[[BaseException], bool] = lambda error: False  # True if a lost process or result raised it
    announce: Announcer = announce_nothing
    files: AbstractContextManager[object] = field(default_factory=nullcontext)  # entered around the run
    results: Any = None
    full_sizes: Mapping[str, int] = field(default_factory=dict)  # by role: planned size, if some workers are not placed
    begin_step: Callable[[int], None] = note_nothing  # called at the start of each attempt of a step


def _handles_of(role: RLRoleType) -> list[Any]:
    """Return a property with the handles of a role's workers."""
    return property(lambda trainer: trainer.actor_handles.get(role, []))  # type: ignore[return-value]


class BaseTrainer(ABC):
    """Base of every trainer: subclass it and write :meth:`init` and :meth:`fit`.

    In ``__init__`` only define fields. Role groups (``RG_ACTOR``, ``RG_ROLLOUT``, ...) are bound after construction,
    one for each role of the job, including roles of your own (``RG_JUDGE``); use them from ``init`` on.

    Args:
        actor_handles: the handles of each role's workers, in rank order.
        actor_classes: the workload class of each role.
        config: the job's ``config``, as an OmegaConf ``DictConfig``.
    """

    config_class: ClassVar[type[Any] | None] = None
    """The dataclass of the job's ``config``; None: any keys."""

    plan: ClassVar[type[TrainerPlan]] = TrainerPlan
    """Checks and describes jobs of this class before anything starts."""

    def __init__(
        self, actor_handles: Mapping[RLRoleType, list[Any]], actor_classes: Mapping[RLRoleType, type[Any]], config: Any
    ) -> None:
        self._actor_handles = {RLRoleType(role): list(handles) for role, handles in actor_handles.items()}
        self._actor_classes = {RLRoleType(role): undecorated(cls) for role, cls in actor_classes.items()}
        self._config = config
        self._link: TrainerLink | None = None
        self._steps: Steps | None = None
        self._total_steps = 0

    @abstractmethod
    def init(self) -> None:
        """Prepare the training: tokenizer, data loader, the workloads' models."""

    @abstractmethod
    def fit(self) -> None:
        """Train."""

    def on_end(self, outcome: RunEnd) -> None:
        """Called when the run has failed or was stopped. It is not called when the step will be repeated, nor in a
        process that is killed. Another thread may be in :meth:`fit`. A runtime may still start the trainer again."""

    def steps(self, total_steps: int) -> Iterator[int]:
        """Yield the steps after the last committed one up to ``total_steps``. The step is committed at the end of the
        loop's body: the state of every stateful workload and :attr:`state` are saved.

        Calls in the loop's body, and after the loop, survive the death of any process: they run once, and give the same
        results. A second loop continues after the first."""
        self._total_steps = total_steps
        yield from self._bound_steps().run(total_steps)

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's own state, saved at each commit: numbers, strings, arrays, lists or dicts of them, and objects
        with ``state_dict`` and ``load_state_dict`` (a data cursor). Add your values in ``init``: when the trainer
        continues from a commit, :meth:`steps` loads the objects in place and replaces the plain values.

        Everything else that the trainer holds is lost when it restarts."""
        return self._bound_steps().state

    @state.setter
    def state(self, value: Any) -> None:
        raise AttributeError("self.state stays the same dict: set its keys, self.state['name'] = ...")

    @property
    def restart_info(self) -> RestartInfo:
        """The number of restarts of this trainer, and the reason for the last one. ``step`` is set once :meth:`steps`
        has begun."""
        return self._bound_steps().restart_info

    def log(self, step: int, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Report the metrics of a step; return at once. Raises CallError if ``step`` or a metric is not a number."""
        if not hasattr(step, "__index__") or step < 0:
            raise errors.CallError(f"log() takes the step number first, not {step!r}")
        values = {**(metrics or {}), **more}
        for name, value in values.items():
            try:
                values[name] = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise errors.CallError(f"log() takes numbers, and '{name}' is {cut_middle(repr(value), 60)}") from error
        self._bound().report(StepReport(step, self._total_steps, values))

    def announce(self, activity: str) -> None:
        """Show an activity, like ``loading the models``, until the next step is logged; return at once."""
        self._bound().announce(activity)

    def replace_late(self, timeout: errors.InvocationTimeout) -> None:
        """End the workers that ``timeout`` lists as late, and wait for their replacements, which have the state of the
        last commit and of the step's earlier calls. The late call is dropped; otherwise later calls would wait for
        it."""
        self._bound_steps().port.replace_late(timeout)

    @property
    def results_dir(self) -> Any:
        """The folder where workers save models: :attr:`job_dir`, or a ``UPath`` if the job has an object store."""
        link = self._bound()
        return link.results if link.results is not None else link.job_dir

    @property
    def job_dir(self) -> Path:
        return self._bound().job_dir

    @property
    def config(self) -> Any:
        return self._config

    @property
    def actor_handles(self) -> dict[RLRoleType, list[Any]]:
        return self._actor_handles

    actors = _handles_of(RLRoleType.ACTOR)
    references = _handles_of(RLRoleType.REFERENCE)
    rollouts = _handles_of(RLRoleType.ROLLOUT)
    rewards = _handles_of(RLRoleType.REWARD)
    critics = _handles_of(RLRoleType.CRITIC)

    def get_role_groups(self) -> list[str]:
        """Return the names of the role groups, e.g. ``["RG_ACTOR", "RG_ROLLOUT"]``."""
        return [f"RG_{role}" for role in self._actor_handles]

    def get_workload_resource(self, role: str) -> dict[str, float]:
        """Return the resources of one worker of ``role``, e.g. ``{"cpu": 1.0, "gpu": 0.5}``. Raises UnknownMethod for
        an unknown role."""
        name = RLRoleType(role)
        if name not in self._actor_handles:
            raise errors.UnknownMethod(f"the job has no role '{name}'{hint(name, self._actor_handles)}")
        return dict(self._bound().resources.get(name, {}))

    def bind(self, link: TrainerLink, attempt: Attempt | None = None) -> Steps:
        """Connect the trainer to its runtime, which calls this once, and create the role groups."""
        self._link = link
        traits = {
            str(role): RoleTraits(len(handles), is_stateful(cls), bool(getattr(cls, "needs_own_process", False)))
            for role, handles in self._actor_handles.items()
            for cls in [self._actor_classes[role]]
        }
        services = link.port, link.recovery, link.checkpoints
        self._steps = steps = Steps(*services, traits, attempt or Attempt(), link.begin_step)
        steps.port.renewed = self._replace_handles
        for role, handles in self._actor_handles.items():
            cls = self._actor_classes[role]
            size = replicas_of(cls, self._config, len(handles))
            full = link.full_sizes.get(role, len(handles))
            group = RoleGroup(role, cls, len(handles), size, steps.port, steps.counter, full)
            setattr(self, f"RG_{role}", group)
        return steps

    def _replace_handles(self, renewed: Renewed) -> None:
        for rank, handle in renewed.handles.items():
            self._actor_handles[RLRoleType(renewed.role)][rank] = handle

    def _bound_steps(self) -> Steps:
        self._bound()
        assert self._steps is not None, "bind sets both"
        return self._steps

    def _bound(self) -> TrainerLink:
        if self._link is None:
            raise errors.CallError("the trainer is not bound yet: use role groups, log and job_dir from init() on")
        return self._link

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that do not exist: explain a missing role group.
        if name.startswith("RG_"):
            if self.__dict__.get("_link") is None:
                raise errors.UnknownMethod(f"{name} is bound after the trainer is constructed: use it from init() on")
            raise errors.UnknownMethod(f"the job has no role group '{name}'{hint(name, self.get_role_groups())}")
        # A property of a subclass that raised AttributeError also ends here: evaluate it again to raise its own error.
        return object.__getattribute__(self, name)


def run_trainer(make_trainer: Callable[[], BaseTrainer], link: TrainerLink) -> None:
    """Run ``init`` and ``fit``. If one of them raises, call ``on_end`` and raise its error.

    A step that cannot continue (a commit that cannot be restored, a replay that diverges, an error marked
    ``retryable``) is repeated from the newest commit by a new trainer object, at most three times without a commit in
    between."""
    last: list[BaseTrainer] = []

    def make() -> BaseTrainer:
        last[:] = [make_trainer()]
        return last[0]

    with link.files:
        try:
            _run_attempts(make, link)
        except (Exception, SystemExit):
            for trainer in last:
                tell_end(trainer, "failed")
            raise


def tell_end(trainer: BaseTrainer, outcome: RunEnd) -> None:
    """Call ``on_end`` and log its errors."""
    try:
        trainer.on_end(outcome)
    except Exception:  # noqa: BLE001 -- the user's code: whatever it raises must not hide why the run has ended
        _LOG.exception("%s.on_end failed", type(trainer).__name__)


def _run_attempts(make_trainer: Callable[[], BaseTrainer], link: TrainerLink) -> None:
    attempt, failures = Attempt(), 0
    while True:
        trainer = make_trainer()
        steps = trainer.bind(link, attempt)
        try:
            if attempt.number:
                steps.forget()
            with steps.setup():
                trainer.init()
            trainer.fit()
            steps.finish()
            return
        except errors.StepAbandoned as abandoned:
            step, cause = abandoned.step, abandoned.cause
        except Exception as error:
            original = error.original if isinstance(error, InvocationError) else None
            is_retryable = any(getattr(item, "retryable", False) is True for item in (error, original))
            if not is_retryable and not link.is_loss(error):
                raise
            step, cause = steps.port.step or (steps.port.committed or 0) + 1, error
        counts = int(not isinstance(cause, errors.WorkloadDied))  # the master itself counts lost workers
        failures = counts if steps.commits else failures + counts
        if failures > _MAX_ATTEMPTS or not (steps.can_go_back() or attempt.number):
            raise cause
        reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        if (committed := steps.port.committed or 0) < step - 1:
            _LOG.warning("going back from step %d to the commit of step %d: %s", step, committed, reason)
        else:
            _LOG.warning("repeating step %d from the last commit: %s", step, reason)
        steps.port.close(errors.StepAbandoned(step, cause))
        attempt = Attempt(attempt.number + 1, True, reason)
